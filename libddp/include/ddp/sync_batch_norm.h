// Batch normalisation with the statistics of all ranks' batches together, as torch.nn.SyncBatchNorm, also on the CPU.
//
//   struct NetImpl : torch::nn::Module {
//     explicit NetImpl(const ddp::ProcessGroup& group) : norm(register_module("norm", ddp::SyncBatchNorm(64, group))) {}
//     ddp::SyncBatchNorm norm;                                  // where torch::nn::BatchNorm2d was
//   };
//   auto model = ddp::convert_sync_batch_norm(sequential, group);   // or, in what is made of Sequentials, all at once
#pragma once

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/pimpl.h>

#include <ostream>
#include <utility>

#include "ddp/process_group.h"

namespace ddp {

/// Parameters, buffers, their names and their initial values are those of torch::nn::BatchNorm{1,2,3}d, so checkpoints
/// are exchanged with either. Any number of dimensions from two on: {N, C, ...}; N may differ over ranks and may be 0.
///
/// In training, forward sums each channel over all ranks by one all_reduce, backward by another: all ranks call both,
/// in the same order. In evaluation, and in a world of one, it computes what BatchNorm computes and sends nothing.
/// Gradients of weight and bias are those of this rank's rows, for DistributedDataParallel to average. The gradient
/// cannot be differentiated again.
///
/// Throws DataError on all ranks when all batches together have a single value per channel, ConfigError for a tensor of
/// fewer than two dimensions or another number of channels, and the errors of all_reduce.
/// Source: Ioffe and Szegedy, 2015, with the sums taken over ranks.
class SyncBatchNormImpl : public torch::nn::NormImplBase<0, SyncBatchNormImpl, torch::nn::BatchNormOptions> {
 public:
  SyncBatchNormImpl(const torch::nn::BatchNormOptions& options, ProcessGroup group)
      : NormImplBase(options), group_(std::move(group)) {}

  torch::Tensor forward(const torch::Tensor& input);
  void pretty_print(std::ostream& stream) const override;

  const ProcessGroup& group() const { return group_; }

  /// Shares the tensors and takes the mode of `norm`, a BatchNorm with the same options.
  void take(const torch::nn::Module& norm);

 protected:
  void _check_input_dim(const torch::Tensor& input) override;

 private:
  ProcessGroup group_;
};

TORCH_MODULE(SyncBatchNorm);

namespace detail {
void convert_batch_norms(torch::nn::Module& module, const ProcessGroup& group);
}  // namespace detail

/// Replaces every BatchNorm1d, 2d and 3d that a Sequential or a ModuleList in `module` holds, at any depth, by a
/// SyncBatchNorm with the same tensors, options and mode, once for each. Returns `module`. A BatchNorm that is a member
/// of a class of one's own cannot be replaced from outside, because that class calls it by its type: ConfigError names
/// all of these, and nothing is changed; declare them as ddp::SyncBatchNorm. Convert before the optimizer and
/// DistributedDataParallel are made.
template <class M>
M convert_sync_batch_norm(M module, const ProcessGroup& group) {
  detail::convert_batch_norms(*module, group);
  return module;
}

}  // namespace ddp
