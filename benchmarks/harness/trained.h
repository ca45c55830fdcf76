// The model of bench_step and bench_overlap, with or without the wrapper: layers of Linear(dim), and how their gradients
// are averaged.
#pragma once

#include <torch/torch.h>

#include <optional>
#include <string>
#include <vector>

#include "ddp/distributed_data_parallel.h"
#include "ddp/grad.h"

namespace bench {

struct NetImpl : torch::nn::Module {
  NetImpl(int64_t dim, int64_t layers, bool relu) : relu(relu) {
    for (int64_t i = 0; i < layers; ++i) {
      linears.push_back(register_module("linear" + std::to_string(i), torch::nn::Linear(dim, dim)));
    }
  }

  torch::Tensor forward(torch::Tensor x) {
    for (auto& linear : linears) {
      x = linear->forward(x);
      if (relu) x = torch::relu(x);
    }
    return x;
  }

  std::vector<torch::nn::Linear> linears;
  bool relu;
};
TORCH_MODULE(Net);

struct TrainedOptions {
  int64_t dim = 1024;
  int64_t layers = 1;
  bool relu = false;
  std::string reducer = "overlap";  ///< overlap: averages while backward runs; naive: after it; none: not at all
  double bucket_cap_mb = 25;
};

class Trained {
 public:
  Trained(const TrainedOptions& options, const ddp::ProcessGroup& group)
      : naive_(options.reducer == "naive"), net_(options.dim, options.layers, options.relu) {
    if (options.reducer == "none") {
      net_->to(group.device());
    } else {
      ddp_.emplace(net_, group, ddp::DistributedDataParallelOptions{.bucket_cap_mb = options.bucket_cap_mb});
    }
  }

  torch::Tensor forward(const torch::Tensor& x) {
    if (!ddp_) return net_->forward(x);
    auto guard = ddp_->no_sync(naive_);
    return ddp_->forward(x);
  }
  void zero_grad() { ddp_ ? ddp_->zero_grad() : net_->zero_grad(); }
  void backward(torch::Tensor loss) {
    loss.backward();
    if (naive_) ddp_->reduce_gradients();
  }
  bool replicas_equal() const { return !ddp_ || ddp::replicas_equal(*ddp_); }
  std::vector<torch::Tensor> parameters() const { return net_->parameters(); }

 private:
  bool naive_;
  Net net_;
  std::optional<ddp::DistributedDataParallel<Net>> ddp_;
};

}  // namespace bench
