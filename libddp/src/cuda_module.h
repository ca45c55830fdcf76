// The door to libddp_cuda, which is loaded only when a CUDA device or the nccl backend is asked for: a CPU rank then
// never maps libtorch_cuda.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>

namespace ddp::detail {

/// What libddp_cuda.so exports under the name `ddp_cuda_module`. Both sides are built from this header.
struct CudaModule {
  int (*device_count)();
  void (*set_device)(int device);
  c10::intrusive_ptr<c10d::Backend> (*make_nccl)(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                 std::chrono::milliseconds timeout);
};

/// Loads the module on the first call. Throws ConfigError that says what is missing: the module, or a library it needs.
const CudaModule& cuda_module();

/// True when the file libddp_cuda.so lies where `cuda_module` looks. Loads nothing.
bool cuda_module_available();

/// CUDA devices that this process can use. Loads the module only where an NVIDIA driver is present.
int visible_cuda_devices();

}  // namespace ddp::detail
