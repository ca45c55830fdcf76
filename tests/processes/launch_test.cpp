// Launchers as they are: torchrun, mpirun, plain shells; and the helper itself that the other tests of
// processes use.
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <set>
#include <sstream>
#include <thread>

#include "ddp/env.h"
#include "ddp/error.h"
#include "ddp/run.h"
#include "support/catch.h"
#include "support/launch.h"
#include "support/spawn.h"

namespace {

using namespace ddp::test;

int env_int(const char* name) { return std::atoi(std::getenv(name)); }

bool alive(pid_t pid) { return ::kill(pid, 0) == 0; }

// Waits for what another process does; false when it did not come in time.
template <class Condition>
bool eventually(Condition condition, std::chrono::milliseconds limit = 5s) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(20ms);
  }
  return true;
}

std::vector<pid_t> pids_in(const std::filesystem::path& file) {
  std::ifstream stream(file);
  std::vector<pid_t> pids;
  for (pid_t pid = 0; stream >> pid;) pids.push_back(pid);
  return pids;
}

// What stands before a program's name.
Words mpirun(int ranks, const Words& arguments = {}) {
  Words words = Words{"mpirun", "-np", std::to_string(ranks)} + arguments;
  if (::geteuid() == 0) words.push_back("--allow-run-as-root");
  if (std::thread::hardware_concurrency() < 2) words.push_back("--oversubscribe");  // a slot is a core
  return words;
}

}  // namespace

// Says how it was launched, in one line.
DDP_TEST_PROGRAM(print_env) {
  return ddp::run([] {
    const ddp::Env env = ddp::read_env();
    std::ostringstream line;
    line << "launched by=" << ddp::to_string(env.launcher) << " " << env.place().name() << " local=" << env.local_rank
         << "/" << env.local_world_size << " at=" << env.master_addr << ":" << env.master_port
         << " agent=" << env.agent_store << " restart=" << env.restart_count << " named=" << !env.run_id.empty()
         << "\n";
    std::cout << line.str() << std::flush;
  });
}

// Rank 1 fails, rank 0 notices.
DDP_TEST_PROGRAM(boom) {
  return ddp::run([] {
    if (env_int("RANK") == 1) throw std::runtime_error("boom of the C++ program");
    // A consequence comes after its cause: wait, up to 5 s, for rank 1's report, and give it the time to end, since
    // torchrun ends with a signal whoever is still there when it sees the first failure.
    const auto mine = std::filesystem::path(std::getenv("TORCHELASTIC_ERROR_FILE"));
    const auto cause = mine.parent_path().parent_path() / "1" / mine.filename();
    for (int i = 0; i < 500 && !std::filesystem::exists(cause); ++i) std::this_thread::sleep_for(10ms);
    std::this_thread::sleep_for(300ms);
    throw ddp::PeerError("[ddp::all_reduce] rank 0/2: rank 1 is gone");
  });
}

DDP_TEST_PROGRAM(sleep_long) {
  std::ofstream(args.at(0), std::ios::app) << ::getpid() << "\n";
  std::this_thread::sleep_for(120s);
  return 0;
}

TEST_CASE("launch: alone it is a world of one", "[launch]") {
  const Result result = run_command(program("print_env"));
  INFO(result.describe());
  CHECK(result.exit_code == 0);
  CHECK(result.output == "launched by=none rank 0/1 local=0/1 at=:0 agent=0 restart=0 named=0\n");
}

TEST_CASE("launch: a faulty environment ends the program with exit code 1 and all faults", "[launch]") {
  Result result = run_command(program("print_env"), {.env = {{"RANK", "0"}}});
  INFO(result.describe());
  CHECK(result.exit_code == 1);
  for (const char* name : {"WORLD_SIZE is missing", "MASTER_ADDR is missing", "MASTER_PORT is missing"}) {
    CHECK_THAT(result.output, ContainsSubstring(name));
  }
  result = run_command(
      program("print_env"),
      {.env = {{"RANK", "9"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "12139"}, {"MASTER_PORT", "127.0.0.1"}}});
  CHECK(result.exit_code == 1);
  CHECK_THAT(result.output, ContainsSubstring("RANK=9"));
  CHECK_THAT(result.output, ContainsSubstring("MASTER_PORT=\"127.0.0.1\""));
}

TEST_CASE("launch: torchrun's variables are read", "[launch][torchrun]") {
  const auto launcher = torchrun(2);
  if (!launcher) DDP_SKIP("no Python with torch (LIBDDP_TEST_PYTHON)");
  const Result result = run_command(*launcher + program("print_env"), {.deadline = 90s});
  INFO(result.describe());
  CHECK(result.exit_code == 0);
  const auto lines = lines_with(result.output, "launched by=torchrun");
  REQUIRE(lines.size() == 2);
  for (int rank = 0; rank < 2; ++rank) {
    const std::string r = std::to_string(rank);
    const auto mine = lines_with(result.output, "rank " + r + "/2 local=" + r + "/2 at=");
    REQUIRE(mine.size() == 1);
    CHECK_THAT(mine[0], ContainsSubstring("agent=1 restart=0 named=1"));
    CHECK_THAT(mine[0], !ContainsSubstring(":0 "));
  }
}

TEST_CASE("launch: the C++ message is the root cause in torchrun's summary", "[launch][torchrun]") {
  const auto launcher = torchrun(2);
  if (!launcher) DDP_SKIP("no Python with torch (LIBDDP_TEST_PYTHON)");
  const Result result = run_command(*launcher + program("boom"), {.deadline = 90s});
  INFO(result.describe());
  CHECK(result.exit_code == 1);
  const auto root = result.output.find("Root Cause");
  REQUIRE(root != std::string::npos);
  CHECK_THAT(result.output.substr(0, root), ContainsSubstring("[ddp::run] rank 1/2: boom of the C++ program\n"));
  CHECK_THAT(result.output.substr(root), ContainsSubstring("[ddp::run] rank 1/2: boom of the C++ program"));
  CHECK_THAT(result.output.substr(root), ContainsSubstring("exitcode  : 1"));
}

TEST_CASE("launch: a restart by torchrun is counted", "[launch][torchrun]") {
  const auto launcher = torchrun(1, {"--max-restarts", "1", "--monitor-interval", "0.1"});
  if (!launcher) DDP_SKIP("no Python with torch (LIBDDP_TEST_PYTHON)");
  const std::string script = "[ \"$TORCHELASTIC_RESTART_COUNT\" = 0 ] && exit 3; exec \"$0\" \"$@\"";
  const Result result =
      run_command(*launcher + std::vector<std::string>{"sh", "-c", script} + program("print_env"), {.deadline = 90s});
  INFO(result.describe());
  CHECK(result.exit_code == 0);
  CHECK_THAT(result.output, ContainsSubstring("launched by=torchrun rank 0/1"));
  CHECK_THAT(result.output, ContainsSubstring("restart=1"));
}

TEST_CASE("launch: ranks of mpirun on one host agree on a meeting place", "[launch][mpirun]") {
  if (!has_program("mpirun")) DDP_SKIP("no mpirun (apt-get install openmpi-bin)");
  const Result result = run_command(mpirun(2) + program("print_env"));
  INFO(result.describe());
  CHECK(result.exit_code == 0);
  const auto lines = lines_with(result.output, "launched by=Open MPI");
  REQUIRE(lines.size() == 2);
  std::set<std::string> places;
  for (int rank = 0; rank < 2; ++rank) {
    const std::string r = std::to_string(rank);
    const auto mine = lines_with(result.output, "rank " + r + "/2 local=" + r + "/2 at=127.0.0.1:");
    REQUIRE(mine.size() == 1);
    places.insert(mine[0].substr(mine[0].find(" at=")));
  }
  CHECK(places.size() == 1);

  const Result given =
      run_command(mpirun(2, {"-x", "MASTER_ADDR=10.1.2.3", "-x", "MASTER_PORT=29511"}) + program("print_env"));
  CHECK(lines_with(given.output, "at=10.1.2.3:29511").size() == 2);
}

TEST_CASE("launch: mpirun -np 2 ./mini_train trains, with the losses of Python's DDP and nothing set",
          "[launch][mpirun]") {
  if (!has_program("mpirun")) DDP_SKIP("no mpirun (apt-get install openmpi-bin)");
  const Result result = run_command(mpirun(2) + Words{test_bin("mini_train")}, {.env = {{"OMP_NUM_THREADS", "1"}}});
  INFO(result.describe());
  CHECK(result.exit_code == 0);
  CHECK_THAT(result.output, ContainsSubstring("world of 2 (Open MPI)"));
  check_losses_of_two_ranks(result.output);

  const Result four = run_command(mpirun(4, {"--oversubscribe"}) + Words{test_bin("mini_train"), "--steps", "2"},
                                  {.env = {{"OMP_NUM_THREADS", "1"}}});
  INFO(four.describe());
  CHECK(four.exit_code == 0);
  CHECK_THAT(four.output, ContainsSubstring("world of 4 (Open MPI)") && ContainsSubstring("replicas equal: yes"));
}

TEST_CASE("launch: torchrun with a static address trains, with the losses of Python's DDP", "[launch][torchrun]") {
  const auto python = test_python();
  if (!python) DDP_SKIP("no Python with torch (LIBDDP_TEST_PYTHON)");
  const Result result = run_command({*python, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2",
                                     "--rdzv-backend", "static", "--master-addr", "127.0.0.1", "--master-port",
                                     std::to_string(free_port()), "--no-python", test_bin("mini_train")},
                                    {.deadline = 60s});
  INFO(result.describe());
  CHECK(result.exit_code == 0);
  CHECK_THAT(result.output, ContainsSubstring("world of 2 (torchrun)"));
  check_losses_of_two_ranks(result.output);
}

TEST_CASE("spawn: ranks get torchrun's variables and their results come back", "[spawn]") {
  const auto results = spawn_ranks(3,
                                   [](int rank) {
                                     const ddp::Env env = ddp::read_env();
                                     DDP_CHECK(env.launcher == ddp::Launcher::kTorchrun);
                                     DDP_CHECK(env.place() == ddp::Place{.rank = rank, .size = 3});
                                     DDP_CHECK(env.local_rank == rank);
                                     DDP_CHECK(env.master_addr == "127.0.0.1");
                                     std::cout << "out " << rank << " extra=" << std::getenv("EXTRA");
                                     std::fprintf(stderr, "err %d", rank);
                                     if (rank == 1) DDP_CHECK(1 + 1 == 3);
                                     if (rank == 2) ::_exit(7);
                                   },
                                   {.env = {{"EXTRA", "yes"}}});
  REQUIRE(results.size() == 3);
  CHECK(results[0].ok());
  CHECK_THAT(results[0].output, ContainsSubstring("out 0 extra=yes"));
  CHECK_THAT(results[0].output, ContainsSubstring("err 0"));
  CHECK(results[1].exit_code == 1);
  CHECK_THAT(results[1].error, ContainsSubstring("launch_test.cpp:"));
  CHECK_THAT(results[1].error, ContainsSubstring("DDP_CHECK(1 + 1 == 3) is false"));
  CHECK(results[2].exit_code == 7);
  CHECK(results[2].error.empty());
  CHECK_FALSE(results[2].ok());
}

TEST_CASE("spawn: at the deadline the whole group is killed, with what the ranks have started", "[spawn]") {
  TempDir dir;
  const auto results = spawn_ranks(2,
                                   [&](int rank) {
                                     if (rank == 0) return;
                                     const pid_t grandchild = ::fork();
                                     if (grandchild == 0) {
                                       std::this_thread::sleep_for(120s);
                                       ::_exit(0);
                                     }
                                     std::ofstream(dir / "pids") << grandchild << "\n" << std::flush;
                                     std::this_thread::sleep_for(120s);
                                   },
                                   {.deadline = 1s});
  CHECK(results[0].ok());
  CHECK(results[1].timed_out);
  CHECK(results[1].signal == SIGKILL);
  CHECK(results[1].seconds > 0.9);
  CHECK(results[1].seconds < 5);
  const auto pids = pids_in(dir / "pids");
  REQUIRE(pids.size() == 1);
  CHECK(eventually([&] { return !alive(pids[0]); }));
}

TEST_CASE("spawn: a killed torchrun leaves no workers behind", "[spawn][torchrun]") {
  const auto launcher = torchrun(2);
  if (!launcher) DDP_SKIP("no Python with torch (LIBDDP_TEST_PYTHON)");
  TempDir dir;
  const Result result = run_command(*launcher + program("sleep_long", {(dir / "pids").string()}), {.deadline = 12s});
  INFO(result.describe());
  CHECK(result.timed_out);
  const auto pids = pids_in(dir / "pids");
  REQUIRE(pids.size() == 2);
  for (pid_t pid : pids) CHECK(eventually([&] { return !alive(pid); }));
}

TEST_CASE("spawn: a program that does not exist, and one that a signal ends", "[spawn]") {
  CHECK(run_command({"/nonexistent/program"}).exit_code == 127);
  CHECK(run_command({"sh", "-c", "kill -TERM $$"}).signal == SIGTERM);
  CHECK(run_command({"pwd"}, {.cwd = "/usr"}).output == "/usr\n");
}
