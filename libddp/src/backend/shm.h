// Shared memory as a c10d backend, for ranks on one host: what Gloo does over sockets, without them.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <memory>

#include "shm/exchange.h"

namespace ddp::detail {

/// `connect_gloo` makes the backend for what is not done here, sparse tensors; it is called when they first come.
c10::intrusive_ptr<c10d::Backend> make_shm(std::unique_ptr<shm::Exchange> exchange,
                                           std::function<c10::intrusive_ptr<c10d::Backend>()> connect_gloo);

}  // namespace ddp::detail
