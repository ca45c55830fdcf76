// Sampler and loop over real ranks: uneven loaders (B14a), one seed for the split (B21a), position and world size (B26).
#include <torch/torch.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <numeric>
#include <set>
#include <sstream>

#include "ddp/collectives.h"
#include "ddp/distributed_data_parallel.h"
#include "ddp/distributed_sampler.h"
#include "ddp/error.h"
#include "ddp/loop.h"
#include "support/catch.h"
#include "support/spawn.h"

namespace {

using namespace ddp::test;
using ddp::DistributedSampler;
using ddp::Place;
using ddp::ProcessGroup;

ProcessGroup join() { return ProcessGroup::from_env({.timeout = 8s}); }

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

std::string error_of(const std::function<void()>& call) { return message_of<ddp::Error>(call); }

// Row i is the number i.
struct Numbers : torch::data::datasets::Dataset<Numbers, int64_t> {
  explicit Numbers(size_t n) : n(n) {}
  int64_t get(size_t i) override { return static_cast<int64_t>(i); }
  std::optional<size_t> size() const override { return n; }
  size_t n;
};

auto loader_of(const DistributedSampler& sampler, size_t batch, size_t workers = 0) {
  return torch::data::make_data_loader(Numbers(sampler.dataset_size()), sampler,
                                       torch::data::DataLoaderOptions(batch).workers(workers));
}

// The rows of a global step, of all ranks, sorted, as text.
std::string rows_of_step(const std::vector<int64_t>& batch, const ProcessGroup& group) {
  std::string mine;
  for (int64_t row : batch) mine += std::to_string(row) + " ";
  std::multiset<int> rows;
  for (const auto& text : ddp::all_gather_object(mine, group)) {
    std::istringstream words(text);
    rows.insert(std::istream_iterator<int>(words), {});
  }
  std::string text;
  for (int row : rows) text += std::to_string(row) + " ";
  return text;
}

constexpr size_t kRows = 64;
constexpr int kEpochs = 3;

// B26's program: N=64, global batch 4, three epochs; at most `steps` of them from `state` on. Appends a line per global
// step to `out` on rank 0 and returns the state where it ended.
ddp::State train(const ProcessGroup& group, const ddp::State* state, int steps, const std::filesystem::path& out) {
  DistributedSampler sampler(kRows, group, {.seed = 5});
  if (state) sampler.load_state_dict(*state);
  auto loader = loader_of(sampler, 4 / static_cast<size_t>(group.size()), /*workers=*/1);
  std::ofstream file(out, std::ios::app);
  for (auto epoch : ddp::epochs(sampler, kEpochs)) {
    for (auto& batch : epoch.batches(*loader)) {
      auto rows = rows_of_step(batch, group);
      if (group.is_root()) file << epoch << ": " << rows << std::endl;
      if (--steps == 0) return sampler.state_dict();
    }
  }
  return sampler.state_dict();
}

// A state between processes, through the sampler's archives.
void store(const ddp::State& state, const Place& place, const std::filesystem::path& path) {
  DistributedSampler sampler(kRows, place, {.seed = 5});
  sampler.load_state_dict(state);
  torch::serialize::OutputArchive archive;
  sampler.save(archive);
  archive.save_to(path.string());
}

ddp::State restore(const Place& place, const std::filesystem::path& path) {
  torch::serialize::InputArchive archive;
  archive.load_from(path.string());
  DistributedSampler sampler(kRows, place, {.seed = 5});
  sampler.load(archive);
  return sampler.state_dict();
}

std::string text_of(const std::filesystem::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

// One life of the job: `ranks` processes that make `steps` steps from the stored state on, if there is one.
void life(int ranks, int steps, const std::filesystem::path& folder) {
  run_ranks(ranks, [&](int) {
    auto group = join();
    std::optional<ddp::State> state;
    if (std::filesystem::exists(folder / "state")) state = restore(group, folder / "state");
    ddp::barrier(group);
    auto end = train(group, state ? &*state : nullptr, steps, folder / "rows");
    if (group.is_root()) store(end, group, folder / "state");
  });
}

std::vector<std::string> golden_rows() {
  TempDir folder;
  life(2, -1, folder.path());
  std::istringstream stream(text_of(folder / "rows"));
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

std::string joined(const std::vector<std::string>& lines) {
  std::string text;
  for (const auto& line : lines) text += line + "\n";
  return text;
}

}  // namespace

TEST_CASE("B14a: a rank with an extra batch does not run an extra step") {
  for (int64_t window : {1, 2}) {
    run_ranks(2, [&](int rank) {
      auto group = join();
      torch::nn::Linear net(torch::nn::LinearOptions(1, 1).bias(false));
      torch::nn::init::zeros_(net->weight);
      ddp::DistributedDataParallel model(net, group);
      torch::optim::SGD optimizer(net->parameters(), 0.1);
      std::vector<torch::Tensor> batches(rank == 0 ? 3 : 2, torch::full({1, 1}, rank + 1.0));

      int seen = 0, steps = 0;
      for (auto [batch, micro] : ddp::accumulate(batches, window, group)) {
        auto guard = model.no_sync(!micro.last());
        (model(batch).sum() / micro.count()).backward();
        ++seen;
        if (!micro.last()) continue;
        optimizer.step();
        model.zero_grad();
        ++steps;
      }
      DDP_CHECK(seen == 2);
      DDP_CHECK(steps == (window == 1 ? 2 : 1));
      auto metric = torch::full({1}, 100.0 + rank);
      ddp::all_reduce(metric, group);
      DDP_CHECK(metric.item<double>() == 201);
      for (const auto& weight : ddp::all_gather(net->weight.detach(), group)) {
        // Each step moves by -0.1 * mean(1, 2).
        DDP_CHECK(std::abs(weight.item<double>() + 0.15 * steps) < 1e-6);
      }
    });
  }
}

TEST_CASE("B14a: uneven loaders of torch with workers, several epochs, a rank with none stops all") {
  run_ranks(2, [](int rank) {
    auto group = join();
    auto loader =
        torch::data::make_data_loader(Numbers(rank == 0 ? 23 : 17), torch::data::DataLoaderOptions(2).workers(2));
    for (int epoch = 0; epoch < 3; ++epoch) {
      int seen = 0;
      std::vector<int64_t> counts;
      for (auto [batch, micro] : ddp::accumulate(*loader, 4, group)) {
        ++seen;
        if (micro.last()) counts.push_back(micro.count());
      }
      DDP_CHECK(seen == 9);
      DDP_CHECK(counts == std::vector<int64_t>({4, 4, 1}));
    }
    std::vector<int> some(static_cast<size_t>(rank) * 5);
    for ([[maybe_unused]] auto [batch, micro] : ddp::accumulate(some, 4, group)) DDP_CHECK(false);
  });
}

TEST_CASE("B21a: ranks that give the sampler different values are told so on every rank") {
  run_ranks(3, [](int rank) {
    auto group = join();
    auto seeds = error_of([&] { DistributedSampler(16, group, {.seed = rank == 2 ? 102u : 100u}); });
    DDP_CHECK(contains(seeds, "seed is 100 on rank 0 and 102 on rank 2"));
    auto sizes = error_of([&] { DistributedSampler(rank == 1 ? 17 : 16, group); });
    DDP_CHECK(contains(sizes, "dataset_size is 16 on rank 0 and 17 on rank 1"));
    auto shuffles = error_of([&] { DistributedSampler(16, group, {.shuffle = rank != 1}); });
    DDP_CHECK(contains(shuffles, "shuffle is true on rank 0 and false on rank 1"));
    auto drops = error_of([&] { DistributedSampler(16, group, {.drop_last = rank > 0}); });
    DDP_CHECK(contains(drops, "drop_last is false on rank 0 and true on rank 1"));

    DistributedSampler sampler(16, group, {.seed = 100});  // and with equal values the parts are disjoint
    sampler.reset();
    std::string mine;
    auto part = sampler.next(16);
    for (size_t row : *part) mine += std::to_string(row) + " ";
    std::multiset<int> rows;
    for (const auto& text : ddp::all_gather_object(mine, group)) {
      std::istringstream words(text);
      rows.insert(std::istream_iterator<int>(words), {});
    }
    DDP_CHECK(rows.size() == 18);  // two rows pad
    DDP_CHECK(std::set<int>(rows.begin(), rows.end()).size() == 16);
  });
}

TEST_CASE(
    "B26: lists of rows over kills and resumes are those of an unbroken run, at the same and at other world sizes") {
  auto golden = golden_rows();
  REQUIRE(golden.size() == 48);
  for (size_t epoch = 0; epoch < 3; ++epoch) {  // it is one itself: every row once per epoch
    std::set<std::string> rows;
    for (size_t step = 0; step < 16; ++step) {
      std::istringstream words(golden[epoch * 16 + step]);
      std::string label, row;
      words >> label;
      CHECK(label == std::to_string(epoch) + ":");
      while (words >> row) rows.insert(row);
    }
    CHECK(rows.size() == kRows);
  }
  struct Life {
    int ranks;
    int steps;
  };
  const std::vector<std::vector<Life>> jobs = {
      {{2, 5}, {2, 4}, {2, 7}, {2, 21}, {2, -1}},  // stops after 5, 9, 16 (a boundary) and 37 steps
      {{2, 8}, {1, -1}},
      {{2, 8}, {4, -1}},
      {{1, 16}, {2, 3}, {4, 13}, {1, 16}, {2, -1}},  // boundaries too
  };
  for (const auto& job : jobs) {
    TempDir folder;
    std::string plan;
    for (auto [ranks, steps] : job) {
      life(ranks, steps, folder.path());
      plan += std::to_string(ranks) + " ranks, " + std::to_string(steps) + " steps; ";
    }
    INFO(plan);
    CHECK(text_of(folder / "rows") == joined(golden));

    life(2, -1, folder.path());  // after the end: nothing
    CHECK(text_of(folder / "rows") == joined(golden));
  }
}
