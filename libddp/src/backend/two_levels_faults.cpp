// How calls of TwoLevels wait for other hosts, and how they fail.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "backend/two_levels.h"
#include "ddp/error.h"
#include "error_text.h"

namespace ddp::detail {
namespace {

using std::chrono::milliseconds;

// How long a leader waits before it asks whether those it waits for still live: on its host, and on others.
constexpr milliseconds kNap(100), kQuestions(500);
// How long ranks wait for each other's reasons once they fail.
constexpr milliseconds kReasons(400), kFarewell(150);

bool contains(const std::string& text, std::initializer_list<const char*> words) {
  return std::any_of(words.begin(), words.end(),
                     [&](const char* word) { return text.find(word) != std::string::npos; });
}

enum class Kind { kMismatch, kTimeout, kPeer, kOther };

Kind kind_of(const std::exception_ptr& error, const std::string& text) {
  // A rank of the host that has given up passes on why.
  if (text.find("ranks disagree") != std::string::npos) return Kind::kMismatch;
  try {
    std::rethrow_exception(error);
  } catch (const MismatchError&) {
    return Kind::kMismatch;
  } catch (const TimeoutError&) {
    return Kind::kTimeout;
  } catch (const PeerError&) {
    return Kind::kPeer;
  } catch (...) {
    if (contains(text, {"Timed out", "timed out", "imeout"})) return Kind::kTimeout;
    if (contains(text, {"Connection closed", "Connection reset", "Broken pipe", "Connection refused"})) {
      return Kind::kPeer;
    }
    return Kind::kOther;
  }
}

}  // namespace

std::string TwoLevels::where() const {
  return fmt::format("[ddp::{}] {}: call #{} in group \"{}\"", to_string(static_cast<shm::Operation>(call_.operation)),
                     options_.place.name(), call_.number, options_.group);
}

// A connection may be closed by one who only heard of the fault before this rank did: what this host's ranks know.
std::string TwoLevels::news_of_host() {
  if (exchange() == nullptr || watch_ == Watch::kNothing) return "";
  for (const auto deadline = Clock::now() + kFarewell; Clock::now() < deadline;) {
    try {
      exchange()->look_for_the_dead();
    } catch (const Error& e) {
      const std::string text = e.what(), before = where() + ": ";
      return "; " + (text.starts_with(before) ? text.substr(before.size()) : text);
    }
    std::this_thread::sleep_for(milliseconds(10));
  }
  return "";
}

// Whom this rank talks to on other hosts.
std::string TwoLevels::peers() const {
  std::vector<int> others = peers_;
  std::erase(others, options_.place.rank);
  return others.empty() ? "all ranks" : fmt::format("rank {}", fmt::join(others, ", "));
}

void TwoLevels::fail(const std::exception_ptr& error) {
  std::string text = error_text(error);
  if (!text.starts_with("[ddp::")) {
    text = fmt::format("{}: between hosts, with {}: {}{}", where(), peers(), text, news_of_host());
  }
  const Kind kind = kind_of(error, text);
  const auto begin = text.starts_with(where()) ? text.find_first_not_of(": ", where().size()) : 0;
  const std::string reason = fmt::format("in {} #{}: {}", to_string(static_cast<shm::Operation>(call_.operation)),
                                         call_.number, text.substr(std::min(begin, text.size())));
  if (exchange() != nullptr) exchange()->give_up(reason);
  board_.post(reason);
  abandon_gloo();
  // Who knows the cause himself need not wait for others to tell it.
  const bool certain = kind == Kind::kMismatch || text.find("has ended") != std::string::npos;
  if (!certain) text += board_.others(kReasons);
  // The store ends with the rank that serves it: let the others read before this one ends.
  if (options_.place.rank == 0) std::this_thread::sleep_for(certain ? kReasons + kFarewell : kFarewell);
  failure_ = text;
  switch (kind) {
    case Kind::kMismatch:
      throw MismatchError(text);
    case Kind::kTimeout:
      throw TimeoutError(text);
    case Kind::kPeer:
      throw PeerError(text);
    case Kind::kOther:
      break;
  }
  throw CommError(text);
}

// Gloo ends only when what it has begun ends, which after a failure may be at the timeout: it is left alone with that. If
// it is idle, its connections are closed now, and the other hosts hear so.
void TwoLevels::abandon_gloo() noexcept {
  for (at::Tensor& tensor : scratch_) tensor = at::Tensor();
  try {
    std::thread([gloo = std::move(gloo_), flat = std::move(flat_)]() mutable { gloo.reset(), flat.reset(); }).detach();
  } catch (const std::exception&) {
    gloo_.release(), flat_.release();
  }
}

void TwoLevels::await(const WorkPtr& work, Watch watch) {
  if (work == nullptr) return;
  watch_ = watch;
  struct Signal {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
  };
  const auto signal = std::make_shared<Signal>();
  work->getFuture()->addCallback([signal](c10::ivalue::Future&) {
    std::lock_guard lock(signal->mutex);
    signal->done = true;
    signal->changed.notify_one();
  });
  const auto begin = Clock::now();
  const auto deadline = begin + options_.timeout + kSlack;
  auto next_question = begin + kQuestions;
  const auto is_done = [&] {
    std::unique_lock lock(signal->mutex);
    return signal->changed.wait_for(lock, kNap, [&] { return signal->done; });
  };
  while (!is_done()) {
    if (watch_ == Watch::kHost && exchange() != nullptr) exchange()->look_for_the_dead();
    if (Clock::now() >= deadline) {
      throw TimeoutError(
          fmt::format("{} waited {:.3g} s for other hosts, {}; look at the rank that did not come, or "
                      "raise the group's timeout",
                      where(), std::chrono::duration<double>(Clock::now() - begin).count(), peers()));
    }
    if (Clock::now() < next_question) continue;
    if (const auto first = board_.first(); !first.empty()) throw PeerError(fmt::format("{}: {}", where(), first));
    next_question = Clock::now() + kQuestions;
  }
  work->wait();
}

}  // namespace ddp::detail
