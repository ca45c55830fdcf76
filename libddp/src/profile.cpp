#include "ddp/profile.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <deque>
#include <fstream>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <system_error>
#include <thread>

#include "ddp/error.h"

namespace ddp {
namespace {

using Clock = std::chrono::steady_clock;

double micros(Clock::duration d) { return std::chrono::duration<double, std::micro>(d).count(); }

c10::Event record_event(c10::Device device) {
  c10::Event event(device.type(), c10::EventFlag::BACKEND_DEFAULT);  // the default flag has no timing
  event.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  return event;
}

// Device times are distances between events, in float milliseconds, which get coarse when they are long. So each step has
// an origin of its own, whose time is known from the one before as soon as the device has passed it.
struct Origin {
  c10::Event event;
  std::optional<double> known_us;
  std::shared_ptr<Origin> previous;

  double us() {
    event.synchronize();
    if (!known_us) known_us = previous->us() + 1e3 * previous->event.elapsedTime(event);
    previous.reset();
    return *known_us;
  }
};

struct Finished {
  size_t phase;
  int64_t step;
  size_t thread;
  double start_us;
  double duration_us;
};

struct Pending {
  Finished range;
  std::shared_ptr<Origin> origin;
  c10::Event begin;
  c10::Event end;

  Finished resolve() {
    end.synchronize();
    range.start_us = origin->us() + 1e3 * origin->event.elapsedTime(begin);
    range.duration_us = 1e3 * begin.elapsedTime(end);
    return range;
  }
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  size_t n = values.size();
  return n % 2 ? values[n / 2] : 0.5 * (values[n / 2 - 1] + values[n / 2]);
}

}  // namespace

struct Profiler::Impl {
  Options options;
  bool on_device;
  Clock::time_point start = Clock::now();
  double start_us = micros(std::chrono::system_clock::now().time_since_epoch());

  std::mutex mutex;
  std::vector<std::string> names;
  std::map<std::thread::id, size_t> threads;
  std::deque<Finished> finished;
  std::deque<Pending> pending;
  std::shared_ptr<Origin> origin;
  int64_t step = 0;
  int64_t first_whole_step = 0;  // parts of earlier ones are forgotten

  double now_us() const { return start_us + micros(Clock::now() - start); }

  size_t index_of(std::string_view name) {
    auto it = std::find(names.begin(), names.end(), name);
    if (it != names.end()) return static_cast<size_t>(it - names.begin());
    names.emplace_back(name);
    return names.size() - 1;
  }

  size_t this_thread() { return threads.try_emplace(std::this_thread::get_id(), threads.size()).first->second; }

  void add(const Finished& range) {
    finished.push_back(range);
    if (finished.size() <= options.max_events) return;
    first_whole_step = std::max(first_whole_step, finished.front().step + 1);
    finished.pop_front();
  }

  // Takes over what the device has finished, or waits for all of it.
  void collect(bool wait) {
    while (!pending.empty() && (wait || pending.size() > options.max_events || pending.front().end.query())) {
      add(pending.front().resolve());
      pending.pop_front();
    }
  }

  void new_origin() {
    if (origin && origin->event.query()) origin->us();
    origin = std::make_shared<Origin>(Origin{record_event(options.device), std::nullopt, origin});
    if (origin->previous) return;
    origin->event.synchronize();
    origin->known_us = now_us();
  }
};

struct Profiler::Range::Open {
  Impl* impl;
  std::string phase;
  double start_us;
  std::shared_ptr<Origin> origin;
  std::optional<c10::Event> begin;
};

Profiler::Profiler(Options options) : impl_(new Impl) {
  impl_->options = options;
  impl_->on_device = options.enabled && !options.device.is_cpu();
  if (impl_->on_device) impl_->new_origin();
}

Profiler::~Profiler() = default;

Profiler::Range::Range(std::unique_ptr<Open> open) : open_(std::move(open)) {}

Profiler::Range Profiler::range(std::string_view phase) {
  if (!impl_->options.enabled) return Range(nullptr);
  auto open = std::make_unique<Range::Open>();
  open->impl = impl_.get();
  open->phase = phase;
  if (impl_->on_device) {
    std::lock_guard lock(impl_->mutex);
    open->origin = impl_->origin;
    open->begin = record_event(impl_->options.device);
  }
  open->start_us = impl_->now_us();
  return Range(std::move(open));
}

Profiler::Range::~Range() {
  if (!open_) return;
  Impl& impl = *open_->impl;
  double end_us = impl.now_us();
  try {
    std::lock_guard lock(impl.mutex);
    Finished range{.phase = impl.index_of(open_->phase),
                   .step = impl.step,
                   .thread = impl.this_thread(),
                   .start_us = open_->start_us,
                   .duration_us = end_us - open_->start_us};
    if (impl.on_device) {
      impl.pending.push_back({range, open_->origin, std::move(*open_->begin), record_event(impl.options.device)});
    } else {
      impl.add(range);
    }
  } catch (...) {  // a failed device: the error shows in the work itself
  }
}

void Profiler::step() {
  if (!impl_->options.enabled) return;
  std::lock_guard lock(impl_->mutex);
  ++impl_->step;
  if (!impl_->on_device) return;
  impl_->collect(/*wait=*/false);
  impl_->new_origin();
}

int64_t Profiler::steps() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->step;
}

std::vector<Profiler::Phase> Profiler::phases() const {
  std::lock_guard lock(impl_->mutex);
  impl_->collect(/*wait=*/true);
  std::vector<std::map<int64_t, double>> sums(impl_->names.size());
  for (const Finished& range : impl_->finished) {
    if (range.step < impl_->first_whole_step || range.step >= impl_->step) continue;
    sums[range.phase][range.step] += range.duration_us / 1e3;
  }
  std::vector<Phase> result;
  for (size_t i = 0; i < sums.size(); ++i) {
    if (sums[i].empty()) continue;
    std::vector<double> values;
    for (const auto& [step, ms] : sums[i]) values.push_back(ms);
    auto [low, high] = std::minmax_element(values.begin(), values.end());
    result.push_back({.name = impl_->names[i],
                      .median_ms = median(values),
                      .min_ms = *low,
                      .max_ms = *high,
                      .steps = static_cast<int64_t>(values.size())});
  }
  return result;
}

std::string Profiler::table() const {
  std::string text =
      fmt::format("{:<20} {:>12} {:>12} {:>12} {:>8}\n", "phase", "median ms", "min ms", "max ms", "steps");
  for (const Phase& p : phases()) {
    text +=
        fmt::format("{:<20} {:>12.3f} {:>12.3f} {:>12.3f} {:>8}\n", p.name, p.median_ms, p.min_ms, p.max_ms, p.steps);
  }
  return text;
}

double Profiler::median_ms(std::string_view phase) const {
  for (const Phase& p : phases()) {
    if (p.name == phase) return p.median_ms;
  }
  return 0;
}

void Profiler::write_chrome_trace(const std::string& path, int rank) const {
  std::lock_guard lock(impl_->mutex);
  impl_->collect(/*wait=*/true);
  errno = 0;
  std::ofstream file(path);
  auto text = [](const nlohmann::json& json) {
    return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  };
  file << R"({"displayTimeUnit":"ms","traceEvents":[)" << '\n';
  file << text(
      {{"ph", "M"}, {"pid", rank}, {"name", "process_name"}, {"args", {{"name", fmt::format("rank {}", rank)}}}});
  for (const Finished& range : impl_->finished) {
    file << ",\n"
         << fmt::format(R"({{"ph":"X","pid":{},"tid":{},"ts":{:.3f},"dur":{:.3f},"name":{},"args":{{"step":{}}}}})",
                        rank, range.thread, range.start_us, range.duration_us, text(impl_->names[range.phase]),
                        range.step);
  }
  file << "\n]}\n";
  file.close();
  if (!file)
    throw Error(fmt::format("[ddp::Profiler] cannot write {}: {}", path, std::generic_category().message(errno)));
}

}  // namespace ddp
