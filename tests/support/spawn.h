// Real processes for tests: ranks by fork, programs by exec, each with a deadline after which the whole group is killed.
//
//   run_ranks(2, [](int rank) { auto group = ddp::ProcessGroup::from_env(); DDP_CHECK(group.rank() == rank); });
//   auto results = spawn_ranks(2, body, {.deadline = 5s});       // results[1].signal, .exit_code, .error, .output
//   auto result = run_command(*torchrun(2) + program("boom"));   // a DDP_TEST_PROGRAM(boom) of this executable
//
// Ranks are forked from the test's own process, so the test must not have used libtorch's threads or its backward
// before: use torch inside the body only. Memory is copied, nothing comes back but the result: let a rank print or
// write to a TempDir what the test has to see. Catch's macros do not count in a rank; use DDP_CHECK.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace ddp::test {

using namespace std::chrono_literals;

/// Variables to set, or to unset where there is no value.
using Environment = std::map<std::string, std::optional<std::string>>;

struct Options {
  std::chrono::milliseconds deadline = 30s;
  Environment env = {};
  std::filesystem::path cwd = {};
};

/// How a process ended.
struct Result {
  int exit_code = -1;      ///< -1 when a signal ended it
  int signal = 0;          ///< the signal that ended it, 0 when it exited
  bool timed_out = false;  ///< it was killed at the deadline
  std::string error;       ///< what the rank threw, "" when it returned; unused for commands
  std::string output;      ///< stdout and stderr together
  double seconds = 0;      ///< from the start of all to the end of this one

  bool ok() const { return exit_code == 0 && error.empty() && !timed_out; }
  /// All of it as text, for a failure message.
  std::string describe() const;
};

/// Forks `ranks` processes with torchrun's variables (MASTER_PORT is free) and runs `body` in each. Launcher variables
/// of the surroundings are removed. A rank that returns exits with 0, one that throws with 1.
std::vector<Result> spawn_ranks(int ranks, const std::function<void(int rank)>& body, const Options& options = {});

/// The same; a rank that threw, ended otherwise or was killed at the deadline fails the test case.
void run_ranks(int ranks, const std::function<void(int rank)>& body, const Options& options = {});

/// Turns the calling rank into a program, with the environment that the rank has.
[[noreturn]] void exec_program(const std::vector<std::string>& argv);

/// Runs a program, found by PATH, without the launcher variables of the surroundings, unless `options.env` sets them.
Result run_command(const std::vector<std::string>& argv, const Options& options = {});

/// `argv` joined, for launcher + program + arguments.
std::vector<std::string> operator+(std::vector<std::string> head, const std::vector<std::string>& tail);

/// The path of a built executable: in $LIBDDP_TEST_BIN, else in the folder given at compile time, else beside this one.
std::string test_bin(const std::string& name);

/// A Python with torch: $LIBDDP_TEST_PYTHON, else the one given at compile time. Nothing when there is none.
std::optional<std::string> test_python();

/// "torchrun --standalone --no-python --nproc-per-node N" of that Python, with more arguments; the program follows.
std::optional<std::vector<std::string>> torchrun(int ranks, const std::vector<std::string>& arguments = {});

/// Command line of a DDP_TEST_PROGRAM of this executable.
std::vector<std::string> program(const std::string& name, const std::vector<std::string>& arguments = {});

/// A TCP port of 127.0.0.1 that is free at this moment.
uint16_t free_port();

/// A new folder, removed with all in it at the end.
class TempDir {
 public:
  TempDir();
  ~TempDir();
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

/// Names a function `int(const std::vector<std::string>& args)` as a program: see DDP_TEST_PROGRAM.
struct ProgramRegistration {
  using Main = int (*)(const std::vector<std::string>& args);
  ProgramRegistration(const char* name, Main main);
};

/// Called by main.cpp: runs the program that the command line names, nothing when it names none.
std::optional<int> run_named_program(int argc, char** argv);

}  // namespace ddp::test

/// Defines a small program inside a test executable, for launchers to start: `DDP_TEST_PROGRAM(boom) { return 3; }`,
/// with its arguments in `args`.
#define DDP_TEST_PROGRAM(name)                                                                                  \
  static int ddp_test_program_##name(const std::vector<std::string>& args);                                     \
  static const ::ddp::test::ProgramRegistration ddp_test_program_entry_##name(#name, &ddp_test_program_##name); \
  static int ddp_test_program_##name([[maybe_unused]] const std::vector<std::string>& args)
