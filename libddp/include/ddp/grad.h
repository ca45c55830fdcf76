// Gradients between backward and the optimizer's step: clipping, token-weighted means, and checks over ranks.
//
//   auto norm = ddp::clip_grad_norm(model, 1.0);      // a tensor: no wait for the GPU
//   ddp::check_replicas(model);                       // throws, naming rank and parameter
#pragma once

#include <torch/types.h>

#include <vector>

#include "ddp/distributed_data_parallel.h"

namespace ddp {

/// Scales gradients so that their total norm is at most `max_norm`, with the bits of torch.nn.utils.clip_grad_norm_ in
/// Python (gradients of one dtype): factor max_norm / (norm + 1e-6), at most 1. Returns the norm before clipping, a
/// scalar on the gradients' device, the same bits on each rank. On the CPU gradients within the limit are only read; on
/// a GPU nothing waits. A parameter that is registered twice (tied weights) counts once. A norm that is not finite is no
/// norm: NaN makes all gradients NaN, infinity makes the finite ones 0 and the others NaN, on all ranks alike; test the
/// result before stepping. Throws ConfigError unless max_norm > 0, and Error while gradients of `no_sync` passes have
/// not been averaged.
torch::Tensor clip_grad_norm(detail::Replica& replica, double max_norm);
template <class M>
torch::Tensor clip_grad_norm(const DistributedDataParallel<M>& model, double max_norm) {
  return clip_grad_norm(*model.replica(), max_norm);
}

/// The factor for a summed loss when ranks or micro-batches hold different numbers of tokens:
///   mean over all tokens = sum over ranks of loss_sum / sum over ranks of tokens,
/// and gradients are averaged over ranks, so each rank's summed loss is multiplied by size / (tokens on all ranks).
/// One small all_reduce; call it once per optimizer step with the tokens of all its micro-batches. Zero when no rank
/// has a token. Collective. Source: huggingface/transformers#34242.
double token_weight(int64_t tokens, const ProcessGroup& group);

/// True, on every rank, when `tensors` hold the same bits on all ranks. Collective; costs one all_reduce of their size.
bool replicas_equal(const std::vector<torch::Tensor>& tensors, const ProcessGroup& group);
template <class M>
bool replicas_equal(const DistributedDataParallel<M>& model) {
  return replicas_equal(model.module()->parameters(), model.group());
}

/// Throws MismatchError on every rank, naming the first parameter (or buffer) that differs from rank 0's and the ranks
/// where it does. A NaN equals itself. Collective.
void check_replicas(detail::Replica& replica);
template <class M>
void check_replicas(const DistributedDataParallel<M>& model) {
  check_replicas(*model.replica());
}

/// The same for gradients: after a synchronised backward they are equal on all ranks.
void check_gradients(detail::Replica& replica);
template <class M>
void check_gradients(const DistributedDataParallel<M>& model) {
  check_gradients(*model.replica());
}

}  // namespace ddp
