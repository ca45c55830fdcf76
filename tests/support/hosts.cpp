#include "support/hosts.h"

#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>

namespace ddp::test {
namespace {

Result ip(const std::string& arguments) { return run_command({"sh", "-c", "exec ip " + arguments}, {.deadline = 10s}); }

void must(const std::string& arguments) {
  const Result result = ip(arguments);
  if (!result.ok()) throw std::runtime_error("ip " + arguments + ": " + result.describe());
}

}  // namespace

std::string TwoHosts::why_not() {
  if (::geteuid() != 0) return "network namespaces need root";
  if (!ip("-V").ok()) return "there is no ip (iproute2)";
  const std::string name = "ddp-try-" + std::to_string(::getpid());
  const bool made = ip("netns add " + name).ok();
  const bool joined = made && ip("-n " + name + " link add ddp0 type veth peer name ddp1").ok();
  if (made) ip("netns del " + name);
  if (!made) return "network namespaces are not allowed here";
  return joined ? "" : "this kernel joins no network namespaces (veth)";
}

TwoHosts::TwoHosts() : prefix_("ddp-test-" + std::to_string(::getpid()) + "-") {
  must("netns add " + name(0));
  must("netns add " + name(1));
  must("-n " + name(0) + " link add eth0 type veth peer name eth0 netns " + name(1));
  for (const int host : {0, 1}) {
    must("-n " + name(host) + " addr add 10.213.0." + std::to_string(host + 1) + "/24 dev eth0");
    must("-n " + name(host) + " link set lo up");
    must("-n " + name(host) + " link set eth0 up");
  }
}

TwoHosts::~TwoHosts() {
  for (const int host : {0, 1}) ip("netns del " + name(host));
}

std::string TwoHosts::name(int host) const { return prefix_ + std::to_string(host); }

void TwoHosts::enter(int host) const {
  const std::string path = "/var/run/netns/" + name(host);
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  const bool done = fd >= 0 && ::setns(fd, CLONE_NEWNET) == 0;
  const int error = errno;
  if (fd >= 0) ::close(fd);
  if (!done) throw std::runtime_error(path + ": " + std::strerror(error));
}

void TwoHosts::plug(bool in) const { must("-n " + name(1) + " link set eth0 " + (in ? "up" : "down")); }

Environment TwoHosts::environment() const { return {{"MASTER_ADDR", "10.213.0.1"}, {"GLOO_SOCKET_IFNAME", "eth0"}}; }

}  // namespace ddp::test
