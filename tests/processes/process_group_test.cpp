// Joining, splitting and failing, with real processes.
#include "ddp/process_group.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <csignal>
#include <cstdlib>
#include <thread>

#include "ddp/c10d.h"
#include "ddp/collectives.h"
#include "ddp/error.h"
#include "support/catch.h"
#include "support/spawn.h"

using namespace ddp::test;
using ddp::ProcessGroup;

namespace {

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_CASE("a world of one needs no launcher, and its collectives are the identity") {
  run_ranks(1, [](int) {
    for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})
      unsetenv(name);
    const auto group = ProcessGroup::from_env();
    DDP_CHECK(group.size() == 1 && group.rank() == 0 && group.backend() == "none");
    auto t = torch::tensor({1.0, 2.0});
    ddp::all_reduce(t, group);
    ddp::broadcast(t, group);
    DDP_CHECK(torch::equal(t, torch::tensor({1.0, 2.0})));
    DDP_CHECK(torch::equal(ddp::all_gather(t, group).at(0), t));
    DDP_CHECK(torch::equal(ddp::reduce_scatter(t, group), t));
    DDP_CHECK(torch::equal(ddp::all_to_all(t, group), t));
    DDP_CHECK(ddp::broadcast_object("x", group) == "x");
    DDP_CHECK(contains(message_of<ddp::ConfigError>([&] { ddp::c10d_group(group); }), "world of one"));
  });
}

TEST_CASE("ranks join, and know their place") {
  for (const int ranks : {2, 4}) {
    run_ranks(ranks, [ranks](int rank) {
      const auto group = ProcessGroup::from_env({.timeout = 20s});
      DDP_CHECK(group.rank() == rank && group.size() == ranks && group.backend() == "shm");
      DDP_CHECK(group.timeout() == 20s && group.device().is_cpu());
      auto t = torch::ones({1});
      DDP_CHECK(ddp::c10d_group(group)->getSize() == ranks);
      ddp::all_reduce(t, group);
      DDP_CHECK(t.item<float>() == ranks);
    });
  }
}

TEST_CASE("options that cannot work are refused with the reason") {
  run_ranks(1, [](int) {
    DDP_CHECK(contains(message_of<ddp::ConfigError>([] { ProcessGroup::from_env({.backend = "mpi"}); }),
                       "auto, shm, gloo or nccl"));
    DDP_CHECK(contains(message_of<ddp::ConfigError>([] { ProcessGroup::from_env({.timeout = 0ms}); }), "positive"));
    DDP_CHECK(
        contains(message_of<ddp::ConfigError>([] { ProcessGroup::from_env({.device = torch::Device(torch::kMeta)}); }),
                 "not supported"));
  });
}

TEST_CASE("nccl without a GPU is refused, never replaced") {
  run_ranks(1,
            [](int) {
              const auto text = message_of<ddp::ConfigError>([] { ProcessGroup::from_env({.backend = "nccl"}); });
              DDP_CHECK(contains(text, "nccl needs a CUDA device") || contains(text, "built without NCCL"));
            },
            {.env = {{"CUDA_VISIBLE_DEVICES", ""}}});
}

// Case B04 d.
TEST_CASE("an absent rank is reported after the timeout, by number") {
  const auto results = spawn_ranks(1, [](int) { ProcessGroup::from_env({.timeout = 1s}); },
                                   {.deadline = 10s, .env = {{"WORLD_SIZE", "3"}}});
  CHECK(results[0].exit_code == 1);
  CHECK_THAT(results[0].error, ContainsSubstring("1 of 3 joined") && ContainsSubstring("missing: rank 1, 2"));
  CHECK(results[0].seconds < 5);
}

TEST_CASE("a store that nobody serves is an error that names host and port") {
  const auto port = std::to_string(free_port());
  const auto results =
      spawn_ranks(1, [](int) { ProcessGroup::from_env({.timeout = 1s}); },
                  {.deadline = 20s, .env = {{"WORLD_SIZE", "2"}, {"RANK", "1"}, {"MASTER_PORT", port}}});
  CHECK_THAT(results[0].error, ContainsSubstring("127.0.0.1:" + port));
  CHECK(results[0].seconds < 10);
}

// Case B03 a.
TEST_CASE("a port that is taken is a catchable error with host and port") {
  const int holder = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  REQUIRE(bind(holder, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
  REQUIRE(listen(holder, 1) == 0);
  socklen_t length = sizeof address;
  getsockname(holder, reinterpret_cast<sockaddr*>(&address), &length);
  const auto port = std::to_string(ntohs(address.sin_port));
  const auto results = spawn_ranks(1, [](int) { ProcessGroup::from_env({.timeout = 5s}); },
                                   {.deadline = 10s, .env = {{"WORLD_SIZE", "2"}, {"MASTER_PORT", port}}});
  close(holder);
  CHECK(results[0].exit_code == 1);
  CHECK(results[0].seconds < 2);
  CHECK_THAT(results[0].error, ContainsSubstring("127.0.0.1:" + port) && ContainsSubstring("MASTER_PORT"));
}

TEST_CASE("a host that does not resolve is an error that names it") {
  const auto results =
      spawn_ranks(1, [](int) { ProcessGroup::from_env({.timeout = 1s}); },
                  {.deadline = 20s, .env = {{"WORLD_SIZE", "2"}, {"MASTER_ADDR", "no-such-host.invalid"}}});
  CHECK_THAT(results[0].error, ContainsSubstring("no-such-host.invalid"));
  CHECK(results[0].seconds < 10);
}

// Case B04 e.
TEST_CASE("ranks that were told different world sizes all hear of it") {
  const auto results = spawn_ranks(2,
                                   [](int rank) {
                                     setenv("WORLD_SIZE", rank == 0 ? "2" : "3", 1);
                                     ProcessGroup::from_env({.timeout = 5s});
                                   },
                                   {.deadline = 15s});
  for (const auto& result : results) {
    CHECK_THAT(result.error, ContainsSubstring("a world of 2") && ContainsSubstring("a world of 3"));
    CHECK(result.seconds < 4);
  }
}

// Trap 22: after a restart under torchrun the agent's store still holds the keys of the dead.
TEST_CASE("keys of an earlier life in the store do no harm") {
  run_ranks(3, [](int rank) {
    // Rank 2 plays torchrun's agent and serves the store through two lives of ranks 0 and 1.
    setenv("WORLD_SIZE", "2", 1);
    setenv("LOCAL_WORLD_SIZE", "2", 1);
    setenv("TORCHELASTIC_USE_AGENT_STORE", "True", 1);
    if (rank == 2) {
      c10d::TCPStoreOptions options;
      options.port = static_cast<uint16_t>(std::stoi(getenv("MASTER_PORT")));
      options.isServer = true;
      options.waitWorkers = false;
      c10d::TCPStore store("127.0.0.1", options);
      store.wait({"test/done/0", "test/done/1"}, 20s);
      return;
    }
    const auto live = [&](int life) {
      const auto group = ProcessGroup::from_env({.timeout = 10s});
      auto t = torch::tensor({life + rank});
      ddp::all_reduce(t, group);
      DDP_CHECK(t.item<int>() == 2 * life + 1);
    };
    live(0);
    // The second life of one rank meets the first life's keys of the other.
    if (rank == 1) std::this_thread::sleep_for(500ms);
    live(1);
    c10d::TCPStoreOptions options;
    options.port = static_cast<uint16_t>(std::stoi(getenv("MASTER_PORT")));
    c10d::TCPStore("127.0.0.1", options).set("test/done/" + std::to_string(rank), std::vector<uint8_t>{1});
  });
}

TEST_CASE("split makes groups by colour, ordered by key") {
  run_ranks(4, [](int rank) {
    const auto world = ProcessGroup::from_env({.timeout = 20s});
    const auto half = world.split(rank % 2, /*key=*/-rank);
    DDP_CHECK(half.size() == 2);
    DDP_CHECK(half.rank() == (rank < 2 ? 1 : 0));
    auto sum = torch::tensor({rank});
    ddp::all_reduce(sum, half);
    DDP_CHECK(sum.item<int>() == (rank % 2 == 0 ? 2 : 4));
    const auto alone = world.split(rank);
    DDP_CHECK(alone.size() == 1 && alone.backend() == "none");
    DDP_CHECK(contains(message_of<ddp::ConfigError>([&] { world.split(-1); }), "color is -1"));
    ddp::barrier(world);
  });
}

TEST_CASE("a duplicate never meets the calls of its original") {
  for (const char* backend : {"shm", "gloo"}) {
    run_ranks(2, [&](int rank) {
      const auto world = ProcessGroup::from_env({.backend = backend, .timeout = 20s});
      const auto other = world.duplicate("other");
      auto a = torch::tensor({1.0f}), b = torch::tensor({10.0f});
      // On Gloo even begun in opposite orders on the two ranks.
      const bool swapped = rank == 1 && world.backend() == "gloo";
      auto first = swapped ? ddp::all_reduce_async(b, other) : ddp::all_reduce_async(a, world);
      auto second = swapped ? ddp::all_reduce_async(a, world) : ddp::all_reduce_async(b, other);
      first.wait(), second.wait();
      DDP_CHECK(a.item<float>() == 2 && b.item<float>() == 20);
    });
  }
}

TEST_CASE("a rank that dies is an error on the others, soon, with its name") {
  for (const char* backend : {"shm", "gloo"}) {
    const auto results = spawn_ranks(3,
                                     [&](int rank) {
                                       const auto group = ProcessGroup::from_env({.backend = backend, .timeout = 8s});
                                       if (rank == 1) raise(SIGKILL);
                                       auto t = torch::ones({1000});
                                       for (int i = 0; i < 100; ++i) ddp::all_reduce(t, group);
                                     },
                                     {.deadline = 25s});
    CHECK(results[1].signal == SIGKILL);
    for (const int rank : {0, 2}) {
      INFO(results[rank].describe());
      CHECK(results[rank].exit_code == 1);
      CHECK_THAT(results[rank].error, ContainsSubstring("rank 1") && ContainsSubstring("[ddp::all_reduce]"));
      CHECK(results[rank].seconds < 12);
    }
  }
}

// Case B14 c.
TEST_CASE("gloo: ranks in different operations learn who was where") {
  const auto results = spawn_ranks(2,
                                   [](int rank) {
                                     const auto group = ProcessGroup::from_env({.backend = "gloo", .timeout = 2s});
                                     auto t = torch::ones({4});
                                     ddp::all_reduce(t, group);
                                     if (rank == 0) {
                                       ddp::all_reduce(t, group);
                                     } else {
                                       ddp::barrier(group);
                                     }
                                   },
                                   {.deadline = 15s});
  CHECK_THAT(results[0].error, ContainsSubstring("rank 1 calls #3 barrier"));
  CHECK_THAT(results[1].error, ContainsSubstring("rank 0 calls #3 all_reduce"));
}

TEST_CASE("a normal end is quiet, whoever is last") {
  const auto results = spawn_ranks(2, [](int rank) {
    const auto group = ProcessGroup::from_env({.timeout = 20s});
    ddp::barrier(group);
    if (rank == 0) std::this_thread::sleep_for(1s);
  });
  for (const auto& result : results) {
    INFO(result.describe());
    CHECK(result.ok());
    CHECK_THAT(result.output, !ContainsSubstring("rror") && !ContainsSubstring("Connection"));
  }
}
