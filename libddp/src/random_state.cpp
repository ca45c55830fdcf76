#include "random_state.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/types.h>

#include <mutex>

namespace ddp::detail {
namespace {

torch::Tensor state_of(at::Generator generator) {
  std::lock_guard lock(generator.mutex());
  return generator.get_state().clone();
}

void set_state(at::Generator generator, const torch::Tensor& state) {
  std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

at::Generator default_generator(torch::Device device) { return at::globalContext().defaultGenerator(device); }

}  // namespace

RandomState random_state(torch::Device device) {
  RandomState state{.cpu = state_of(default_generator(torch::kCPU)), .cuda = {}};
  if (device.is_cuda()) state.cuda = state_of(default_generator(device)).cpu();
  return state;
}

void check_random_state(const RandomState& state) { at::detail::createCPUGenerator().set_state(state.cpu); }

void set_random_state(const RandomState& state, torch::Device device) {
  set_state(default_generator(torch::kCPU), state.cpu);
  if (device.is_cuda() && state.cuda.defined()) set_state(default_generator(device), state.cuda);
}

}  // namespace ddp::detail
