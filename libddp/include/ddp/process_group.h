// The ranks that work together, as a value: cheap to copy, the last copy closes the connections.
//
//   auto group = ddp::ProcessGroup::from_env({.timeout = 30min});    // torchrun, Slurm, Open MPI; alone: a world of one
//   group.rank(), group.size(), group.device()
//   auto half = group.split(group.rank() % 2);                       // a group of the ranks with equal colour
#pragma once

#include <torch/types.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "ddp/env.h"
#include "ddp/place.h"

namespace ddp {

namespace detail {
struct GroupImpl;
}

/// How a group is made.
struct ProcessGroupOptions {
  /// "auto": nccl where the device is a CUDA device, else shm (shared memory) where all ranks share a host, else shm+gloo
  /// (shared memory inside each host, Gloo between them) where a host has several ranks, else gloo.
  /// "shm", "gloo", "nccl": that one or an error that says why not.
  std::string backend = "auto";
  /// For joining and for every collective.
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  /// The default is `pick_device` of the visible CUDA devices, else the CPU.
  std::optional<torch::Device> device = std::nullopt;
};

/// A group of processes. Copies share one implementation. Collectives on one group must be called in the same order on
/// all its ranks. Different groups never meet; with shm, whose collectives are done when the call returns, groups of the
/// same ranks must also be used in the same order, or from a thread each. Not thread-safe for collectives on one group.
class ProcessGroup {
 public:
  /// A world of one: every collective is the identity, no socket is opened.
  ProcessGroup();

  /// Joins the ranks that the launcher started (see `read_env`). Collective.
  /// Throws ConfigError for a faulty environment or option, TimeoutError "joined k of W" with the missing ranks,
  /// MismatchError when ranks were told different world sizes or chose different backends.
  static ProcessGroup from_env(ProcessGroupOptions options = {});

  /// The same from given values.
  explicit ProcessGroup(const Env& env, ProcessGroupOptions options = {});

  int rank() const;
  int size() const;
  int local_rank() const;
  Place place() const;
  operator Place() const { return place(); }  // NOLINT: a group is a place wherever only the place matters
  bool is_root() const { return rank() == 0; }

  /// The device of this rank's tensors.
  torch::Device device() const;
  /// "shm", "shm+gloo", "gloo", "nccl", or "none" in a world of one.
  const std::string& backend() const;
  std::chrono::milliseconds timeout() const;

  /// The group of all ranks that gave the same `color`, ordered by `key`, then by rank. Collective.
  /// Requires: color >= 0.
  ProcessGroup split(int color, int key = 0) const;

  /// The same ranks over connections of their own, so that its collectives never meet those of this group (as
  /// MPI_Comm_dup). `name` appears in error messages. Collective.
  ProcessGroup duplicate(const std::string& name) const;

  /// For the library's own sources and `ddp/c10d.h`.
  const std::shared_ptr<detail::GroupImpl>& impl() const { return impl_; }

 private:
  explicit ProcessGroup(std::shared_ptr<detail::GroupImpl> impl) : impl_(std::move(impl)) {}

  std::shared_ptr<detail::GroupImpl> impl_;
};

}  // namespace ddp
