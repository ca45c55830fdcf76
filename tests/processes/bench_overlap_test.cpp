// bench_overlap and bench_loader run, and what they verify is right.
#include <fstream>
#include <nlohmann/json.hpp>

#include "support/catch.h"
#include "support/spawn.h"

using namespace ddp::test;

namespace {

nlohmann::json run_bench(int ranks, const std::vector<std::string>& command) {
  const TempDir dir;
  const auto argv = command + std::vector<std::string>{"--json", dir / "out.json"};
  for (const auto& result : spawn_ranks(ranks, [&](int) { exec_program(argv); })) {
    INFO(command[0] << "\n" << result.describe());
    REQUIRE(result.ok());
  }
  std::ifstream file(dir / "out.json");
  return nlohmann::json::parse(file);
}

}  // namespace

TEST_CASE("bench_overlap: every gradient is the ranks' mean, with any buckets on any backend") {
  for (const std::string backend : {"shm", "gloo"}) {
    const auto report =
        run_bench(2, {test_bin("bench_overlap"), "--backend", backend, "--buckets", "0.02,5", "--layers", "4", "--dim",
                      "64", "--steps", "2", "--rounds", "2", "--warmup", "2"});
    INFO(report.dump());
    CHECK(report["backend"] == backend);
    REQUIRE(report["rows"].size() == 2);
    for (const auto& row : report["rows"]) {
      CHECK(row["wrong"] == 0);
      CHECK(row["none_ms"] > 0);
      CHECK(row["exposed_ms"] == row["overlap_ms"].get<double>() - row["none_ms"].get<double>());
    }
  }
}

TEST_CASE("bench_loader: every loader hands on the sampler's rows in order") {
  for (const int ranks : {1, 2}) {
    const auto report = run_bench(ranks, {test_bin("bench_loader"), "--seq", "16", "--batch", "3", "--steps", "20",
                                          "--rounds", "2", "--compute-ms", "0.1"});
    INFO(report.dump());
    REQUIRE(report["rows"].size() == 4);
    for (const auto& row : report["rows"]) {
      CHECK(row["wrong"] == 0);
      CHECK(row["batches_per_s"] > 0);
      CHECK(row["wait_share"] < 1);
    }
  }
}
