// ddprun's output: whole lines, no lost ones, and nobody who reads slowly or not at all stops it.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>

#include "support/catch.h"
#include "support/launch.h"
#include "support/spawn.h"

namespace {

using namespace ddp::test;
namespace fs = std::filesystem;

}  // namespace

TEST_CASE("ddprun: eight ranks write whole lines, all of them, each to its own stream", "[ddprun]") {
  NEEDS_DDPRUN();
  TempDir dir;
  constexpr int kLines = 2000;
  // awk writes blocks of 4 KiB, which end in the middle of lines.
  const std::string script =
      "awk -v r=$RANK 'BEGIN { x = \"xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\"; for (i = "
      "0; i < " +
      std::to_string(kLines) +
      "; i++) { s = \"rank \" r \" line \" i \" \" substr(x, 1, i % "
      "50); print \"out \" s; print \"err \" s > \"/dev/stderr\" } }'";
  const auto check = [&](const std::string& text, const std::string& stream, const std::string& other) {
    std::map<int, int> next;
    for (const auto& line : lines_of(text)) {
      if (line.starts_with("[ddprun]")) continue;
      int rank = -1, again = -1, number = -1, length = 0;
      char name[4] = {};
      if (std::sscanf(line.c_str(), "[%d] %3s rank %d line %d %n", &rank, name, &again, &number, &length) != 4) {
        FAIL("not a whole line: " << line);
      }
      if (name != stream) {
        if (name != other) FAIL("not of this stream: " << line);
        continue;
      }
      const int tail = number % 50;
      if (rank != again || number != next[rank]++ || line.substr(length) != std::string(tail, 'x')) {
        FAIL("damaged or out of order: " << line);
      }
    }
    for (int rank = 0; rank < 8; ++rank) CHECK(next[rank] == kLines);
  };
  const auto both = launch_sh({"-n", "8", "--prefix"}, script, {.deadline = 30s});  // into one pipe
  CHECK(both.exit_code == 0);
  check(both.output, "out", "err");
  check(both.output, "err", "out");

  std::ofstream(dir / "rank.sh") << script;
  const auto apart = run_command({"sh", "-c", ddprun() + " -n 8 --prefix --log-dir logs sh ./rank.sh >out 2>err"},
                                 {.deadline = 30s, .cwd = dir.path()});
  CHECK(apart.exit_code == 0);
  check(read_file(dir / "out"), "out", "");
  check(read_file(dir / "err"), "err", "");
  // The logs have it without prefix.
  const auto job = fs::directory_iterator(dir / "logs")->path();
  for (const char* stream : {"out", "err"}) {
    const auto lines = lines_of(read_file(job / "attempt_0" / "5" / (std::string("std") + stream + ".log")));
    REQUIRE(lines.size() == kLines);
    CHECK(lines[7] == std::string(stream) + " rank 5 line 7 xxxxxxx");
  }
}

TEST_CASE("ddprun: a last line without an end gets one", "[ddprun]") {
  NEEDS_DDPRUN();
  const auto result = launch_sh({"-n", "2", "--prefix"}, "printf begun; exit 0", {.env = {{"OMP_NUM_THREADS", "1"}}});
  const auto lines = lines_of(result.output);
  CHECK(std::set<std::string>(lines.begin(), lines.end()) == std::set<std::string>{"[0] begun", "[1] begun"});
}

TEST_CASE("ddprun: readers that are slow, gone or asleep", "[ddprun]") {
  NEEDS_DDPRUN();
  TempDir dir;
  const auto run = [&](const std::string& arguments, const std::string& rank, const std::string& reader) {
    const std::string job = ddprun() + " " + arguments + " sh -c '" + rank + "'";
    return run_command({"sh", "-c", "{ " + job + "; echo code $? >&2; kill $(cat reader); } | " + reader},
                       {.deadline = 20s, .env = {{"OMP_NUM_THREADS", "1"}}, .cwd = dir.path()});
  };
  auto result = run("-n 2", "yes | head -c 3000000", "(sleep 0.5; wc -c)");
  INFO("slow: " << result.describe());
  CHECK_THAT(result.output, ContainsSubstring("code 0") && ContainsSubstring("6000000"));

  result = run("-n 2", "yes | head -c 3000000; echo done >&2", "head -n 1");
  INFO("gone: " << result.describe());
  CHECK_THAT(result.output, ContainsSubstring("code 0"));
  CHECK(count_of(result.output, "done\n") == 2);

  // A signal is heeded although nobody takes the output; the rank's end ends the reader, not the other way round.
  result = run("-n 1", "(sleep 0.3; kill -TERM $PPID) & exec yes", "sh -c 'echo $$ >reader; exec sleep 15'");
  INFO("asleep: " << result.describe());
  CHECK_THAT(result.output, ContainsSubstring("code 143"));
  CHECK(result.seconds < 8);
}
