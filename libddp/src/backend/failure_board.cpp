#include "backend/failure_board.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <future>
#include <thread>
#include <utility>
#include <vector>

namespace ddp::detail {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// In a large group the first few reasons say enough.
constexpr size_t kReasons = 4, kSilent = 8;

std::string key_of(int rank) { return fmt::format("why/{}", rank); }

std::string collect(c10d::Store& store, const Place& place, milliseconds patience) {
  const auto deadline = Clock::now() + patience;
  std::vector<int> silent;
  for (int rank = 0; rank < place.size; ++rank) {
    if (rank != place.rank) silent.push_back(rank);
  }
  std::vector<std::string> reasons;
  for (;;) {
    std::erase_if(silent, [&](int rank) {
      if (!store.check({key_of(rank)})) return false;
      reasons.push_back(fmt::format("; rank {}: {}", rank, store.get_to_str(key_of(rank))));
      return true;
    });
    if (silent.empty() || Clock::now() >= deadline) break;
    std::this_thread::sleep_for(milliseconds(20));
  }
  // Who names a rank first: "rank 2 has ended" says more than a connection that was closed.
  std::stable_partition(reasons.begin(), reasons.end(), [](const std::string& reason) {
    return reason.find("has ended") != std::string::npos || reason.find("did not come") != std::string::npos;
  });
  if (reasons.size() > kReasons) reasons.resize(kReasons);
  std::string text = fmt::format("{}", fmt::join(reasons, ""));
  if (silent.empty()) return text;
  const bool more = silent.size() > kSilent;
  if (more) silent.resize(kSilent);
  return text + fmt::format("; no word from rank {}{}", fmt::join(silent, ", "), more ? ", ..." : "");
}

}  // namespace

FailureBoard::FailureBoard(c10::intrusive_ptr<c10d::Store> store, Place place)
    : store_(std::move(store)), place_(place) {}

// The question is asked on a thread of its own, which stays behind where the store never answers.
std::optional<std::string> FailureBoard::ask(milliseconds limit,
                                             std::function<std::string(c10d::Store& store)> question) {
  if (lost_) return std::nullopt;
  try {
    std::packaged_task<std::string()> task(
        [store = store_, question = std::move(question)] { return question(*store); });
    auto answer = task.get_future();
    std::thread(std::move(task)).detach();
    if (answer.wait_for(limit) == std::future_status::ready) return answer.get();
  } catch (const std::exception&) {
  }
  lost_ = true;
  return std::nullopt;
}

std::string FailureBoard::first() {
  return ask(std::chrono::seconds(1),
             [](c10d::Store& store) { return store.check({"first"}) ? store.get_to_str("first") : std::string(); })
      .value_or("");
}

void FailureBoard::post(const std::string& reason) {
  ask(milliseconds(500), [key = key_of(place_.rank), rank = place_.rank, reason](c10d::Store& store) {
    store.set(key, reason);
    if (!store.check({"first"})) store.set("first", fmt::format("rank {}: {}", rank, reason));
    return std::string();
  });
}

std::string FailureBoard::others(milliseconds patience) {
  const auto said = ask(patience + milliseconds(500),
                        [place = place_, patience](c10d::Store& store) { return collect(store, place, patience); });
  return said ? *said : "; the store is gone, so who serves it may have ended: rank 0, or torchrun's agent";
}

}  // namespace ddp::detail
