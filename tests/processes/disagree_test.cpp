// Ranks that make different calls, or average different backwards: an error on all of them that says who did what,
// before a wrong value is used. Reliability D3, D4, D8; cases B10, B11, B14.
#include <torch/torch.h>

#include <functional>
#include <thread>

#include "ddp/collectives.h"
#include "ddp/distributed_data_parallel.h"
#include "ddp/error.h"
#include "ddp/fused_adam.h"
#include "ddp/grad.h"
#include "support/catch.h"
#include "support/models.h"
#include "support/spawn.h"

using namespace ddp::test;
using ddp::DistributedDataParallel;
using ddp::ProcessGroup;
using ddp::ReduceOp;
using torch::Tensor;

namespace {

constexpr const char* kBackends[] = {"shm", "gloo"};

// Long enough that an error which had to wait for it is seen by the clock.
constexpr auto kTimeout = 20s;
constexpr double kSoon = 10;  // seconds, for a busy machine

// `body` must fail on each rank, before the timeout, with all of `parts` in the message.
void all_hear(int ranks, const std::string& backend, const std::function<void(const ProcessGroup&)>& body,
              const std::vector<std::string>& parts) {
  INFO(backend);
  const auto results = spawn_ranks(
      ranks, [&](int) { body(ProcessGroup::from_env({.backend = backend, .timeout = kTimeout})); }, {.deadline = 60s});
  for (const auto& result : results) {
    INFO(result.describe());
    CHECK(result.exit_code == 1);
    for (const auto& part : parts) CHECK_THAT(result.error, ContainsSubstring(part));
    CHECK(result.seconds < kSoon);
  }
}

struct TwoImpl : torch::nn::Module {
  TwoImpl() {
    a = register_module("a", one_weight(1));
    b = register_module("b", one_weight(1));
  }
  Tensor forward(const Tensor& x, bool use_b) { return use_b ? a(x) + b(x) : a(x); }
  torch::nn::Linear a{nullptr}, b{nullptr};
};
TORCH_MODULE(Two);

// A wrong value must not be seen: who gets past the call fails the test.
[[noreturn]] void not_reached(const Tensor& t) {
  throw std::runtime_error("no error, value " + std::to_string(t.flatten()[0].item<double>()));
}

}  // namespace

TEST_CASE("collectives of different sizes, dtypes, operations, roots and order: all ranks hear both calls") {
  for (const char* backend : kBackends) {
    all_hear(2, backend,
             [](const ProcessGroup& group) {
               Tensor t = torch::ones({group.is_root() ? 1000 : 2000});
               ddp::all_reduce(t, group);
               not_reached(t);
             },
             {"ranks disagree", "rank 0 calls #", "all_reduce sum of 1000 Float", "rank 1 calls #", "of 2000 Float"});
    all_hear(3, backend,
             [](const ProcessGroup& group) {
               Tensor t = torch::ones({8}, group.rank() == 2 ? torch::kInt32 : torch::kFloat);
               ddp::all_reduce(t, group);
               not_reached(t);
             },
             {"ranks disagree", "8 Float", "rank 2 calls #", "8 Int"});
    all_hear(2, backend,
             [](const ProcessGroup& group) {
               Tensor t = torch::ones({8});
               ddp::all_reduce(t, group, group.is_root() ? ReduceOp::kSum : ReduceOp::kMax);
               not_reached(t);
             },
             {"ranks disagree", "all_reduce sum", "all_reduce max"});
    all_hear(3, backend,
             [](const ProcessGroup& group) {
               Tensor t = torch::ones({8});
               ddp::broadcast(t, group, group.rank() == 1 ? 1 : 0);
               ddp::barrier(group);
               not_reached(t);
             },
             {"ranks disagree", "root 0", "rank 1 calls #", "root 1"});
    all_hear(2, backend,
             [](const ProcessGroup& group) {
               Tensor t = torch::ones({8});
               if (group.is_root()) ddp::barrier(group);
               ddp::all_reduce(t, group);
               if (!group.is_root()) ddp::barrier(group);
               not_reached(t);
             },
             {"ranks disagree", "rank 0 calls #", "barrier", "rank 1 calls #", "all_reduce sum of 8 Float"});
    all_hear(2, backend,
             [](const ProcessGroup& group) {
               const auto parts = ddp::all_gather(torch::ones({group.is_root() ? 8 : 4}), group);
               not_reached(parts[0]);
             },
             {"ranks disagree", "all_gather of 8 Float", "all_gather of 4 Float"});
    all_hear(
        2, backend,
        [](const ProcessGroup& group) { not_reached(ddp::all_to_all(torch::ones({group.is_root() ? 8 : 4}), group)); },
        {"[ddp::all_to_all]", "rank 0", "rank 1"});
  }
}

// On the wire both are 8 bytes, or a sum.
TEST_CASE("over Gloo what was asked for is compared, not what travels") {
  all_hear(2, "gloo",
           [](const ProcessGroup& group) {
             Tensor t = group.is_root() ? torch::ones({2}) : torch::ones({1}, torch::kInt64);
             ddp::broadcast(t.flatten(), group);
             ddp::barrier(group);
             not_reached(t);
           },
           {"ranks disagree", "broadcast of 2 Float root 0", "broadcast of 1 Long root 0"});
  all_hear(2, "gloo",
           [](const ProcessGroup& group) {
             Tensor t = torch::ones({8});
             ddp::all_reduce(t, group, group.is_root() ? ReduceOp::kSum : ReduceOp::kAvg);
             not_reached(t);
           },
           {"ranks disagree", "all_reduce sum of 8", "all_reduce avg of 8"});
  all_hear(2, "gloo",
           [](const ProcessGroup& group) {
             Tensor t = torch::ones({8});
             if (group.is_root()) {
               ddp::all_reduce(t, group);
             } else {
               t = ddp::reduce_scatter(t, group);
             }
             not_reached(t);
           },
           {"ranks disagree", "all_reduce sum of 8", "reduce_scatter sum of 8"});
}

TEST_CASE("several calls on their way over Gloo, the last one different: the others still have their values") {
  all_hear(2, "gloo",
           [](const ProcessGroup& group) {
             Tensor a = torch::full({1000}, 1.0), b = torch::ones({group.is_root() ? 10 : 11});
             auto first = ddp::all_reduce_async(a, group);
             auto second = ddp::all_reduce_async(b, group);
             first.wait();
             DDP_CHECK(torch::equal(a, torch::full({1000}, 2.0)));
             second.wait();
             not_reached(b);
           },
           {"ranks disagree", "sum of 10 Float", "sum of 11 Float"});
}

TEST_CASE("a rank that is slow is waited for, and nothing is wrong") {
  run_ranks(3, [](int rank) {
    const auto group = ProcessGroup::from_env({.backend = "gloo", .timeout = kTimeout});
    if (rank == 1) std::this_thread::sleep_for(1200ms);
    Tensor t = torch::ones({4});
    ddp::all_reduce(t, group);
    DDP_CHECK(t[0].item<float>() == 3);
    const auto all = ddp::all_gather(torch::tensor({rank}), group);
    DDP_CHECK(all[2].item<int64_t>() == 2);
  });
}

// Case B10 i, reliability D3. PyTorch: silent on the first step.
TEST_CASE("a parameter without a gradient is an error in the same backward, on all ranks, with its name and the rank") {
  for (const char* backend : kBackends) {
    all_hear(2, backend,
             [](const ProcessGroup& group) {
               DistributedDataParallel model(Two(), group);
               model(input(group.rank() + 1), false).sum().backward();
               not_reached(model->a->weight.grad());
             },
             {"no gradient reached: b.weight", "find_unused_parameters"});
    for (const bool from_the_start : {true, false}) {
      all_hear(2, backend,
               [&](const ProcessGroup& group) {
                 DistributedDataParallel model(Two(), group);
                 if (!from_the_start) {
                   for (int step = 0; step < 2; ++step) {
                     model(input(group.rank() + 1), true).sum().backward();
                     DDP_CHECK(model->b->weight.grad().item<float>() == 1.5f);
                     model.zero_grad();
                   }
                 }
                 model(input(group.rank() + 1), group.is_root()).sum().backward();
                 not_reached(model->a->weight.grad());
               },
               {"no gradient reached: b.weight (rank 1)"});
    }
  }
}

// Cases B11 b, B14 b and reliability D3: each time one rank is a backward ahead of the other, and the sizes are alike.
TEST_CASE("gradients of different steps never meet") {
  for (const char* backend : kBackends) {
    SECTION(std::string("backward on one rank only, ") + backend) {
      all_hear(2, backend,
               [](const ProcessGroup& group) {
                 DistributedDataParallel model(one_weight(0), group);
                 for (int step = 0; step < 2; ++step) {
                   const Tensor loss = model(input(group.rank() + 1)).sum();
                   if (step == 0 && !group.is_root()) continue;  // a loss that is NaN here, say
                   loss.backward();
                   not_reached(model->weight.grad());
                 }
               },
               {"ranks disagree", "1 synchronised forward", "2 synchronised forward"});
    }
    SECTION(std::string("no_sync on one rank only, ") + backend) {
      for (const bool own_zero_grad : {true, false}) {
        all_hear(2, backend,
                 [&](const ProcessGroup& group) {
                   DistributedDataParallel model(one_weight(0), group);
                   ddp::AdamW optim(model->parameters(), {.lr = 0.1});
                   for (int step = 0; step < 2; ++step) {
                     auto guard = model.no_sync(step == 0 && !group.is_root());
                     model(input(group.rank() + 1)).sum().backward();
                     if (step == 1 || group.is_root()) not_reached(model->weight.grad());
                     optim.step();
                     own_zero_grad ? model.zero_grad() : optim.zero_grad();
                   }
                 },
                 {"ranks disagree", "dropping gradients that were not averaged"});
      }
    }
    SECTION(std::string("an extra bucket, ") + backend) {
      all_hear(2, backend,
               [](const ProcessGroup& group) {
                 torch::nn::Sequential net(torch::nn::Linear(300, 300), torch::nn::Linear(300, 300));
                 DistributedDataParallel model(net, group,
                                               {.bucket_cap_mb = group.is_root() ? 25 : 0.1, .first_bucket_mb = 0.1});
               },
               {"rank 0 has options", "25 MiB", "rank 1 has options", "0.1 MiB"});
    }
    SECTION(std::string("the reducer over hooks, ") + backend) {
      all_hear(2, backend,
               [](const ProcessGroup& group) {
                 DistributedDataParallel model(one_weight(0), group, {.compression = ddp::Compression::kBFloat16});
                 for (int step = 0; step < 2; ++step) {
                   const Tensor loss = model(input(group.rank() + 1)).sum();
                   if (step == 0 && !group.is_root()) continue;
                   loss.backward();
                   not_reached(model->weight.grad());
                 }
               },
               {"ranks disagree", "1 synchronised forward", "2 synchronised forward"});
    }
  }
}

// Case B11 e.
TEST_CASE("two backwards of one forward are an error, with both backends") {
  for (const char* backend : kBackends) {
    run_ranks(2, [&](int rank) {
      const auto group = ProcessGroup::from_env({.backend = backend, .timeout = kTimeout});
      DistributedDataParallel model(one_weight(1), group);
      const Tensor loss = model(input(rank + 1)).sum();
      loss.backward({}, /*retain_graph=*/true);
      const auto text = message_of<ddp::Error>([&] { loss.backward(); });
      DDP_CHECK(text.find("second backward") != std::string::npos);
    });
  }
}

// What must stay allowed: ranks with different numbers of passes under no_sync, and forwards that are not trained.
TEST_CASE("windows of different lengths and evaluation on one rank are no disagreement") {
  for (const char* backend : kBackends) {
    run_ranks(2, [&](int rank) {
      const auto group = ProcessGroup::from_env({.backend = backend, .timeout = kTimeout});
      DistributedDataParallel model(one_weight(1), group);
      for (int step = 0; step < 3; ++step) {
        for (int micro = 0; micro <= rank; ++micro) {
          auto guard = model.no_sync(micro < rank);
          model(input(1)).sum().backward();
        }
        DDP_CHECK(model->weight.grad().item<float>() == 1.5f);
        model.zero_grad();
        if (rank == 0) {
          torch::NoGradGuard no_grad;
          model(input(1));
        }
      }
    });
  }
}

// Case B14 a and c.
TEST_CASE("an extra backward on one rank ends in an error that says which rank was in which call") {
  for (const auto& [backend, with_barrier] : {std::pair("shm", true), {"gloo", false}}) {
    INFO(backend << " " << with_barrier);
    const auto results = spawn_ranks(2,
                                     [&, backend = backend, with_barrier = with_barrier](int rank) {
                                       const auto group = ProcessGroup::from_env({.backend = backend, .timeout = 2s});
                                       DistributedDataParallel model(one_weight(0), group);
                                       for (int step = 0; step < (rank == 0 ? 3 : 2); ++step) {
                                         model(input(rank + 1)).sum().backward();
                                         DDP_CHECK(model->weight.grad().item<float>() == 1.5f);
                                         model.zero_grad();
                                       }
                                       Tensor metric = torch::tensor({100.0f + static_cast<float>(rank)});
                                       with_barrier ? ddp::barrier(group) : ddp::all_reduce(metric, group);
                                       not_reached(metric);
                                     },
                                     {.deadline = 30s});
    for (const auto& result : results) CHECK(result.exit_code == 1);
    CHECK_THAT(results[0].error, ContainsSubstring("world.0.ddp") && ContainsSubstring("rank 0/2"));
    CHECK_THAT(results[1].error, ContainsSubstring(with_barrier ? "[ddp::barrier]" : "[ddp::all_reduce]"));
    CHECK_THAT(results[1].error, ContainsSubstring("group \"world\"") && ContainsSubstring("rank 1/2"));
  }
}

// Reliability D8.
TEST_CASE("an exception in one rank's forward, or its early return, does not let the others hang") {
  for (const char* backend : kBackends) {
    for (const bool throws : {true, false}) {
      INFO(backend << " " << throws);
      const auto results = spawn_ranks(3,
                                       [&](int rank) {
                                         const auto group =
                                             ProcessGroup::from_env({.backend = backend, .timeout = kTimeout});
                                         DistributedDataParallel model(one_weight(0), group);
                                         for (int step = 0; step < 3; ++step) {
                                           if (rank == 1 && step == 1) {
                                             if (throws) throw std::runtime_error("boom");
                                             return;
                                           }
                                           model(input(rank + 1)).sum().backward();
                                           model.zero_grad();
                                         }
                                       },
                                       {.deadline = 40s});
      CHECK(results[1].exit_code == (throws ? 1 : 0));
      for (const int other : {0, 2}) {
        INFO(results[other].describe());
        CHECK(results[other].exit_code == 1);
        CHECK(results[other].seconds < kSoon);
        CHECK_THAT(results[other].error, ContainsSubstring("[ddp::"));
      }
    }
  }
}

// Reliability D4: what ddp_test.cpp does not have.
TEST_CASE("models that differ in order, in what is trained or in buffers: the first difference on all ranks") {
  struct OrderedImpl : torch::nn::Module {
    explicit OrderedImpl(bool swapped) {
      for (const char* name : {swapped ? "b" : "a", swapped ? "a" : "b"}) register_module(name, one_weight(1));
    }
    Tensor forward(const Tensor& x) { return x; }
  };
  const auto buffered = [](int64_t size) {
    torch::nn::Sequential net(torch::nn::Linear(4, 4));
    net->register_buffer("statistic", torch::zeros({size}));
    return net;
  };
  for (const char* backend : kBackends) {
    all_hear(2, backend,
             [](const ProcessGroup& group) {
               DistributedDataParallel model(std::make_shared<OrderedImpl>(!group.is_root()), group);
             },
             {"different models", "rank 0 has parameter a.weight", "rank 1 has parameter b.weight"});
    all_hear(2, backend,
             [](const ProcessGroup& group) {
               torch::nn::Sequential net(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4));
               if (group.is_root()) net[0]->parameters()[0].set_requires_grad(false);
               DistributedDataParallel model(net, group);
             },
             {"different models", "rank 0 has parameter 0.bias", "rank 1 has parameter 0.weight"});
    all_hear(
        2, backend,
        [&](const ProcessGroup& group) { DistributedDataParallel model(buffered(group.is_root() ? 3 : 4), group); },
        {"different models", "buffer statistic Float[3]", "buffer statistic Float[4]"});
  }
}
