// Copies batches to a CUDA device beside its work. Speaks to whichever device libtorch has loaded, through c10: no CUDA
// symbol is linked.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace ddp::detail {

class SideStream {
 public:
  /// Requires: the CUDA module is loaded and has a device.
  SideStream(c10::Device device, bool pin_memory);

  /// What was copied, until it has arrived.
  struct Copies {
    std::optional<c10::Event> done;
    std::vector<at::Tensor> tensors;
  };
  using Visit = std::function<void(const std::function<void(at::Tensor&)>& f)>;

  /// The calling thread's work goes to the stream of its own, until the guard ends.
  std::unique_ptr<c10::StreamGuard> enter() const { return std::make_unique<c10::StreamGuard>(stream_); }

  /// Replaces each tensor that `visit` shows by its copy on the device, made on the current stream. Does not wait.
  Copies copy(const Visit& visit) const;

  /// The stream that is current here waits for the copies, and their memory is not reused before it is done with them.
  void arrive(Copies& copies) const;

 private:
  c10::Device device_;
  bool pin_memory_;
  c10::Stream stream_;
};

}  // namespace ddp::detail
