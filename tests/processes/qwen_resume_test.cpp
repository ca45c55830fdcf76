// The promise of the main job: kill every rank at any moment, start the same command again, and it ends as a run that
// was left alone.
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "support/catch.h"
#include "support/spawn.h"

namespace {

using namespace ddp::test;
namespace fs = std::filesystem;

std::string bytes_of(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// Text with some structure, 40 KB of it, always the same.
void write_text(const fs::path& file) {
  std::ofstream out(file);
  uint32_t state = 1;
  for (int line = 0; line < 1000; ++line) {
    state = state * 1664525 + 1013904223;
    out << "line " << line << ": value " << (state >> 20) << ", twice " << 2 * (state >> 20) << "\n";
  }
}

class Job {
 public:
  Job(const TempDir& dir, std::string name) : dir_(dir), name_(std::move(name)) {}

  fs::path checkpoints() const { return dir_ / name_; }
  nlohmann::json summary() const { return nlohmann::json::parse(bytes_of(checkpoints() / "summary.json")); }

  // Runs the program on two ranks, to its end or until `kill_when` exists and `later` has passed.
  std::vector<Result> run(const fs::path& kill_when = {}, std::chrono::milliseconds later = 0ms,
                          const std::vector<std::string>& more = {"--max-steps", "30"}) const {
    fs::create_directories(checkpoints());
    std::jthread killer;
    if (!kill_when.empty()) {
      for (int rank : {0, 1}) fs::remove(pid_file(rank));
      killer = std::jthread([&](const std::stop_token& stop) {
        while (!fs::exists(kill_when) && !stop.stop_requested()) std::this_thread::sleep_for(1ms);
        std::this_thread::sleep_for(later);
        for (int rank : {0, 1}) {
          pid_t pid = 0;
          if (std::ifstream(pid_file(rank)) >> pid) ::kill(pid, SIGKILL);
        }
      });
    }
    const auto command = command_line(more);
    return spawn_ranks(2,
                       [&](int rank) {
                         std::ofstream(pid_file(rank)) << ::getpid() << std::endl;
                         exec_program(command);
                       },
                       {.deadline = 60s});
  }

 private:
  fs::path pid_file(int rank) const { return dir_ / (name_ + ".pid" + std::to_string(rank)); }

  std::vector<std::string> command_line(const std::vector<std::string>& more) const {
    const std::vector<std::string> model{"--preset", "tiny", "--data", dir_ / "text", "--seq", "32", "--batch", "1"};
    const std::vector<std::string> saves{"--checkpoint-every", "10", "--checkpoint-dir", checkpoints()};
    const std::vector<std::string> output{"--log-every", "7", "--summary", checkpoints() / "summary.json"};
    return std::vector<std::string>{test_bin("qwen_pretrain")} + model + saves + output + more;
  }

  const TempDir& dir_;
  const std::string name_;
};

}  // namespace

TEST_CASE("qwen_pretrain: kill -9 of all ranks twice, then the same command: losses and files of an unbroken run") {
  const TempDir dir;
  write_text(dir / "text");
  const Job whole(dir, "whole"), broken(dir, "broken");
  for (const auto& result : whole.run()) {
    INFO(result.describe());
    REQUIRE(result.ok());
  }
  for (const char* checkpoint : {"checkpoint_epoch0_step10.pt", "checkpoint_epoch0_step20.pt"}) {
    for (const auto& result : broken.run(broken.checkpoints() / checkpoint, 30ms)) {
      INFO(result.describe());
      REQUIRE(result.signal == SIGKILL);
    }
  }
  const auto last = broken.run();
  for (const auto& result : last) {
    INFO(result.describe());
    REQUIRE(result.ok());
  }
  CHECK_THAT(last[0].output, ContainsSubstring("step20.pt"));  // it says from where it goes on
  REQUIRE(whole.summary()["losses"].size() == 30);
  CHECK(broken.summary()["losses"] == whole.summary()["losses"]);
  const auto file = [](const Job& job) { return bytes_of(job.checkpoints() / "checkpoint_epoch0_step30.pt"); };
  REQUIRE(file(whole).size() > 1000000);
  CHECK(file(broken) == file(whole));  // weights, optimizer, position, random states
}

TEST_CASE("qwen_pretrain: a schedule that would bend on resuming is refused, and the checkpoint stays") {
  const TempDir dir;
  write_text(dir / "text");
  const Job job(dir, "job");
  const std::vector<std::string> cosine{"--schedule", "cosine", "--warmup", "2"};
  for (const auto& result : job.run({}, 0ms, cosine + std::vector<std::string>{"--max-steps", "10"})) {
    INFO(result.describe());
    REQUIRE(result.ok());
  }
  const auto before = bytes_of(job.checkpoints() / "checkpoint_epoch0_step10.pt");
  for (const auto& result : job.run({}, 0ms, cosine + std::vector<std::string>{"--max-steps", "20"})) {
    INFO(result.describe());
    CHECK(result.exit_code == 1);
    CHECK_THAT(result.output, ContainsSubstring("this run has warmup(2) * cosine(20, 0.1)"));
  }
  CHECK(bytes_of(job.checkpoints() / "checkpoint_epoch0_step10.pt") == before);
}
