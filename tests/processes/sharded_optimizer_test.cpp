// Optimizers whose update the ranks of one host share (shard_over): the bits of the whole update, meetings,
// checkpoints.
#include <sys/mman.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <functional>
#include <memory>
#include <thread>

#include "ddp/checkpointer.h"
#include "ddp/collectives.h"
#include "ddp/distributed_data_parallel.h"
#include "ddp/error.h"
#include "ddp/fused_adam.h"
#include "ddp/fused_sgd.h"
#include "ddp/grad.h"
#include "ddp/log.h"
#include "ddp/lr_schedule.h"
#include "ddp/stateful.h"
#include "shared_memory_tensors.h"
#include "support/catch.h"
#include "support/spawn.h"

using namespace ddp::test;
using ddp::ProcessGroup;
using torch::Tensor;
using Optimizer = std::unique_ptr<torch::optim::Optimizer>;

namespace {

ProcessGroup quiet_group(const char* backend = "shm") {
  ddp::log::set_sink([](ddp::log::Level, std::string_view) {});
  return ProcessGroup::from_env({.backend = backend, .timeout = 20s});
}

Tensor draw(at::IntArrayRef shape, int64_t seed, at::ScalarType dtype = torch::kFloat) {
  return torch::randn(shape, at::make_generator<at::CPUGeneratorImpl>(seed), torch::kDouble).to(dtype);
}

// Smaller than the ranks are many, of odd sizes, around the borders of parts, and in another layout.
std::vector<Tensor> parameters(at::ScalarType dtype = torch::kFloat, int64_t seed = 0) {
  const std::vector<std::vector<int64_t>> shapes{{}, {1}, {3, 5}, {64}, {67}, {130, 33}, {2, 3, 4, 5}, {257}};
  std::vector<Tensor> made;
  for (const auto& shape : shapes) {
    Tensor parameter = draw(shape, 10 + seed + std::ssize(made), dtype);
    if (parameter.dim() == 4) parameter = parameter.contiguous(torch::MemoryFormat::ChannelsLast);
    made.push_back(parameter.requires_grad_(true));
  }
  return made;
}

// The same on all ranks, as after averaging; now and then a parameter has none.
void set_gradients(const std::vector<Tensor>& parameters, int step) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Tensor& parameter = parameters[i];
    parameter.mutable_grad().reset();
    if ((step + static_cast<int>(i)) % 4 == 3) continue;
    parameter.mutable_grad() =
        torch::empty_like(parameter, torch::MemoryFormat::Preserve)
            .detach()
            .copy_(draw(parameter.sizes(), 1000 + 50 * step + static_cast<int64_t>(i), parameter.scalar_type()));
  }
}

using Make = std::function<Optimizer(const std::vector<Tensor>&, std::optional<ProcessGroup>)>;

const std::vector<std::pair<std::string, Make>>& kinds() {
  static const std::vector<std::pair<std::string, Make>> made{
      {"Adam",
       [](const auto& p, auto over) {
         return std::make_unique<ddp::Adam>(
             p, ddp::AdamOptions{.lr = 0.05, .weight_decay = 0.1, .amsgrad = true, .shard_over = over});
       }},
      {"AdamW",
       [](const auto& p, auto over) {
         return std::make_unique<ddp::AdamW>(p, ddp::AdamWOptions{.lr = 0.05, .maximize = true, .shard_over = over});
       }},
      {"SGD",
       [](const auto& p, auto over) {
         return std::make_unique<ddp::SGD>(
             p, ddp::SGDOptions{.lr = 0.05, .momentum = 0.9, .nesterov = true, .shard_over = over});
       }},
      {"AdamW with masters",
       [](const auto& p, auto over) {
         return std::make_unique<ddp::AdamW>(p,
                                             ddp::AdamWOptions{.lr = 0.05, .master_weights = true, .shard_over = over});
       }},
      {"SGD with masters",
       [](const auto& p, auto over) {
         return std::make_unique<ddp::SGD>(
             p, ddp::SGDOptions{.lr = 0.05, .momentum = 0.9, .master_weights = true, .shard_over = over});
       }},
      {"SGD without momentum",
       [](const auto& p, auto over) {
         return std::make_unique<ddp::SGD>(p, ddp::SGDOptions{.lr = 0.05, .weight_decay = 0.1, .shard_over = over});
       }},
  };
  return made;
}

bool is_sharded(const Optimizer& optimizer) {
  return dynamic_cast<const ddp::FusedOptimizer&>(*optimizer).is_sharded();
}

void check_equal(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  DDP_CHECK(a.size() == b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    DDP_CHECK(torch::equal(a[i], b[i]));
    DDP_CHECK(a[i].strides() == b[i].strides());
  }
}

void check_all_shared(const torch::optim::Optimizer& optimizer, const std::vector<Tensor>& parameters) {
  for (const Tensor& parameter : parameters) DDP_CHECK(ddp::detail::is_shared_tensor(parameter));
  const ddp::State state = ddp::state_dict(optimizer);
  for (const auto& entry : state.at("state").as_dict()) {
    for (const auto& [key, value] : entry.second.as_dict()) {
      if (!(key == ddp::State("step"))) DDP_CHECK(ddp::detail::is_shared_tensor(value.as_tensor()));
    }
  }
}

}  // namespace

TEST_CASE("sharded: parameters and state have the bits of the whole update, for every optimizer and dtype") {
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [](int rank) {
      const auto group = quiet_group();
      for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kBFloat16, torch::kHalf}) {
        for (const auto& [name, make] : kinds()) {
          const auto p = parameters(dtype), q = parameters(dtype, /*seed=*/100 * rank);  // q becomes rank 0's
          Optimizer whole = make(p, std::nullopt), sharded = make(q, group);
          DDP_CHECK(!is_sharded(whole) && is_sharded(sharded));
          check_equal(p, q);
          for (int step = 0; step < 6; ++step) {
            if (step == 3) {
              for (auto* one : {&whole, &sharded}) (*one)->param_groups()[0].options().set_lr(0.01);
            }
            set_gradients(p, step), set_gradients(q, step);
            whole->step(), sharded->step();
            check_equal(p, q);
            DDP_CHECK(ddp::state_dict(*whole) == ddp::state_dict(*sharded));
          }
          check_all_shared(*sharded, q);
          ddp::barrier(group);  // nobody destroys the optimizer while another still steps
        }
      }
    });
  }
}

TEST_CASE("sharded: it is one memory, which a forked child does not have") {
  run_ranks(2, [](int rank) {
    const auto group = quiet_group();
    auto p = parameters();
    ddp::AdamW optim(p, {.shard_over = group});
    torch::NoGradGuard no_grad;
    if (rank == 1) p[5].fill_(7);
    ddp::barrier(group);
    DDP_CHECK((p[5] == 7).all().item<bool>());
    const pid_t child = ::fork();
    if (child == 0) {
      const auto page = reinterpret_cast<uintptr_t>(p[5].data_ptr()) / 4096 * 4096;
      ::_exit(::msync(reinterpret_cast<void*>(page), 4096, MS_ASYNC) != 0 && errno == ENOMEM ? 0 : 1);
    }
    int status = -1;
    ::waitpid(child, &status, 0);
    DDP_CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    ddp::barrier(group);
  });
}

TEST_CASE("sharded: groups keep their own options, a schedule their learning rates, a late group is updated by each") {
  run_ranks(3, [](int) {
    const auto group = quiet_group();
    const auto p = parameters(), q = parameters();
    const auto make = [&](const std::vector<Tensor>& of, std::optional<ProcessGroup> over) {
      std::vector<torch::optim::OptimizerParamGroup> groups;
      groups.emplace_back(std::vector<Tensor>(of.begin(), of.begin() + 3),
                          std::make_unique<torch::optim::AdamWOptions>(0.5));
      groups.emplace_back(std::vector<Tensor>(of.begin() + 3, of.end()));
      return std::make_unique<ddp::AdamW>(groups, ddp::AdamWOptions{.lr = 0.01, .shard_over = over});
    };
    const auto whole = make(p, std::nullopt), sharded = make(q, group);
    const auto late_p = parameters(torch::kFloat, 70), late_q = parameters(torch::kFloat, 70);
    whole->add_param_group(torch::optim::OptimizerParamGroup(late_p));
    sharded->add_param_group(torch::optim::OptimizerParamGroup(late_q));
    ddp::lr::Schedule of_whole(*whole, ddp::lr::warmup(3) * ddp::lr::cosine(6)),
        of_sharded(*sharded, ddp::lr::warmup(3) * ddp::lr::cosine(6));
    sharded->set_maximize(1, true), whole->set_maximize(1, true);
    for (int step = 0; step < 5; ++step) {
      set_gradients(p, step), set_gradients(q, step), set_gradients(late_p, step), set_gradients(late_q, step);
      whole->step(), sharded->step();
      of_whole.step(), of_sharded.step();
      check_equal(p, q), check_equal(late_p, late_q);
    }
    DDP_CHECK(!ddp::detail::is_shared_tensor(late_q[0]));
    ddp::barrier(group);
  });
}

TEST_CASE("sharded: training with the wrapper has the losses of the whole update, whichever is made first") {
  for (const bool wrapper_first : {true, false}) {
    run_ranks(3, [&](int rank) {
      const auto group = quiet_group();
      const auto train = [&](bool shard) {
        torch::manual_seed(1 + rank);  // rank 0's weights win
        torch::nn::Sequential net(torch::nn::Linear(9, 31), torch::nn::Tanh(), torch::nn::Linear(31, 4));
        std::optional<ddp::DistributedDataParallel<torch::nn::Sequential>> model;
        if (wrapper_first || !shard) model.emplace(net, group);
        ddp::AdamOptions options{.lr = 0.02};
        if (shard) options.shard_over = group;
        ddp::Adam optim(net->parameters(), options);
        if (!model) model.emplace(net, group);
        std::vector<double> losses;
        for (int step = 0; step < 8; ++step) {
          auto loss = torch::mse_loss((*model)(draw({5, 9}, 100 * step + rank)), draw({5, 4}, 7 * step + rank));
          model->zero_grad();
          loss.backward();
          ddp::clip_grad_norm(*model, 0.5);
          optim.step();
          losses.push_back(loss.item<double>());
        }
        DDP_CHECK(ddp::replicas_equal(*model));
        DDP_CHECK(optim.is_sharded() == shard);
        ddp::barrier(group);
        return losses;
      };
      const auto whole = train(false);
      DDP_CHECK(train(true) == whole);
      DDP_CHECK(whole.back() != whole.front());
    });
  }
}

TEST_CASE("sharded: a slow rank still reads the old parameters, and no rank reads half new ones") {
  run_ranks(2, [](int rank) {
    const auto group = quiet_group();
    Tensor weight = torch::ones({1 << 20}).requires_grad_(true);
    ddp::SGD optim(std::vector<Tensor>{weight}, {.lr = 1.0, .shard_over = group});
    for (int step = 0; step < 30; ++step) {
      weight.mutable_grad() = torch::full({1 << 20}, -1.0);
      if (step % 10 == 0 && rank == 1) {
        std::this_thread::sleep_for(20ms);  // rank 0 waits in its step
        DDP_CHECK((weight == step + 1).all().item<bool>());
      }
      optim.step();
      // The last element first: it is what the last rank writes last.
      DDP_CHECK(weight[(1 << 20) - 1].item<float>() == static_cast<float>(step + 2));
      DDP_CHECK(weight[(1 << 19) - 1].item<float>() == static_cast<float>(step + 2));
      DDP_CHECK((weight == step + 2).all().item<bool>());
    }
    ddp::barrier(group);
  });
}

TEST_CASE("sharded: autograd hears of the update on every rank, also where another rank made it") {
  run_ranks(3, [](int) {
    const auto group = quiet_group();
    Tensor weight = torch::ones({2}).requires_grad_(true);  // one rank's alone
    ddp::Adam optim(std::vector<Tensor>{weight}, {.shard_over = group});
    const Tensor stale = weight.square().sum();
    weight.mutable_grad() = torch::ones({2});
    optim.step();
    DDP_CHECK(message_of<c10::Error>([&] { stale.backward(); }).find("inplace operation") != std::string::npos);
    ddp::barrier(group);
  });
}

TEST_CASE("sharded: checkpoints go both ways between shared and whole, and state comes back into shared memory") {
  const TempDir dir;
  run_ranks(2, [&](int) {
    const auto group = quiet_group();
    struct Net : torch::nn::Module {
      Net() : all(::parameters(torch::kBFloat16)) {
        for (size_t i = 0; i < all.size(); ++i) register_parameter("p" + std::to_string(i), all[i]);
      }
      std::vector<Tensor> all;
    };
    // Steps [first, last), resumed from `from` and saved to `to`, "" for neither.
    const auto run = [&](const Make& make, bool shard, int first, int last, const std::string& from,
                         const std::string& to) {
      auto net = std::make_shared<Net>();
      const Optimizer optim = make(net->all, shard ? std::optional(group) : std::nullopt);
      if (!from.empty()) {
        ddp::Checkpointer checkpoints(dir / from, group, {.every = 0});
        checkpoints.track("model", net).track("optimizer", *optim);
        DDP_CHECK(checkpoints.resume());
      }
      for (int step = first; step < last; ++step) set_gradients(net->all, step), optim->step();
      if (!to.empty()) {
        ddp::Checkpointer checkpoints(dir / to, group, {.every = 0});
        checkpoints.track("model", net).track("optimizer", *optim);
        checkpoints.save();
      }
      if (shard && last > first + 3) check_all_shared(*optim, net->all);
      std::vector<Tensor> result;
      for (const Tensor& parameter : net->all) result.push_back(parameter.detach().clone());
      const ddp::State state = ddp::state_dict(*optim);
      for (const auto& entry : state.at("state").as_dict()) {
        for (const auto& [key, value] : entry.second.as_dict()) result.push_back(value.as_tensor().clone());
      }
      ddp::barrier(group);
      return result;
    };
    for (const auto& [name, make] : kinds()) {
      const auto unbroken = run(make, false, 0, 7, "", "");
      run(make, true, 0, 3, "", name + " shared");
      run(make, false, 0, 3, "", name + " whole");
      check_equal(run(make, true, 3, 7, name + " shared", ""), unbroken);
      check_equal(run(make, true, 3, 7, name + " whole", ""), unbroken);
      check_equal(run(make, false, 3, 7, name + " shared", ""), unbroken);
      // Loaded and saved again without a step in between.
      run(make, true, 3, 3, name + " shared", name + " again");
      check_equal(run(make, false, 3, 7, name + " again", ""), unbroken);
    }
  });
}

TEST_CASE("sharded: a write by one rank reaches the masters of all") {
  run_ranks(2, [](int rank) {
    const auto group = quiet_group();
    const auto p = parameters(torch::kBFloat16), q = parameters(torch::kBFloat16);
    ddp::AdamW whole(p, {.lr = 0.01, .master_weights = true}),
        sharded(q, {.lr = 0.01, .master_weights = true, .shard_over = group});
    for (int step = 0; step < 6; ++step) {
      if (step == 3) {
        torch::NoGradGuard no_grad;
        p[5].narrow(0, 0, 70).mul_(0.5);
        ddp::barrier(group);
        if (rank == 1) q[5].narrow(0, 0, 70).mul_(0.5);  // in rank 0's part
        ddp::barrier(group);
      }
      set_gradients(p, step), set_gradients(q, step);
      whole.step(), sharded.step();
      check_equal(p, q);
      DDP_CHECK(ddp::state_dict(whole) == ddp::state_dict(sharded));
    }
    ddp::barrier(group);
  });
}

TEST_CASE("sharded: loading into an optimizer that has stepped leaves nothing of its own state") {
  run_ranks(2, [](int) {
    const auto group = quiet_group();
    for (const auto& [name, make] : kinds()) {
      const auto p = parameters(), q = parameters();
      Optimizer whole = make(p, std::nullopt), sharded = make(q, group);
      const auto both = [&](auto&& call) { call(whole, p), call(sharded, q); };
      ddp::State early;  // of a copy: state_dict's tensors are live; two parameters of it have no state at all
      both([&](Optimizer& optim, const std::vector<Tensor>& of) {
        set_gradients(of, 3);
        optim->step();
      });
      Optimizer other = make(parameters(), std::nullopt);
      ddp::load_state_dict(*other, ddp::state_dict(*whole));
      early = ddp::state_dict(*other);
      for (int step = 4; step < 8; ++step) {
        both([&](Optimizer& optim, const std::vector<Tensor>& of) { set_gradients(of, step), optim->step(); });
      }
      both([&](Optimizer& optim, const std::vector<Tensor>&) { ddp::load_state_dict(*optim, early); });
      for (int step = 8; step < 12; ++step) {
        both([&](Optimizer& optim, const std::vector<Tensor>& of) { set_gradients(of, step), optim->step(); });
        check_equal(p, q);
        DDP_CHECK(ddp::state_dict(*whole) == ddp::state_dict(*sharded));
      }
      check_all_shared(*sharded, q);
      ddp::barrier(group);
    }
  });
}

TEST_CASE("sharded: ranks that would update differently hear so, and nothing is changed") {
  run_ranks(2, [](int rank) {
    const auto group = quiet_group();
    auto p = parameters();
    const auto before = [&] {
      std::vector<Tensor> copies;
      for (const Tensor& one : p) copies.push_back(one.detach().clone());
      return copies;
    }();
    ddp::AdamW optim(p, {.lr = 0.1, .shard_over = group});
    const auto refused = [&] {
      const std::string message = message_of<ddp::MismatchError>([&] { optim.step(); });
      DDP_CHECK(message.find("[ddp::AdamW] rank " + std::to_string(rank) + "/2") != std::string::npos);
      DDP_CHECK(message.find("is not that of rank 1") != std::string::npos);
      for (size_t i = 0; i < p.size(); ++i) DDP_CHECK(torch::equal(p[i], before[i]));
      ddp::barrier(group);
    };
    set_gradients(p, 0);
    if (rank == 1) p[2].mutable_grad().reset();
    refused();
    set_gradients(p, 0);
    if (rank == 1) optim.param_groups()[0].options().set_lr(0.2);
    refused();
    optim.param_groups()[0].options().set_lr(0.1);
    if (rank == 1) optim.set_maximize(0, true);
    refused();
    optim.set_maximize(0, false);
    optim.step();  // all agree again
    DDP_CHECK(!torch::equal(p[5], before[5]));
    ddp::barrier(group);

    std::vector<Tensor> other{torch::zeros({3, rank == 1 ? 4 : 3}).requires_grad_(true)};
    const std::string message = message_of<ddp::MismatchError>([&] { ddp::SGD(other, {.shard_over = group}); });
    DDP_CHECK(message.find("parameter 0 is Float[3, 3] of strides [3, 1] on rank 0 and Float[3, 4]") !=
              std::string::npos);
  });
}

TEST_CASE("sharded: parameters that moved, or belong to two optimizers, are refused") {
  run_ranks(2, [](int) {
    const auto group = quiet_group();
    auto p = parameters();
    auto first = std::make_unique<ddp::Adam>(p, ddp::AdamOptions{.shard_over = group});
    ddp::SGD second(p, {.lr = 0.1});
    set_gradients(p, 0);
    DDP_CHECK(message_of<ddp::ConfigError>([&] { second.step(); }).find("shard_over of another optimizer") !=
              std::string::npos);
    DDP_CHECK(message_of<ddp::ConfigError>([&] {
                ddp::SGD(p, {.shard_over = group});
              }).find("shard_over of another optimizer") != std::string::npos);
    first->step();
    ddp::barrier(group);
    first.reset();
    ddp::barrier(group);
    ddp::SGD third(p, {.lr = 0.1, .shard_over = group});  // the first is gone
    DDP_CHECK(third.is_sharded());
    third.step();
    p[4].set_data(p[4].data().clone());
    DDP_CHECK(message_of<ddp::ConfigError>([&] { third.step(); }).find("was moved or converted") != std::string::npos);
    ddp::barrier(group);
  });
}

TEST_CASE("sharded: what shares storage stays on each rank and is updated there") {
  run_ranks(2, [](int) {
    const auto group = quiet_group();
    const auto make = [] {
      const Tensor base = draw({40}, 3);
      return std::vector<Tensor>{base.narrow(0, 0, 20).detach().requires_grad_(true),
                                 base.narrow(0, 20, 20).detach().requires_grad_(true),
                                 draw({5}, 4).requires_grad_(true)};
    };
    const auto p = make(), q = make();
    ddp::Adam whole(p, {.lr = 0.1}), sharded(q, {.lr = 0.1, .shard_over = group});
    DDP_CHECK(sharded.is_sharded());
    for (int step = 0; step < 3; ++step) {
      set_gradients(p, step), set_gradients(q, step);
      whole.step(), sharded.step();
      check_equal(p, q);
    }
    DDP_CHECK(!ddp::detail::is_shared_tensor(q[0]) && ddp::detail::is_shared_tensor(q[2]));
    DDP_CHECK(q[0].storage().data() == q[1].storage().data());
    ddp::barrier(group);
  });
}

TEST_CASE("shard_over changes nothing over sockets and in a world of one, and says so once") {
  for (const int ranks : {1, 2}) {
    run_ranks(ranks, [ranks](int rank) {
      std::string lines;
      const auto group = ranks == 1 ? ProcessGroup() : quiet_group("gloo");
      ddp::log::set_sink([&](ddp::log::Level, std::string_view line) { lines += std::string(line) + "\n"; });
      const auto p = parameters(), q = parameters();
      ddp::AdamW whole(p, {.lr = 0.1}), asked(q, {.lr = 0.1, .shard_over = group});
      DDP_CHECK(!asked.is_sharded());
      for (int step = 0; step < 3; ++step) {
        set_gradients(p, step), set_gradients(q, step);
        whole.step(), asked.step();
        check_equal(p, q);
      }
      const bool told = lines.find("shard_over: backend gloo shares no memory") != std::string::npos;
      DDP_CHECK(told == (ranks == 2 && rank == 0));
      DDP_CHECK(std::count(lines.begin(), lines.end(), '\n') == (told ? 1 : 0));
      if (ranks == 2) ddp::barrier(group);
    });
  }
}

TEST_CASE("sharded: the others hear of a rank that dies before its update") {
  const auto results = spawn_ranks(3,
                                   [](int rank) {
                                     const auto group = quiet_group();
                                     auto p = parameters();
                                     ddp::AdamW optim(p, {.shard_over = group});
                                     set_gradients(p, 0);
                                     optim.step();
                                     if (rank == 1) ::kill(::getpid(), SIGKILL);
                                     optim.step();
                                   },
                                   {.deadline = 20s});
  CHECK(results[1].signal == SIGKILL);
  for (const int rank : {0, 2}) {
    INFO(results[rank].describe());
    CHECK_THAT(results[rank].error, ContainsSubstring("rank 1"));
    CHECK(results[rank].seconds < 10);
  }
}
