// Shared memory inside each host and Gloo between hosts, as one c10d backend: "shm+gloo".
//
//   auto backend = make_hierarchy({.place = place, .group = name, .timeout = timeout, .hosts = joined.hosts,
//                                  .exchange = std::move(joined.exchange), .store = keys});
//   backend->allreduce(tensors)->wait();      // goes on while the caller computes
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <string>

#include "backend/two_levels.h"

namespace ddp::detail {

/// The name of the backend, in c10d and in `ProcessGroup::backend`.
inline constexpr const char* kHierarchy = "shm+gloo";

/// all_reduce, reduce, broadcast, barrier, and all_gather where all hosts have the same number of ranks, in two levels;
/// reduce_scatter as an all_reduce; the rest, and sparse tensors, over one Gloo group of all ranks, connected when it is
/// first needed. Collectives are done one after the other on a thread of the backend. Collective. Throws c10::Error.
c10::intrusive_ptr<c10d::Backend> make_hierarchy(TwoLevelsOptions options);

/// "2 hosts of 4 ranks, shared memory inside each, Gloo between 4 leaders of each" for the first log line.
std::string describe_hosts(const shm::Hosts& hosts);

}  // namespace ddp::detail
