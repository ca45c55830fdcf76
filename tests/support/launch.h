// What the tests of launchers share: ddprun itself, and questions to a launcher's output.
//
//   NEEDS_DDPRUN();
//   auto result = launch_sh({"-n", "2"}, "[ $RANK = 0 ] || exit 3");       // a script on each rank
//   CHECK(count_of(result.output, "[ddprun] rank 1/2 failed first") == 1);
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "support/catch.h"
#include "support/spawn.h"

namespace ddp::test {

using Words = std::vector<std::string>;

/// The path of ddprun, and whether it was built.
const std::string& ddprun();
bool has_ddprun();

/// "ddprun ARGUMENTS..."
Result launch(const Words& arguments, const Options& options = {});

/// "ddprun ARGUMENTS... sh -c SCRIPT". A rank's parent is ddprun: `kill -TERM $PPID` in the script is an operator's signal.
Result launch_sh(const Words& arguments, const std::string& script, const Options& options = {});

/// Whether the shell finds a program of this name.
bool has_program(const std::string& name);

std::vector<std::string> lines_of(const std::string& text);
std::vector<std::string> lines_with(const std::string& text, const std::string& part);
size_t count_of(const std::string& text, const std::string& part);
std::string read_file(const std::filesystem::path& file);

/// Shell commands that wait up to 2.5 s for the processes in the file `pids` to end, and print "alive K of N".
extern const std::string kCountAlive;

/// What mini_train prints with two ranks, the losses of Python's DDP (they stand in its header too).
void check_losses_of_two_ranks(const std::string& output);

}  // namespace ddp::test

#define NEEDS_DDPRUN() \
  if (!::ddp::test::has_ddprun()) DDP_SKIP("no ddprun (LIBDDP_BUILD_TOOLS=OFF)")
