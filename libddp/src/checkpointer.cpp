#include "ddp/checkpointer.h"

#include <fmt/format.h>

#include <cmath>
#include <cstring>

#include "checkpoint_best.h"
#include "checkpointer_impl.h"
#include "ddp/collectives.h"
#include "ddp/error.h"
#include "ddp/log.h"

namespace ddp {

Checkpointer::Impl::Impl(std::filesystem::path directory, ProcessGroup group, CheckpointerOptions options)
    : directory(std::move(directory)),
      group(std::move(group)),
      options(options),
      writer(this->directory, this->group, {.keep = options.keep, .keep_every = options.keep_every}) {
  if (this->directory.empty()) throw ConfigError("[ddp::Checkpointer] the directory is an empty path");
  if (options.every < 0 || options.keep < 0 || options.keep_every < 0) {
    throw ConfigError(
        fmt::format("[ddp::Checkpointer] every is {}, keep is {} and keep_every is {}; none may be negative (0: never "
                    "by itself, keep all, no milestones)",
                    options.every, options.keep, options.keep_every));
  }
}

std::string Checkpointer::Impl::who() const { return fmt::format("[ddp::Checkpointer] {}:", group.place().name()); }

Checkpointer::Checkpointer(std::filesystem::path directory, ProcessGroup group, CheckpointerOptions options)
    : impl_(std::make_unique<Impl>(std::move(directory), std::move(group), options)) {}
Checkpointer::Checkpointer(Checkpointer&&) noexcept = default;
Checkpointer& Checkpointer::operator=(Checkpointer&&) noexcept = default;
Checkpointer::~Checkpointer() = default;

Checkpointer& Checkpointer::add(const std::string& name, Stateful object) {
  if (name.empty()) throw ConfigError("[ddp::Checkpointer] an object is tracked under an empty name");
  for (const auto& other : impl_->tracked) {
    if (other.name == name) throw ConfigError(fmt::format("[ddp::Checkpointer] \"{}\" is tracked twice", name));
  }
  impl_->tracked.push_back({name, std::move(object)});
  return *this;
}

bool Checkpointer::step() {
  const CheckpointerOptions& options = impl_->options;
  ++impl_->step;
  if (options.every == 0 || impl_->step % options.every != 0) return false;
  impl_->save(options.async ? Impl::When::kInBackground : Impl::When::kNow);
  return true;
}

void Checkpointer::save() { impl_->save(Impl::When::kNow); }

void Checkpointer::wait() {
  const std::string failure = impl_->settle();
  if (!failure.empty()) throw CheckpointError(fmt::format("{} {}", impl_->who(), failure));
}

void Checkpointer::pin(const std::string& name) {
  detail::pin_link(name);  // throws
  if (name == detail::kBestPin) {
    throw ConfigError("[ddp::Checkpointer] \"best\" is pinned by save_best, which knows the metric");
  }
  impl_->pin(name, std::nullopt);
}

bool Checkpointer::save_best(double metric) {
  // The metric of rank 0 decides, so that all ranks do the same.
  std::string bytes(reinterpret_cast<const char*>(&metric), sizeof metric);
  bytes = broadcast_object(bytes, impl_->group);
  std::memcpy(&metric, bytes.data(), sizeof metric);
  if (!std::isfinite(metric)) {
    log::info(impl_->group, fmt::format("[ddp::Checkpointer] a metric of {} is never the best", metric));
    return false;
  }
  const auto& best = impl_->best;
  const bool is_better = !best || (impl_->options.better == Better::kLower ? metric < *best : metric > *best);
  if (!is_better) return false;
  impl_->pin(detail::kBestPin, metric);
  impl_->best = metric;
  return true;
}

std::optional<double> Checkpointer::best() const { return impl_->best; }
int64_t Checkpointer::step_count() const { return impl_->step; }
void Checkpointer::set_epoch(int64_t epoch) { impl_->epoch = epoch; }
void Checkpointer::set_loss(double loss) { impl_->loss = loss; }
const std::filesystem::path& Checkpointer::directory() const { return impl_->directory; }
const std::optional<std::filesystem::path>& Checkpointer::last_saved() const { return impl_->last_saved; }

}  // namespace ddp
