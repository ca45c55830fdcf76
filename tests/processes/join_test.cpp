// Loops over uneven inputs: what each rank sees, small cases by hand. Bits against PyTorch:
// golden/join_golden_test.cpp.
#include "ddp/join.h"

#include <torch/torch.h>

#include <functional>
#include <list>

#include "ddp/collectives.h"
#include "ddp/error.h"
#include "ddp/fused_adam.h"
#include "ddp/grad.h"
#include "support/catch.h"
#include "support/models.h"
#include "support/spawn.h"

using namespace ddp::test;
using ddp::DistributedDataParallel;
using ddp::DivideBy;
using ddp::ProcessGroup;
using torch::Tensor;

namespace {

void in_group(int ranks, const std::function<void(const ProcessGroup&)>& body) {
  for (const char* backend : {"shm", "gloo"}) {
    INFO(backend);
    run_ranks(ranks, [&](int) { body(ProcessGroup::from_env({.backend = backend, .timeout = 20s})); });
  }
}

// Rank r has r + 1 batches of value r + 1.
std::vector<Tensor> uneven(int rank) {
  return std::vector<Tensor>(static_cast<size_t>(rank) + 1, torch::full({1, 1}, rank + 1.0, torch::kFloat));
}

// Shows each batch once, as a torch loader does.
class Once {
 public:
  explicit Once(int count) : count_(count) {}
  struct Iterator {
    using value_type = Tensor;
    using difference_type = std::ptrdiff_t;
    Tensor operator*() const { return torch::full({1, 1}, static_cast<float>(*left), torch::kFloat); }
    Iterator& operator++() {
      --*left;
      return *this;
    }
    void operator++(int) { --*left; }
    bool operator==(std::default_sentinel_t) const { return *left == 0; }
    int* left;
  };
  Iterator begin() { return {&count_}; }
  std::default_sentinel_t end() const { return {}; }

 private:
  int count_;
};

}  // namespace

TEST_CASE("as many turns as the longest rank has batches, the sum is divided by the world or by those still active") {
  in_group(3, [](const ProcessGroup& group) {
    // The gradient of w * x is x: 1, 2, 3 in the first turn, then 2, 3, then 3.
    const std::pair<DivideBy, std::vector<double>> cases[] = {{DivideBy::kWorld, {2.0, 5.0 / 3, 1.0}},
                                                              {DivideBy::kActive, {2.0, 2.5, 3.0}}};
    DistributedDataParallel model(one_weight(0), group);
    for (const auto& [divide_by, expected] : cases) {
      auto batches = uneven(group.rank());
      size_t turns = 0;
      for (auto& turn : ddp::join(batches, model, {.divide_by = divide_by})) {
        DDP_CHECK(static_cast<bool>(turn) == (static_cast<int>(turns) <= group.rank()));
        DDP_CHECK(turn.active() == 3 - static_cast<int>(turns));
        if (turn) model(*turn).sum().backward();
        DDP_CHECK(std::abs(model->weight.grad().item<double>() - expected[turns]) < 1e-6);
        ddp::check_gradients(model);
        model.zero_grad();
        ++turns;
      }
      DDP_CHECK(turns == 3);
    }
    model(torch::full({1, 1}, group.rank() + 1.0)).sum().backward();  // afterwards all is as before
    DDP_CHECK(model->weight.grad().item<float>() == 2.f);
  });
}

TEST_CASE("ranks that have run out step too: weights and optimizer state stay equal") {
  in_group(2, [](const ProcessGroup& group) {
    torch::manual_seed(1);
    torch::nn::Sequential net(torch::nn::Linear(3, 4), torch::nn::Tanh(), torch::nn::Linear(4, 1));
    DistributedDataParallel model(net, group);
    ddp::AdamW optim(model->parameters(), {.lr = 0.1});
    torch::manual_seed(10 + group.rank());
    std::list<Tensor> batches;
    for (int i = 0; i < 2 + 3 * group.rank(); ++i) batches.push_back(torch::randn({4, 3}));
    int turns = 0;
    for (auto& turn : ddp::join(batches, model)) {
      if (turn) {
        {
          auto guard = model.no_sync();  // a window of two in each turn
          model(*turn).square().mean().backward();
        }
        model(*turn).square().mean().backward();
      }
      ddp::clip_grad_norm(model, 1.0);
      optim.step(), model.zero_grad();
      ++turns;
    }
    DDP_CHECK(turns == 5);
    ddp::check_replicas(model);
    model(torch::ones({1, 3})).sum().backward();  // and the next step
    optim.step();
    ddp::check_replicas(model);
  });
}

TEST_CASE("every kind of reducer takes part: unused parameters, static graph, sparse embeddings, compression") {
  struct PartsImpl : torch::nn::Module {
    explicit PartsImpl(bool sparse) {
      table = register_module("table", torch::nn::Embedding(torch::nn::EmbeddingOptions(4, 2).sparse(sparse)));
      spare = register_module("spare", one_weight(1));
      torch::NoGradGuard no_grad;
      table->weight.fill_(1);
    }
    Tensor forward(int64_t row, bool use_spare) {
      const Tensor sum = table(torch::tensor({row})).sum();
      return use_spare ? sum + spare(torch::ones({1, 1})).sum() : sum;
    }
    torch::nn::Embedding table{nullptr};
    torch::nn::Linear spare{nullptr};
  };
  in_group(2, [](const ProcessGroup& group) {
    const auto run = [&](bool sparse, bool use_spare, ddp::DistributedDataParallelOptions options) {
      DistributedDataParallel model(std::make_shared<PartsImpl>(sparse), group, options);
      std::vector<int64_t> rows(group.is_root() ? 1 : 3, group.rank() + 1);
      int turns = 0;
      for (auto& turn : ddp::join(rows, model)) {
        if (turn) model(*turn, use_spare).backward();
        Tensor grad = model->table->weight.grad();
        if (grad.is_sparse()) grad = grad.to_dense();
        DDP_CHECK(grad[2][0].item<float>() == 0.5f);
        DDP_CHECK(grad[1][0].item<float>() == (turns == 0 ? 0.5f : 0.f));
        if (!use_spare) DDP_CHECK(!model->spare->weight.grad().defined());
        model.zero_grad();
        ++turns;
      }
      DDP_CHECK(turns == 3);
    };
    run(false, true, {});
    run(false, false, {.find_unused_parameters = true});
    run(false, true, {.static_graph = true});
    run(true, true, {});
    run(false, true, {.compression = ddp::Compression::kBFloat16});
    run(false, true, {.gradient_as_bucket_view = false, .hook = [](Tensor bucket, const ProcessGroup& g) {
                        ddp::all_reduce(bucket, g, ddp::ReduceOp::kAvg);
                        return bucket;
                      }});
  });
}

TEST_CASE("buffers are those of the highest rank that has a batch, on all ranks at the end") {
  struct CountingImpl : torch::nn::Module {
    CountingImpl() {
      linear = register_module("linear", one_weight(1));
      count = register_buffer("count", torch::zeros({1}));
    }
    Tensor forward(const Tensor& x) {
      count += 1;
      return linear(x);
    }
    torch::nn::Linear linear{nullptr};
    Tensor count;
  };
  in_group(2, [](const ProcessGroup& group) {
    DistributedDataParallel model(std::make_shared<CountingImpl>(), group);
    std::vector<Tensor> batches(group.is_root() ? 4 : 2, torch::ones({1, 1}));
    for (auto& turn : ddp::join(batches, model)) {
      if (turn) model(*turn).sum().backward();
      model.zero_grad();
    }
    DDP_CHECK(model->count.item<float>() == 4);
  });
}

TEST_CASE("an input range, a rank without any batch, and a world of one") {
  in_group(2, [](const ProcessGroup& group) {
    DistributedDataParallel model(one_weight(0), group);
    Once batches(group.is_root() ? 0 : 2);
    std::vector<float> gradients;
    for (auto& turn : ddp::join(batches, model)) {
      if (turn) model(*turn).sum().backward();
      gradients.push_back(model->weight.grad().item<float>());
      model.zero_grad();
    }
    DDP_CHECK(gradients == std::vector<float>{1.f, 0.5f});
    Once none(0);
    for (auto& turn : ddp::join(none, model)) DDP_CHECK(!turn && false);
  });
  run_ranks(1, [](int) {
    DistributedDataParallel model(one_weight(0), ProcessGroup());
    Once batches(3);
    int turns = 0;
    for (auto& turn : ddp::join(batches, model, {.throw_on_early_end = true})) {
      model(*turn).sum().backward();
      DDP_CHECK(turn.active() == 1);
      ++turns;
    }
    DDP_CHECK(turns == 3);
  });
}

TEST_CASE(
    "throw_on_early_end: the same error on all ranks, naming those that ran out, the group is as good as before") {
  in_group(3, [](const ProcessGroup& group) {
    DistributedDataParallel model(one_weight(0), group);
    std::vector<Tensor> batches(group.rank() == 1 ? 1 : 2, torch::ones({1, 1}));
    int turns = 0;
    const auto text = message_of<ddp::Error>([&] {
      for (auto& turn : ddp::join(batches, model, {.throw_on_early_end = true})) {
        model(*turn).sum().backward();
        model.zero_grad();
        ++turns;
      }
    });
    DDP_CHECK(turns == 1);
    DDP_CHECK(text.find("after 1 turns rank 1 has no more batches and rank 0, 2 has") != std::string::npos);
    std::vector<Tensor> even(2, torch::ones({1, 1}));
    for (auto& turn : ddp::join(even, model, {.throw_on_early_end = true})) model(*turn).sum().backward();
    DDP_CHECK(model->weight.grad().item<float>() == 2.f);
  });
}

TEST_CASE("a turn without its backward is an error") {
  for (const char* backend : {"shm", "gloo"}) {
    INFO(backend);
    const auto results = spawn_ranks(2, [&](int rank) {
      const auto group = ProcessGroup::from_env({.backend = backend, .timeout = 5s});
      DistributedDataParallel model(one_weight(0), group);
      std::vector<Tensor> batches(2, torch::ones({1, 1}));
      for (auto& turn : ddp::join(batches, model)) {
        if (rank == 0) model(*turn).sum().backward();
        model.zero_grad();
      }
    });
    CHECK_THAT(results[1].error, ContainsSubstring("[ddp::join] rank 1/2: turn 1 had 0 synchronised backwards"));
    CHECK(results[0].exit_code == 1);
  }
}

TEST_CASE("hooks divide by the world themselves, so dividing by the active ones is refused") {
  in_group(2, [](const ProcessGroup& group) {
    DistributedDataParallel model(one_weight(0), group, {.compression = ddp::Compression::kBFloat16});
    std::vector<Tensor> batches(group.is_root() ? 1 : 2, torch::ones({1, 1}));
    const auto text = message_of<ddp::ConfigError>([&] {
      for (auto& turn : ddp::join(batches, model, {.divide_by = DivideBy::kActive})) {
        if (turn) model(*turn).sum().backward();
      }
    });
    DDP_CHECK(text.find("kWorld") != std::string::npos);
  });
}
