// The arguments of a collective, checked before anything is sent.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/types.h>

#include <string>

#include "ddp/error.h"
#include "ddp/process_group.h"
#include "group_impl.h"

namespace ddp::detail {

/// One call, for its error messages. The checks throw MismatchError.
class Call {
 public:
  Call(const char* name, const ProcessGroup& group) : name_(name), impl_(*group.impl()) {}

  [[noreturn]] void refuse(const std::string& why) const {
    throw MismatchError(fmt::format("[ddp::{}] {}: {}", name_, impl_.place.name(), why));
  }

  void require_tensor(const torch::Tensor& tensor) const {
    if (!tensor.defined()) refuse("the tensor is undefined; give an allocated one");
    if (tensor.layout() != torch::kStrided) refuse("the tensor is sparse; call to_dense() first");
    if (tensor.is_cuda() && impl_.backend != "nccl" && !impl_.alone()) {
      refuse(
          fmt::format("the tensor is on {} and this group has the backend {}; move it to the CPU or make the group "
                      "with nccl",
                      tensor.device().str(), impl_.backend));
    }
  }

  void require_root(int root) const {
    if (root < 0 || root >= impl_.place.size) {
      refuse(fmt::format("root is {}, expected one of 0..{}", root, impl_.place.size - 1));
    }
  }

  void require_like(const torch::Tensor& tensor, const torch::Tensor& like, const std::string& what) const {
    require_tensor(tensor);
    if (tensor.sizes() != like.sizes() || tensor.scalar_type() != like.scalar_type()) {
      refuse(fmt::format("{} is {}, expected {}", what, describe(tensor), describe(like)));
    }
  }

  void require_count(size_t found, size_t expected, const char* what) const {
    if (found != expected) refuse(fmt::format("{} {} were given, expected {}, one per rank", found, what, expected));
  }

  void require_divisible(const torch::Tensor& tensor) const {
    if (tensor.dim() == 0 || tensor.size(0) % impl_.place.size != 0) {
      refuse(fmt::format("dimension 0 of {} cannot be cut into {} equal parts", describe(tensor), impl_.place.size));
    }
  }

  static std::string describe(const torch::Tensor& tensor) {
    return fmt::format("{}[{}]", c10::toString(tensor.scalar_type()), fmt::join(tensor.sizes(), ", "));
  }

 private:
  const char* name_;
  const GroupImpl& impl_;
};

}  // namespace ddp::detail
