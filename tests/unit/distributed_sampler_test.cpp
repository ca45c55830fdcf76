#include "ddp/distributed_sampler.h"

#include <torch/torch.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "ddp/error.h"
#include "ddp/log.h"
#include "support/catch.h"

using ddp::DistributedSampler;
using ddp::test::ContainsSubstring;
using ddp::test::message_of;
using Rows = std::vector<size_t>;

namespace {

Rows draw(DistributedSampler& sampler, size_t batch = 4) {
  Rows rows;
  sampler.reset();
  while (auto next = sampler.next(batch)) rows.insert(rows.end(), next->begin(), next->end());
  return rows;
}

// A world without processes: the sampler of each rank.
std::vector<DistributedSampler> world(size_t n, int size, DistributedSampler::Options options = {}) {
  std::vector<DistributedSampler> samplers;
  for (int rank = 0; rank < size; ++rank) samplers.emplace_back(n, ddp::Place{rank, size}, options);
  return samplers;
}

// One batch on each rank, used: the rows of a global step, sorted. Empty at the end.
Rows global_step(std::vector<DistributedSampler>& ranks, size_t batch) {
  Rows rows;
  for (auto& sampler : ranks) {
    auto next = sampler.next(batch);
    if (!next) continue;
    rows.insert(rows.end(), next->begin(), next->end());
    sampler.consume();
  }
  std::sort(rows.begin(), rows.end());
  return rows;
}

struct Silent {
  Silent() {
    ddp::log::set_sink([](auto, auto) {});
  }
  ~Silent() { ddp::log::set_sink({}); }
};

}  // namespace

// B19: N=8, W=2, batch 4.
TEST_CASE("set_epoch reaches a copy, and equal seed and epoch give equal orders") {
  auto ranks = world(8, 2, {.seed = 1});
  std::set<Rows> orders;
  for (int epoch = 0; epoch < 3; ++epoch) {
    std::set<size_t> seen;
    for (auto& sampler : ranks) {
      auto copy = sampler;  // what a loader holds
      sampler.set_epoch(epoch);
      auto rows = draw(copy);
      orders.insert(rows);
      seen.insert(rows.begin(), rows.end());
    }
    CHECK(seen.size() == 8);
  }
  CHECK(orders.size() == 6);  // three epochs, two ranks, all different

  DistributedSampler again(8, ddp::Place{0, 2}, {.seed = 1});
  again.set_epoch(1);
  ranks[0].set_epoch(1);
  CHECK(draw(again) == draw(ranks[0]));
}

TEST_CASE("without set_epoch each new iteration is the next epoch") {
  DistributedSampler by_itself(8, ddp::Place{0, 2}), told(8, ddp::Place{0, 2});
  for (int epoch = 0; epoch < 3; ++epoch) {
    told.set_epoch(epoch);
    CHECK(draw(by_itself) == draw(told));
    CHECK(by_itself.epoch() == epoch);
  }
}

TEST_CASE("a loader of torch draws the sampler's rows, a new order each epoch") {
  struct Identity : torch::data::datasets::Dataset<Identity, int64_t> {
    int64_t get(size_t i) override { return static_cast<int64_t>(i); }
    std::optional<size_t> size() const override { return 8; }
  };
  DistributedSampler sampler(8, ddp::Place{0, 2});
  auto loader = torch::data::make_data_loader(Identity(), sampler, 4);
  std::set<std::vector<int64_t>> orders;
  for (int epoch = 0; epoch < 3; ++epoch) {
    sampler.set_epoch(epoch);
    DistributedSampler expected(8, ddp::Place{0, 2});
    expected.set_epoch(epoch);
    auto rows = draw(expected);
    for (auto& batch : *loader) {
      CHECK(std::equal(batch.begin(), batch.end(), rows.begin(), rows.end()));
      orders.insert(batch);
    }
  }
  CHECK(orders.size() == 3);
}

TEST_CASE("set_epoch in the middle: the running iteration ends in its order and does not count") {
  DistributedSampler sampler(16, ddp::Place{}, {.shuffle = false});
  sampler.reset();
  REQUIRE(sampler.next(4) == Rows{0, 1, 2, 3});
  sampler.consume();
  sampler.set_epoch(5);
  CHECK(sampler.epoch() == 5);
  CHECK(sampler.consumed() == 0);
  CHECK(sampler.next(4) == Rows{4, 5, 6, 7});
  sampler.consume();
  sampler.finish_epoch();
  CHECK(sampler.consumed() == 0);
  CHECK_FALSE(sampler.complete());
  sampler.reset();
  CHECK(sampler.epoch() == 5);
  CHECK(sampler.next(2) == Rows{0, 1});
}

TEST_CASE("the position is what was used, not what was handed out") {
  DistributedSampler sampler(64, ddp::Place{1, 2});
  sampler.reset();
  for (int i = 0; i < 7; ++i) sampler.next(2);
  sampler.consume(3);
  CHECK(sampler.consumed() == 12);
  CHECK(sampler.state_dict().at("consumed").as_int() == 12);
  sampler.consume(4);
  CHECK_THAT(message_of<ddp::ConfigError>([&] { sampler.consume(); }),
             ContainsSubstring("a batch was used that this sampler did not hand out"));
}

// B26: N=64, W=2, batch 2.
TEST_CASE("a resume goes on at the same row, at any stop, also twice in one epoch") {
  constexpr int kEpochs = 3, kSteps = 16;
  std::vector<Rows> golden;
  auto ranks = world(64, 2, {.seed = 7});
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    for (auto& s : ranks) s.set_epoch(epoch), s.reset();
    for (int step = 0; step < kSteps; ++step) golden.push_back(global_step(ranks, 2));
  }

  for (std::vector<int> stops : {std::vector{5}, {9}, {5, 9}, {16}, {37}, {5, 9, 16, 37}}) {
    std::vector<Rows> rows;
    ddp::State saved;
    auto again = world(64, 2, {.seed = 7});
    for (auto& s : again) s.reset();
    while (true) {
      if (std::find(stops.begin(), stops.end(), static_cast<int>(rows.size())) != stops.end()) {
        saved = again[0].state_dict();
        stops.erase(stops.begin());
        again = world(64, 2, {.seed = 7});
        for (auto& s : again) s.load_state_dict(saved), s.reset();
      }
      auto step = global_step(again, 2);
      if (!step.empty()) {
        rows.push_back(step);
        continue;
      }
      CHECK(again[0].complete());
      if (again[0].epoch() + 1 == kEpochs) break;
      for (auto& s : again) s.reset();  // the next epoch by itself
    }
    CHECK(rows == golden);
  }
}

// P3: the interleaved split gives the same rows per global step at every world size.
TEST_CASE("another world size goes on at the global position with the same rows per step") {
  Silent silent;
  for (size_t n : {size_t{64}, size_t{61}, size_t{66}}) {
    for (bool drop_last : {false, true}) {
      DistributedSampler::Options options{.seed = 3, .drop_last = drop_last};
      auto whole = world(n, 2, options);
      for (auto& s : whole) s.reset();
      std::vector<Rows> golden;
      while (!golden.empty() ? !golden.back().empty() : true) golden.push_back(global_step(whole, 2));
      golden.pop_back();

      auto first = world(n, 2, options);
      for (auto& s : first) s.reset();
      std::multiset<size_t> seen;
      for (int step = 0; step < 8; ++step) {
        for (size_t row : global_step(first, 2)) seen.insert(row);
      }
      for (int size : {1, 2, 4, 3}) {
        INFO("rows " << n << ", ranks " << size << ", drop_last " << drop_last);
        auto rest = world(n, size, options);
        for (auto& s : rest) s.load_state_dict(first[0].state_dict()), s.reset();
        auto all = seen;
        size_t step = 8;
        while (true) {
          auto rows = global_step(rest, size == 3 ? 1 : 4 / static_cast<size_t>(size));
          if (rows.empty()) break;
          // The last one may be padded or cut otherwise.
          if (size != 3 && step < 15) CHECK(rows == golden[step++]);
          for (size_t row : rows) all.insert(row);
        }
        CHECK(rest[0].complete());
        // Twice: only what pads the last step. Missing: only what does not fill it.
        std::set<size_t> once(all.begin(), all.end());
        if (drop_last) {
          CHECK(all.size() == once.size());
          CHECK(n - once.size() < static_cast<size_t>(size));
        } else {
          CHECK(once.size() == n);
          CHECK(all.size() - n < static_cast<size_t>(size));
        }
      }
    }
  }
}

TEST_CASE("a state of other data is refused with both values") {
  DistributedSampler sampler(64, ddp::Place{}, {.seed = 7});
  auto refusal = [&](size_t n, DistributedSampler::Options options) {
    auto state = DistributedSampler(n, ddp::Place{}, options).state_dict();
    return message_of<ddp::DataError>([&] { sampler.load_state_dict(state); });
  };
  CHECK_THAT(refusal(65, {.seed = 7}), ContainsSubstring("dataset_size was 65") && ContainsSubstring("is 64 now"));
  CHECK_THAT(refusal(64, {.seed = 8}), ContainsSubstring("seed was 8") && ContainsSubstring("is 7 now"));
  CHECK_THAT(refusal(64, {.shuffle = false, .seed = 7}), ContainsSubstring("shuffle was false"));
  CHECK_THAT(refusal(64, {.seed = 7, .drop_last = true}), ContainsSubstring("drop_last was true"));
  CHECK_THROWS_AS(sampler.load_state_dict(ddp::State::dict()), ddp::DataError);
  for (auto [key, value] : {std::pair{"epoch", -1}, {"consumed", -4}, {"consumed", 65}, {"world_size", 0}}) {
    auto state = sampler.state_dict();
    state.set(key, value);
    CHECK_THAT(message_of<ddp::DataError>([&] { sampler.load_state_dict(state); }),
               ContainsSubstring("the saved position is none"));
  }
  CHECK(sampler.consumed() == 0);
}

TEST_CASE("a seed beyond int64 survives the state") {
  DistributedSampler a(8, ddp::Place{}, {.seed = ~uint64_t{0}}), b(8, ddp::Place{}, {.seed = ~uint64_t{0}});
  CHECK_NOTHROW(b.load_state_dict(a.state_dict()));
}

TEST_CASE("torch's archives hold the position too") {
  DistributedSampler a(64, ddp::Place{0, 2}), b(64, ddp::Place{0, 2});
  a.set_epoch(3);
  a.reset();
  a.next(4);
  a.consume();
  torch::serialize::OutputArchive out;
  a.save(out);
  std::stringstream stream;
  out.save_to(stream);
  torch::serialize::InputArchive in;
  in.load_from(stream);
  b.load(in);
  CHECK(b.state_dict() == a.state_dict());
  CHECK(b.consumed() == 8);
}

TEST_CASE("finish, stop and what cannot be") {
  DistributedSampler sampler(10, ddp::Place{0, 2});
  sampler.reset();
  sampler.next(3);
  sampler.consume();
  sampler.stop();
  CHECK_FALSE(sampler.next(3));
  CHECK(sampler.consumed() == 6);
  sampler.continue_epoch();
  sampler.reset();
  CHECK(sampler.epoch() == 0);
  CHECK(sampler.next(3)->size() == 2);
  sampler.finish_epoch();
  CHECK(sampler.complete());

  CHECK_THROWS_AS(DistributedSampler(0, ddp::Place{}), ddp::ConfigError);
  CHECK_THROWS_AS(DistributedSampler(1, ddp::Place{2, 2}), ddp::ConfigError);
  CHECK_THROWS_AS(sampler.set_epoch(-1), ddp::ConfigError);
  CHECK_THROWS_AS(sampler.reset(11), ddp::ConfigError);
  CHECK_NOTHROW(sampler.reset(10));
}
