#include "ddp/run.h"

#include <c10/util/Exception.h>

#include <ctime>
#include <fstream>
#include <nlohmann/json.hpp>

#include "ddp/error.h"
#include "support/catch.h"
#include "support/scoped.h"
#include "support/spawn.h"

namespace {

using ddp::test::CapturedStderr;
using ddp::test::ContainsSubstring;
using ddp::test::ScopedEnv;
using ddp::test::TempDir;

// Rank 1 of 2 whatever started the test; the error file is in a folder of its own.
struct RankOne {
  TempDir dir;
  ScopedEnv rank{"RANK", "1"};
  ScopedEnv size{"WORLD_SIZE", "2"};
  ScopedEnv file{"TORCHELASTIC_ERROR_FILE", (dir / "error.json").string()};

  nlohmann::json error() const { return nlohmann::json::parse(std::ifstream(dir / "error.json")); }
  bool has_error() const { return std::filesystem::exists(dir / "error.json"); }
};

int three() { return 3; }
void nothing() {}

}  // namespace

TEST_CASE("run: returns what the body returns, 0 for nothing, and reports nothing", "[run]") {
  RankOne one;
  CapturedStderr errors;
  CHECK(ddp::run(nothing) == ddp::kExitSuccess);
  CHECK(ddp::run(three) == 3);
  CHECK(ddp::run([] {}) == 0);
  CHECK(ddp::run([calls = 0]() mutable { return ++calls; }) == 1);
  CHECK(ddp::run(std::function<void()>(nothing)) == 0);
  CHECK(ddp::run(std::function<int()>(three)) == 3);
  CHECK(errors.text().empty());
  CHECK_FALSE(one.has_error());
}

TEST_CASE("run: an exception is one line on stderr with the rank, and the error file of @record", "[run]") {
  RankOne one;
  std::string text;
  const long before = static_cast<long>(std::time(nullptr));
  {
    CapturedStderr errors;
    CHECK(ddp::run([] { throw std::runtime_error("boom"); }) == ddp::kExitFailure);
    text = errors.text();
  }
  CHECK(text == "[ddp::run] rank 1/2: boom\n");
  const auto message = one.error().at("message");
  CHECK(message.at("message") == "[ddp::run] rank 1/2: boom");
  CHECK(message.at("extraInfo").at("py_callstack") == "[ddp::run] rank 1/2: boom");
  const long timestamp = std::stol(message.at("extraInfo").at("timestamp").get<std::string>());
  CHECK(timestamp >= before);
  CHECK(timestamp <= static_cast<long>(std::time(nullptr)));
}

TEST_CASE("run: the loss of a peer is dated after its cause, so that torchrun names the cause", "[run]") {
  RankOne one;
  CapturedStderr errors;
  const long before = static_cast<long>(std::time(nullptr));
  CHECK(ddp::run([] { throw ddp::PeerError("[ddp::all_reduce] rank 1/2: rank 0 is gone"); }) == 1);
  // The message names its rank already and is not prefixed again.
  CHECK(errors.text() == "[ddp::all_reduce] rank 1/2: rank 0 is gone\n");
  CHECK(std::stol(one.error().at("message").at("extraInfo").at("timestamp").get<std::string>()) > before);
}

TEST_CASE("run: every kind of exception is reported", "[run]") {
  RankOne one;
  CapturedStderr errors;
  SECTION("c10::Error without its backtrace") {
    CHECK(ddp::run([] { TORCH_CHECK(false, "shapes differ"); }) == 1);
    CHECK_THAT(errors.text(), ContainsSubstring("rank 1/2: shapes differ"));
    CHECK_THAT(errors.text(), !ContainsSubstring("frame #"));
    CHECK_THAT(errors.text(), !ContainsSubstring("Exception raised from"));
  }
  SECTION("nested exceptions with their cause") {
    CHECK(ddp::run([] {
            try {
              throw std::runtime_error("disk full");
            } catch (...) {
              std::throw_with_nested(std::runtime_error("cannot save"));
            }
          }) == 1);
    CHECK_THAT(errors.text(), ContainsSubstring("rank 1/2: cannot save\n  caused by: disk full\n"));
  }
  SECTION("something that is no exception class") {
    CHECK(ddp::run([]() -> int { throw 42; }) == 1);
    CHECK_THAT(errors.text(), ContainsSubstring("rank 1/2: an exception that is no std::exception"));
  }
  CHECK(one.has_error());
}

TEST_CASE("run: the rank of the report is read leniently from each launcher", "[run]") {
  ScopedEnv no_file("TORCHELASTIC_ERROR_FILE", std::nullopt);
  ScopedEnv no_rank("RANK", std::nullopt);
  ScopedEnv no_size("WORLD_SIZE", std::nullopt);
  ScopedEnv no_mpi("OMPI_COMM_WORLD_RANK", std::nullopt);
  ScopedEnv no_slurm("SLURM_PROCID", std::nullopt);
  auto report = [] {
    CapturedStderr errors;
    CHECK(ddp::run([] { throw std::runtime_error("boom"); }) == 1);
    return errors.text();
  };
  CHECK(report() == "[ddp::run] rank 0/1: boom\n");
  SECTION("Slurm") {
    ScopedEnv rank("SLURM_PROCID", "3"), size("SLURM_NTASKS", "4"), step("SLURM_STEP_NUM_TASKS", std::nullopt);
    CHECK(report() == "[ddp::run] rank 3/4: boom\n");
  }
  SECTION("Open MPI") {
    ScopedEnv rank("OMPI_COMM_WORLD_RANK", "2"), size("OMPI_COMM_WORLD_SIZE", "3");
    CHECK(report() == "[ddp::run] rank 2/3: boom\n");
  }
  SECTION("a faulty environment") {
    ScopedEnv rank("RANK", "9"), size("WORLD_SIZE", "two");
    CHECK(report() == "[ddp::run] rank 9: boom\n");
  }
}

TEST_CASE("run: an error file that cannot be written is said, and the exit code stays", "[run]") {
  TempDir dir;
  ScopedEnv file("TORCHELASTIC_ERROR_FILE", (dir / "missing/error.json").string());
  CapturedStderr errors;
  CHECK(ddp::run([] { throw std::runtime_error("boom"); }) == 1);
  CHECK_THAT(errors.text(),
             ContainsSubstring("boom\n[ddp::run] the error file " + (dir / "missing/error.json").string()));
  CHECK_THAT(errors.text(), ContainsSubstring("No such file or directory"));
}

TEST_CASE("error_report_json: any bytes make valid JSON", "[run]") {
  const std::string message = "quote \" backslash \\ newline \n byte \xff end";
  const auto json = nlohmann::json::parse(ddp::error_report_json(message, 1700000000));
  CHECK(json.at("message").at("message") == "quote \" backslash \\ newline \n byte \xEF\xBF\xBD end");
  CHECK(json.at("message").at("extraInfo").at("timestamp") == "1700000000");
  CHECK(json.size() == 1);
}
