#include "child.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <system_error>
#include <utility>

namespace ddprun {
namespace {

std::system_error system_error(const char* what) { return {errno, std::generic_category(), what}; }

std::pair<Fd, Fd> make_pipe() {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) throw system_error("a pipe cannot be made");
  return {Fd(ends[0]), Fd(ends[1])};
}

std::vector<char*> pointers(const std::vector<std::string>& words) {
  std::vector<char*> result;
  for (const auto& word : words) result.push_back(const_cast<char*>(word.c_str()));
  result.push_back(nullptr);
  return result;
}

[[noreturn]] void keep(int pipe) {
  ::prctl(PR_SET_NAME, "ddprun-keeper");
  ::setsid();  // out of reach of the terminal and of a kill of ddprun's group
  sigset_t all;
  ::sigfillset(&all);
  ::sigprocmask(SIG_SETMASK, &all, nullptr);
  const int null = ::open("/dev/null", O_RDWR);
  for (const int fd : {0, 1, 2}) ::dup2(null, fd);
  std::vector<pid_t> groups;
  for (pid_t message = 0;;) {
    const ssize_t n = ::read(pipe, &message, sizeof message);
    if (n < 0 && errno == EINTR) continue;
    if (n != static_cast<ssize_t>(sizeof message)) break;  // ddprun is gone
    if (message > 0) {
      groups.push_back(message);
    } else {
      std::erase(groups, -message);
    }
  }
  for (const pid_t group : groups) ::kill(-group, SIGKILL);
  ::_exit(0);
}

// Between fork and exec: async-signal-safe calls only.
[[noreturn]] void become(const char* path, char** arguments, char** environment, pid_t parent, int in, int out, int err,
                         int status, int keeper, const sigset_t& mask) {
  ::setpgid(0, 0);  // a terminal's Ctrl-C reaches ddprun alone, which passes it on
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(127);  // it died before the line above
  // The keeper hears of the group from itself, before there is anything to kill in it: ddprun may die at any moment.
  const pid_t group = ::getpid();
  [[maybe_unused]] const auto told = ::write(keeper, &group, sizeof group);
  struct sigaction action {};
  action.sa_handler = SIG_DFL;
  ::sigaction(SIGPIPE, &action, nullptr);
  ::dup2(in, STDIN_FILENO);
  ::dup2(out, STDOUT_FILENO);
  ::dup2(err, STDERR_FILENO);
  ::sigprocmask(SIG_SETMASK, &mask, nullptr);
  ::execve(path, arguments, environment);
  const int error = errno;
  [[maybe_unused]] const auto written = ::write(status, &error, sizeof error);
  ::_exit(127);
}

}  // namespace

Keeper::Keeper() {
  auto [read, write] = make_pipe();
  pid_ = ::fork();
  if (pid_ < 0) throw system_error("a process cannot be started");
  if (pid_ == 0) {
    write.close();
    keep(read.get());
  }
  pipe_ = std::move(write);
}

Keeper::~Keeper() {
  pipe_.close();
  while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

// A keeper that somebody has killed is missed only when ddprun is killed too.
void Keeper::forget(pid_t group) {
  const pid_t message = -group;
  [[maybe_unused]] const auto written = ::write(pipe_.get(), &message, sizeof message);
}

Program find_program(const std::vector<std::string>& command) {
  const std::string& name = command.front();
  Program program{.path = name, .arguments = command};
  if (name.find('/') == std::string::npos) {
    const char* path = std::getenv("PATH");
    std::istringstream folders(path != nullptr ? path : "/usr/local/bin:/usr/bin:/bin");
    program.path.clear();
    for (std::string folder; program.path.empty() && std::getline(folders, folder, ':');) {
      const std::string candidate = (folder.empty() ? "." : folder) + "/" + name;
      struct stat status {};
      if (::stat(candidate.c_str(), &status) == 0 && S_ISREG(status.st_mode) && ::access(candidate.c_str(), X_OK) == 0)
        program.path = candidate;
    }
    if (program.path.empty()) {
      const bool here = ::access(name.c_str(), F_OK) == 0;
      throw ProgramError{
          127, name + " is not found in PATH" + (here ? "; to run the one in this folder, write ./" + name : "")};
    }
    return program;
  }
  struct stat status {};
  if (::stat(name.c_str(), &status) != 0) {
    throw ProgramError{errno == EACCES ? 126 : 127, name + ": " + std::strerror(errno)};
  }
  if (S_ISDIR(status.st_mode)) throw ProgramError{126, name + " is a folder, not a program"};
  if (::access(name.c_str(), X_OK) != 0) throw ProgramError{126, name + " is not executable (chmod +x)"};
  return program;
}

Child start(const Program& program, const std::vector<std::string>& environment, const sigset_t& mask, Keeper& keeper) {
  auto [out_read, out_write] = make_pipe();
  auto [err_read, err_write] = make_pipe();
  auto [status_read, status_write] = make_pipe();
  // A rank in the background of the terminal that reads from it would be stopped.
  const Fd null(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (!null) throw system_error("/dev/null");
  const auto arguments = pointers(program.arguments), variables = pointers(environment);
  const pid_t parent = ::getpid();

  const pid_t pid = ::fork();
  if (pid < 0) throw system_error("a process cannot be started");
  if (pid == 0) {
    become(program.path.c_str(), const_cast<char**>(arguments.data()), const_cast<char**>(variables.data()), parent,
           null.get(), out_write.get(), err_write.get(), status_write.get(), keeper.fd(), mask);
  }
  ::setpgid(pid, pid);  // here and in the child: whoever comes first
  status_write.close();
  int error = 0;
  ssize_t n = 0;
  while ((n = ::read(status_read.get(), &error, sizeof error)) < 0 && errno == EINTR) {
  }
  if (n > 0) {
    ::waitpid(pid, nullptr, 0);
    keeper.forget(pid);
    std::string why = std::strerror(error);
    if (error == ENOENT) why = "its interpreter or loader does not exist";
    if (error == ENOEXEC) why = "it is no program of this machine, and has no line \"#!\"";
    throw ProgramError{126, program.path + " cannot be executed: " + why};
  }
  for (const Fd* fd : {&out_read, &err_read}) ::fcntl(fd->get(), F_SETFL, O_NONBLOCK);
  return {.pid = pid, .out = std::move(out_read), .err = std::move(err_read)};
}

}  // namespace ddprun
