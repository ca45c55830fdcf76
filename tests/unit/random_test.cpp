#include "ddp/random.h"

#include <torch/torch.h>

#include <set>

#include "support/catch.h"

namespace {

using ddp::Place;

torch::Tensor dropout_mask(int64_t n) { return torch::dropout(torch::ones({n}), 0.5, /*train=*/true); }

std::vector<float> values(const torch::Tensor& t) { return {t.data_ptr<float>(), t.data_ptr<float>() + t.numel()}; }

// Rows whose augmentation is drawn from the row's own generator.
class NoisyRows : public torch::data::datasets::Dataset<NoisyRows, torch::data::TensorExample> {
 public:
  NoisyRows(uint64_t seed, Place place) : seed_(seed), place_(place) {}
  torch::data::TensorExample get(size_t row) override {
    auto generator = ddp::make_generator(seed_, place_, row);
    return torch::bernoulli(torch::full({8}, 0.5), generator);
  }
  torch::optional<size_t> size() const override { return 32; }

 private:
  uint64_t seed_;
  Place place_;
};

torch::Tensor load_all(uint64_t seed, Place place, size_t workers) {
  auto loader = torch::data::make_data_loader<torch::data::samplers::SequentialSampler>(
      NoisyRows(seed, place).map(torch::data::transforms::Stack<torch::data::TensorExample>()),
      torch::data::DataLoaderOptions().batch_size(4).workers(workers));
  std::vector<torch::Tensor> batches;
  for (auto& batch : *loader) batches.push_back(batch.data);
  return torch::cat(batches);
}

}  // namespace

TEST_CASE("seed_all: dropout masks differ between ranks, repeat between runs and are Python's", "[random]") {
  // From Python: torch.manual_seed(42 + r); torch.nn.functional.dropout(torch.ones(16), 0.5).tolist()
  const std::vector<std::vector<float>> python = {{2, 2, 2, 2, 0, 2, 0, 0, 2, 2, 2, 2, 0, 0, 2, 0},
                                                  {0, 2, 2, 0, 0, 0, 2, 2, 2, 0, 0, 0, 2, 0, 0, 0}};
  for (int run = 0; run < 2; ++run) {
    for (int rank = 0; rank < 2; ++rank) {
      ddp::seed_all(42, {.rank = rank, .size = 2});
      CHECK(values(dropout_mask(16)) == python[static_cast<size_t>(rank)]);
    }
  }
}

TEST_CASE("seed_all: rank 1's uniform numbers are Python's after manual_seed(43)", "[random]") {
  ddp::seed_all(42, {.rank = 1, .size = 4});
  CHECK(values(torch::rand({4})) == std::vector<float>{0.453968287f, 0.196491241f, 0.921035707f, 0.346179068f});
}

TEST_CASE("make_generator: repeats, differs by seed, rank and stream, and leaves the default generator alone",
          "[random]") {
  auto draw = [](uint64_t seed, int rank, uint64_t stream) {
    auto generator = ddp::make_generator(seed, {.rank = rank, .size = 4}, stream);
    return values(torch::rand({4}, generator));
  };
  std::set<std::vector<float>> seen;
  for (uint64_t seed : {0, 1, 42}) {
    for (int rank : {0, 1, 2}) {
      for (uint64_t stream : {0, 1, 42}) {
        CHECK(draw(seed, rank, stream) == draw(seed, rank, stream));
        seen.insert(draw(seed, rank, stream));
      }
    }
  }
  CHECK(seen.size() == 27);
  // No truncation to 32 bits on the way in.
  CHECK(draw(uint64_t{1} << 32, 0, 0) != draw(0, 0, 0));
  CHECK(draw(0, 0, uint64_t{1} << 32) != draw(0, 0, 0));

  torch::manual_seed(7);
  const auto expected = values(torch::rand({4}));
  torch::manual_seed(7);
  draw(1, 2, 3);
  CHECK(values(torch::rand({4})) == expected);
}

TEST_CASE("make_generator: first numbers of neighbouring streams are spread evenly", "[random]") {
  double sum = 0;
  double lag = 0;
  double last = 0;
  constexpr int kStreams = 2000;
  for (uint64_t stream = 0; stream < kStreams; ++stream) {
    auto generator = ddp::make_generator(42, {}, stream);
    const double x = torch::rand({1}, generator).item<double>() - 0.5;
    sum += x;
    lag += x * last;
    last = x;
  }
  // Standard errors of uniform numbers: sqrt(1/12/n) = 0.0065 for the mean, 1/12/sqrt(n) = 0.0019 for the
  // lag-1 product.
  CHECK(std::abs(sum / kStreams) < 4 * 0.0065);
  CHECK(std::abs(lag / kStreams) < 4 * 0.0019);
}

TEST_CASE("make_generator: two loader workers draw what one thread draws, and ranks differ", "[random]") {
  const Place one{.rank = 1, .size = 2};
  const auto alone = load_all(42, one, 0);
  CHECK(torch::equal(load_all(42, one, 2), alone));
  CHECK(torch::equal(load_all(42, one, 2), alone));
  CHECK_FALSE(torch::equal(load_all(42, {.rank = 0, .size = 2}, 2), alone));
  CHECK_FALSE(torch::equal(load_all(43, one, 2), alone));
  CHECK_FALSE(torch::equal(alone[0], alone[1]));
}
