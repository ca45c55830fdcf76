#include "ddp/loop.h"

#include <torch/torch.h>

#include <string>

#include "ddp/error.h"
#include "ddp/log.h"
#include "ddp/process_group.h"
#include "support/catch.h"

using ddp::DistributedSampler;
using ddp::test::ContainsSubstring;

namespace {

// Row i is the number i; a batch is {rows}.
struct Numbers : torch::data::datasets::Dataset<Numbers, torch::Tensor> {
  explicit Numbers(size_t n) : n(n) {}
  torch::Tensor get(size_t i) override { return torch::full({1}, static_cast<int64_t>(i), torch::kLong); }
  std::optional<size_t> size() const override { return n; }
  size_t n;
};

auto loader_of(const DistributedSampler& sampler, size_t batch, size_t workers = 0, bool drop_last = false) {
  return torch::data::make_data_loader(Numbers(sampler.dataset_size()), sampler,
                                       torch::data::DataLoaderOptions(batch).workers(workers).drop_last(drop_last));
}

std::string text_of(const std::vector<torch::Tensor>& batch) {
  std::string text;
  for (const auto& row : batch) text += std::to_string(row.item<int64_t>()) + " ";
  return text;
}

struct Lines {
  Lines() {
    ddp::log::set_sink([this](auto, std::string_view line) { text += line; });
  }
  ~Lines() { ddp::log::set_sink({}); }
  std::string text;
};

// An input iterator: what it shows is gone with the next ++, and may be moved from but not copied.
struct OneByOne {
  struct Item {
    explicit Item(int v) : value(std::make_unique<int>(v)) {}
    std::unique_ptr<int> value;
  };
  struct End {};
  struct Iterator {
    OneByOne* source;
    Item& operator*() { return *source->current; }
    Iterator& operator++() {
      source->read();
      return *this;
    }
    bool operator==(const End&) const { return !source->current; }
  };
  Iterator begin() {
    read();
    return {this};
  }
  End end() { return {}; }
  void read() {
    current.reset();
    if (next < count) current.emplace(next++);
  }
  int count;
  int next = 0;
  std::optional<Item> current = {};
};

}  // namespace

TEST_CASE("windows of four, the last one shorter and saying so") {
  DistributedSampler sampler(22, ddp::Place{}, {.shuffle = false});
  auto loader = loader_of(sampler, 2);
  std::string seen;
  for (auto epoch : ddp::epochs(sampler, 1)) {
    for (auto [batch, micro] : epoch.accumulate(*loader, 4)) {
      seen += std::to_string(micro.index()) + "/" + std::to_string(micro.count()) + (micro.last() ? "! " : " ");
      CHECK(batch.size() == 2);
    }
  }
  CHECK(seen == "0/4 1/4 2/4 3/4! 0/4 1/4 2/4 3/4! 0/3 1/3 2/3! ");
}

TEST_CASE("the position moves with whole windows, so that no gradient is lost by a resume") {
  for (size_t workers : {0, 2}) {  // two workers read ahead (trap 13)
    DistributedSampler sampler(64, ddp::Place{0, 2});
    auto loader = loader_of(sampler, 2, workers);
    std::vector<size_t> positions;
    for (auto epoch : ddp::epochs(sampler, 1)) {
      for (auto [batch, micro] : epoch.accumulate(*loader, 3)) positions.push_back(sampler.consumed());
    }
    CHECK(positions == std::vector<size_t>{0, 0, 12, 12, 12, 24, 24, 24, 36, 36, 36, 48, 48, 48, 60, 64});
    CHECK(sampler.epoch() == 1);  // the loop is through: what is left begins there
    CHECK(sampler.consumed() == 0);
  }
}

// B26: stops at steps 5, 9 (same epoch), 16 (boundary), 37; 3 epochs of 16 steps.
TEST_CASE("epochs begin where a resume left off: nothing twice, nothing skipped, nothing after the end") {
  for (size_t workers : {0, 2}) {
    auto run = [&](DistributedSampler sampler, int steps, std::string& seen) {
      auto loader = loader_of(sampler, 2, workers);
      for (auto epoch : ddp::epochs(sampler, 3)) {
        for (auto& batch : epoch.batches(*loader)) {
          seen += std::to_string(epoch) + ": " + text_of(batch) + "\n";
          if (--steps == 0) return sampler.state_dict();
        }
      }
      return sampler.state_dict();
    };
    auto fresh = [] { return DistributedSampler(64, ddp::Place{0, 2}, {.seed = 5}); };
    std::string golden;
    auto end = run(fresh(), -1, golden);
    CHECK(std::count(golden.begin(), golden.end(), '\n') == 48);

    std::string seen;
    auto state = run(fresh(), 5, seen);
    for (int steps : {4, 7, 21, -1}) {
      auto sampler = fresh();
      sampler.load_state_dict(state);
      state = run(sampler, steps, seen);
    }
    CHECK(seen == golden);

    Lines lines;
    auto sampler = fresh();
    sampler.load_state_dict(end);
    std::string after;
    run(sampler, -1, after);
    CHECK(after.empty());
    CHECK_THAT(lines.text, ContainsSubstring("all 3 epochs are done"));
  }
}

TEST_CASE("a loader that drops its last batch ends the epoch, also when the stop was just before") {
  DistributedSampler sampler(11, ddp::Place{}, {.shuffle = false});
  auto loader = loader_of(sampler, 4, 0, /*drop_last=*/true);
  ddp::State state;
  int batches = 0;
  for (auto epoch : ddp::epochs(sampler, 2)) {
    for (auto& batch : epoch.batches(*loader)) {
      CHECK(batch.size() == 4);
      if (++batches == 2) state = sampler.state_dict();
    }
    if (epoch == 0) CHECK(sampler.complete());
  }
  CHECK(batches == 4);

  DistributedSampler again(11, ddp::Place{}, {.shuffle = false});
  again.load_state_dict(state);
  auto rest = loader_of(again, 4, 0, true);
  std::vector<int> of_epoch;
  for (auto epoch : ddp::epochs(again, 2)) {
    for ([[maybe_unused]] auto& batch : epoch.batches(*rest)) of_epoch.push_back(epoch);
  }
  CHECK(of_epoch == std::vector{1, 1});
}

TEST_CASE("leaving an epoch early goes on with the next, leaving all goes on in the middle, workers do not mind") {
  for (size_t workers : {0, 2}) {
    DistributedSampler sampler(32, ddp::Place{});
    auto loader = loader_of(sampler, 2, workers);
    std::vector<int> epochs;
    for (auto epoch : ddp::epochs(sampler, 3)) {
      for (auto [batch, micro] : epoch.accumulate(*loader, 2)) {
        epochs.push_back(epoch);
        if (micro.last()) break;
      }
      if (epoch == 1) break;
    }
    CHECK(epochs == std::vector{0, 0, 1, 1});
    CHECK(sampler.epoch() == 1);
    CHECK(sampler.consumed() == 4);

    int left = 0;
    for (auto epoch : ddp::epochs(sampler, 2)) {
      for ([[maybe_unused]] auto& batch : epoch.batches(*loader)) ++left;
    }
    CHECK(left == 14);

    sampler.set_epoch(0);
    CHECK_THROWS_AS(
        [&] {
          for (auto epoch : ddp::epochs(sampler, 1)) {
            for ([[maybe_unused]] auto& batch : epoch.batches(*loader)) throw std::runtime_error("user's");
          }
        }(),
        std::runtime_error);
  }
}

TEST_CASE("a loader with another sampler is an error, not a silent loss of the position") {
  DistributedSampler sampler(8, ddp::Place{}), other(8, ddp::Place{});
  auto loader = loader_of(other, 2);
  CHECK_THAT(ddp::test::message_of<ddp::ConfigError>([&] {
               for (auto epoch : ddp::epochs(sampler, 1)) {
                 for ([[maybe_unused]] auto& batch : epoch.batches(*loader)) {
                 }
               }
             }),
             ContainsSubstring("give the loader this sampler"));
}

TEST_CASE("free accumulate: containers by reference, input ranges by move, any count") {
  ddp::ProcessGroup alone;
  std::vector<std::string> texts = {"a", "b", "c"};
  std::string seen;
  for (auto [batch, micro] : ddp::accumulate(texts, 2, alone)) {
    seen += batch + std::to_string(micro.count());
    batch += "!";
  }
  CHECK(seen == "a2b2c1");
  CHECK(texts[2] == "c!");

  const std::vector<int> numbers = {1, 2, 3, 4};
  int windows = 0;
  for (auto [number, micro] : ddp::accumulate(numbers, 2, alone)) windows += micro.last();
  CHECK(windows == 2);

  OneByOne source{.count = 5};
  int sum = 0;
  for (auto [item, micro] : ddp::accumulate(source, 3, alone)) sum += *item.value;
  CHECK(sum == 10);

  OneByOne ahead{.count = 9};
  for (auto [item, micro] : ddp::accumulate(ahead, 3, alone)) {
    CHECK(ahead.next <= 3);  // no further than the window
    break;
  }

  std::vector<int> none;
  for ([[maybe_unused]] auto [batch, micro] : ddp::accumulate(none, 2, alone)) FAIL("an empty loader");
  CHECK_THROWS_AS(ddp::accumulate(none, 0, alone), ddp::ConfigError);
}

TEST_CASE("no copy of a tensor's storage is made") {
  std::vector<torch::Tensor> batches = {torch::ones({4}), torch::ones({4})};
  size_t i = 0;
  for (auto [batch, micro] : ddp::accumulate(batches, 2, ddp::ProcessGroup())) {
    CHECK(batch.data_ptr() == batches[i++].data_ptr());
  }
}
