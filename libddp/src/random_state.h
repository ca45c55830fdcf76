// The state of a rank's default random generators, as tensors.
#pragma once

#include <torch/types.h>

namespace ddp::detail {

/// uint8 tensors as torch.get_rng_state() and torch.cuda.get_rng_state() return them; `cuda` is undefined on
/// a rank whose device is the CPU.
struct RandomState {
  torch::Tensor cpu;
  torch::Tensor cuda;
};

RandomState random_state(torch::Device device);

/// Throws what libtorch throws for a state that is none. Changes nothing.
void check_random_state(const RandomState& state);

/// Requires: `check_random_state` passed. A state of CUDA is ignored on a rank without it.
void set_random_state(const RandomState& state, torch::Device device);

}  // namespace ddp::detail
