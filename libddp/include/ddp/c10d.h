// Opt-in: the c10d objects under a group, for code that calls c10d itself. The only public header that includes c10d;
// `ddp.h` does not include it.
//
//   ddp::c10d_group(group)->allreduce(tensors)->wait();
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "ddp/process_group.h"

namespace ddp {

/// The c10d group. Throws ConfigError in a world of one, which has none.
c10::intrusive_ptr<c10d::ProcessGroup> c10d_group(const ProcessGroup& group);

}  // namespace ddp
