// The sampler's rows against those of Python's (sampler.txt, made by make_sampler_golden.py).
#include <fstream>
#include <map>
#include <sstream>

#include "ddp/distributed_sampler.h"
#include "support/catch.h"

namespace {

constexpr uint64_t kSeed = 42;

uint64_t fnv1a(const std::vector<size_t>& rows) {
  uint64_t h = 0xcbf29ce484222325;
  for (size_t row : rows) h = (h ^ row) * 0x100000001b3;
  return h;
}

// Through a copy, as a loader does, in batches that do not divide the length.
std::vector<size_t> epoch_of(ddp::DistributedSampler sampler, int epoch) {
  auto loaders_copy = sampler;
  sampler.set_epoch(epoch);
  loaders_copy.reset();
  std::vector<size_t> rows;
  while (auto batch = loaders_copy.next(997)) rows.insert(rows.end(), batch->begin(), batch->end());
  return rows;
}

}  // namespace

TEST_CASE("the sampler's order is that of torch.utils.data.DistributedSampler") {
  std::ifstream file(LIBDDP_TEST_DATA "/sampler.txt");
  REQUIRE(file);
  int cases = 0;
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("#")) continue;
    INFO(line);
    std::istringstream words(line);
    size_t n = 0, length = 0;
    ddp::Place place;
    bool shuffle = false, drop_last = false;
    int epoch = 0;
    REQUIRE(words >> n >> place.size >> place.rank >> shuffle >> drop_last >> epoch >> length);

    ddp::DistributedSampler sampler(n, place, {.shuffle = shuffle, .seed = kSeed, .drop_last = drop_last});
    auto rows = epoch_of(sampler, epoch);
    REQUIRE(rows.size() == length);
    CHECK(sampler.num_samples() == length);
    if (words >> std::ws; words.peek() == '#') {
      std::string hash;
      words.ignore() >> hash;
      CHECK(fnv1a(rows) == std::stoull(hash, nullptr, 16));
    } else {
      std::vector<size_t> expected{std::istream_iterator<size_t>(words), {}};
      CHECK(rows == expected);
    }
    ++cases;
  }
  CHECK(cases == 6 * 18 * 2 * 2 * 3);  // N, ranks of all W, shuffle, drop_last, epochs
}
