// DistributedDataParallel with real processes: averaging, no_sync, unused parameters, checks. The small cases are those
// of comparable libraries' users (B10, B11, B14, B15, B17): one weight, inputs of one number, results by hand.
#include "ddp/distributed_data_parallel.h"

#include <torch/torch.h>

#include <cmath>
#include <functional>

#include "ddp/error.h"
#include "ddp/fused_adam.h"
#include "ddp/grad.h"
#include "ddp/log.h"
#include "support/catch.h"
#include "support/models.h"
#include "support/spawn.h"

using namespace ddp::test;
using ddp::DistributedDataParallel;
using ddp::ProcessGroup;
using torch::Tensor;

namespace {

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

void in_group(int ranks, const std::function<void(const ProcessGroup&)>& body) {
  run_ranks(ranks, [&](int) { body(ProcessGroup::from_env({.timeout = 20s})); });
}

struct TwoImpl : torch::nn::Module {
  TwoImpl() {
    a = register_module("a", one_weight(1));
    b = register_module("b", one_weight(1));
  }
  Tensor forward(const Tensor& x, bool use_a, bool use_b) {
    Tensor sum = torch::zeros({1, 1});
    if (use_a) sum = sum + a(x);
    if (use_b) sum = sum + b(x);
    return sum;
  }
  torch::nn::Linear a{nullptr}, b{nullptr};
};
TORCH_MODULE(Two);

struct NormedImpl : torch::nn::Module {
  explicit NormedImpl(double statistic) {
    linear = register_module("linear", torch::nn::Linear(4, 4));
    statistic_buffer = register_buffer("statistic", torch::full({3}, statistic));
    counter = register_buffer("counter", torch::full({}, static_cast<int64_t>(statistic), torch::kInt64));
  }
  Tensor forward(const Tensor& x) { return linear(x); }
  torch::nn::Linear linear{nullptr};
  Tensor statistic_buffer, counter;
};
TORCH_MODULE(Normed);

}  // namespace

TEST_CASE("weights and buffers of rank 0 are everywhere after construction") {
  in_group(3, [](const ProcessGroup& group) {
    torch::manual_seed(group.rank());
    Normed net(group.rank() + 7.0);
    const Tensor before = net->linear->weight.detach().clone();
    DistributedDataParallel model(net, group);
    DDP_CHECK(ddp::replicas_equal(model));
    ddp::check_replicas(model);
    DDP_CHECK(torch::equal(model->statistic_buffer, torch::full({3}, 7.0)));
    DDP_CHECK(model->counter.item<int64_t>() == 7);
    if (group.is_root()) DDP_CHECK(torch::equal(model->linear->weight, before));
  });
}

TEST_CASE("buffers follow rank 0 at the first forward of a window, and not in evaluation") {
  in_group(2, [](const ProcessGroup& group) {
    DistributedDataParallel model(Normed(1.0), group);
    const auto forward = [&] { return model(torch::ones({2, 4})).sum(); };
    forward().backward();
    model->statistic_buffer.fill_(10.0 + group.rank());
    forward().backward();
    DDP_CHECK(torch::equal(model->statistic_buffer, torch::full({3}, 10.0)));
    model->statistic_buffer.fill_(20.0 + group.rank());
    if (group.is_root()) {  // rank 0 evaluates alone
      torch::NoGradGuard no_grad;
      model(torch::ones({2, 4}));
    }
    DDP_CHECK(torch::equal(model->statistic_buffer, torch::full({3}, 20.0 + group.rank())));
  });
}

TEST_CASE("gradients are averaged while backward runs, parameters stay equal over steps") {
  in_group(2, [](const ProcessGroup& group) {
    DistributedDataParallel model(one_weight(1), group);
    ddp::AdamW optim(model->parameters(), {.lr = 0.1});
    for (int step = 0; step < 3; ++step) {
      model(input(group.rank() + 1)).sum().backward();
      DDP_CHECK(model->weight.grad().item<float>() == 1.5f);
      ddp::check_gradients(model);
      optim.step(), model.zero_grad();
      DDP_CHECK(!model->weight.grad().defined());
    }
    DDP_CHECK(ddp::replicas_equal(model));
  });
}

TEST_CASE("the same losses on one process and on two and four, to rounding") {
  const TempDir folder;
  for (const int ranks : {1, 2, 4}) {
    run_ranks(ranks, [&](int rank) {
      const auto group = ranks == 1 ? ProcessGroup() : ProcessGroup::from_env({.timeout = 20s});
      torch::manual_seed(1);
      torch::nn::Sequential net(torch::nn::Linear(8, 16), torch::nn::Tanh(), torch::nn::Linear(16, 2));
      DistributedDataParallel model(net, group);
      torch::optim::SGD optim(model->parameters(), 0.1);
      torch::manual_seed(2);
      const Tensor x = torch::randn({8, 8}), y = torch::randn({8, 2});
      const int64_t rows = 8 / ranks;
      for (int step = 0; step < 5; ++step) {
        torch::mse_loss(model(x.narrow(0, rank * rows, rows)), y.narrow(0, rank * rows, rows)).backward();
        optim.step(), model.zero_grad();
      }
      const Tensor flat = torch::nn::utils::parameters_to_vector(model->parameters()).detach();
      DDP_CHECK(ddp::replicas_equal(model));
      if (rank != 0) return;
      const auto file = (folder / "one.pt").string();
      if (ranks == 1) torch::save(flat, file);
      Tensor one;
      torch::load(one, file);
      DDP_CHECK((flat - one).abs().max().item<double>() < 1e-6);
    });
  }
}

// Case B10 i.
TEST_CASE("a parameter without a gradient is an error in the same backward, with its name") {
  in_group(2, [](const ProcessGroup& group) {
    DistributedDataParallel model(Two(), group);
    const auto out = model(input(group.rank() + 1), true, false);
    const auto text = message_of<ddp::Error>([&] { out.sum().backward(); });
    if (!contains(text, "no gradient reached: b.weight;") || !contains(text, "find_unused_parameters"))
      throw std::runtime_error(text);
  });
}

TEST_CASE("a parameter that one rank alone leaves without a gradient is an error on both, with its name and the rank") {
  in_group(2, [](const ProcessGroup& group) {
    DistributedDataParallel model(Two(), group);
    for (int step = 0; step < 2; ++step) {
      const auto out = model(input(1), true, group.is_root());
      const auto text = message_of<ddp::Error>([&] { out.sum().backward(); });
      if (!contains(text, "no gradient reached: b.weight (rank 1);")) throw std::runtime_error(text);
      model.zero_grad();
      const auto again = model(input(group.rank() + 1), true, true);  // the group is as good as before
      again.sum().backward();
      DDP_CHECK(model->b->weight.grad().item<float>() == 1.5f);
      model.zero_grad();
    }
  });
}

// Case B10 ii.
TEST_CASE("unused parameters are found over the whole window, when asked") {
  in_group(2, [](const ProcessGroup& group) {
    DistributedDataParallel model(Two(), group, {.find_unused_parameters = true});
    for (int step = 0; step < 2; ++step) {
      {
        auto guard = model.no_sync();
        model(input(group.rank() + 1), true, false).sum().backward();
      }
      model(input(10 * (group.rank() + 1)), false, true).sum().backward();
      DDP_CHECK(model->a->weight.grad().item<float>() == 1.5f && model->b->weight.grad().item<float>() == 15.f);
      model.zero_grad();
    }
    model(input(1), false, true).sum().backward();
    DDP_CHECK(!model->a->weight.grad().defined());  // unused on all ranks
    model.zero_grad();
    model(input(2), group.is_root(), true).sum().backward();  // used on rank 0 alone
    DDP_CHECK(model->a->weight.grad().item<float>() == 1.f);
  });
}

TEST_CASE("an output that the loss ignores is no obstacle when unused parameters are looked for") {
  struct PairImpl : TwoImpl {
    std::pair<Tensor, Tensor> forward(const Tensor& x) { return {a(x), b(x)}; }
  };
  in_group(2, [](const ProcessGroup& group) {
    DistributedDataParallel model(std::make_shared<PairImpl>(), group, {.find_unused_parameters = true});
    for (int step = 0; step < 3; ++step) {
      model(input(group.rank() + 1)).first.sum().backward();
      DDP_CHECK(model->a->weight.grad().item<float>() == 1.5f);
      model.zero_grad();
    }
  });
}

TEST_CASE("a static graph averages from its first step") {
  in_group(2, [](const ProcessGroup& group) {
    DistributedDataParallel model(Two(), group, {.static_graph = true});
    for (int step = 0; step < 3; ++step) {
      model(input(group.rank() + 1), true, true).sum().backward();
      DDP_CHECK(model->a->weight.grad().item<float>() == 1.5f && model->b->weight.grad().item<float>() == 1.5f);
      model.zero_grad();
    }
  });
}

// Case B11 a to e.
TEST_CASE("no_sync: the state at forward decides, guards nest and restore") {
  in_group(2, [](const ProcessGroup& group) {
    const double x = group.rank() + 1;
    DistributedDataParallel model(one_weight(1), group);
    const auto grad = [&] { return model->weight.grad().item<float>(); };
    const auto forward = [&] { return model(input(x)).sum(); };

    Tensor loss = forward();  // (a) the guard around backward only: still averages
    {
      auto guard = model.no_sync();
      loss.backward();
    }
    DDP_CHECK(grad() == 1.5f && !model.gradients_pending());
    model.zero_grad();

    {  // (b) around forward only: local, and refused
      auto guard = model.no_sync();
      loss = forward();
    }
    loss.backward();
    DDP_CHECK(grad() == static_cast<float>(x) && model.gradients_pending());
    DDP_CHECK(contains(message_of<ddp::Error>([&] { ddp::clip_grad_norm(model, 1.0); }), "have not been averaged"));
    DDP_CHECK(contains(message_of<ddp::Error>([&] { ddp::check_gradients(model); }), "have not been averaged"));
    model.reduce_gradients();
    DDP_CHECK(grad() == 1.5f && !model.gradients_pending());
    model.zero_grad();

    {  // (c) nested, and switched off inside
      auto outer = model.no_sync();
      auto inner = model.no_sync();
      forward().backward();
      forward().backward();
    }
    forward().backward();
    DDP_CHECK(grad() == 4.5f);
    model.zero_grad();
    {
      auto outer = model.no_sync();
      auto inner = model.no_sync(false);
      forward().backward();
    }
    DDP_CHECK(grad() == static_cast<float>(x));
    model.zero_grad();

    try {  // (d) an exception inside the guard
      auto guard = model.no_sync();
      throw std::runtime_error("boom");
    } catch (const std::runtime_error&) {
    }
    forward().backward();
    DDP_CHECK(grad() == 1.5f);
    model.zero_grad();

    loss = forward();  // (e) two backwards of one forward
    loss.backward({}, /*retain_graph=*/true);
    DDP_CHECK(contains(message_of<ddp::Error>([&] { loss.backward(); }), "second backward"));
  });
}

TEST_CASE("dropping gradients that were never averaged warns, once") {
  in_group(2, [](const ProcessGroup& group) {
    int warnings = 0;
    ddp::log::set_sink(
        [&](ddp::log::Level level, std::string_view) { warnings += level == ddp::log::Level::kWarning; });
    DistributedDataParallel model(one_weight(1), group);
    for (int i = 0; i < 2; ++i) {
      auto guard = model.no_sync();
      model(input(1)).sum().backward();
      model.zero_grad();
    }
    ddp::log::set_sink({});
    DDP_CHECK(warnings == 1);
  });
}

// Case B14 a: the third backward of rank 0 meets nobody; it must not be paired with rank 1's metric.
TEST_CASE("an extra backward on one rank never mixes with another collective") {
  const auto results = spawn_ranks(2,
                                   [](int rank) {
                                     const auto group = ProcessGroup::from_env({.timeout = 3s});
                                     DistributedDataParallel model(one_weight(0), group);
                                     for (int step = 0; step < (rank == 0 ? 3 : 2); ++step) {
                                       model(input(rank + 1)).sum().backward();
                                       DDP_CHECK(model->weight.grad().item<float>() == 1.5f);
                                       model.zero_grad();
                                     }
                                     Tensor metric = torch::tensor({100.0f + static_cast<float>(rank)});
                                     ddp::all_reduce(metric, group);
                                     DDP_CHECK(metric.item<float>() == 201.0f);
                                   },
                                   {.deadline = 20s});
  CHECK_THAT(results[0].error, ContainsSubstring("rank 1 ") && ContainsSubstring("world.0.ddp"));
  CHECK(results[1].exit_code == 1);
  CHECK(!contains(results[1].error, "201"));
}

// Case B14 b: the step is skipped by a value that all ranks share, never by one rank's own.
TEST_CASE("NaN on one rank reaches the norm on all, so all skip alike") {
  in_group(2, [](const ProcessGroup& group) {
    DistributedDataParallel model(one_weight(0), group);
    ddp::AdamW optim(model->parameters(), {.lr = 0.1});
    int skipped = 0;
    for (int step = 0; step < 3; ++step) {
      const bool bad = step == 1 && group.rank() == 1;
      (model(input(group.rank() + 1)) * (bad ? std::nan("") : 1.0)).sum().backward();
      if (std::isfinite(ddp::clip_grad_norm(model, 1.0).item<double>())) {
        optim.step();
      } else {
        ++skipped;
      }
      model.zero_grad();
    }
    DDP_CHECK(skipped == 1 && ddp::replicas_equal(model));
    DDP_CHECK(std::isfinite(model->weight.item<double>()));
  });
}

// Case B15.
TEST_CASE("clipping works on the whole sum, and is the same on all ranks") {
  in_group(2, [](const ProcessGroup& group) {
    const bool first = group.is_root();
    DistributedDataParallel model(one_weight(0), group);
    {
      auto guard = model.no_sync();
      model(input(first ? 3 : 1)).sum().backward();
      DDP_CHECK(contains(message_of<ddp::Error>([&] { ddp::clip_grad_norm(model, 3.0); }), "no_sync"));
    }
    model(input(first ? 5 : 3)).sum().backward();
    DDP_CHECK(ddp::clip_grad_norm(model, 3.0).item<double>() == 6.0);
    DDP_CHECK(std::abs(model->weight.grad().item<double>() - 3.0) < 1e-5);
    DDP_CHECK(ddp::clip_grad_norm(model, 100.0).item<double>() < 3.0);  // below the limit nothing changes
    DDP_CHECK(std::abs(model->weight.grad().item<double>() - 3.0) < 1e-5);
    DDP_CHECK(contains(message_of<ddp::ConfigError>([&] { ddp::clip_grad_norm(model, 0.0); }), "positive"));
  });
}

// Case B17: rank 0 holds {8}, rank 1 {1, 2, 3}; the loss is w * x, so the gradient is the mean of x.
TEST_CASE("tokens weigh the same wherever they are") {
  in_group(2, [](const ProcessGroup& group) {
    DistributedDataParallel model(one_weight(0), group);
    const Tensor rows = group.is_root() ? torch::tensor({8.f}) : torch::tensor({1.f, 2.f, 3.f});
    const auto gradient = [&](const Tensor& mine, bool global) {
      const Tensor sum = model(mine.view({-1, 1})).sum();
      const auto count = mine.numel();
      (global ? sum * ddp::token_weight(count, group) : sum / count).backward();
      const auto value = model->weight.grad().item<float>();
      model.zero_grad();
      return value;
    };
    DDP_CHECK(gradient(rows, true) == 3.5f);
    DDP_CHECK(gradient(rows, false) == 5.0f);
    DDP_CHECK(gradient(group.is_root() ? rows : torch::empty({0}), true) == 8.f);  // rank 1 is masked entirely
    DDP_CHECK(ddp::token_weight(0, group) == 0.0);
  });
}

// Reliability D4.
TEST_CASE("ranks that built different models all hear what differs first") {
  const std::pair<std::function<torch::nn::Sequential(int)>, std::string> cases[] = {
      {[](int rank) { return torch::nn::Sequential(torch::nn::Linear(4, rank == 0 ? 4 : 5)); }, "0.weight Float[5, 4]"},
      {[](int rank) {
         torch::nn::Sequential net(torch::nn::Linear(4, 4));
         if (rank == 1) net->push_back(torch::nn::Linear(4, 4));
         return net;
       },
       "1.weight"},
      {[](int rank) {
         torch::nn::Sequential net(torch::nn::Linear(4, 4));
         if (rank == 1) net->to(torch::kDouble);
         return net;
       },
       "Double[4, 4]"},
  };
  for (const auto& [build, part] : cases) {
    const auto results = spawn_ranks(2, [&, build = build](int rank) {
      DistributedDataParallel model(build(rank), ProcessGroup::from_env({.timeout = 5s}));
    });
    for (const auto& result : results) {
      CHECK_THAT(result.error,
                 ContainsSubstring("different models") && ContainsSubstring(part) && ContainsSubstring("rank 1"));
    }
  }
}

TEST_CASE("options that exclude each other, and modules without parameters, are refused") {
  run_ranks(1, [](int) {
    const ProcessGroup alone;
    const auto hook = [](Tensor bucket, const ProcessGroup&) { return bucket; };
    DDP_CHECK(contains(message_of<ddp::ConfigError>([&] {
                         DistributedDataParallel(one_weight(1), alone,
                                                 {.compression = ddp::Compression::kFloat16, .hook = hook});
                       }),
                       "exclude each other"));
    DDP_CHECK(contains(message_of<ddp::ConfigError>([&] { DistributedDataParallel(torch::nn::Tanh(), alone); }),
                       "no parameter"));
    DDP_CHECK(contains(
        message_of<ddp::ConfigError>([&] { DistributedDataParallel(one_weight(1), alone, {.bucket_cap_mb = -1}); }),
        "positive"));
  });
}

TEST_CASE("a bucket size that fits the connection is chosen, the same on all ranks, and gradients are averaged") {
  run_ranks(2, [](int) {
    const auto group = ProcessGroup::from_env({.backend = "gloo", .timeout = 20s});
    std::string said;
    ddp::log::set_sink([&](ddp::log::Level, std::string_view line) { said += line; });
    DistributedDataParallel model(one_weight(1), group, {.bucket_cap_mb = ddp::kAutoBucketCap});
    ddp::log::set_sink(nullptr);
    DDP_CHECK(contains(said, "buckets of ") == group.is_root());
    for (int step = 0; step < 3; ++step) {
      model(input(group.rank() + 1)).sum().backward();
      DDP_CHECK(model->weight.grad().item<float>() == 1.5f);
      model.zero_grad();
    }
  });
}

TEST_CASE("compression and own hooks average too") {
  in_group(2, [](const ProcessGroup& group) {
    for (const auto compression : {ddp::Compression::kFloat16, ddp::Compression::kBFloat16}) {
      DistributedDataParallel model(one_weight(1), group, {.compression = compression});
      for (int step = 0; step < 2; ++step) {
        model(input(group.rank() + 1)).sum().backward();
        DDP_CHECK(model->weight.grad().item<float>() == 1.5f && model->weight.grad().scalar_type() == torch::kFloat);
        model.zero_grad();
      }
      model(input(1.0 + 1.0 / 4096)).sum().backward();  // needs more than 11 bits: rounded on the wire
      DDP_CHECK(model->weight.grad().item<float>() == 1.0f);
    }
    int calls = 0;
    DistributedDataParallel model(one_weight(1), group, {.hook = [&](Tensor bucket, const ProcessGroup& g) {
                                    ++calls;
                                    ddp::all_reduce(bucket, g, ddp::ReduceOp::kMax);
                                    return bucket;
                                  }});
    model(input(group.rank() + 1)).sum().backward();
    DDP_CHECK(calls == 1 && model->weight.grad().item<float>() == 2.f);
  });
}

TEST_CASE("reduce_gradients gives the bits of the overlapped average") {
  in_group(2, [](const ProcessGroup& group) {
    torch::manual_seed(3);
    torch::nn::Sequential net(torch::nn::Linear(50, 70), torch::nn::ReLU(), torch::nn::Linear(70, 30));
    DistributedDataParallel model(net, group);
    torch::manual_seed(100 + group.rank());
    const Tensor x = torch::randn({16, 50});
    model(x).square().mean().backward();
    std::vector<Tensor> overlapped;
    for (const auto& p : model->parameters()) overlapped.push_back(p.grad().clone());
    model.zero_grad();
    {
      auto guard = model.no_sync();
      model(x).square().mean().backward();
    }
    model.reduce_gradients();
    for (size_t i = 0; i < overlapped.size(); ++i)
      DDP_CHECK(torch::equal(overlapped[i], model->parameters()[i].grad()));
  });
}

// Reliability D7.
TEST_CASE("one flipped bit in one rank's weights is found, with rank and parameter") {
  in_group(3, [](const ProcessGroup& group) {
    DistributedDataParallel model(Two(), group);
    if (group.rank() == 2) {
      auto bits = model->b->weight.detach().view(torch::kInt32);
      bits.bitwise_xor_(1);
    }
    const auto text = message_of<ddp::MismatchError>([&] { ddp::check_replicas(model); });
    DDP_CHECK(contains(text, "parameter b.weight") && contains(text, "on rank 2"));
    DDP_CHECK(!ddp::replicas_equal(model));
  });
}

TEST_CASE("tied weights count once in the norm") {
  struct SharedImpl : torch::nn::Module {
    SharedImpl() {
      first = register_module("first", one_weight(3));
      second = register_module("second", first);  // the same module under two names
    }
    Tensor forward(const Tensor& x) { return first(x) + second(x); }
    torch::nn::Linear first{nullptr}, second{nullptr};
  };
  in_group(2, [](const ProcessGroup& group) {
    DistributedDataParallel model(std::make_shared<SharedImpl>(), group);
    model(input(1)).sum().backward();
    DDP_CHECK(ddp::clip_grad_norm(model, 100).item<double>() == 2.0);  // d(2wx)/dw, once
  });
}
