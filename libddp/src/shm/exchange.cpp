#include "shm/exchange.h"

#include <c10/core/ScalarType.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <string_view>

#include "ddp/error.h"
#include "shm/identity.h"
#include "shm/reduce.h"

namespace ddp::detail::shm {
namespace {

using std::chrono::milliseconds;

// How long a rank sleeps before it asks whether the others still live.
constexpr milliseconds kNap(100);

void futex_wait(std::atomic<uint32_t>& word, uint32_t value, milliseconds limit) {
  const timespec time{.tv_sec = limit.count() / 1000, .tv_nsec = limit.count() % 1000 * 1'000'000};
  ::syscall(SYS_futex, &word, FUTEX_WAIT, value, &time, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word) { ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Half a millisecond where every rank has a core: to sleep and be woken costs a tenth of one. Where ranks share cores, who
// spins keeps the one waited for from running.
int choose_spins(int ranks) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  const bool known = ::sched_getaffinity(0, sizeof allowed, &allowed) == 0;
  return known && ranks <= CPU_COUNT(&allowed) ? 20000 : 0;
}

// Where there are several hosts, ranks wait here on a thread beside the one that computes, and beside those of sockets: to
// spin takes from them.
constexpr int kFewSpins = 400;

}  // namespace

const char* to_string(Operation operation) {
  constexpr const char* kNames[] = {"nothing", "all_reduce",     "broadcast",  "reduce",  "all_gather", "gather",
                                    "scatter", "reduce_scatter", "all_to_all", "barrier", "send",       "recv"};
  return kNames[static_cast<size_t>(operation)];
}

Exchange::Exchange(Arena arena, Peers peers, Place place, std::string group, milliseconds timeout)
    : arena_(std::move(arena)),
      peers_(std::move(peers)),
      place_(place),
      shown_(peers_.names.empty() ? place : Place{.rank = peers_.names[place.rank], .size = peers_.world}),
      group_(std::move(group)),
      timeout_(timeout),
      layout_(place.size),
      spins_(peers_.names.empty() ? choose_spins(place.size) : std::min(choose_spins(place.size), kFewSpins)) {}

Exchange::~Exchange() {
  if (arena_.is_ours()) announce(State::kLeft);
}

Header& Exchange::header() const { return *reinterpret_cast<Header*>(arena_.data()); }

Rank& Exchange::rank(int rank) const { return *reinterpret_cast<Rank*>(arena_.data() + layout_.rank(rank)); }

Lane& Exchange::lane(int from, int to) const {
  return *reinterpret_cast<Lane*>(arena_.data() + layout_.lane(from, to));
}

void Exchange::announce(State state, int blamed) noexcept {
  State here = State::kHere;  // who has failed does not also leave
  rank(place_.rank).blamed.store(blamed + 1, std::memory_order_relaxed);
  rank(place_.rank).state.compare_exchange_strong(here, state);
  futex_wake(header().arrived);
  for (int other = 0; other < place_.size; ++other) ring(other);
}

void Exchange::give_up(const std::string& reason) noexcept {
  if (!arena_.is_ours() || rank(place_.rank).state.load() != State::kHere) return;
  set_reason(reason);
  announce(State::kFailed);
}

// Others read it once this rank is marked as failed.
void Exchange::set_reason(std::string_view reason) noexcept {
  char* text = rank(place_.rank).reason;
  text[reason.copy(text, kReason - 1)] = '\0';
}

std::string_view Exchange::reason_of(int other) const {
  const Rank& they = rank(other);
  if (they.state.load(std::memory_order_acquire) != State::kFailed) return {};
  return {they.reason, ::strnlen(they.reason, kReason)};
}

void Exchange::look_for_the_dead() {
  look_for_the_dead(call_, [](int) { return true; });
}

void Exchange::require_usable() const {
  if (!arena_.is_ours()) {
    throw CommError(
        fmt::format("[ddp::ProcessGroup] {}: group \"{}\" belongs to the process that made it; a child made by "
                    "fork cannot use it: fork before, or make a group in the child",
                    shown_.name(), group_));
  }
  if (failure_.empty()) return;
  throw CommError(fmt::format("[ddp::ProcessGroup] {}: group \"{}\" failed before and cannot be used any more: {}",
                              shown_.name(), group_, failure_));
}

void Exchange::begin(Call call) {
  require_usable();
  call.number = ++calls_;
  call_ = call;
  rank(place_.rank).calls[turn_] = call;
  comparing_ = true;
}

void Exchange::meet() {
  ++meetings_;
  const uint32_t before = header().arrived.fetch_add(1, std::memory_order_seq_cst);
  // After it, not before: who dies in between must not look as if it had arrived.
  rank(place_.rank).arrivals.store(meetings_, std::memory_order_relaxed);
  const bool last = before + 1 == meetings_ * static_cast<uint32_t>(place_.size);
  if (last) {
    if (header().sleepers.load(std::memory_order_seq_cst) != 0) futex_wake(header().arrived);
  } else {
    wait_for_all();
  }
  if (comparing_) compare_calls();
}

// The count wraps around, so the distance is what is compared.
bool Exchange::all_arrived() const {
  const uint32_t target = meetings_ * static_cast<uint32_t>(place_.size);
  return static_cast<int32_t>(header().arrived.load(std::memory_order_acquire) - target) >= 0;
}

bool Exchange::has_arrived(int other) const {
  return static_cast<int32_t>(rank(other).arrivals.load(std::memory_order_relaxed) - meetings_) >= 0;
}

void Exchange::wait_for_all() {
  for (int spin = 0; spin < spins_; ++spin) {
    if (all_arrived()) return;
    pause();
  }
  const auto deadline = Clock::now() + timeout_;
  const auto absent = [&](int other) { return !has_arrived(other); };
  while (!all_arrived()) {
    if (idle_) idle_();
    const uint32_t seen = header().arrived.load(std::memory_order_seq_cst);
    header().sleepers.fetch_add(1, std::memory_order_seq_cst);
    if (!all_arrived()) futex_wait(header().arrived, seen, idle_ ? milliseconds(1) : kNap);
    header().sleepers.fetch_sub(1, std::memory_order_seq_cst);
    if (all_arrived()) return;
    look_for_the_dead(call_, absent);
    if (Clock::now() < deadline) continue;
    fail<TimeoutError>(fmt::format("{} waited {:.3g} s; {}; look at the rank that did not come, or raise the group's "
                                   "timeout",
                                   where(call_), std::chrono::duration<double>(timeout_).count(), missing(absent)),
                       first(absent));
  }
}

void Exchange::compare_calls() {
  comparing_ = false;
  const auto call_of = [&](int other) { return rank(other).calls[turn_]; };
  const Call first = call_of(0);
  for (int other = 1; other < place_.size; ++other) {
    if (call_of(other) == first) continue;
    fail<MismatchError>(
        fmt::format("{}: ranks disagree: rank {} calls {}, rank {} calls {}; make the same calls with the "
                    "same sizes in the same order on all ranks",
                    where(call_), name_of(0), describe(first), name_of(other), describe(call_of(other))));
  }
}

bool Exchange::has_ended(int other) const {
  if (other == place_.rank || peers_.pids[other] == ::getpid()) return false;  // itself, or a thread of this process
  return shm::has_ended(peers_.pids[other], peers_.processes[other]);
}

std::string Exchange::how_it_went(int other) const {
  const Rank& they = rank(other);
  const State state = they.state.load(std::memory_order_acquire);
  if (state == State::kLeft) return "has left the group";
  if (state == State::kHere) return "";
  if (const auto reason = reason_of(other); !reason.empty()) return fmt::format("has failed in this group: {}", reason);
  const int blamed = they.blamed.load(std::memory_order_relaxed) - 1;
  return blamed < 0 ? "has failed in this group; its own message says why"
                    : fmt::format("has failed in this group over rank {}; its own message says why", name_of(blamed));
}

void Exchange::look_for_the_dead(const Call& call, const std::function<bool(int)>& needed) {
  // The dead first: who has failed did so because of them. But who gave a reason and then ended did so for that.
  for (const bool dead : {true, false}) {
    for (int other = 0; other < place_.size; ++other) {
      if (other == place_.rank || !needed(other)) continue;
      const std::string_view reason = reason_of(other);
      const std::string how = dead ? (reason.empty() && has_ended(other) ? "has ended" : "") : how_it_went(other);
      // What it did before it went may have come in between.
      if (how.empty() || !needed(other)) continue;
      if (!reason.empty()) set_reason(reason);  // passed on to those who wait for this rank
      fail<PeerError>(fmt::format("{}: rank {} (process {}) {}; its last call was {}", where(call), name_of(other),
                                  peers_.pids[other], how, describe(last_call(other))),
                      other);
    }
  }
}

const Call& Exchange::last_call(int other) const {
  const Rank& they = rank(other);
  return they.calls[0].number < they.calls[1].number ? they.calls[1] : they.calls[0];
}

int Exchange::first(const std::function<bool(int)>& needed) const {
  for (int other = 0; other < place_.size; ++other) {
    if (other != place_.rank && needed(other)) return other;
  }
  return -1;
}

std::string Exchange::missing(const std::function<bool(int)>& needed) const {
  std::vector<std::string> names;
  for (int other = 0; other < place_.size; ++other) {
    if (other == place_.rank || !needed(other)) continue;
    names.push_back(fmt::format("rank {} (process {}) did not come, its last call was {}", name_of(other),
                                peers_.pids[other], describe(last_call(other))));
  }
  return fmt::format("{}", fmt::join(names, "; "));
}

void Exchange::ring(int other) const {
  Rank& they = rank(other);
  they.bell.fetch_add(1, std::memory_order_seq_cst);
  if (they.asleep.load(std::memory_order_seq_cst) != 0) futex_wake(they.bell);
}

void Exchange::wait_for_bell(const std::function<bool()>& done, const Call& call, int from, milliseconds timeout) {
  require_usable();
  Rank& mine = rank(place_.rank);
  const auto deadline = Clock::now() + timeout;
  const auto needed = [&](int other) { return other == from && !done(); };
  for (int spin = 0;; ++spin) {
    const uint32_t seen = mine.bell.load(std::memory_order_seq_cst);
    if (done()) return;
    if (spin < spins_) {
      pause();
      continue;
    }
    mine.asleep.store(1, std::memory_order_seq_cst);
    futex_wait(mine.bell, seen, kNap);
    mine.asleep.store(0, std::memory_order_seq_cst);
    look_for_the_dead(call, needed);
    if (Clock::now() < deadline || done()) continue;
    fail<TimeoutError>(fmt::format("{} waited {:.3g} s; {}; look at that rank, or raise the group's timeout",
                                   where(call), std::chrono::duration<double>(timeout).count(), missing(needed)),
                       from);
  }
}

std::string Exchange::where(const Call& call) const {
  return fmt::format("[ddp::{}] {}: call #{} in group \"{}\"", to_string(static_cast<Operation>(call.operation)),
                     shown_.name(), call.number, group_);
}

std::string Exchange::describe(const Call& call) {
  const auto operation = static_cast<Operation>(call.operation);
  if (operation == Operation::kNone) return "none";
  std::string text = fmt::format("#{} {}", call.number, to_string(operation));
  if (call.op >= 0) text += fmt::format(" {}", to_string(static_cast<Op>(call.op)));
  if (call.dtype >= 0)
    text += fmt::format(" of {} {}", call.count, c10::toString(static_cast<c10::ScalarType>(call.dtype)));
  if (call.root >= 0) text += fmt::format(" root {}", call.root);
  return text;
}

}  // namespace ddp::detail::shm
