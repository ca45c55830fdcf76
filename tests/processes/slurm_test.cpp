// Slurm as it is: a controller and one node of our own for the time of a test (tests/support/slurm_one_node.sh). Skipped
// where Slurm is not installed or cannot start.
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <optional>
#include <set>
#include <string>

#include "support/catch.h"
#include "support/launch.h"
#include "support/spawn.h"

namespace {

using namespace ddp::test;
namespace fs = std::filesystem;

// A shell script inside the Slurm. Nothing, with the reason in `why`, when there is none.
std::optional<Result> in_slurm(const std::string& script, const fs::path& folder, std::string& why) {
  const auto result =
      run_command({"bash", LIBDDP_TEST_DATA "/../support/slurm_one_node.sh", "bash", "-c", script},
                  {.deadline = 60s, .env = {{"OMP_NUM_THREADS", "1"}, {"SLURM_CONF", std::nullopt}}, .cwd = folder});
  if (result.exit_code != 77) return result;
  why = result.output.substr(0, result.output.find('\n'));
  if (why.starts_with("SKIPPED: ")) why.erase(0, 9);
  return std::nullopt;
}

// `sbatch --wait` looks every few seconds only.
const std::string kWaitForJob =
    "for i in $(seq 300); do [ -z \"$(squeue -h -j $job 2>/dev/null)\" ] && break; sleep 0.1; done\n"
    "scontrol show job $job | grep -o -E '(JobState|ExitCode)=[^ ]*'\n";

std::string command(const Words& words) {
  std::string text;
  for (const auto& word : words) text += (text.empty() ? "'" : " '") + word + "'";
  return text;
}

}  // namespace

TEST_CASE("slurm: srun -n 2 ./mini_train trains, with the losses of Python's DDP and nothing set", "[launch][slurm]") {
  TempDir dir;
  std::string why;
  const auto result = in_slurm("srun -n 2 " + test_bin("mini_train"), dir.path(), why);
  if (!result) DDP_SKIP(why);
  INFO(result->describe());
  CHECK(result->exit_code == 0);
  CHECK_THAT(result->output, ContainsSubstring("world of 2 (Slurm)"));
  check_losses_of_two_ranks(result->output);
}

TEST_CASE("slurm: a batch script is a world of one, its steps are worlds of two that meet at different ports",
          "[launch][slurm]") {
  TempDir dir;
  std::ofstream(dir / "job.sh") << "#!/bin/sh\n"
                                << command(program("print_env")) << "\nfor step in 1 2; do srun "
                                << command(program("print_env")) << " | sed \"s/^/step $step /\"; done\n";
  std::string why;
  const auto result = in_slurm("job=$(sbatch --parsable -n 2 -o out job.sh)\n" + kWaitForJob, dir.path(), why);
  if (!result) DDP_SKIP(why);
  const auto output = read_file(dir / "out");
  INFO(result->describe() << output);
  CHECK_THAT(result->output, ContainsSubstring("JobState=COMPLETED\nExitCode=0:0\n"));
  CHECK(count_of(output, "launched by=none rank 0/1") == 1);
  std::set<std::string> places;
  for (const char* step : {"1", "2"}) {
    std::set<std::string> of_step;
    for (const char* rank : {"0", "1"}) {
      const std::string r = rank;
      const auto mine = lines_with(
          output, std::string("step ") + step + " launched by=Slurm rank " + r + "/2 local=" + r + "/2 at=127.0.0.1:");
      REQUIRE(mine.size() == 1);
      CHECK_THAT(mine[0], ContainsSubstring("named=1"));
      of_step.insert(mine[0].substr(mine[0].find(" at="), mine[0].find(" agent=") - mine[0].find(" at=")));
    }
    CHECK(of_step.size() == 1);
    places.insert(*of_step.begin());
  }
  CHECK(places.size() == 2);
}

// The signal reaches the tasks of the step, which save and end with 0; the same job again goes on from there.
TEST_CASE("slurm: scancel --signal=TERM saves and stops, and the same job again resumes", "[launch][slurm]") {
  if (!fs::exists(test_bin("qwen_pretrain"))) DDP_SKIP("no qwen_pretrain (LIBDDP_BUILD_EXAMPLES=OFF)");
  TempDir dir;
  std::ofstream text(dir / "text");
  for (int i = 0; i < 3000; ++i) text << "number " << i << " and its square " << i * i << "\n";
  text.close();
  std::ofstream(dir / "endless.sh") << "#!/bin/sh\nsrun " << test_bin("qwen_pretrain")
                                    << " --preset tiny --data text --seq 32 --batch 1 --epochs 100 --max-steps 100000 "
                                       "--checkpoint-every 100000 --checkpoint-dir run --log-every 1\n";
  std::string why;
  const auto result =
      in_slurm(std::string("job=$(sbatch --parsable -n 2 -o first endless.sh)\n"
                           "for i in $(seq 200); do grep -q '^step  *5/' first 2>/dev/null && break; sleep 0.1; done\n"
                           "scancel --signal=TERM $job\n") +
                   kWaitForJob +
                   "job=$(sbatch --parsable -n 2 -o second endless.sh)\n"
                   "for i in $(seq 200); do grep -q '^step' second 2>/dev/null && break; sleep 0.1; done\n"
                   "scancel --signal=USR1 $job\n" +
                   kWaitForJob,
               dir.path(), why);
  if (!result) DDP_SKIP(why);
  const auto first = read_file(dir / "first"), second = read_file(dir / "second");
  INFO(result->describe() << "first:\n" << first << "second:\n" << second);
  CHECK(count_of(result->output, "JobState=COMPLETED") == 2);
  CHECK(count_of(result->output, "ExitCode=0:0") == 2);
  CHECK_THAT(first, ContainsSubstring("received SIGTERM"));
  CHECK_THAT(second, ContainsSubstring("received SIGUSR1"));
  const auto last = lines_with(first, "stopped by a signal; the same command goes on from step ");
  REQUIRE(last.size() == 1);
  const int64_t step = std::stoll(last[0].substr(last[0].rfind(' ')));
  const auto steps = lines_with(second, "| loss ");
  REQUIRE(!steps.empty());
  CHECK(std::stoll(steps[0].substr(steps[0].find("step ") + 5)) == step + 1);
}
