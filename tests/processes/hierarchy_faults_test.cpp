// What ranks of several hosts hear when others die, stop, leave or disagree, on their own host and elsewhere. Hosts are
// names that ranks pretend.
#include <torch/torch.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "ddp/collectives.h"
#include "ddp/error.h"
#include "ddp/process_group.h"
#include "shm/join.h"
#include "support/catch.h"
#include "support/spawn.h"

using namespace ddp::test;
using ddp::ProcessGroup;
using torch::Tensor;

namespace {

// Ranks of host `host_of[rank]`, which fail each in its own way.
std::vector<Result> failing(const std::vector<int>& host_of, const std::function<void(const ProcessGroup&)>& body,
                            std::chrono::milliseconds timeout) {
  return spawn_ranks(static_cast<int>(host_of.size()),
                     [&](int rank) {
                       ddp::detail::shm::pretend_host("host" + std::to_string(host_of[rank]));
                       const auto group = ProcessGroup::from_env({.timeout = timeout});
                       DDP_CHECK(group.backend() == "shm+gloo");
                       body(group);
                     },
                     {.deadline = 40s});
}

bool names(const std::string& text, int rank) { return text.find("rank " + std::to_string(rank)) != std::string::npos; }

}  // namespace

// Row D1: a leader, a rank that leads nothing, the rank that serves the store; seen on its own host and on the other. At
// once as a rule; but now and then Gloo misses that a connection was closed, and then at the timeout.
TEST_CASE("shm+gloo: kill -9 in the middle of all-reduces is seen within the timeout, by name, on every survivor") {
  const std::vector<std::pair<std::vector<int>, int>> cases = {
      {{0, 0, 1, 1}, 3}, {{0, 0, 1, 1}, 0}, {{0, 0, 1}, 2}, {{0, 0, 1}, 1}, {{0, 0, 0, 1}, 0}};
  for (const auto& [host_of, victim] : cases) {
    const TempDir dir;
    const auto results = failing(
        host_of,
        [&, victim = victim](const ProcessGroup& group) {
          std::thread killer;
          if (group.rank() == victim) {
            killer = std::thread([&] {
              std::this_thread::sleep_for(30ms);
              std::ofstream(dir / "time") << std::chrono::steady_clock::now().time_since_epoch().count();
              ::kill(::getpid(), SIGKILL);
            });
          }
          try {
            for (Tensor t = torch::zeros({1000000});;) ddp::all_reduce(t, group);
          } catch (const ddp::CommError& e) {
            int64_t then = 0;
            std::ifstream(dir / "time") >> then;
            const auto late = std::chrono::steady_clock::now().time_since_epoch() - std::chrono::nanoseconds(then);
            if (then == 0 || late > 5s) throw std::runtime_error(std::string("seen too late: ") + e.what());
            throw;
          }
        },
        4s);
    for (int rank = 0; rank < std::ssize(host_of); ++rank) {
      INFO("rank " << victim << " of " << host_of.size() << " dies, rank " << rank << ": " << results[rank].describe());
      if (rank == victim) {
        CHECK(results[rank].signal == SIGKILL);
      } else {
        CHECK(names(results[rank].error, victim));
        CHECK_THAT(results[rank].error, ContainsSubstring("[ddp::all_reduce] rank " + std::to_string(rank) + "/"));
        CHECK_THAT(results[rank].error, !ContainsSubstring("seen too late"));
      }
    }
  }
}

// A rank that waits in memory for a leader learns what the leader met outside.
TEST_CASE("shm+gloo: when a whole host is gone, ranks that have no connection to it hear the cause") {
  const auto results = failing(
      {0, 0, 1, 0},
      [](const ProcessGroup& group) {
        if (group.rank() == 2) ::_exit(7);
        for (Tensor t = torch::zeros({1000});;) ddp::all_reduce(t, group);
      },
      20s);
  for (const int rank : {1, 3}) {
    INFO(results[rank].describe());
    CHECK_THAT(results[rank].error, ContainsSubstring("rank 0 (process ") &&
                                        ContainsSubstring("failed in this group") &&
                                        ContainsSubstring("between hosts, with rank 2"));
    CHECK(results[rank].seconds < 6);
  }
}

// Row D2.
TEST_CASE("shm+gloo: a stopped rank is an error everywhere at the timeout, with its name") {
  const auto results = failing(
      {0, 0, 1, 1},
      [](const ProcessGroup& group) {
        if (group.rank() == 3) {
          if (::fork() == 0) {
            std::this_thread::sleep_for(4s);
            ::kill(::getppid(), SIGCONT);
            ::_exit(0);
          }
          ::kill(::getpid(), SIGSTOP);
          ::_exit(0);
        }
        const auto begin = std::chrono::steady_clock::now();
        try {
          Tensor t = torch::zeros({100000});
          ddp::all_reduce(t, group);
        } catch (const ddp::CommError& e) {
          DDP_CHECK(std::chrono::steady_clock::now() - begin < 3500ms);
          throw;
        }
      },
      2s);
  for (const int rank : {0, 1, 2}) {
    INFO(results[rank].describe());
    CHECK(names(results[rank].error, 3));
  }
}

// Row D3, between hosts and on one.
TEST_CASE("shm+gloo: ranks that disagree hear so at once, with both calls, and no value is used") {
  const auto check = [](const std::function<void(const ProcessGroup&)>& body, const std::string& first,
                        const std::string& second) {
    for (const auto& result : failing({0, 0, 1, 1}, body, 10s)) {
      INFO(result.describe());
      CHECK(result.exit_code == 1);
      CHECK(result.seconds < 6);  // not by the timeout
      CHECK_THAT(result.error,
                 ContainsSubstring("ranks disagree") && ContainsSubstring(first) && ContainsSubstring(second));
    }
  };
  const auto here = [](const ProcessGroup& group) { return group.rank() < 2; };
  check([&](const ProcessGroup& g) { ddp::all_reduce(torch::ones({here(g) ? 100000 : 100001}), g); },
        "calls #2 all_reduce sum of 100000 Float", "calls #2 all_reduce sum of 100001 Float");
  check([&](const ProcessGroup& g) { here(g) ? ddp::all_reduce(torch::ones({4}), g) : ddp::barrier(g); },
        "calls #2 all_reduce sum of 4 Float", "calls #2 barrier");
  check(
      [&](const ProcessGroup& g) {
        ddp::all_reduce(torch::ones({4}, torch::kInt), g, here(g) ? ddp::ReduceOp::kSum : ddp::ReduceOp::kMax);
      },
      "calls #2 all_reduce sum of 4 Int", "calls #2 all_reduce max of 4 Int");
}

TEST_CASE("shm+gloo: ranks of one host that disagree are named by their numbers in the group") {
  const auto results = failing(
      {0, 0, 1, 1}, [](const ProcessGroup& g) { ddp::all_reduce(torch::ones({g.rank() == 3 ? 5 : 4}), g); }, 10s);
  for (const int rank : {2, 3}) {
    INFO(results[rank].describe());
    CHECK_THAT(results[rank].error, ContainsSubstring("rank 2 calls #2 all_reduce sum of 4 Float, rank 3 calls #2 "
                                                      "all_reduce sum of 5 Float"));
  }
  for (const int rank : {0, 1}) {
    INFO(results[rank].describe());
    CHECK(results[rank].exit_code == 1);
    CHECK_THAT(results[rank].error, ContainsSubstring("ranks disagree"));
    CHECK(results[rank].seconds < 6);
  }
}

TEST_CASE("shm+gloo: after an error the group says why it cannot be used any more, and a normal end is quiet") {
  const auto results = failing(
      {0, 0, 1},
      [](const ProcessGroup& group) {
        message_of<ddp::MismatchError>([&] { ddp::all_reduce(torch::ones({group.rank() / 2 + 1}), group); });
        ddp::barrier(group);
      },
      5s);
  for (const auto& result : results) {
    INFO(result.describe());
    CHECK_THAT(result.error, ContainsSubstring("failed before") && ContainsSubstring("ranks disagree"));
  }
  const auto quiet = failing(
      {0, 0, 1},
      [](const ProcessGroup& group) {
        ddp::barrier(group);
        if (group.rank() == 1) std::this_thread::sleep_for(1s);
      },
      5s);
  for (const auto& result : quiet) {
    INFO(result.describe());
    CHECK(result.ok());
    CHECK_THAT(result.output, !ContainsSubstring("rror") && !ContainsSubstring("Connection"));
  }
}
