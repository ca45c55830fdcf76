// libddp_cuda: everything of this library that needs CUDA or NCCL to link.
#include <c10/cuda/CUDAFunctions.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "cuda_module.h"

namespace {

c10::intrusive_ptr<c10d::Backend> make_nccl(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                            std::chrono::milliseconds timeout) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = timeout;
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(store, rank, size, options);
}

int device_count() { return c10::cuda::device_count(); }

void set_device(int device) { c10::cuda::set_device(static_cast<c10::DeviceIndex>(device)); }

}  // namespace

extern "C" __attribute__((visibility("default"))) const ddp::detail::CudaModule ddp_cuda_module{
    .device_count = device_count,
    .set_device = set_device,
    .make_nccl = make_nccl,
};
