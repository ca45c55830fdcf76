#include "ddp/collectives.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <functional>
#include <utility>

#include "call.h"
#include "group_impl.h"
#include "signature.h"
#include "wire.h"

namespace ddp {

class Work::Impl {
 public:
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  std::function<void()> finish;  // runs once, when all works are done
};

Work::Work() = default;
Work::Work(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Work::Work(Work&&) noexcept = default;
Work& Work::operator=(Work&&) noexcept = default;
Work::~Work() = default;

void Work::wait() {
  if (!impl_) return;
  const auto impl = std::move(impl_);
  for (const auto& work : impl->works) work->wait();
  if (impl->finish) impl->finish();
}

bool Work::is_completed() const {
  if (!impl_) return true;
  for (const auto& work : impl_->works) {
    if (!work->isCompleted()) return false;
  }
  return true;
}

namespace {

using namespace detail;
using torch::Tensor;

Work work_of(c10::intrusive_ptr<c10d::Work> work, std::function<void()> finish = nullptr) {
  auto impl = std::make_unique<Work::Impl>();
  impl->works.push_back(std::move(work));
  impl->finish = std::move(finish);
  return Work(std::move(impl));
}

// As the numbers of c10d::ReduceOp: a mean travels as a sum, so what was asked for is said apart.
int shown(ReduceOp op) {
  constexpr c10d::ReduceOp::RedOpType kOps[] = {c10d::ReduceOp::SUM, c10d::ReduceOp::AVG,     c10d::ReduceOp::MIN,
                                                c10d::ReduceOp::MAX, c10d::ReduceOp::PRODUCT, c10d::ReduceOp::BAND,
                                                c10d::ReduceOp::BOR, c10d::ReduceOp::BXOR};
  return kOps[static_cast<int>(op)];
}

// In a world of one.
Work copied(const Tensor& from, Tensor to) {
  torch::NoGradGuard no_grad;
  to.copy_(from);
  return Work();
}

std::vector<Tensor> like_for_each_rank(const Tensor& tensor, const ProcessGroup& group) {
  std::vector<Tensor> outputs(group.size());
  for (auto& output : outputs) output = torch::empty_like(tensor, torch::MemoryFormat::Contiguous);
  return outputs;
}

}  // namespace

Work all_reduce_async(Tensor tensor, const ProcessGroup& group, ReduceOp op) {
  const Call call("all_reduce", group);
  call.require_tensor(tensor);
  const Wire wire = to_wire(call, tensor, op);
  if (group.size() == 1 || tensor.numel() == 0) return Work();
  std::vector<Tensor> tensors{wire.tensor.detach()};
  c10d::AllreduceOptions options;
  options.reduceOp = wire.c10d_op();
  const Intent intent("all_reduce", tensor, shown(op));
  auto work = group.impl()->backend_for(tensor.device())->allreduce(tensors, options);
  return work_of(std::move(work), [tensor, wire, op, size = group.size()]() mutable {
    store_result(from_wire(wire.tensor, tensor, op, size), tensor);
  });
}

Work broadcast_async(Tensor tensor, const ProcessGroup& group, int root) {
  const Call call("broadcast", group);
  call.require_tensor(tensor);
  call.require_root(root);
  if (group.size() == 1 || tensor.numel() == 0) return Work();
  std::vector<Tensor> bytes{group.rank() == root || tensor.is_contiguous() ? carried(tensor, group)
                                                                           : room_for(tensor, group)};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  const Intent intent("broadcast", tensor);
  auto work = group.impl()->backend_for(tensor.device())->broadcast(bytes, options);
  const bool in_place = bytes[0].is_alias_of(tensor) || group.rank() == root;
  return work_of(std::move(work), [tensor, bytes = bytes[0], in_place] {
    if (!in_place) unpack(bytes, tensor);
  });
}

Work reduce_async(Tensor tensor, const ProcessGroup& group, int root, ReduceOp op) {
  const Call call("reduce", group);
  call.require_tensor(tensor);
  call.require_root(root);
  const Wire wire = to_wire(call, tensor, op);
  if (group.size() == 1 || tensor.numel() == 0) return Work();
  std::vector<Tensor> tensors{wire.tensor.detach()};
  c10d::ReduceOptions options;
  options.reduceOp = wire.c10d_op();
  options.rootRank = root;
  const Intent intent("reduce", tensor, shown(op));
  auto work = group.impl()->backend_for(tensor.device())->reduce(tensors, options);
  return work_of(std::move(work), [tensor, wire, op, size = group.size(), mine = group.rank() == root]() mutable {
    if (mine) store_result(from_wire(wire.tensor, tensor, op, size), tensor);
  });
}

Work all_gather_async(std::vector<Tensor> outputs, const Tensor& tensor, const ProcessGroup& group) {
  const Call call("all_gather", group);
  call.require_tensor(tensor);
  call.require_count(outputs.size(), group.size(), "outputs");
  for (const auto& output : outputs) call.require_like(output, tensor, "an output");
  if (group.size() == 1) return copied(tensor, outputs[0]);
  if (tensor.numel() == 0) return Work();
  std::vector<Tensor> inputs{carried(tensor, group)};
  std::vector<std::vector<Tensor>> gathered(1);
  for (const auto& output : outputs) gathered[0].push_back(room_for(output, group));
  const Intent intent("all_gather", tensor);
  auto work = group.impl()->backend_for(tensor.device())->allgather(gathered, inputs, c10d::AllgatherOptions());
  return work_of(std::move(work), [outputs = std::move(outputs), parts = gathered[0]] {
    for (size_t rank = 0; rank < outputs.size(); ++rank) unpack(parts[rank], outputs[rank]);
  });
}

Work gather_async(std::vector<Tensor> outputs, const Tensor& tensor, const ProcessGroup& group, int root) {
  const Call call("gather", group);
  call.require_tensor(tensor);
  call.require_root(root);
  const bool mine = group.rank() == root;
  call.require_count(outputs.size(), mine ? group.size() : 0, "outputs");
  for (const auto& output : outputs) call.require_like(output, tensor, "an output");
  if (group.size() == 1) return copied(tensor, outputs[0]);
  if (tensor.numel() == 0) return Work();
  std::vector<Tensor> inputs{carried(tensor, group)};
  std::vector<std::vector<Tensor>> gathered;
  if (mine) {
    gathered.emplace_back();
    for (const auto& output : outputs) gathered[0].push_back(room_for(output, group));
  }
  c10d::GatherOptions options;
  options.rootRank = root;
  const Intent intent("gather", tensor);
  auto work = group.impl()->backend_for(tensor.device())->gather(gathered, inputs, options);
  return work_of(std::move(work), [outputs = std::move(outputs), gathered] {
    for (size_t rank = 0; rank < outputs.size(); ++rank) unpack(gathered[0][rank], outputs[rank]);
  });
}

Work scatter_async(Tensor output, const std::vector<Tensor>& inputs, const ProcessGroup& group, int root) {
  const Call call("scatter", group);
  call.require_tensor(output);
  call.require_root(root);
  const bool mine = group.rank() == root;
  call.require_count(inputs.size(), mine ? group.size() : 0, "inputs");
  for (const auto& input : inputs) call.require_like(input, output, "an input");
  if (group.size() == 1) return copied(inputs[0], output);
  if (output.numel() == 0) return Work();
  std::vector<Tensor> outputs{room_for(output, group)};
  std::vector<std::vector<Tensor>> parts;
  if (mine) {
    parts.emplace_back();
    for (const auto& input : inputs) parts[0].push_back(carried(input, group));
  }
  c10d::ScatterOptions options;
  options.rootRank = root;
  const Intent intent("scatter", output);
  auto work = group.impl()->backend_for(output.device())->scatter(outputs, parts, options);
  return work_of(std::move(work), [output, part = outputs[0], parts] { unpack(part, output); });
}

Work reduce_scatter_async(Tensor output, const Tensor& tensor, const ProcessGroup& group, ReduceOp op) {
  const Call call("reduce_scatter", group);
  call.require_tensor(tensor);
  call.require_divisible(tensor);
  const int64_t rows = tensor.size(0) / group.size();
  call.require_like(output, tensor.narrow(0, 0, rows), "the output");
  const Wire wire = to_wire(call, tensor, op);
  if (group.size() == 1) return copied(tensor, output);
  if (tensor.numel() == 0) return Work();
  const Intent intent("reduce_scatter", tensor, shown(op));
  const auto backend = group.impl()->backend_for(tensor.device());
  const auto finish = [op, size = group.size()](const Tensor& part, Tensor output) {
    store_result(from_wire(part, output, op, size), output);
  };
  if (backend->getBackendName() != "gloo") {
    std::vector<std::vector<Tensor>> inputs{wire.tensor.chunk(group.size())};
    std::vector<Tensor> outputs{torch::empty_like(inputs[0][0])};
    c10d::ReduceScatterOptions options;
    options.reduceOp = wire.c10d_op();
    auto work = backend->reduce_scatter(outputs, inputs, options);
    return work_of(std::move(work), [finish, part = outputs[0], output] { finish(part, output); });
  }
  // Gloo's own reduce_scatter is an all_reduce as well.
  Tensor whole = wire.tensor.is_alias_of(tensor) ? wire.tensor.clone() : wire.tensor;
  std::vector<Tensor> tensors{whole.detach()};
  c10d::AllreduceOptions options;
  options.reduceOp = wire.c10d_op();
  auto work = backend->allreduce(tensors, options);
  const Tensor part = whole.narrow(0, rows * group.rank(), rows);
  return work_of(std::move(work), [finish, part, output] { finish(part, output); });
}

Work all_to_all_async(Tensor output, const Tensor& tensor, const ProcessGroup& group) {
  const Call call("all_to_all", group);
  call.require_tensor(tensor);
  call.require_divisible(tensor);
  call.require_like(output, tensor, "the output");
  if (group.size() == 1) return copied(tensor, output);
  if (tensor.numel() == 0) return Work();
  GroupImpl& impl = *group.impl();
  const auto backend = impl.backend_for(tensor.device());
  std::vector<Tensor> outgoing = carried(tensor, group).flatten().chunk(group.size());
  const Tensor received = room_for(output, group);
  std::vector<Tensor> incoming = received.chunk(group.size());
  auto work = std::make_unique<Work::Impl>();
  if (backend->getBackendName() != "gloo") {
    work->works.push_back(backend->alltoall(incoming, outgoing, c10d::AllToAllOptions()));
  } else {
    // Gloo of libtorch 2.11 has no all_to_all of a list; messages between pairs are the same on every version. They
    // have no signature, so a byte that has one goes before them.
    const Intent intent("all_to_all", tensor);
    std::vector<Tensor> proof{torch::zeros({1}, torch::kUInt8)};
    work->works.push_back(backend->allreduce(proof, c10d::AllreduceOptions()));
    Signature signature;
    intent.describe(signature);
    const auto tag = static_cast<int>(tag_of(signature, static_cast<uint64_t>(impl.next_tag++)) & 0x7fffffff);
    for (int step = 1; step < group.size(); ++step) {
      const int to = (group.rank() + step) % group.size(), from = (group.rank() - step + group.size()) % group.size();
      std::vector<Tensor> in{incoming[from]}, out{outgoing[to]};
      work->works.push_back(backend->recv(in, from, tag));
      work->works.push_back(backend->send(out, to, tag));
    }
    incoming[group.rank()].copy_(outgoing[group.rank()]);
  }
  work->finish = [output, received, outgoing] { unpack(received, output); };
  return Work(std::move(work));
}

Work barrier_async(const ProcessGroup& group) {
  if (group.size() == 1) return Work();
  return work_of(group.impl()->backend_for(c10::kCPU)->barrier(c10d::BarrierOptions()));
}

void all_reduce(Tensor tensor, const ProcessGroup& group, ReduceOp op) {
  all_reduce_async(std::move(tensor), group, op).wait();
}

void broadcast(Tensor tensor, const ProcessGroup& group, int root) {
  broadcast_async(std::move(tensor), group, root).wait();
}

void reduce(Tensor tensor, const ProcessGroup& group, int root, ReduceOp op) {
  reduce_async(std::move(tensor), group, root, op).wait();
}

std::vector<Tensor> all_gather(const Tensor& tensor, const ProcessGroup& group) {
  Call("all_gather", group).require_tensor(tensor);
  auto outputs = like_for_each_rank(tensor, group);
  all_gather_async(outputs, tensor, group).wait();
  return outputs;
}

std::vector<Tensor> gather(const Tensor& tensor, const ProcessGroup& group, int root) {
  Call("gather", group).require_tensor(tensor);
  std::vector<Tensor> outputs;
  if (group.rank() == root) outputs = like_for_each_rank(tensor, group);
  gather_async(outputs, tensor, group, root).wait();
  return outputs;
}

void scatter(Tensor output, const std::vector<Tensor>& inputs, const ProcessGroup& group, int root) {
  scatter_async(std::move(output), inputs, group, root).wait();
}

Tensor reduce_scatter(const Tensor& tensor, const ProcessGroup& group, ReduceOp op) {
  const Call call("reduce_scatter", group);
  call.require_tensor(tensor);
  call.require_divisible(tensor);
  Tensor output =
      torch::empty_like(tensor.narrow(0, 0, tensor.size(0) / group.size()), torch::MemoryFormat::Contiguous);
  reduce_scatter_async(output, tensor, group, op).wait();
  return output;
}

Tensor all_to_all(const Tensor& tensor, const ProcessGroup& group) {
  Call("all_to_all", group).require_tensor(tensor);
  Tensor output = torch::empty_like(tensor, torch::MemoryFormat::Contiguous);
  all_to_all_async(output, tensor, group).wait();
  return output;
}

void barrier(const ProcessGroup& group) { barrier_async(group).wait(); }

}  // namespace ddp
