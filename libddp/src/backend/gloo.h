// The one door to ProcessGroupGloo, whose headers libtorch does not ship whole.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>

namespace ddp::detail {

/// Connects `size` ranks through `store`. Collective. Throws c10::Error.
c10::intrusive_ptr<c10d::Backend> make_gloo(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                            std::chrono::milliseconds timeout);

/// The messages of the next collective of `gloo`, made by `make_gloo`, carry `tag`: they meet those of the same tag
/// alone. Where two are on their way at once their tags must differ.
void set_next_tag(c10d::Backend& gloo, uint32_t tag);

}  // namespace ddp::detail
