// SyncBatchNorm against one BatchNorm over the batches of all ranks together.
#include "ddp/sync_batch_norm.h"

#include <torch/torch.h>

#include <functional>
#include <sstream>

#include "ddp/distributed_data_parallel.h"
#include "ddp/error.h"
#include "ddp/grad.h"
#include "support/catch.h"
#include "support/spawn.h"

using namespace ddp::test;
using ddp::ProcessGroup;
using ddp::SyncBatchNorm;
using torch::Tensor;
using torch::nn::BatchNormOptions;

namespace {

void in_group(int ranks, const std::function<void(const ProcessGroup&)>& body) {
  for (const char* backend : {"shm", "gloo"}) {
    INFO(backend);
    run_ranks(ranks, [&](int) { body(ProcessGroup::from_env({.backend = backend, .timeout = 20s})); });
  }
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Errors of float32 sums in another order.
void require_close(const Tensor& found, const Tensor& expected, const std::string& what, double tolerance = 2e-5) {
  const auto difference = (found.to(torch::kDouble) - expected.to(torch::kDouble)).abs().max().item<double>();
  if (!(difference <= tolerance)) {
    std::ostringstream text;
    text << what << " differs by " << difference;
    throw std::runtime_error(text.str());
  }
}

Tensor rows_of(const Tensor& whole, const std::vector<int64_t>& rows, int rank) {
  int64_t first = 0;
  for (int r = 0; r < rank; ++r) first += rows[r];
  return whole.narrow(0, first, rows[rank]);
}

// Two training steps and an evaluation, on the rows of this rank and on all of them in one process.
template <class Reference>
void compare(const ProcessGroup& group, Reference reference, const BatchNormOptions& options, torch::IntArrayRef shape,
             const std::vector<int64_t>& rows, torch::ScalarType dtype = torch::kFloat, double shift = 3) {
  SyncBatchNorm norm(options, group);
  torch::manual_seed(1);
  if (options.affine()) {
    torch::NoGradGuard no_grad;
    norm->weight.uniform_(0.5, 1.5), norm->bias.uniform_(-1, 1);
    reference->weight.copy_(norm->weight), reference->bias.copy_(norm->bias);
  }
  norm->to(dtype), reference->to(dtype);
  const double tolerance = dtype == torch::kDouble ? (shift > 100 ? 1e-8 : 1e-11) : 2e-5;
  for (int step = 0; step < 2; ++step) {
    Tensor whole = (torch::randn(shape) * 2 + shift).to(dtype).requires_grad_(true);
    const Tensor weights = torch::randn(shape).to(dtype);
    Tensor mine = rows_of(whole.detach(), rows, group.rank()).clone().requires_grad_(true);
    const Tensor expected = reference(whole);
    (expected * weights).sum().backward();
    const Tensor found = norm(mine);
    (found * rows_of(weights, rows, group.rank())).sum().backward();
    if (mine.numel() > 0) {
      require_close(found, rows_of(expected, rows, group.rank()), "the output", tolerance);
      require_close(mine.grad(), rows_of(whole.grad(), rows, group.rank()), "the gradient of the input", tolerance);
    }
    if (options.affine()) {
      Tensor weight = norm->weight.grad().clone(), bias = norm->bias.grad().clone();
      ddp::all_reduce(weight, group), ddp::all_reduce(bias, group);  // rows of all ranks
      require_close(weight, reference->weight.grad(), "the gradient of the weight", 50 * tolerance);
      require_close(bias, reference->bias.grad(), "the gradient of the bias", 50 * tolerance);
      norm->zero_grad(), reference->zero_grad();
    }
    if (options.track_running_stats()) {
      require_close(norm->running_mean, reference->running_mean, "the running mean", tolerance);
      require_close(norm->running_var, reference->running_var, "the running variance", tolerance);
      DDP_CHECK(norm->num_batches_tracked.template item<int64_t>() == step + 1);
    }
  }
  norm->eval(), reference->eval();
  if (options.track_running_stats() && group.is_root()) {  // alone: evaluation sends nothing
    const Tensor x = torch::randn(shape).to(dtype);
    require_close(norm(x), reference(x), "the output in evaluation", tolerance);
  }
}

}  // namespace

TEST_CASE("forward, gradients and running statistics are those of one BatchNorm over all ranks' rows") {
  in_group(2, [](const ProcessGroup& group) {
    compare(group, torch::nn::BatchNorm1d(5), BatchNormOptions(5), {12, 5}, {6, 6});
    compare(group, torch::nn::BatchNorm2d(3), BatchNormOptions(3), {6, 3, 4, 5}, {3, 3});
    compare(group, torch::nn::BatchNorm3d(2), BatchNormOptions(2), {4, 2, 3, 2, 2}, {2, 2});
    compare(group, torch::nn::BatchNorm2d(3), BatchNormOptions(3), {6, 3, 4, 5}, {3, 3}, torch::kDouble);
    // A mean of 500 deviations costs digits of the variance, as a difference of squares: 6 of 16.
    compare(group, torch::nn::BatchNorm2d(3), BatchNormOptions(3), {6, 3, 4, 5}, {3, 3}, torch::kDouble, 1000);
  });
}

TEST_CASE("batches of different sizes over ranks, an empty one among them") {
  in_group(3, [](const ProcessGroup& group) {
    compare(group, torch::nn::BatchNorm1d(5), BatchNormOptions(5), {12, 5}, {7, 4, 1});
    compare(group, torch::nn::BatchNorm2d(3), BatchNormOptions(3), {6, 3, 4, 5}, {1, 0, 5});
  });
}

TEST_CASE("options: without weights, without running statistics, cumulative average, other eps") {
  in_group(2, [](const ProcessGroup& group) {
    const auto with = [&](const BatchNormOptions& options) {
      compare(group, torch::nn::BatchNorm1d(options), options, {12, 5}, {5, 7});
    };
    with(BatchNormOptions(5).affine(false));
    with(BatchNormOptions(5).track_running_stats(false));
    with(BatchNormOptions(5).momentum(std::nullopt));
    with(BatchNormOptions(5).eps(0.1).momentum(0.5));
  });
}

TEST_CASE("channels-last inputs, bfloat16, and inputs without a gradient") {
  in_group(2, [](const ProcessGroup& group) {
    torch::manual_seed(2);
    const Tensor whole = torch::randn({4, 3, 5, 5}), weights = torch::randn({4, 3, 5, 5});
    const auto half = [&](const Tensor& t) { return t.narrow(0, 2 * group.rank(), 2); };
    SyncBatchNorm norm(3, group);
    torch::nn::BatchNorm2d reference(3);
    Tensor all = whole.clone().requires_grad_(true);
    (reference(all) * weights).sum().backward();
    Tensor mine = half(whole).contiguous(at::MemoryFormat::ChannelsLast).detach().requires_grad_(true);
    (norm(mine) * half(weights)).sum().backward();
    require_close(mine.grad(), half(all.grad()), "the gradient in channels-last");

    norm->zero_grad();
    norm(half(whole)).sum().backward();  // only weight and bias
    DDP_CHECK(norm->bias.grad()[0].item<float>() == 50);

    Tensor low = half(whole).to(torch::kBFloat16).requires_grad_(true);
    const Tensor out = norm(low);
    out.sum().backward();
    DDP_CHECK(out.scalar_type() == torch::kBFloat16 && low.grad().scalar_type() == torch::kBFloat16);
    require_close(out, half(reference(whole)), "the output in bfloat16", 0.05);
  });
}

TEST_CASE("a world of one computes what BatchNorm computes, to the bit") {
  run_ranks(1, [](int) {
    torch::manual_seed(3);
    SyncBatchNorm norm(3, ProcessGroup());
    torch::nn::BatchNorm2d reference(3);
    Tensor x = torch::randn({4, 3, 5, 5}).requires_grad_(true), y = x.detach().clone().requires_grad_(true);
    const Tensor found = norm(x), expected = reference(y);
    found.square().sum().backward(), expected.square().sum().backward();
    DDP_CHECK(torch::equal(found, expected) && torch::equal(x.grad(), y.grad()));
    DDP_CHECK(torch::equal(norm->running_var, reference->running_var));
  });
}

TEST_CASE("a wrapped model with SyncBatchNorm trains as one process on the whole batch") {
  struct BlockImpl : torch::nn::Module {
    BlockImpl() {
      net = register_module("net", torch::nn::Sequential(torch::nn::Conv2d(4, 3, 3), torch::nn::BatchNorm2d(3)));
    }
    Tensor forward(const Tensor& x) { return net->forward(x); }
    torch::nn::Sequential net{nullptr};
  };
  in_group(2, [](const ProcessGroup& group) {
    const auto build = [] {
      torch::manual_seed(4);
      return torch::nn::Sequential(torch::nn::Conv2d(2, 4, 3), torch::nn::BatchNorm2d(4), torch::nn::ReLU(),
                                   std::make_shared<BlockImpl>());
    };
    auto alone = build();
    torch::optim::SGD alone_optim(alone->parameters(), 0.1);
    ddp::DistributedDataParallel model(ddp::convert_sync_batch_norm(build(), group), group);
    torch::optim::SGD optim(model->parameters(), 0.1);
    torch::manual_seed(5);
    for (int step = 0; step < 3; ++step) {
      const Tensor x = torch::randn({6, 2, 8, 8}), y = torch::randn({6, 3, 4, 4});
      alone_optim.zero_grad();
      torch::mse_loss(alone->forward(x), y).backward();
      alone_optim.step();
      const auto half = [&](const Tensor& t) { return t.narrow(0, 3 * group.rank(), 3); };
      torch::mse_loss(model(half(x)), half(y)).backward();
      optim.step(), model.zero_grad();
    }
    ddp::check_replicas(model);
    const auto expected = alone->named_parameters();
    for (const auto& entry : model.module()->named_parameters()) {
      require_close(entry.value(), expected[entry.key()], entry.key(), 1e-5);
    }
    const auto buffers = alone->named_buffers();
    for (const auto& entry : model.module()->named_buffers()) {
      require_close(entry.value(), buffers[entry.key()], entry.key(), 1e-5);
    }
  });
}

TEST_CASE("the converter keeps tensors and modes, and names what it cannot reach") {
  struct OwnImpl : torch::nn::Module {
    OwnImpl() { norm = register_module("norm", torch::nn::BatchNorm1d(4)); }
    Tensor forward(const Tensor& x) { return norm(x); }
    torch::nn::BatchNorm1d norm{nullptr};
  };
  run_ranks(1, [](int) {
    const ProcessGroup group;
    torch::nn::BatchNorm1d norm(torch::nn::BatchNormOptions(4).eps(0.5));
    norm->eval();
    norm->running_mean.fill_(7);
    torch::nn::Sequential net(torch::nn::Linear(4, 4), norm);
    net->push_back(torch::nn::Functional(torch::relu));
    torch::nn::ModuleList list(torch::nn::BatchNorm2d(3), net);
    ddp::convert_sync_batch_norm(list, group);
    const auto* sync = list[1]->as<torch::nn::Sequential>()->ptr(1)->as<SyncBatchNorm>();
    DDP_CHECK(sync != nullptr && list[0]->as<SyncBatchNorm>() != nullptr);
    DDP_CHECK(sync->weight.is_same(norm->weight) && sync->options.eps() == 0.5 && !sync->is_training());
    DDP_CHECK(sync->running_mean[0].item<float>() == 7 &&
              sync->named_buffers()["running_mean"].is_same(sync->running_mean));
    DDP_CHECK(sync->named_parameters()["weight"].is_same(norm->weight));
    DDP_CHECK(contains(c10::str(*sync), "ddp::SyncBatchNorm(4"));
    const Tensor x = torch::ones({2, 4});
    DDP_CHECK(torch::equal(net->forward(x), torch::relu(norm(net[0]->as<torch::nn::Linear>()->forward(x)))));

    torch::nn::Sequential mixed(torch::nn::BatchNorm1d(4));
    mixed->push_back("own", std::make_shared<OwnImpl>());
    const auto text = message_of<ddp::ConfigError>([&] { ddp::convert_sync_batch_norm(mixed, group); });
    DDP_CHECK(contains(text, "own.norm") && contains(text, "ddp::SyncBatchNorm"));
    DDP_CHECK(mixed->ptr(0)->as<torch::nn::BatchNorm1d>() != nullptr);  // nothing is changed
    DDP_CHECK(
        contains(message_of<ddp::ConfigError>([&] { ddp::convert_sync_batch_norm(torch::nn::BatchNorm1d(4), group); }),
                 "the module itself"));
  });
}

TEST_CASE("inputs that cannot work are refused") {
  in_group(2, [](const ProcessGroup& group) {
    SyncBatchNorm norm(3, group);
    DDP_CHECK(contains(message_of<ddp::ConfigError>([&] { norm(torch::ones({3})); }), "expected [N, 3, ...]"));
    DDP_CHECK(contains(message_of<ddp::ConfigError>([&] { norm(torch::ones({2, 4})); }), "Float[2, 4]"));
    DDP_CHECK(contains(message_of<ddp::DataError>([&] {
                         norm(torch::ones({group.is_root() ? 1 : 0, 3}));
                       }),
                       "1 value(s) per channel"));
  });
}
