// Row P1: a signal at any moment, to one rank or to all: one common step is saved, the exit code is the documented one, and
// the same command goes on from that step.
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>

#include "support/catch.h"
#include "support/launch.h"
#include "support/spawn.h"

namespace {

using namespace ddp::test;
namespace fs = std::filesystem;

// Starts in one folder after another the same endless training, in which rank 1 does `deed` in the background.
class Training {
 public:
  Training() {
    std::ofstream text(dir_ / "text");
    for (int i = 0; i < 3000; ++i) text << "number " << i << " and its square " << i * i << "\n";
  }

  Result run(const std::string& deed) const {
    std::ofstream(dir_ / "rank.sh")
        << "if [ $RANK = 1 ]; then (trap '' TERM USR1\n"
        << deed << "\n) & fi\nexec " << test_bin("qwen_pretrain")
        << " --preset tiny --data text --seq 32 --batch 1 --epochs 1000 --max-steps 1000000 --checkpoint-every 5 "
           "--checkpoint-dir run --log-every 1\n";
    return launch({"-n", "2", "sh", "rank.sh"},
                  {.deadline = 30s, .env = {{"OMP_NUM_THREADS", "1"}}, .cwd = dir_.path()});
  }

  /// The step of checkpoint_latest.pt, 0 when there is none.
  int64_t saved_step() const {
    std::error_code error;
    const auto target = fs::read_symlink(dir_ / "run" / "checkpoint_latest.pt", error).string();
    const auto at = target.find("_step");
    return error || at == std::string::npos ? 0 : std::stoll(target.substr(at + 5));
  }

 private:
  TempDir dir_;
};

// The step that a printed line speaks of.
int64_t step_in(const std::string& line, const std::string& before) {
  return std::stoll(line.substr(line.find(before) + before.size()));
}

}  // namespace

TEST_CASE("P1: a signal to one rank, to all, twice, during a save: one common step is saved, exit code 0", "[ddprun]") {
  NEEDS_DDPRUN();
  if (!fs::exists(test_bin("qwen_pretrain"))) DDP_SKIP("no qwen_pretrain (LIBDDP_BUILD_EXAMPLES=OFF)");
  // $$ is rank 1 itself, $PPID is ddprun. A life has begun to train when its own first checkpoint is there.
  const std::string trained =
      "old=$(readlink run/checkpoint_latest.pt); while [ \"$(readlink run/checkpoint_latest.pt)\" "
      "= \"$old\" ]; do sleep 0.01; done\n";
  const std::string saving = "while ! ls run/checkpoint_tmp.* >/dev/null 2>&1; do :; done\n";
  const std::pair<const char*, std::string> cases[] = {
      {"SIGTERM to rank 1", trained + "kill -TERM $$"},
      {"SIGUSR1 to rank 1", trained + "kill -USR1 $$"},
      {"SIGTERM to the launcher", trained + "kill -TERM $PPID"},
      {"SIGUSR1 to the launcher", trained + "kill -USR1 $PPID"},
      {"SIGTERM to rank 1 and to the launcher, which is twice to rank 1", trained + "kill -TERM $$ $PPID"},
      {"SIGTERM during a save", trained + saving + "kill -TERM $PPID"},
  };
  const Training training;
  int64_t step = 0;
  for (const auto& [name, deed] : cases) {
    const auto result = training.run(deed);
    INFO(name << ": " << result.describe());
    CHECK(result.exit_code == 0);
    const auto said = lines_with(result.output, "stopped by a signal; the same command goes on from step ");
    REQUIRE(said.size() == 1);
    // It began where the last one ended, and what it says is what it saved.
    const auto steps = lines_with(result.output, "| loss ");
    REQUIRE(!steps.empty());
    CHECK(step_in(steps.front(), "step ") == step + 1);
    step = step_in(said[0], "from step ");
    CHECK(step_in(steps.back(), "step ") == step);
    CHECK(training.saved_step() == step);
    CHECK(result.seconds < 15);
  }
}

TEST_CASE("P1: a signal while ranks start and load ends them, and the checkpoint stays", "[ddprun]") {
  NEEDS_DDPRUN();
  if (!fs::exists(test_bin("qwen_pretrain"))) DDP_SKIP("no qwen_pretrain (LIBDDP_BUILD_EXAMPLES=OFF)");
  const Training training;
  const std::string later = "while [ ! -e run/checkpoint_latest.pt ]; do sleep 0.01; done; kill -TERM $PPID";
  REQUIRE(training.run(later).exit_code == 0);
  for (const char* moment : {"0.2", "0.5"}) {
    const int64_t before = training.saved_step();
    const auto result = training.run(std::string("sleep ") + moment + "; kill -TERM $PPID");
    INFO(moment << ": " << result.describe());
    // No handler yet: the signal's own action. Else as above.
    CHECK((result.exit_code == 128 + SIGTERM || result.exit_code == 0));
    CHECK(training.saved_step() >= before);
    if (result.exit_code != 0) CHECK(training.saved_step() == before);
  }
  const int64_t last = training.saved_step();
  const auto result = training.run("sleep 3; kill -TERM $PPID");
  INFO(result.describe());
  CHECK(result.exit_code == 0);
  CHECK(step_in(lines_with(result.output, "| loss ").at(0), "step ") == last + 1);
}
