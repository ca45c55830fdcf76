// The benchmarks run, and verify what they measure.
#include <fstream>
#include <nlohmann/json.hpp>

#include "support/catch.h"
#include "support/spawn.h"

using namespace ddp::test;

namespace {

// Runs a benchmark on two ranks and returns what it wrote.
nlohmann::json run_bench(const std::vector<std::string>& command) {
  const TempDir dir;
  const auto argv = command + std::vector<std::string>{"--json", dir / "out.json"};
  for (const auto& result : spawn_ranks(2, [&](int) { exec_program(argv); })) {
    INFO(command[2] << "\n" << result.describe());
    REQUIRE(result.ok());
  }
  std::ifstream file(dir / "out.json");
  return nlohmann::json::parse(file);
}

}  // namespace

TEST_CASE("bench_all_reduce: no wrong element in any collective on any backend") {
  for (const std::string backend : {"shm", "gloo"}) {
    for (const std::string op : {"all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter",
                                 "reduce_scatter", "all_to_all", "barrier"}) {
      const auto report = run_bench(
          {test_bin("bench_all_reduce"), "--op", op, "--backend", backend, "--sizes", "4K,1M", "--iterations", "3"});
      INFO(report.dump());
      REQUIRE(report["backend"] == backend);
      REQUIRE(!report["rows"].empty());
      for (const auto& row : report["rows"]) CHECK(row["wrong"] == 0);
    }
  }
}

TEST_CASE("bench_step: the same losses on every backend and with every reducer") {
  nlohmann::json losses;
  for (const std::string backend : {"shm", "gloo"}) {
    for (const std::string reducer : {"overlap", "naive"}) {
      const auto report = run_bench({test_bin("bench_step"), "--reducer", reducer, "--backend", backend, "--model",
                                     "stack", "--layers", "3", "--dim", "64", "--steps", "5", "--warmup", "1"});
      REQUIRE(report["losses"].size() >= 5);
      if (losses.is_null()) losses = report["losses"];
      CHECK(report["losses"] == losses);
    }
  }
}
