#include "local_peers.h"

#include <fmt/format.h>
#include <unistd.h>

#include <sstream>
#include <thread>

namespace ddp::detail {

LocalPeers::LocalPeers(c10d::Store& store, const Place& place) {
  const auto key = [](int rank) { return fmt::format("process/{}", rank); };
  const auto mine = shm::identify_this_process();
  store.set(key(place.rank), mine.text());
  for (int rank = 0; rank < place.size; ++rank) {
    if (rank == place.rank) continue;
    std::istringstream text(store.get_to_str(key(rank)));
    const auto other = shm::Identity::parse(text);
    if (!mine.apart_from(other).empty() || other.pid == mine.pid) continue;  // ranks may be threads
    peers_.push_back({.rank = rank, .pid = other.pid, .process = shm::open_process(other.pid)});
  }
}

std::vector<const LocalPeers::Peer*> LocalPeers::ended(std::chrono::milliseconds patience) const {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  for (;;) {
    std::vector<const Peer*> found;
    for (const Peer& peer : peers_) {
      if (shm::has_ended(peer.pid, peer.process)) found.push_back(&peer);
    }
    if (!found.empty() || peers_.empty() || std::chrono::steady_clock::now() >= deadline) return found;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

}  // namespace ddp::detail
