#include "side_stream.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

namespace ddp::detail {
namespace {

c10::Device with_index(c10::Device device) {
  return device.has_index() ? device : c10::impl::VirtualGuardImpl(device.type()).getDevice();
}

}  // namespace

SideStream::SideStream(c10::Device device, bool pin_memory)
    : device_(with_index(device)),
      pin_memory_(pin_memory),
      stream_(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device_)) {}

SideStream::Copies SideStream::copy(const Visit& visit) const {
  Copies copies;
  visit([&](at::Tensor& tensor) {
    if (!tensor.defined()) return;
    // Page-locked memory goes back to libtorch's cache of it, which keeps it until the copy is done.
    const at::Tensor source = pin_memory_ && tensor.is_cpu() ? tensor.pin_memory() : tensor;
    tensor = source.to(source.options().device(device_), /*non_blocking=*/true);
    copies.tensors.push_back(tensor);
  });
  copies.done.emplace(device_.type());
  copies.done->record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  return copies;
}

void SideStream::arrive(Copies& copies) const {
  const c10::Stream current = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  copies.done->block(current);
  for (const at::Tensor& tensor : copies.tensors) tensor.record_stream(current);
  copies = {};
}

}  // namespace ddp::detail
