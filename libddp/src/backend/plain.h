// Tensors as the plain memory that shared-memory collectives work on.
#pragma once

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <span>
#include <string>
#include <vector>

#include "ddp/error.h"
#include "shm/collectives.h"

namespace ddp::detail {

[[noreturn]] inline void refuse(const char* operation, const std::string& why) {
  throw MismatchError(fmt::format("[ddp::{}] {}", operation, why));
}

// A tensor as plain memory for the time of a call. Where it is not contiguous, a copy, which `put_back` writes back.
class Plain {
 public:
  Plain(const char* operation, const at::Tensor& tensor) : tensor_(tensor) {
    if (!tensor.device().is_cpu() || tensor.layout() != c10::kStrided) {
      refuse(operation, fmt::format("the shm backend moves dense CPU tensors, this one is {} on {}; move it to the CPU",
                                    c10::str(tensor.layout()), tensor.device().str()));
    }
    plain_ = tensor.detach().resolve_conj().resolve_neg().contiguous();
    if (plain_.is_complex()) plain_ = at::view_as_real(plain_);
  }

  shm::Buffer buffer() const {
    return {.data = static_cast<std::byte*>(plain_.data_ptr()), .count = plain_.numel(), .dtype = plain_.scalar_type()};
  }

  void put_back() {
    if (plain_.is_alias_of(tensor_)) return;
    at::NoGradGuard no_grad;
    tensor_.detach().copy_(tensor_.is_complex() ? at::view_as_complex(plain_) : plain_);
  }

 private:
  at::Tensor tensor_, plain_;
};

class Plains {
 public:
  Plains(const char* operation, const std::vector<at::Tensor>& tensors) {
    for (const at::Tensor& tensor : tensors) plains_.emplace_back(operation, tensor);
    for (const Plain& plain : plains_) buffers_.push_back(plain.buffer());
  }

  std::span<const shm::Buffer> buffers() const { return buffers_; }
  void put_back() {
    for (Plain& plain : plains_) plain.put_back();
  }

 private:
  std::vector<Plain> plains_;
  std::vector<shm::Buffer> buffers_;
};

}  // namespace ddp::detail
