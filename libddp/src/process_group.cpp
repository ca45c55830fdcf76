#include "ddp/process_group.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "backend/gloo.h"
#include "backend/hierarchy.h"
#include "backend/shm.h"
#include "cuda_module.h"
#include "ddp/c10d.h"
#include "ddp/collectives.h"
#include "ddp/error.h"
#include "ddp/log.h"
#include "error_text.h"
#include "group_impl.h"
#include "rendezvous.h"
#include "shm/join.h"

namespace ddp {
namespace {

using detail::GroupImpl;

std::string who(const Place& place) { return fmt::format("[ddp::ProcessGroup] {}", place.name()); }

void check(const Env& env, const ProcessGroupOptions& options) {
  const std::string& backend = options.backend;
  if (backend != "auto" && backend != "shm" && backend != "gloo" && backend != "nccl") {
    throw ConfigError(
        fmt::format("{}: backend \"{}\" is not known; choose auto, shm, gloo or nccl", who(env.place()), backend));
  }
  if (options.timeout <= std::chrono::milliseconds::zero()) {
    throw ConfigError(
        fmt::format("{}: the timeout is {} ms; give a positive one", who(env.place()), options.timeout.count()));
  }
  if (env.world_size < 1 || env.rank < 0 || env.rank >= env.world_size) {
    throw ConfigError(fmt::format("{}: the rank must lie in 0..{}", who(env.place()), env.world_size - 1));
  }
  if (options.device && !options.device->is_cpu() && !options.device->is_cuda()) {
    throw ConfigError(
        fmt::format("{}: device {} is not supported; choose cpu or cuda", who(env.place()), options.device->str()));
  }
}

// One CUDA device per process where there are any, unless the options say otherwise.
torch::Device choose_device(const Env& env, const ProcessGroupOptions& options) {
  torch::Device device = torch::kCPU;
  if (options.device) {
    device = *options.device;
    if (device.is_cuda() && !device.has_index()) device = torch::Device(torch::kCUDA, env.local_rank);
  } else if (options.backend != "gloo" && options.backend != "shm") {
    const bool one_per_task = env.launcher == Launcher::kSlurm;
    const int visible = detail::visible_cuda_devices();
    if (const auto index = pick_device(env.local_rank, env.local_world_size, visible, one_per_task)) {
      device = torch::Device(torch::kCUDA, static_cast<c10::DeviceIndex>(*index));
    }
  }
  if (options.backend == "nccl" && !device.is_cuda()) {
    detail::cuda_module();  // says so when it is the module that is missing
    throw ConfigError(
        fmt::format("{}: backend nccl needs a CUDA device and this process sees none; use gloo on the CPU, "
                    "or check the driver and CUDA_VISIBLE_DEVICES",
                    who(env.place())));
  }
  if (device.is_cuda()) detail::cuda_module().set_device(device.index());
  return device;
}

void log_choice(const GroupImpl& impl, const Env& env) {
  const std::string launcher =
      env.launcher == Launcher::kNone ? std::string("no launcher") : std::string(to_string(env.launcher));
  const std::string why = impl.alone() ? "a world of one needs none" : impl.why;
  log::info(impl.place, fmt::format("world of {} ({}), backend {} ({}), device {}, threads={}, timeout {:.3g} s",
                                    impl.place.size, launcher, impl.backend, why, impl.device.str(),
                                    at::get_num_threads(), std::chrono::duration<double>(impl.timeout).count()));
}

}  // namespace

namespace detail {
namespace {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

// Called before all ranks throw: rank 0 may serve the store, in which the others have to read why.
void let_all_know(c10d::Store& store, const Place& place) {
  const auto key = [](int rank) { return fmt::format("knows/{}", rank); };
  try {
    store.set(key(place.rank), "1");
    for (int rank = 1; place.rank == 0 && rank < place.size; ++rank) store.wait({key(rank)}, std::chrono::seconds(1));
  } catch (const std::exception&) {
    // Who is gone need not know.
  }
}

// Shared memory where all ranks are on one host, both where several hosts have several, else Gloo; `impl` gets the choice
// and the reason.
BackendPtr connect_cpu(GroupImpl& impl, const std::shared_ptr<CallLog>& log) {
  const auto connect_gloo = [store = impl.store, place = impl.place, timeout = impl.timeout, log]() -> BackendPtr {
    const auto keys = c10::make_intrusive<c10d::PrefixStore>("gloo", store);
    log->set_local_peers(LocalPeers(*keys, place));
    return watch(make_gloo(keys, place.rank, place.size, timeout), log);
  };
  const auto choose = [&](const std::string& name, const std::string& reason) {
    if (impl.backend == "nccl") {
      impl.why = fmt::format("CUDA tensors; {} for CPU tensors: {}", name, reason);
    } else {
      impl.backend = name;
      impl.why = reason;
    }
  };
  if (impl.wanted == "gloo") {
    choose("gloo", "as asked");
    return connect_gloo();
  }
  c10d::PrefixStore keys("shm", impl.store);
  auto joined = shm::join(keys, impl.place, impl.name, impl.timeout);
  const bool apart = joined.hosts.size() > 1;
  if (joined.exchange && !apart) {
    choose("shm", "all ranks share a host");
    return make_shm(std::move(joined.exchange), connect_gloo);
  }
  if (impl.wanted == "shm") {
    let_all_know(keys, impl.place);
    throw ConfigError(fmt::format("{}: backend shm needs all ranks on one host: {}; choose auto or gloo",
                                  who(impl.place), apart ? joined.why_apart : joined.why_not));
  }
  if (std::ssize(joined.hosts) == impl.place.size || !joined.why_not.empty()) {
    choose("gloo", joined.why_not.empty() ? joined.why_apart : joined.why_not);
    return connect_gloo();
  }
  choose(kHierarchy, describe_hosts(joined.hosts));
  return make_hierarchy({.place = impl.place,
                         .group = impl.name,
                         .timeout = impl.timeout,
                         .hosts = std::move(joined.hosts),
                         .exchange = std::move(joined.exchange),
                         .store = c10::make_intrusive<c10d::PrefixStore>(kHierarchy, impl.store)});
}

}  // namespace

std::shared_ptr<GroupImpl> connect_group(GroupImpl description, c10::intrusive_ptr<c10d::Store> store) {
  using c10d::ProcessGroup;
  auto impl = std::make_shared<GroupImpl>(std::move(description));
  const int rank = impl->place.rank, size = impl->place.size;
  impl->store = std::move(store);
  auto log = std::make_shared<CallLog>(c10::make_intrusive<c10d::PrefixStore>("calls", impl->store), impl->place,
                                       impl->name, impl->timeout);
  try {
    impl->group = c10::make_intrusive<ProcessGroup>(impl->store, rank, size);
    auto cpu = connect_cpu(*impl, log);
    impl->group->setBackend(c10::kCPU, ProcessGroup::BackendType::CUSTOM, cpu);
    impl->group->setDefaultBackend(ProcessGroup::BackendType::CUSTOM);
    if (impl->backend == "nccl") {
      auto nccl = cuda_module().make_nccl(c10::make_intrusive<c10d::PrefixStore>("nccl", impl->store), rank, size,
                                          impl->timeout);
      impl->group->setBackend(c10::kCUDA, ProcessGroup::BackendType::NCCL, watch(std::move(nccl), log));
      impl->group->setDefaultBackend(ProcessGroup::BackendType::NCCL);
    }
    impl->group->setGroupName(impl->name);
    // The rank that serves the store must not leave while others still connect through it.
    cpu->barrier(c10d::BarrierOptions())->wait();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& e) {
    const std::string lost = lost_store(*impl->store);
    throw CommError(fmt::format("{}: the ranks of group \"{}\" met but could not connect: {}{}", who(impl->place),
                                impl->name, error_text(e),
                                !lost.empty() ? lost
                                              : "; on several hosts set GLOO_SOCKET_IFNAME to the network interface "
                                                "that they share"));
  }
  return impl;
}

}  // namespace detail

ProcessGroup::ProcessGroup() : impl_(std::make_shared<GroupImpl>()) {}

ProcessGroup ProcessGroup::from_env(ProcessGroupOptions options) {
  return ProcessGroup(read_env(), std::move(options));
}

ProcessGroup::ProcessGroup(const Env& env, ProcessGroupOptions options) {
  check(env, options);
  GroupImpl description;
  description.place = env.place();
  description.local_rank = env.local_rank;
  description.timeout = options.timeout;
  description.device = choose_device(env, options);
  if (env.world_size == 1) {
    impl_ = std::make_shared<GroupImpl>(std::move(description));
  } else {
    description.wanted = options.backend;
    if (description.device.is_cuda() && options.backend != "gloo") description.backend = "nccl";
    auto store = detail::connect_store(env, options.timeout);
    const std::string traits = fmt::format("{} {}", description.device.is_cuda() ? "cuda" : "cpu", description.wanted);
    const std::string meeting = detail::meet(*store, env.place(), traits, options.timeout);
    impl_ = detail::connect_group(std::move(description),
                                  c10::make_intrusive<c10d::PrefixStore>("libddp/" + meeting, store));
  }
  log_choice(*impl_, env);
}

int ProcessGroup::rank() const { return impl_->place.rank; }
int ProcessGroup::size() const { return impl_->place.size; }
int ProcessGroup::local_rank() const { return impl_->local_rank; }
Place ProcessGroup::place() const { return impl_->place; }
torch::Device ProcessGroup::device() const { return impl_->device; }
const std::string& ProcessGroup::backend() const { return impl_->backend; }
std::chrono::milliseconds ProcessGroup::timeout() const { return impl_->timeout; }

ProcessGroup ProcessGroup::split(int color, int key) const {
  if (color < 0) {
    throw ConfigError(
        fmt::format("[ddp::ProcessGroup::split] {}: color is {}; give one >= 0, and a color of its own to a "
                    "rank that shall be alone",
                    place().name(), color));
  }
  if (impl_->alone()) return *this;
  const auto choices = all_gather(torch::tensor({color, key}, torch::kInt64), *this);
  std::vector<std::pair<int64_t, int>> members;  // by key, then by rank
  for (int rank = 0; rank < size(); ++rank) {
    if (choices[rank][0].item<int64_t>() == color) members.emplace_back(choices[rank][1].item<int64_t>(), rank);
  }
  std::sort(members.begin(), members.end());
  const auto me = std::find_if(members.begin(), members.end(), [&](const auto& m) { return m.second == rank(); });

  GroupImpl description;
  description.place = {.rank = static_cast<int>(me - members.begin()), .size = static_cast<int>(members.size())};
  description.local_rank = impl_->local_rank;
  description.device = impl_->device;
  description.timeout = impl_->timeout;
  description.name = fmt::format("{}.{}.{}", impl_->name, impl_->children++, color);
  if (description.alone()) return ProcessGroup(std::make_shared<GroupImpl>(std::move(description)));
  description.wanted = impl_->wanted;
  if (impl_->backend == "nccl") description.backend = "nccl";
  auto store = c10::make_intrusive<c10d::PrefixStore>(description.name, impl_->store);
  return ProcessGroup(detail::connect_group(std::move(description), std::move(store)));
}

ProcessGroup ProcessGroup::duplicate(const std::string& name) const {
  if (impl_->alone()) return *this;
  GroupImpl description = *impl_;
  description.children = description.next_tag = 0;
  description.name = fmt::format("{}.{}.{}", impl_->name, impl_->children++, name);
  description.group = nullptr;
  auto store = c10::make_intrusive<c10d::PrefixStore>(description.name, impl_->store);
  return ProcessGroup(detail::connect_group(std::move(description), std::move(store)));
}

c10::intrusive_ptr<c10d::ProcessGroup> c10d_group(const ProcessGroup& group) {
  if (group.impl()->alone()) {
    throw ConfigError(
        "[ddp::c10d_group] a world of one has no c10d group; start two ranks, or test group.size() first");
  }
  return group.impl()->group;
}

}  // namespace ddp
