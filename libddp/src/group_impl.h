// What a ProcessGroup shares between its copies.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <string>

#include "ddp/env.h"
#include "ddp/place.h"
#include "watched_backend.h"

namespace ddp::detail {

struct GroupImpl {
  Place place;
  int local_rank = 0;
  std::string name = "world";
  std::string wanted = "auto";   // of the options
  std::string backend = "none";  // for tensors on `device`
  std::string why;               // it was chosen
  c10::Device device = c10::kCPU;
  std::chrono::milliseconds timeout = std::chrono::minutes(10);

  // Null in a world of one.
  c10::intrusive_ptr<c10d::Store> store;
  c10::intrusive_ptr<c10d::ProcessGroup> group;

  int children = 0;  // groups made of this one, counted alike on all ranks
  int next_tag = 0;  // of point-to-point messages, counted alike on all ranks

  bool alone() const { return place.size == 1; }

  /// The backend for tensors on `device`: shared memory or Gloo for the CPU, NCCL for CUDA.
  c10::intrusive_ptr<c10d::Backend> backend_for(const c10::Device& device) const {
    return group->getBackend(device.type());
  }
};

/// Connects the ranks of `place` through `store` (keys of their own under it). Collective.
std::shared_ptr<GroupImpl> connect_group(GroupImpl description, c10::intrusive_ptr<c10d::Store> store);

}  // namespace ddp::detail
