// Row P4: a store that is none, one that dies while ranks join, one that dies later: an error within ten seconds that
// names host and port, whatever the group's timeout; never an abort. (A busy port, a host that does not resolve and a
// store that nobody serves are in process_group_test.)
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <csignal>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "ddp/collectives.h"
#include "ddp/error.h"
#include "ddp/process_group.h"
#include "support/catch.h"
#include "support/spawn.h"

using namespace ddp::test;
using ddp::ProcessGroup;

namespace {

std::string place() { return std::string("127.0.0.1:") + getenv("MASTER_PORT"); }

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// The last of three ranks plays torchrun's agent: it serves the store until `done` keys are there, then it is gone at
// once. The others make a world of `world` with it.
template <class Body>
std::vector<Result> with_agent(int world, const std::vector<std::string>& done, Body&& body) {
  return spawn_ranks(3,
                     [&](int rank) {
                       const auto port = static_cast<uint16_t>(std::stoi(getenv("MASTER_PORT")));
                       c10d::TCPStoreOptions options;
                       options.port = port;
                       options.waitWorkers = false;
                       if (rank == 2) {
                         options.isServer = true;
                         c10d::TCPStore store("127.0.0.1", options);
                         store.wait(done, 20s);
                         raise(SIGKILL);
                       }
                       setenv("WORLD_SIZE", std::to_string(world).c_str(), 1);
                       setenv("LOCAL_WORLD_SIZE", std::to_string(world).c_str(), 1);
                       setenv("TORCHELASTIC_USE_AGENT_STORE", "True", 1);
                       body(rank, [&](const std::string& key) {
                         c10d::TCPStore("127.0.0.1", options).set(key, std::vector<uint8_t>{1});
                       });
                     },
                     {.deadline = 30s});
}

}  // namespace

TEST_CASE("P4: the store dies while ranks wait for one that is missing") {
  // Both have said hello; the third of the world never comes.
  const auto results = with_agent(3, {"libddp/meet/rank/0", "libddp/meet/rank/1"}, [](int, auto&&) {
    const auto text = message_of<ddp::CommError>([] { ProcessGroup::from_env({.timeout = 60s}); });
    DDP_CHECK(contains(text, "the store at " + place() + " is lost"));
    DDP_CHECK(contains(text, "start all ranks again"));
  });
  for (const int rank : {0, 1}) {
    INFO(results[rank].describe());
    CHECK(results[rank].ok());
    CHECK(results[rank].seconds < 10);
  }
}

TEST_CASE("P4: the store dies after joining: training goes on, and a new group is an error that names it") {
  for (const char* backend : {"shm", "gloo"}) {
    const auto results = with_agent(2, {"test/0", "test/1"}, [&](int rank, auto&& tell) {
      const auto group = ProcessGroup::from_env({.backend = backend, .timeout = 60s});
      ddp::barrier(group);
      tell("test/" + std::to_string(rank));
      std::this_thread::sleep_for(500ms);
      auto t = torch::tensor({rank + 1});
      for (int i = 0; i < 3; ++i) ddp::all_reduce(t, group);
      DDP_CHECK(t.item<int>() == 3 * 2 * 2);
      const auto text = message_of<ddp::CommError>([&] { group.duplicate("late"); });
      DDP_CHECK(contains(text, "the store at " + place() + " is lost"));
      ddp::barrier(group);
    });
    for (const int rank : {0, 1}) {
      INFO(backend << ": " << results[rank].describe());
      CHECK(results[rank].ok());
      CHECK(results[rank].seconds < 10);
    }
  }
}

// A port that some other server holds, as after a job that was not ended: rank 0 is told by its bind; a rank that only
// connects learns it from silence, at the timeout, or from a connection that is closed at once.
TEST_CASE("P4: what listens at MASTER_PORT is no store") {
  for (const bool closes : {false, true}) {
    const int holder = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    socklen_t length = sizeof address;
    auto* generic = reinterpret_cast<sockaddr*>(&address);
    REQUIRE(bind(holder, generic, length) == 0);
    REQUIRE(listen(holder, 64) == 0);
    getsockname(holder, generic, &length);
    const auto port = std::to_string(ntohs(address.sin_port));
    std::jthread server([&] {
      for (int peer = 0; closes && (peer = accept(holder, nullptr, nullptr)) >= 0;) close(peer);
    });
    const auto results = spawn_ranks(1, [](int) { ProcessGroup::from_env({.timeout = 2s}); },
                                     {.deadline = 15s,
                                      .env = {{"RANK", "1"},
                                              {"LOCAL_RANK", "1"},
                                              {"WORLD_SIZE", "2"},
                                              {"LOCAL_WORLD_SIZE", "2"},
                                              {"MASTER_PORT", port}}});
    shutdown(holder, SHUT_RDWR);  // wakes the server
    server.join();
    close(holder);
    INFO(closes << ": " << results[0].describe());
    CHECK(results[0].exit_code == 1);
    CHECK_THAT(results[0].error,
               ContainsSubstring("127.0.0.1:" + port) && ContainsSubstring("is rank 0 running there?"));
    CHECK(results[0].seconds < 10);
  }
}
