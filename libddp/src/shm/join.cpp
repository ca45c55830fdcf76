#include "shm/join.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <fstream>
#include <optional>
#include <random>
#include <sstream>
#include <system_error>
#include <vector>

namespace ddp::detail::shm {
namespace {

// What a rank says of itself: which kernel and which process numbers it sees; and rank 0 of its memory.
struct Hello {
  std::string kernel = "?";
  uint64_t processes = 0;
  pid_t pid = 0;
  int fd = -1;
  uint64_t token[2] = {};
  std::string problem = "";  // "" where there is none

  std::string text() const {
    return fmt::format("{} {} {} {} {} {} {}", kernel, processes, pid, fd, token[0], token[1], problem);
  }

  static Hello parse(const std::string& text) {
    Hello hello;
    std::istringstream in(text);
    in >> hello.kernel >> hello.processes >> hello.pid >> hello.fd >> hello.token[0] >> hello.token[1] >> std::ws;
    std::getline(in, hello.problem);
    return hello;
  }
};

Hello describe_this_process() {
  Hello hello;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> hello.kernel;
  struct stat status {};
  if (::stat("/proc/self/ns/pid", &status) == 0) hello.processes = status.st_ino;
  hello.pid = ::getpid();
  return hello;
}

uint64_t random_number() {
  std::random_device random;
  return static_cast<uint64_t>(random()) << 32 | random();
}

Header& header(const Arena& arena) { return *reinterpret_cast<Header*>(arena.data()); }

Fd open_process(pid_t pid) {
#ifdef SYS_pidfd_open
  return Fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
#else
  return Fd();
#endif
}

class Joining {
 public:
  Joining(c10d::Store& store, const Place& place) : store_(store), place_(place) {}

  Joined run(const std::string& group, std::chrono::milliseconds timeout) {
    const size_t size = Layout(place_.size).size();
    Hello mine = describe_this_process();
    Arena arena;
    if (place_.rank == 0) {
      try {
        arena = Arena::create(size);
        mine.fd = arena.fd();
        for (auto& part : mine.token) part = random_number();
        std::copy(mine.token, mine.token + 2, header(arena).token);
      } catch (const std::system_error& e) {
        mine.problem = e.what();
      }
    }
    std::vector<Hello> hellos;
    for (const auto& text : tell("hello", mine.text())) hellos.push_back(Hello::parse(text));

    Peers peers;
    std::string verdict = judge(hellos);
    if (verdict.empty()) {
      try {
        if (place_.rank != 0) arena = open(hellos[0], size);
        for (const Hello& hello : hellos) {
          peers.pids.push_back(hello.pid);
          peers.processes.push_back(hello.pid == mine.pid ? Fd() : open_process(hello.pid));
        }
      } catch (const std::exception& e) {
        verdict = fmt::format("rank {} cannot open rank 0's memory: {}", place_.rank, e.what());
      }
    }
    for (const auto& other : tell("verdict", verdict.empty() ? "ok" : verdict)) {
      if (other != "ok") return {nullptr, other};
    }
    arena.close_fd();
    return {std::make_unique<Exchange>(std::move(arena), std::move(peers), place_, group, timeout), ""};
  }

 private:
  // The first reason against, as every rank finds it.
  static std::string judge(const std::vector<Hello>& hellos) {
    const Hello& zero = hellos[0];
    if (!zero.problem.empty()) return fmt::format("rank 0 has no memory to share: {}", zero.problem);
    for (size_t rank = 1; rank < hellos.size(); ++rank) {
      if (hellos[rank].kernel != zero.kernel) return fmt::format("rank {} is on another host than rank 0", rank);
      if (hellos[rank].processes != zero.processes) {
        return fmt::format("rank {} is in another container (process namespace) than rank 0", rank);
      }
    }
    return "";
  }

  static Arena open(const Hello& zero, size_t size) {
    Arena arena = Arena::open(zero.pid, zero.fd, size);
    if (!std::equal(zero.token, zero.token + 2, header(arena).token))
      throw std::runtime_error("it is another's memory");
    return arena;
  }

  // Every rank's text, by rank.
  std::vector<std::string> tell(const std::string& what, const std::string& text) {
    const auto key = [&](int rank) { return fmt::format("{}/{}", what, rank); };
    store_.set(key(place_.rank), text);
    std::vector<std::string> texts;
    for (int rank = 0; rank < place_.size; ++rank) {
      texts.push_back(rank == place_.rank ? text : store_.get_to_str(key(rank)));
    }
    return texts;
  }

  c10d::Store& store_;
  const Place& place_;
};

}  // namespace

Joined join(c10d::Store& store, const Place& place, const std::string& group, std::chrono::milliseconds timeout) {
  return Joining(store, place).run(group, timeout);
}

}  // namespace ddp::detail::shm
