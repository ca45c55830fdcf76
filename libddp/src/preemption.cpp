#include "ddp/preemption.h"

#include <fmt/format.h>
#include <time.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

#include "ddp/collectives.h"
#include "ddp/error.h"
#include "ddp/log.h"

namespace ddp {
namespace {

// What the handler touches. Lock-free atomics are async-signal-safe; one set per process, as signals are.
std::atomic<bool> g_in_use{false};
std::atomic<bool> g_stop{false};
std::atomic<int> g_signal{0};         // the first that came
std::atomic<int64_t> g_signal_ns{0};  // and when
std::atomic<int64_t> g_again_after_ns{0};
static_assert(std::atomic<bool>::is_always_lock_free && std::atomic<int64_t>::is_always_lock_free);

int64_t monotonic_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

void on_signal(int signal) {
  const int saved_errno = errno;
  int64_t now = monotonic_ns();
  int none = 0;
  if (g_signal.compare_exchange_strong(none, signal)) {
    g_signal_ns = now;
    g_stop = true;
  } else if (int64_t first = g_signal_ns; first != 0 && now - first >= g_again_after_ns) {
    // Delivered with its default action as soon as this handler has returned.
    struct sigaction action {};
    action.sa_handler = SIG_DFL;
    ::sigaction(signal, &action, nullptr);
    ::raise(signal);
  }
  errno = saved_errno;
}

std::string signal_name(int signal) {
  const char* name = ::sigabbrev_np(signal);
  return name ? fmt::format("SIG{}", name) : fmt::format("signal {}", signal);
}

}  // namespace

struct Preemption::Impl {
  ProcessGroup group;
  Options options;
  std::vector<std::pair<int, struct sigaction>> old_actions;
  int64_t calls = 0;
  bool agreed = false;
  bool told = false;

  // Where ranks were asked to stop, one more signal is an echo of the request, and its default action would kill a rank
  // that has saved and is about to end.
  void restore() {
    const bool stopping = agreed || g_stop;
    for (auto it = old_actions.rbegin(); it != old_actions.rend(); ++it) {
      if (!stopping || it->second.sa_handler != SIG_DFL) ::sigaction(it->first, &it->second, nullptr);
    }
    g_in_use = false;
  }
};

Preemption::Preemption(const ProcessGroup& group, Options options)
    : impl_(new Impl{.group = group, .options = std::move(options), .old_actions = {}}) {
  auto refuse = [&](const std::string& why) -> ConfigError {
    return ConfigError(fmt::format("[ddp::Preemption] {}: {}", group.place().name(), why));
  };
  if (impl_->options.every < 1) throw refuse(fmt::format("every is {}, at least 1 is needed", impl_->options.every));
  if (g_in_use.exchange(true)) throw refuse("another Preemption lives in this process; share that one");
  g_stop = false;
  g_signal = 0;
  g_signal_ns = 0;
  g_again_after_ns = std::chrono::nanoseconds(impl_->options.again_after).count();

  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;  // the flag is polled, so nothing has to wake up
  ::sigemptyset(&action.sa_mask);
  for (int signal : impl_->options.signals) {
    struct sigaction old {};
    if (::sigaction(signal, &action, &old) != 0) {
      int error = errno;
      impl_->restore();
      throw refuse(fmt::format("{} cannot be caught: {}", signal_name(signal), std::strerror(error)));
    }
    if (old.sa_handler == on_signal) old.sa_handler = SIG_DFL;  // left by an earlier one
    impl_->old_actions.emplace_back(signal, old);
  }
}

Preemption::~Preemption() { impl_->restore(); }

bool Preemption::requested() {
  Impl& impl = *impl_;
  if (int signal = g_signal; signal != 0 && !impl.told) {
    impl.told = true;
    log::warn(impl.group,
              fmt::format("[ddp::Preemption] received {}; all ranks stop after the same step; another signal after {} "
                          "ms or more ends this process at once",
                          signal_name(signal), impl.options.again_after.count()));
  }
  if (!impl.agreed && ++impl.calls % impl.options.every == 0) impl.agreed = any(g_stop, impl.group);
  return impl.agreed;
}

void Preemption::stop() { g_stop = true; }

}  // namespace ddp
