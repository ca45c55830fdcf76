// The one door to ProcessGroupGloo, whose headers libtorch does not ship whole.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>

namespace ddp::detail {

/// Connects `size` ranks through `store`. Collective. Throws c10::Error.
c10::intrusive_ptr<c10d::Backend> make_gloo(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                            std::chrono::milliseconds timeout);

}  // namespace ddp::detail
