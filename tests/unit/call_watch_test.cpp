// Signatures of calls, their tags, and the comparison of what ranks say of themselves; ranks as objects of one process.
#include "call_watch.h"

#include <torch/types.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include "support/catch.h"

using namespace ddp::test;
using namespace std::chrono_literals;
using ddp::Place;
using ddp::detail::CallWatch;
using ddp::detail::describe;
using ddp::detail::hash_of;
using ddp::detail::Intent;
using ddp::detail::Pass;
using ddp::detail::Signature;
using ddp::detail::tag_of;

namespace {

Signature sum_of(int64_t count) { return {.operation = "all_reduce", .count = count, .op = 0, .dtype = 6}; }

// Waits for a verdict, a few seconds at most.
std::string verdict_of(const CallWatch& watch) {
  for (int i = 0; i < 500 && watch.verdict().empty(); ++i) std::this_thread::sleep_for(10ms);
  return watch.verdict();
}

}  // namespace

TEST_CASE("whatever ranks may disagree about changes hash and tag") {
  const Signature base{.operation = "reduce", .count = 5, .op = 1, .dtype = 6, .root = 2, .pass = {.forwards = 3}};
  std::vector<Signature> all(8, base);
  all[1].operation = "broadcast", all[2].count = 6, all[3].op = 2, all[4].dtype = 7, all[5].root = 0;
  all[6].pass.forwards = 4, all[7].pass.dropped = 1;
  std::set<uint64_t> hashes;
  std::set<uint32_t> tags;
  for (const auto& signature : all) hashes.insert(hash_of(signature, 9)), tags.insert(tag_of(signature, 9));
  CHECK(hashes.size() == all.size());
  CHECK(tags.size() == all.size());
  CHECK(hash_of(base, 9) != hash_of(base, 10));
  CHECK(hash_of(base, 9) == hash_of(base, 9));
}

TEST_CASE("calls on their way at once have different tags, whatever their signatures") {
  std::set<uint32_t> tags;
  for (uint64_t number = 5000; number < 5000 + 4096; ++number) tags.insert(tag_of(sum_of(1), number));
  CHECK(tags.size() == 4096);
}

TEST_CASE("a signature in words") {
  CHECK(describe(Signature{.operation = "barrier"}, 3) == "#3 barrier");
  CHECK(describe(sum_of(10), 4) == "#4 all_reduce sum of 10 Float");
  const Signature full{.operation = "reduce", .count = 5, .op = 1, .dtype = 4, .root = 2, .pass = {.forwards = 3}};
  CHECK(describe(full, 1) == "#1 reduce avg of 5 Long root 2 after 3 synchronised forward(s)");
}

TEST_CASE("an intent describes the calls of its thread while it lives, the innermost first") {
  CHECK(Intent::current() == nullptr);
  {
    const Intent outer("broadcast", torch::zeros({3}, torch::kBool));
    {
      const Intent inner("all_gather", torch::zeros({4}, torch::kDouble));
      CHECK(Intent::current() == &inner);
      bool none = false;
      std::thread([&] { none = Intent::current() == nullptr; }).join();
      CHECK(none);
    }
    Signature signature;
    Intent::current()->describe(signature);
    CHECK(describe(signature, 1) == "#1 broadcast of 3 Bool");
  }
  CHECK(Intent::current() == nullptr);
}

TEST_CASE("ranks that wait in different calls of one number hear so, all of them") {
  for (const int ranks : {2, 5}) {
    auto store = c10::make_intrusive<c10d::HashStore>();
    std::vector<std::unique_ptr<CallWatch>> watches;
    std::vector<std::shared_ptr<CallWatch::Pending>> calls;
    for (int rank = 0; rank < ranks; ++rank) {
      watches.push_back(std::make_unique<CallWatch>(store, Place{.rank = rank, .size = ranks}));
      watches.back()->begin(1, sum_of(7))->done = true;
      calls.push_back(watches.back()->begin(2, sum_of(rank == ranks - 1 ? 8 : 9)));
    }
    int told = 0;
    std::mutex mutex;
    for (int rank = 0; rank < ranks; ++rank) {
      watches[rank]->on_verdict(calls[rank], [&] {
        std::lock_guard lock(mutex);
        ++told;
      });
    }
    const std::string first = verdict_of(*watches[0]);
    CHECK_THAT(first, ContainsSubstring("calls #2 all_reduce sum of 9 Float"));
    CHECK_THAT(first, ContainsSubstring("rank " + std::to_string(ranks - 1) + " calls #2 all_reduce sum of 8 Float"));
    for (const auto& watch : watches) CHECK(verdict_of(*watch) == first);
    std::this_thread::sleep_for(300ms);
    std::lock_guard lock(mutex);
    CHECK(told == ranks);
  }
}

TEST_CASE("ranks that wait in the same call, or are done with it, hear nothing") {
  auto store = c10::make_intrusive<c10d::HashStore>();
  CallWatch one(store, {.rank = 0, .size = 2}), other(store, {.rank = 1, .size = 2});
  const auto a = one.begin(1, sum_of(1));
  const auto b = other.begin(1, sum_of(1));
  b->done = true;
  const auto ahead = other.begin(2, sum_of(5));  // rank 0 is not there yet
  std::this_thread::sleep_for(900ms);
  CHECK(one.verdict().empty());
  CHECK(other.verdict().empty());
  CHECK(other.ask(2).empty());
}

TEST_CASE("a call that is done but not waited for does not hide the one that hangs") {
  auto store = c10::make_intrusive<c10d::HashStore>();
  CallWatch one(store, {.rank = 0, .size = 2}), other(store, {.rank = 1, .size = 2});
  const auto a1 = one.begin(1, sum_of(1)), b1 = other.begin(1, sum_of(1));
  const auto a2 = one.begin(2, sum_of(2)), b2 = other.begin(2, sum_of(3));
  CHECK_THAT(verdict_of(one), ContainsSubstring("#2 all_reduce sum of 3"));
}

TEST_CASE("an accusation reaches the ranks that wait") {
  auto store = c10::make_intrusive<c10d::HashStore>();
  CallWatch one(store, {.rank = 0, .size = 2}), other(store, {.rank = 1, .size = 2});
  const auto waits = one.begin(1, sum_of(1));
  other.accuse("rank 1 has lost its way");
  CHECK(other.verdict() == "rank 1 has lost its way");
  CHECK(verdict_of(one) == "rank 1 has lost its way");
}

// Hidden: prints what a call costs while ranks agree, hashing its tag included.
TEST_CASE("cost of a call", "[.]") {
  auto store = c10::make_intrusive<c10d::HashStore>();
  CallWatch watch(store, {.rank = 0, .size = 2});
  constexpr int kCalls = 100'000;
  uint64_t sum = 0;
  const auto begin = CallWatch::Clock::now();
  for (uint64_t number = 1; number <= kCalls; ++number) {
    watch.begin(number, sum_of(1000))->done = true;
    sum += tag_of(sum_of(1000), number);
  }
  const std::chrono::duration<double, std::nano> took = CallWatch::Clock::now() - begin;
  WARN(took.count() / kCalls << " ns a call (" << sum << ")");
}
