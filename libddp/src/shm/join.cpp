#include "shm/join.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <random>
#include <sstream>
#include <system_error>
#include <vector>

namespace ddp::detail::shm {
namespace {

// Where the memory of a host is: a descriptor of its first rank.
struct Memory {
  int fd = -1;
  uint64_t token[2] = {};
  std::string problem = "";  // why there is none, "" where there is

  std::string text() const { return fmt::format("{} {} {} {}", fd, token[0], token[1], problem); }

  static Memory parse(std::istream& in) {
    Memory memory;
    in >> memory.fd >> memory.token[0] >> memory.token[1] >> std::ws;
    std::getline(in, memory.problem);
    return memory;
  }
};

uint64_t random_number() {
  std::random_device random;
  return static_cast<uint64_t>(random()) << 32 | random();
}

Header& header(const Arena& arena) { return *reinterpret_cast<Header*>(arena.data()); }

class Joining {
 public:
  Joining(c10d::Store& store, const Place& place) : store_(store), place_(place) {}

  Joined run(const std::string& group, std::chrono::milliseconds timeout) {
    // Most groups are on one host: rank 0 offers memory for all before it knows.
    Arena arena;
    Memory memory;
    if (place_.rank == 0) memory = offer(arena, place_.size);
    read_hellos(tell("hello", fmt::format("{}\n{}", identify_this_process().text(), memory.text())), memory);

    Joined joined;
    joined.hosts = group_by_host(joined.why_apart);
    const auto mine = std::find_if(joined.hosts.begin(), joined.hosts.end(), [&](const std::vector<int>& ranks) {
      return std::find(ranks.begin(), ranks.end(), place_.rank) != ranks.end();
    });
    const std::vector<int>& local = *mine;
    if (std::ssize(joined.hosts) == place_.size) return joined;
    if (joined.hosts.size() > 1) {
      arena = {};
      memory = local.size() > 1 ? memory_of(local, arena) : Memory();
    }

    Peers peers;
    std::string verdict = open_all(arena, peers, memory, local);
    for (const auto& other : tell("verdict", verdict.empty() ? "ok" : verdict)) {
      if (other == "ok") continue;
      joined.why_not = other;
      return joined;
    }
    if (local.size() == 1) return joined;
    arena.close_fd();
    const auto number = std::find(local.begin(), local.end(), place_.rank) - local.begin();
    const Place here{.rank = static_cast<int>(number), .size = static_cast<int>(local.size())};
    joined.exchange = std::make_unique<Exchange>(std::move(arena), std::move(peers), here, group, timeout);
    return joined;
  }

 private:
  // New memory for `ranks` ranks.
  static Memory offer(Arena& arena, int ranks) {
    Memory memory;
    try {
      arena = Arena::create(Layout(ranks).size());
      memory.fd = arena.fd();
      for (auto& part : memory.token) part = random_number();
      std::copy(memory.token, memory.token + 2, header(arena).token);
    } catch (const std::system_error& e) {
      memory.problem = e.what();
    }
    return memory;
  }

  void read_hellos(const std::vector<std::string>& texts, Memory& of_rank_0) {
    for (const std::string& text : texts) {
      std::istringstream in(text);
      hellos_.push_back(Identity::parse(in));
      if (hellos_.size() == 1) of_rank_0 = Memory::parse(in);
    }
  }

  Hosts group_by_host(std::string& why_apart) const {
    Hosts hosts;
    for (int rank = 0; rank < place_.size; ++rank) {
      const std::string apart = hellos_[rank].apart_from(hellos_[0]);
      if (!apart.empty() && why_apart.empty()) why_apart = fmt::format("rank {} is {} than rank 0", rank, apart);
      const auto host = std::find_if(hosts.begin(), hosts.end(), [&](const std::vector<int>& ranks) {
        return hellos_[rank].apart_from(hellos_[ranks[0]]).empty();
      });
      (host == hosts.end() ? hosts.emplace_back() : *host).push_back(rank);
    }
    return hosts;
  }

  // The memory of this host's ranks, which the first of them makes.
  Memory memory_of(const std::vector<int>& local, Arena& arena) {
    const std::string key = fmt::format("memory/{}", local[0]);
    if (local[0] == place_.rank) {
      Memory memory = offer(arena, static_cast<int>(local.size()));
      store_.set(key, memory.text());
      return memory;
    }
    std::istringstream in(store_.get_to_str(key));
    return Memory::parse(in);
  }

  // Opens the memory and the processes of `local`. Returns why it cannot, "" where it can.
  std::string open_all(Arena& arena, Peers& peers, const Memory& memory, const std::vector<int>& local) const {
    if (local.size() == 1) return "";
    if (!memory.problem.empty()) return fmt::format("rank {} has no memory to share: {}", local[0], memory.problem);
    try {
      if (local[0] != place_.rank) {
        arena = Arena::open(hellos_[local[0]].pid, memory.fd, Layout(static_cast<int>(local.size())).size());
        if (!std::equal(memory.token, memory.token + 2, header(arena).token))
          throw std::runtime_error("it is another's memory");
      }
      for (const int rank : local) {
        const pid_t pid = hellos_[rank].pid;
        peers.pids.push_back(pid);
        peers.processes.push_back(pid == ::getpid() ? Fd() : open_process(pid));
      }
      if (std::ssize(local) < place_.size) peers.names = local, peers.world = place_.size;
    } catch (const std::exception& e) {
      return fmt::format("rank {} cannot open rank {}'s memory: {}", place_.rank, local[0], e.what());
    }
    return "";
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
  std::vector<Identity> hellos_;
};

}  // namespace

Joined join(c10d::Store& store, const Place& place, const std::string& group, std::chrono::milliseconds timeout) {
  return Joining(store, place).run(group, timeout);
}

}  // namespace ddp::detail::shm
