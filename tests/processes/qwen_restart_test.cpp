// Row P2: the launcher starts all ranks again after one of them was killed, in each life anew, and the losses and the last
// checkpoint are those of an unbroken run.
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "support/catch.h"
#include "support/launch.h"
#include "support/spawn.h"

namespace {

using namespace ddp::test;
namespace fs = std::filesystem;

// Thirty steps with a checkpoint at each tenth. In the first KILLS lives rank 1 is killed soon after the life's
// checkpoint is there.
std::string rank_script() {
  return "life=$TORCHELASTIC_RESTART_COUNT\n"
         "if [ $RANK = 1 ] && [ $life -lt $KILLS ]; then\n"
         "  (while [ ! -e $RUN/checkpoint_epoch0_step$(((life + 1) * 10)).pt ]; do sleep 0.01; done; sleep 0.02; kill "
         "-KILL $$) &\n"
         "fi\n"
         "exec " +
         test_bin("qwen_pretrain") +
         " --preset tiny --data text --seq 32 --batch 1 --max-steps 30 --checkpoint-every 10 --checkpoint-dir $RUN "
         "--log-every 7 --summary $RUN/summary.json\n";
}

class Jobs {
 public:
  Jobs() {
    std::ofstream(dir_ / "rank.sh") << rank_script();
    std::ofstream text(dir_ / "text");
    for (int i = 0; i < 3000; ++i) text << "number " << i << " and its square " << i * i << "\n";
  }

  Result run(const Words& launcher, const std::string& name, int kills) const {
    fs::create_directory(dir_ / name);
    return run_command(launcher + Words{"sh", "rank.sh"},
                       {.deadline = 60s,
                        .env = {{"OMP_NUM_THREADS", "1"}, {"RUN", name}, {"KILLS", std::to_string(kills)}},
                        .cwd = dir_.path()});
  }

  nlohmann::json losses(const std::string& name) const {
    return nlohmann::json::parse(read_file(dir_ / name / "summary.json"))["losses"];
  }
  std::string last_checkpoint(const std::string& name) const {
    return read_file(dir_ / name / "checkpoint_epoch0_step30.pt");
  }

  void check_equal(const std::string& broken, const std::string& whole) const {
    REQUIRE(losses(whole).size() == 30);
    CHECK(losses(broken) == losses(whole));
    REQUIRE(last_checkpoint(whole).size() > 1000000);
    CHECK(last_checkpoint(broken) == last_checkpoint(whole));  // weights, optimizer, position, random states
  }

 private:
  TempDir dir_;
};

}  // namespace

TEST_CASE("P2: killed in each life and started again by ddprun, a training has the losses of an unbroken one",
          "[ddprun]") {
  NEEDS_DDPRUN();
  const Jobs jobs;
  const auto whole = jobs.run({ddprun(), "-n", "2"}, "whole", 0);
  INFO(whole.describe());
  REQUIRE(whole.exit_code == 0);
  const auto broken = jobs.run({ddprun(), "-n", "2", "--max-restarts", "2"}, "broken", 2);
  INFO(broken.describe());
  CHECK(broken.exit_code == 0);
  CHECK(count_of(broken.output, "[ddprun] rank 1/2 failed first: signal 9 (SIGKILL)") == 2);
  CHECK_THAT(broken.output, ContainsSubstring("[ddprun] restart 2 of 2"));
  jobs.check_equal("broken", "whole");
}

TEST_CASE("P2: killed in each life and started again by torchrun, a training has the losses of an unbroken one",
          "[torchrun]") {
  const auto python = test_python();
  if (!python) DDP_SKIP("no Python with torch (LIBDDP_TEST_PYTHON)");
  const Jobs jobs;
  const auto torchrun = [&](const char* restarts) {
    return Words{*python,
                 "-m",
                 "torch.distributed.run",
                 "--nnodes",
                 "1",
                 "--nproc-per-node",
                 "2",
                 "--rdzv-backend",
                 "c10d",
                 "--rdzv-id",
                 "p2",
                 "--rdzv-endpoint",
                 "127.0.0.1:" + std::to_string(free_port()),
                 "--max-restarts",
                 restarts,
                 "--monitor-interval",
                 "0.1",
                 "--no-python"};
  };
  const auto broken = jobs.run(torchrun("2"), "broken", 2);
  INFO(broken.describe());
  CHECK(broken.exit_code == 0);
  const auto whole = jobs.run(torchrun("0"), "whole", 0);
  INFO(whole.describe());
  REQUIRE(whole.exit_code == 0);
  jobs.check_equal("broken", "whole");
}
