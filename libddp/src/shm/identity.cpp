#include "shm/identity.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <fstream>
#include <istream>

namespace ddp::detail::shm {
namespace {

std::string& pretended() {
  static std::string name;
  return name;
}

uint64_t namespace_of_this_process(const char* kind) {
  struct stat status {};
  return ::stat(fmt::format("/proc/self/ns/{}", kind).c_str(), &status) == 0 ? status.st_ino : 0;
}

}  // namespace

std::string Identity::text() const { return fmt::format("{} {} {} {} {}", kernel, processes, network, pretended, pid); }

Identity Identity::parse(std::istream& in) {
  Identity identity;
  in >> identity.kernel >> identity.processes >> identity.network >> identity.pretended >> identity.pid;
  return identity;
}

std::string Identity::apart_from(const Identity& other) const {
  if (kernel != other.kernel || pretended != other.pretended) return "on another host";
  if (processes != other.processes) return "in another container (process namespace)";
  return network == other.network ? "" : "in another network namespace";
}

Identity identify_this_process() {
  Identity identity;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> identity.kernel;
  identity.processes = namespace_of_this_process("pid");
  identity.network = namespace_of_this_process("net");
  if (!pretended().empty()) identity.pretended = pretended();
  identity.pid = ::getpid();
  return identity;
}

void pretend_host(const std::string& name) { pretended() = name; }

Fd open_process(pid_t pid) {
#ifdef SYS_pidfd_open
  return Fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
#else
  return Fd();
#endif
}

bool has_ended(pid_t pid, const Fd& process) {
  if (!process) return ::kill(pid, 0) != 0 && errno == ESRCH;
  pollfd poll{.fd = process.get(), .events = POLLIN, .revents = 0};
  return ::poll(&poll, 1, 0) > 0;
}

}  // namespace ddp::detail::shm
