// ddprun, the launcher for machines without Python, as a process of its own. Most of its ranks are shell scripts: a rank's
// parent is ddprun, so that `kill -TERM $PPID` in a rank is an operator's signal to the launcher.
#include <netinet/in.h>
#include <sched.h>
#include <sys/socket.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <tuple>

#include "ddp/collectives.h"
#include "ddp/error.h"
#include "ddp/process_group.h"
#include "ddp/run.h"
#include "support/catch.h"
#include "support/launch.h"
#include "support/spawn.h"

namespace {

using namespace ddp::test;
namespace fs = std::filesystem;

// Cores that a process of this test may use.
int cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return ::sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

}  // namespace

// Rank 1 throws; the others are in a collective and see it leave.
DDP_TEST_PROGRAM(one_throws) {
  return ddp::run([] {
    const auto group = ddp::ProcessGroup::from_env({.timeout = 20s});
    if (group.rank() == 1) throw std::runtime_error("the reason of it all");
    for (;;) ddp::barrier(group);
  });
}

DDP_TEST_PROGRAM(loses_a_peer) {
  return ddp::run([] { throw ddp::PeerError("[ddp::barrier] rank 0/1: rank 7 is gone"); });
}

// All ranks die in each life but the last, in the middle of their collectives.
DDP_TEST_PROGRAM(dies_often) {
  return ddp::run([&] {
    const int job = std::stoi(args.at(0)), lives = std::stoi(args.at(1));
    const auto group = ddp::ProcessGroup::from_env({.backend = "shm", .timeout = 20s});
    for (int i = 0; i < 200; ++i) {
      auto t = torch::full({1000}, 10.0 * job + group.rank());
      ddp::all_reduce(t, group);
      if (t[999].item<double>() != 20.0 * job + 1) throw std::runtime_error("a sum of somebody else");
      if (i == 100 && std::stoi(std::getenv("TORCHELASTIC_RESTART_COUNT")) < lives) ::raise(SIGKILL);
    }
  });
}

TEST_CASE("ddprun: exit codes", "[ddprun]") {
  NEEDS_DDPRUN();
  const std::pair<const char*, int> cases[] = {{"exit 0", 0},
                                               {"[ $RANK = 0 ] || exit 3", 3},
                                               {"[ $RANK = 1 ] || exit 4", 4},
                                               {"[ $RANK = 0 ] || kill -SEGV $$", 128 + SIGSEGV},
                                               {"[ $RANK = 1 ] || kill -KILL $$", 128 + SIGKILL}};
  for (const auto& [script, code] : cases) {
    const auto result = launch_sh({"-n", "2"}, script, {.deadline = 10s});
    INFO(script << ": " << result.describe());
    CHECK(result.exit_code == code);
  }
}

TEST_CASE("ddprun: a program that cannot be started is named", "[ddprun]") {
  NEEDS_DDPRUN();
  TempDir dir;
  std::ofstream(dir / "plain") << "text\n";
  std::ofstream(dir / "lost") << "#!/no/such/interpreter\n";
  fs::permissions(dir / "lost", fs::perms::owner_all);
  const auto path = [&](const char* name) { return (dir / name).string(); };
  const std::tuple<std::string, int, std::string> cases[] = {
      {"no-such-program-anywhere", 127, "no-such-program-anywhere is not found in PATH"},
      {"./no-such-program", 127, "./no-such-program: No such file or directory"},
      {path("plain"), 126, path("plain") + " is not executable"},
      {dir.path().string(), 126, " is a folder"},
      {path("lost"), 126, "its interpreter or loader does not exist"},
  };
  for (const auto& [program, code, text] : cases) {
    const auto result = launch({"-n", "2", program}, {.deadline = 10s, .env = {{"OMP_NUM_THREADS", "1"}}});
    INFO(result.describe());
    CHECK(result.exit_code == code);
    CHECK_THAT(result.output, ContainsSubstring(text));
    CHECK(lines_of(result.output).size() == 1);
  }
}

TEST_CASE("ddprun: a wrong command line is one line and exit code 2", "[ddprun]") {
  NEEDS_DDPRUN();
  const std::pair<Words, const char*> cases[] = {
      {{}, "-n is missing"},
      {{"true"}, "-n is missing"},
      {{"-n", "2"}, "the program to run is missing"},
      {{"-n"}, "-n needs a value"},
      {{"-n", "0", "true"}, "-n is \"0\""},
      {{"-n", "2x", "true"}, "-n is \"2x\""},
      {{"--bogus", "true"}, "--bogus is no option"},
      {{"-n", "2", "--max-restarts", "-1", "true"}, "--max-restarts is \"-1\""},
      {{"-n", "2", "--grace", "soon", "true"}, "--grace is \"soon\""},
      {{"-n", "2", "--env", "NAME", "true"}, "NAME=VALUE"},
      {{"-n", "2", "--env", "RANK=7", "true"}, "ddprun sets this variable itself"},
      {{"-n", "2", "--master", "host", "true"}, "HOST:PORT"},
      {{"-n", "2", "--master", "host:0", "true"}, "1 to 65535"},
      {{"-n", "2", "--master", "::1:29500", "true"}, "in brackets"},
      {{"-n", "2", "--nnodes", "2", "true"}, "--node-rank"},
      {{"-n", "2", "--nnodes", "2", "--node-rank", "0", "true"}, "--master HOST:PORT"},
      {{"-n", "2", "--nnodes", "2", "--node-rank", "2", "--master", "a:1", "true"}, "expected 0 to 1"},
      {{"-n", "2", "--nnodes", "2", "--node-rank", "0", "--master", "a:1", "--max-restarts", "1", "true"}, "torchrun"},
  };
  for (const auto& [arguments, text] : cases) {
    const auto result = launch(arguments, {.deadline = 10s});
    INFO(result.describe());
    CHECK(result.exit_code == 2);
    CHECK_THAT(result.output, ContainsSubstring(text));
    CHECK(lines_of(result.output).size() == 1);
  }
  const auto help = launch({"--help"});
  CHECK(help.exit_code == 0);
  CHECK_THAT(help.output, ContainsSubstring("usage: ddprun -n N") && ContainsSubstring("--max-restarts"));
}

TEST_CASE("ddprun: torchrun's variables, and the program's own arguments", "[ddprun]") {
  NEEDS_DDPRUN();
  const std::string script =
      "echo \"=$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK/$GROUP_WORLD_SIZE at $MASTER_ADDR "
      "restart $TORCHELASTIC_RESTART_COUNT/$TORCHELASTIC_MAX_RESTARTS agent=$TORCHELASTIC_USE_AGENT_STORE "
      "omp=$OMP_NUM_THREADS extra=$EXTRA args=$*=\"; echo \"port $MASTER_PORT\"";
  auto result = launch({"-n", "2", "--max-restarts", "3", "--env", "EXTRA=a=b c", "sh", "-c", script, "$0", "-n", "9"},
                       {.env = {{"OMP_NUM_THREADS", "5"}, {"TORCHELASTIC_USE_AGENT_STORE", "True"}}});
  INFO(result.describe());
  CHECK(result.exit_code == 0);
  for (const char* rank : {"0", "1"}) {
    const std::string r = rank;
    CHECK_THAT(result.output, ContainsSubstring("=" + r + "/2 " + r +
                                                "/2 0/1 at 127.0.0.1 restart 0/3 agent=False omp=5 "
                                                "extra=a=b c args=-n 9=\n"));
  }
  CHECK(lines_of(result.output).size() == 4);  // and not a word of ddprun's

  result = launch_sh({"-n", "2", "--nnodes", "3", "--node-rank", "1", "--master", "[fe80::1]:29511"}, script,
                     {.env = {{"OMP_NUM_THREADS", std::nullopt}}});
  INFO(result.describe());
  for (const char* rank : {"0", "1"}) {
    const std::string local = rank, global = std::to_string(std::stoi(rank) + 2);
    CHECK_THAT(result.output, ContainsSubstring("=" + global + "/6 " + local + "/2 1/3 at fe80::1 restart 0/0 "));
  }
  CHECK(count_of(result.output, "port 29511\n") == 2);
  const auto threads = std::to_string(std::max(1, cores() / 2));
  CHECK(count_of(result.output, " omp=" + threads + " ") == 2);
  CHECK_THAT(result.output, ContainsSubstring("[ddprun] OMP_NUM_THREADS is not set: " + threads + " for each of 2"));

  result = launch(Words{"-n", "1"} + program("print_env"));
  CHECK_THAT(result.output,
             ContainsSubstring("launched by=torchrun rank 0/1") && ContainsSubstring("agent=0 restart=0 named=1"));
}

TEST_CASE("ddprun: -n auto is the visible GPUs, else the cores", "[ddprun]") {
  NEEDS_DDPRUN();
  const auto world = [](const std::string& visible) {
    return launch_sh({"-n", "auto"}, "echo world $WORLD_SIZE",
                     {.env = {{"CUDA_VISIBLE_DEVICES", visible}, {"OMP_NUM_THREADS", "1"}}});
  };
  CHECK(count_of(world("GPU-8932f937,1, 2").output, "world 3\n") == 3);
  CHECK(count_of(world("0,-1,1").output, "world 1\n") == 1);
  const auto n = static_cast<size_t>(cores());
  CHECK(count_of(world("").output, "world " + std::to_string(n) + "\n") == n);
}

TEST_CASE("ddprun: two jobs at once train on their own ports, with the losses of Python's DDP", "[ddprun]") {
  NEEDS_DDPRUN();
  const std::string job = ddprun() + " -n 2 " + test_bin("mini_train");
  TempDir dir;
  const auto result =
      run_command({"sh", "-c", job + " >one & first=$!; " + job + " >two; second=$?; wait $first && exit $second"},
                  {.deadline = 30s, .env = {{"OMP_NUM_THREADS", "1"}}, .cwd = dir.path()});
  INFO(result.describe());
  CHECK(result.exit_code == 0);
  check_losses_of_two_ranks(read_file(dir / "one"));
  check_losses_of_two_ranks(read_file(dir / "two"));
}

TEST_CASE("ddprun: two launchers with --nnodes 2 are one job", "[ddprun]") {
  NEEDS_DDPRUN();
  const std::string common = ddprun() + " -n 1 --nnodes 2 --master 127.0.0.1:" + std::to_string(free_port());
  const std::string program = " " + test_bin("mini_train");
  const auto result = run_command({"sh", "-c",
                                   common + " --node-rank 1" + program + " & " + common + " --node-rank 0" + program +
                                       "; code=$?; wait $! && exit $code"},
                                  {.deadline = 30s, .env = {{"OMP_NUM_THREADS", "1"}}});
  INFO(result.describe());
  CHECK(result.exit_code == 0);
  check_losses_of_two_ranks(result.output);
}

TEST_CASE("ddprun: the first failure comes first, with its message, others are secondary", "[ddprun]") {
  NEEDS_DDPRUN();
  const auto result = launch(Words{"-n", "3"} + program("one_throws"), {.deadline = 30s});
  INFO(result.describe());
  CHECK(result.exit_code == 1);
  const auto first = result.output.find("[ddprun] rank 1/3 failed first: exit code 1 at ");
  REQUIRE(first != std::string::npos);
  const std::string summary = result.output.substr(first);
  CHECK_THAT(lines_of(summary).at(1), ContainsSubstring("    [ddp::run] rank 1/3: the reason of it all"));
  CHECK(count_of(summary, "(secondary)") == 2);
  CHECK_THAT(summary, ContainsSubstring("[ddprun] rank 0/3 ") && ContainsSubstring("[ddprun] rank 2/3 "));
}

// The order of exits is not the order of causes: the guilty one may take its time to end.
TEST_CASE("ddprun: reports decide who failed first, not the order of exits", "[ddprun]") {
  NEEDS_DDPRUN();
  const std::string head = "other=${TORCHELASTIC_ERROR_FILE%/?/error.json}/1/error.json\n";
  const std::string guilty =
      "trap '' TERM; echo '{\"message\": {\"message\": \"the cause\", \"extraInfo\": "
      "{\"timestamp\": \"1\"}}}' >$TORCHELASTIC_ERROR_FILE; sleep 0.4; exit 5\n";
  const auto noticing = [](const std::string& extra) {
    return "while [ ! -s $other ]; do sleep 0.01; done; sleep 0.1; echo '{\"message\": {\"message\": \"rank 1 is "
           "gone\", "
           "\"extraInfo\": {\"timestamp\": \"0\"" +
           extra + "}}}' >$TORCHELASTIC_ERROR_FILE; exit 6\n";
  };
  // As ddp::run marks a PeerError; and without the mark, by time.
  for (const bool marked : {true, false}) {
    const std::string script =
        head + "if [ $RANK = 1 ]; then " + guilty + "else " + noticing(marked ? ", \"secondary\": true" : "") + "fi";
    const auto result = launch_sh({"-n", "2"}, script, {.deadline = 10s});
    INFO(result.describe());
    CHECK(result.exit_code == 5);
    const auto cause = result.output.find("rank 1/2 failed first: exit code 5");
    const auto effect = result.output.find(marked ? "rank 0/2 failed because another had (secondary): exit code 6"
                                                  : "rank 0/2 failed too: exit code 6");
    CHECK(cause < effect);
    CHECK(effect != std::string::npos);
    CHECK(result.output.find("    the cause", cause) < effect);
  }
}

TEST_CASE("ddprun: without an error file the last lines of stderr are shown", "[ddprun]") {
  NEEDS_DDPRUN();
  const auto result = launch_sh({"-n", "1"}, "echo one >&2; echo two >&2; kill -ABRT $$", {.deadline = 10s});
  INFO(result.describe());
  CHECK(result.exit_code == 128 + SIGABRT);
  CHECK_THAT(result.output, ContainsSubstring("failed first: signal 6 (SIGABRT)") &&
                                ContainsSubstring("its last lines on stderr:\n    one\n    two\n"));
}

TEST_CASE("ddprun: restarts, each life with its number and a port of its own", "[ddprun]") {
  NEEDS_DDPRUN();
  const std::string script =
      "echo life $TORCHELASTIC_RESTART_COUNT of rank $RANK; [ $RANK = 0 ] && echo port $MASTER_PORT\n"
      "[ $RANK = 1 ] && [ $TORCHELASTIC_RESTART_COUNT -lt ${LIVES:-9} ] && exit 7; sleep 0.1; exit 0";
  auto result = launch_sh({"-n", "2", "--max-restarts", "4", "--env", "LIVES=2"}, script, {.deadline = 20s});
  INFO(result.describe());
  CHECK(result.exit_code == 0);
  CHECK_THAT(result.output, ContainsSubstring("life 2 of rank 0\n") && ContainsSubstring("life 2 of rank 1\n") &&
                                ContainsSubstring("[ddprun] restart 2 of 4\n") && !ContainsSubstring("life 3"));
  std::set<std::string> ports;
  for (const auto& line : lines_of(result.output)) {
    if (line.starts_with("port ")) ports.insert(line);
  }
  CHECK(ports.size() == 3);

  result = launch_sh({"-n", "2", "--max-restarts", "1"}, script, {.deadline = 20s});
  INFO(result.describe());
  CHECK(result.exit_code == 7);
  CHECK(count_of(result.output, "of rank 1\n") == 2);
  CHECK(count_of(result.output, "failed first: exit code 7") == 2);
}

TEST_CASE("ddprun: signals go to all ranks, and a job that was told to stop is not restarted", "[ddprun]") {
  NEEDS_DDPRUN();
  TempDir dir;
  for (const char* name : {"TERM", "INT", "HUP", "USR1"}) {
    // Every rank has its trap set before rank 0 signals the launcher.
    const std::string script = "trap 'echo saved by rank $RANK; exit 0' " + std::string(name) + "\n: >" +
                               dir.path().string() + "/" + name + ".$RANK\n" + "if [ $RANK = 0 ]; then while [ ! -e " +
                               (dir / name).string() + ".1 ] || [ ! -e " + (dir / name).string() +
                               ".2 ]; do sleep 0.01; done; kill -" + name + " $PPID; fi\nwhile :; do sleep 0.02; done";
    const auto result = launch_sh({"-n", "3", "--max-restarts", "2"}, script, {.deadline = 10s});
    INFO(name << ": " << result.describe());
    CHECK(result.exit_code == 0);
    for (const char* rank : {"0", "1", "2"}) CHECK(count_of(result.output, std::string("saved by rank ") + rank) == 1);
  }
  // Ranks that know no signals die of them.
  const auto result =
      launch_sh({"-n", "2", "--max-restarts", "2"},
                "[ $RANK = 0 ] && sleep 0.2 && kill -TERM $PPID; while :; do sleep 0.02; done", {.deadline = 10s});
  INFO(result.describe());
  CHECK(result.exit_code == 128 + SIGTERM);
  CHECK_THAT(result.output, ContainsSubstring("ended by SIGTERM") && !ContainsSubstring("restart"));
}

TEST_CASE("ddprun: the program in a wrapper script has the time of grace too", "[ddprun]") {
  NEEDS_DDPRUN();
  // The shell around it dies of the signal at once.
  const std::string script =
      "sh -c 'trap \"sleep 0.3; echo inner saved; exit 0\" TERM; [ $RANK = 0 ] && sleep 0.2 && kill "
      "-TERM $0; while :; do sleep 0.02; done' $PPID; echo never";
  const auto result = launch_sh({"-n", "2"}, script, {.deadline = 10s});
  INFO(result.describe());
  CHECK(count_of(result.output, "inner saved\n") == 2);
  CHECK(result.seconds < 5);
}

TEST_CASE("ddprun: a second signal kills at once, an echo of the first does not", "[ddprun]") {
  NEEDS_DDPRUN();
  auto result =
      launch_sh({"-n", "2"},
                "trap '' TERM; if [ $RANK = 0 ]; then sleep 0.2; kill -TERM $PPID; sleep 0.8; kill -TERM $PPID; "
                "fi; while :; do sleep 1; done",
                {.deadline = 15s});
  INFO(result.describe());
  CHECK(result.exit_code == 128 + SIGTERM);
  CHECK_THAT(result.output, ContainsSubstring("a second SIGTERM: the ranks are killed"));
  CHECK(result.seconds < 5);

  result = launch_sh(
      {"-n", "2"},
      "trap 'told=1' TERM; if [ $RANK = 0 ]; then sleep 0.2; kill -TERM $PPID; sleep 0.1; kill -TERM $PPID; fi\n"
      "while [ -z \"$told\" ]; do sleep 0.02; done; sleep 0.3; echo saved; exit 0",
      {.deadline = 15s});
  INFO(result.describe());
  CHECK(result.exit_code == 0);
  CHECK(count_of(result.output, "saved\n") == 2);
}

TEST_CASE("ddprun: when one rank fails, stopped ones are woken and deaf ones killed after the grace", "[ddprun]") {
  NEEDS_DDPRUN();
  auto result = launch_sh({"-n", "2"}, "[ $RANK = 1 ] && kill -STOP $$; sleep 0.2; exit 4", {.deadline = 15s});
  INFO(result.describe());
  CHECK(result.exit_code == 4);
  CHECK_THAT(result.output, ContainsSubstring("rank 0/2 failed first: exit code 4"));
  CHECK(result.seconds < 5);

  result =
      launch_sh({"-n", "3", "--grace", "0.5"},
                "[ $RANK = 2 ] && sleep 0.2 && exit 4; trap '' TERM; while :; do sleep 1; done", {.deadline = 15s});
  INFO(result.describe());
  CHECK(result.exit_code == 4);
  CHECK(result.seconds > 0.6);
  CHECK(result.seconds < 5);
  CHECK_THAT(result.output,
             ContainsSubstring("SIGKILL after 500 ms") &&
                 ContainsSubstring("rank 0/3 did not end in the time of grace and was killed (secondary)"));
}

TEST_CASE("ddprun: killed with -9 it leaves nothing running, not even what the ranks started", "[ddprun]") {
  NEEDS_DDPRUN();
  TempDir dir;
  std::ofstream(dir / "rank.sh")
      << "echo $$ >>pids; sleep 60 & echo $! >>pids\n"
         "[ $RANK = 0 ] && { while [ $(wc -l <pids) -lt 4 ]; do sleep 0.01; done; kill -KILL "
         "$PPID; }; wait\n";
  const auto result = run_command({"sh", "-c", ddprun() + " -n 2 sh ./rank.sh; echo launcher $?\n" + kCountAlive},
                                  {.deadline = 20s, .env = {{"TMPDIR", dir.path().string()}}, .cwd = dir.path()});
  INFO(result.describe());
  CHECK_THAT(result.output, ContainsSubstring("launcher 137") && ContainsSubstring("alive 0 of 4"));
}

TEST_CASE("ddprun: what a rank left running ends with the job, and nobody who holds its output delays it", "[ddprun]") {
  NEEDS_DDPRUN();
  TempDir dir;
  std::ofstream(dir / "rank.sh") << "sleep 50 & echo $! >>pids; setsid sleep 20 & sleep 0.2; echo out\n";
  const auto result = run_command({"sh", "-c", ddprun() + " -n 2 sh ./rank.sh; echo code $?\n" + kCountAlive},
                                  {.deadline = 10s, .cwd = dir.path()});
  INFO(result.describe());
  CHECK(result.seconds < 4);
  CHECK(count_of(result.output, "out\n") == 2);
  CHECK_THAT(result.output, ContainsSubstring("code 0") && ContainsSubstring("alive 0 of 2"));
}

TEST_CASE("D5: two jobs at once whose ranks are killed and started again leave nothing in /dev/shm", "[ddprun]") {
  NEEDS_DDPRUN();
  const auto names = [] {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator("/dev/shm")) names.insert(entry.path().filename());
    return names;
  };
  const auto before = names();
  const std::string lives = std::getenv("LIBDDP_LONG") != nullptr ? "24" : "2";
  const auto self = program("dies_often");
  const auto job = [&](const std::string& number) {
    return ddprun() + " -n 2 --max-restarts " + lives + " " + self[0] + " " + self[1] + " " + number + " " + lives;
  };
  const auto result = run_command({"sh", "-c", job("1") + " & " + job("7") + "; code=$?; wait $! && exit $code"},
                                  {.deadline = 100s, .env = {{"OMP_NUM_THREADS", "1"}}});
  INFO(result.describe());
  CHECK(result.exit_code == 0);
  CHECK(count_of(result.output, "[ddprun] restart " + lives + " of " + lives) == 2);
  CHECK(count_of(result.output, "failed first: signal 9 (SIGKILL)") == 2 * std::stoul(lives));
  CHECK(names() == before);
}

TEST_CASE("ddprun: error files are kept with --log-dir only", "[ddprun]") {
  NEEDS_DDPRUN();
  TempDir dir;
  fs::create_directory(dir / "tmp");
  const Options options{.deadline = 20s, .env = {{"TMPDIR", (dir / "tmp").string()}}, .cwd = dir.path()};
  CHECK(launch_sh({"-n", "1"}, "echo '{}' >$TORCHELASTIC_ERROR_FILE; exit 3", options).exit_code == 3);
  CHECK(fs::is_empty(dir / "tmp"));
  CHECK(
      launch(Words{"-n", "2", "--log-dir", "logs", "--max-restarts", "1"} + program("one_throws"), options).exit_code ==
      1);
  CHECK(fs::is_empty(dir / "tmp"));
  const auto job = fs::directory_iterator(dir / "logs")->path();
  for (const char* attempt : {"attempt_0", "attempt_1"}) {
    const auto report = nlohmann::json::parse(read_file(job / attempt / "1" / "error.json"));
    CHECK(report["message"]["message"] == "[ddp::run] rank 1/2: the reason of it all");
    CHECK_FALSE(report["message"]["extraInfo"].contains("secondary"));
    CHECK_THAT(read_file(job / attempt / "1" / "stderr.log"), ContainsSubstring("the reason of it all"));
  }
  // What is only a consequence says so itself.
  CHECK(launch(Words{"-n", "1", "--log-dir", "peer"} + program("loses_a_peer"), options).exit_code == 1);
  const auto peer = fs::directory_iterator(dir / "peer")->path() / "attempt_0" / "0" / "error.json";
  CHECK(nlohmann::json::parse(read_file(peer))["message"]["extraInfo"]["secondary"] == true);
}

// Case B03 a, through the launcher.
TEST_CASE("ddprun: a port of --master that is taken is an error with host and port, soon", "[ddprun]") {
  NEEDS_DDPRUN();
  const int holder = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  socklen_t length = sizeof address;
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  REQUIRE(::bind(holder, generic, length) == 0);
  REQUIRE(::listen(holder, 8) == 0);
  ::getsockname(holder, generic, &length);
  const auto place = "127.0.0.1:" + std::to_string(ntohs(address.sin_port));
  const auto result = launch({"-n", "2", "--master", place, test_bin("mini_train")}, {.deadline = 20s});
  ::close(holder);
  INFO(result.describe());
  CHECK(result.exit_code == 1);
  CHECK(result.seconds < 10);
  CHECK_THAT(result.output, ContainsSubstring("rank 0/2 failed first: exit code 1") && ContainsSubstring(place) &&
                                ContainsSubstring("Address already in use") && ContainsSubstring("MASTER_PORT"));
}
