#include "support/spawn.h"

#include <ATen/Parallel.h>
#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <sstream>
#include <system_error>
#include <thread>

#include "support/catch.h"

extern char** environ;

namespace ddp::test {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kMark = "LIBDDP_TEST_GROUP";  // an environment variable that finds a command's descendants

struct Fd {
  int value = -1;
  void close() {
    if (value >= 0) ::close(value);
    value = -1;
  }
};

struct Pipe {
  Fd read, write;
  Pipe() {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) throw std::system_error(errno, std::generic_category(), "pipe2");
    read.value = ends[0];
    write.value = ends[1];
    ::fcntl(read.value, F_SETFL, O_NONBLOCK);
  }
};

struct Child {
  pid_t pid = -1;
  Pipe output, error;
  bool ended = false;
};

void drain(Fd& fd, std::string& into) {
  std::array<char, 65536> buffer;
  while (fd.value >= 0) {
    ssize_t n = ::read(fd.value, buffer.data(), buffer.size());
    if (n > 0) {
      into.append(buffer.data(), static_cast<size_t>(n));
    } else if (n == 0) {
      fd.close();
    } else if (errno != EINTR) {
      return;
    }
  }
}

void write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    ssize_t n = ::write(fd, text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return;
    text.remove_prefix(static_cast<size_t>(n));
  }
}

// Variables by which `read_env` would take this process for a rank. A test may itself run under a launcher.
bool is_launcher_variable(std::string_view name) {
  for (std::string_view prefix : {"OMPI_", "PMIX_", "SLURM_", "TORCHELASTIC_", "GROUP_", "ROLE_"}) {
    if (name.starts_with(prefix)) return name != "SLURM_CONF";
  }
  for (std::string_view exact :
       {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    if (name == exact) return true;
  }
  return false;
}

// In a child only.
void apply_environment(const Environment& env) {
  std::vector<std::string> foreign;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    std::string_view name(*entry, std::strcspn(*entry, "="));
    if (is_launcher_variable(name)) foreign.emplace_back(name);
  }
  for (const auto& name : foreign) ::unsetenv(name.c_str());
  for (const auto& [name, value] : env) {
    if (value) {
      ::setenv(name.c_str(), value->c_str(), 1);
    } else {
      ::unsetenv(name.c_str());
    }
  }
}

// In a child only: own group, own streams, no signal handlers of Catch, dead when the test is dead.
void become_child(pid_t group, pid_t parent, const Child& me) {
  ::setpgid(0, group);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(127);
  for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGILL, SIGABRT, SIGFPE, SIGSEGV, SIGPIPE})
    ::signal(signal, SIG_DFL);
  ::dup2(::open("/dev/null", O_RDONLY | O_CLOEXEC), STDIN_FILENO);
  ::dup2(me.output.write.value, STDOUT_FILENO);
  ::dup2(me.output.write.value, STDERR_FILENO);
}

// Processes that carry the mark of this call: they may have left the group, as torchrun's workers do.
std::vector<pid_t> marked(const std::string& mark) {
  std::vector<pid_t> found;
  std::error_code ignored;
  const std::string entry = std::string(kMark) + "=" + mark;
  for (const auto& dir : std::filesystem::directory_iterator("/proc", ignored)) {
    const std::string name = dir.path().filename();
    pid_t pid = 0;
    auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), pid);
    if (error != std::errc() || *end != '\0' || pid == ::getpid()) continue;
    std::ifstream file(dir.path() / "environ", std::ios::binary);
    std::string text{std::istreambuf_iterator<char>(file), {}};
    if (text.find(entry) != std::string::npos) found.push_back(pid);
  }
  return found;
}

void kill_marked(const std::string& mark) {
  if (mark.empty()) return;
  for (int round = 0; round < 10; ++round) {  // who is killed may just have started another
    auto pids = marked(mark);
    if (pids.empty()) return;
    for (pid_t pid : pids) ::kill(pid, SIGKILL);
    std::this_thread::sleep_for(10ms);
  }
}

// Starts `count` children, each running `child(index, its error pipe)` without return, and waits for them.
std::vector<Result> run_group(int count, const std::function<void(int, int)>& child, std::chrono::milliseconds deadline,
                              const std::string& mark) {
  std::vector<Child> children(static_cast<size_t>(count));
  std::vector<Result> results(static_cast<size_t>(count));
  const auto start = Clock::now();
  const pid_t parent = ::getpid();
  std::fflush(nullptr);  // else each child would write what is buffered once more
  std::cout.flush();

  pid_t group = 0;
  for (int i = 0; i < count; ++i) {
    Child& me = children[static_cast<size_t>(i)];
    const pid_t pid = ::fork();
    if (pid == 0) {
      become_child(group, parent, me);
      child(i, me.error.write.value);
      ::_exit(127);
    }
    if (pid < 0) {
      const int error = errno;
      if (group != 0) ::kill(-group, SIGKILL);
      throw std::system_error(error, std::generic_category(), "fork");
    }
    me.pid = pid;
    if (group == 0) group = pid;
    ::setpgid(pid, group);  // here and in the child: whoever comes first
    me.output.write.close();
    me.error.write.close();
  }

  bool killed = false;
  for (size_t alive = children.size(); alive > 0;) {
    std::vector<pollfd> fds;
    for (Child& c : children) {
      for (Fd* fd : {&c.output.read, &c.error.read}) {
        if (fd->value >= 0) fds.push_back({.fd = fd->value, .events = POLLIN, .revents = 0});
      }
    }
    ::poll(fds.data(), fds.size(), 10);
    for (size_t i = 0; i < children.size(); ++i) {
      Child& c = children[i];
      Result& r = results[i];
      drain(c.output.read, r.output);
      drain(c.error.read, r.error);
      siginfo_t info{};
      // Left as a zombie, so that the group's number stays ours until the group is killed.
      if (!c.ended && ::waitid(P_PID, static_cast<id_t>(c.pid), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
          info.si_pid == c.pid) {
        c.ended = true;
        --alive;
        r.seconds = std::chrono::duration<double>(Clock::now() - start).count();
        if (info.si_code == CLD_EXITED) {
          r.exit_code = info.si_status;
        } else {
          r.signal = info.si_status;
          r.timed_out = killed;
        }
      }
    }
    if (!killed && Clock::now() - start > deadline) {
      killed = true;
      ::kill(-group, SIGKILL);
      kill_marked(mark);
    }
  }

  ::kill(-group, SIGKILL);  // what the children have left behind
  kill_marked(mark);
  for (size_t i = 0; i < children.size(); ++i) {
    ::waitpid(children[i].pid, nullptr, 0);
    drain(children[i].output.read, results[i].output);
    drain(children[i].error.read, results[i].error);
    children[i].output.read.close();
    children[i].error.read.close();
  }
  return results;
}

std::map<std::string, ProgramRegistration::Main>& programs() {
  static std::map<std::string, ProgramRegistration::Main> registry;
  return registry;
}

constexpr std::string_view kProgramFlag = "--ddp-program=";

}  // namespace

std::string Result::describe() const {
  std::ostringstream text;
  if (timed_out) {
    text << "killed at the deadline";
  } else if (signal != 0) {
    text << "ended by signal " << signal << " (" << ::strsignal(signal) << ")";
  } else {
    text << "exit code " << exit_code;
  }
  text << " after " << seconds << " s";
  if (!error.empty()) text << "\n  threw: " << error;
  if (!output.empty()) text << "\n  printed:\n" << output;
  return text.str();
}

std::vector<Result> spawn_ranks(int ranks, const std::function<void(int)>& body, const Options& options) {
  const std::string port = std::to_string(free_port());
  auto child = [&](int rank, int error_fd) {
    Environment env = {{"RANK", std::to_string(rank)},
                       {"WORLD_SIZE", std::to_string(ranks)},
                       {"LOCAL_RANK", std::to_string(rank)},
                       {"LOCAL_WORLD_SIZE", std::to_string(ranks)},
                       {"MASTER_ADDR", "127.0.0.1"},
                       {"MASTER_PORT", port},
                       {"OMP_NUM_THREADS", "1"}};
    for (const auto& [name, value] : options.env) env[name] = value;
    apply_environment(env);
    if (!options.cwd.empty() && ::chdir(options.cwd.c_str()) != 0) ::_exit(126);
    int code = 1;
    try {
      at::set_num_threads(1);
      body(rank);
      code = 0;
    } catch (const std::exception& e) {
      const std::string_view what = e.what();
      write_all(error_fd, what.empty() ? "an exception without a message" : what);
    } catch (...) {
      write_all(error_fd, "an exception that is no std::exception (a Catch assertion? use DDP_CHECK in a rank)");
    }
    std::cout.flush();
    std::fflush(nullptr);
    ::_exit(code);  // neither Catch nor libtorch is torn down a second time
  };
  return run_group(ranks, child, options.deadline, "");
}

void run_ranks(int ranks, const std::function<void(int)>& body, const Options& options) {
  auto results = spawn_ranks(ranks, body, options);
  std::string failures;
  for (size_t rank = 0; rank < results.size(); ++rank) {
    if (!results[rank].ok()) {
      failures += "\nrank " + std::to_string(rank) + " of " + std::to_string(ranks) + ": " + results[rank].describe();
    }
  }
  if (!failures.empty()) FAIL("ranks failed:" << failures);
  SUCCEED();
}

Result run_command(const std::vector<std::string>& argv, const Options& options) {
  const std::string mark =
      std::to_string(::getpid()) + "." + std::to_string(Clock::now().time_since_epoch().count()) + ".";
  auto child = [&](int, int) {
    Environment env = options.env;
    env[kMark] = mark;
    apply_environment(env);
    if (!options.cwd.empty() && ::chdir(options.cwd.c_str()) != 0) {
      std::perror(options.cwd.c_str());
      ::_exit(126);
    }
    std::vector<char*> arguments;
    for (const auto& argument : argv) arguments.push_back(const_cast<char*>(argument.c_str()));
    arguments.push_back(nullptr);
    ::execvp(arguments[0], arguments.data());
    std::perror(arguments[0]);
    std::fflush(nullptr);
    ::_exit(127);
  };
  return run_group(1, child, options.deadline, mark).front();
}

void exec_program(const std::vector<std::string>& argv) {
  std::vector<char*> words;
  for (const auto& word : argv) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  ::execv(words[0], words.data());
  throw std::runtime_error(argv[0] + " cannot be started: " + std::strerror(errno));
}

std::vector<std::string> operator+(std::vector<std::string> head, const std::vector<std::string>& tail) {
  head.insert(head.end(), tail.begin(), tail.end());
  return head;
}

std::string test_bin(const std::string& name) {
  if (const char* dir = std::getenv("LIBDDP_TEST_BIN"); dir != nullptr && *dir != '\0')
    return std::filesystem::path(dir) / name;
#ifdef LIBDDP_TEST_BIN
  return std::filesystem::path(LIBDDP_TEST_BIN) / name;
#else
  return std::filesystem::read_symlink("/proc/self/exe").parent_path() / name;
#endif
}

std::optional<std::string> test_python() {
  const char* path = std::getenv("LIBDDP_TEST_PYTHON");
#ifdef LIBDDP_TEST_PYTHON
  if (path == nullptr) path = LIBDDP_TEST_PYTHON;
#endif
  if (path == nullptr || *path == '\0') return std::nullopt;
  return path;
}

std::optional<std::vector<std::string>> torchrun(int ranks, const std::vector<std::string>& arguments) {
  auto python = test_python();
  if (!python) return std::nullopt;
  std::vector<std::string> argv = {
      *python, "-m", "torch.distributed.run", "--standalone", "--no-python", "--nproc-per-node", std::to_string(ranks)};
  return argv + arguments;
}

std::vector<std::string> program(const std::string& name, const std::vector<std::string>& arguments) {
  if (programs().count(name) == 0) throw std::runtime_error("no DDP_TEST_PROGRAM(" + name + ") in this executable");
  std::vector<std::string> argv = {std::filesystem::read_symlink("/proc/self/exe"), std::string(kProgramFlag) + name};
  return argv + arguments;
}

uint16_t free_port() {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  const bool ok = fd >= 0 && ::bind(fd, generic, size) == 0 && ::getsockname(fd, generic, &size) == 0;
  const int error = errno;
  if (fd >= 0) ::close(fd);
  if (!ok) throw std::system_error(error, std::generic_category(), "free_port");
  return ntohs(address.sin_port);
}

TempDir::TempDir() {
  std::string name = (std::filesystem::temp_directory_path() / "libddp-test-XXXXXX").string();
  if (::mkdtemp(name.data()) == nullptr) throw std::system_error(errno, std::generic_category(), name);
  path_ = name;
}

TempDir::~TempDir() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

ProgramRegistration::ProgramRegistration(const char* name, Main main) { programs()[name] = main; }

std::optional<int> run_named_program(int argc, char** argv) {
  if (argc < 2 || !std::string_view(argv[1]).starts_with(kProgramFlag)) return std::nullopt;
  auto found = programs().find(argv[1] + kProgramFlag.size());
  if (found == programs().end()) {
    std::cerr << "no program " << argv[1] << "\n";
    return 126;
  }
  return found->second(std::vector<std::string>(argv + 2, argv + argc));
}

}  // namespace ddp::test
