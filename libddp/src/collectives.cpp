#include "ddp/collectives.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstring>
#include <functional>
#include <utility>

#include "bytes.h"
#include "ddp/error.h"
#include "group_impl.h"

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

using detail::GroupImpl;
using torch::Tensor;

// The arguments of one call, checked before anything is sent.
class Call {
 public:
  Call(const char* name, const ProcessGroup& group) : name_(name), impl_(*group.impl()) {}

  [[noreturn]] void refuse(const std::string& why) const {
    throw MismatchError(fmt::format("[ddp::{}] {}: {}", name_, impl_.place.name(), why));
  }

  void require_tensor(const Tensor& tensor) const {
    if (!tensor.defined()) refuse("the tensor is undefined; give an allocated one");
    if (tensor.layout() != torch::kStrided) refuse("the tensor is sparse; call to_dense() first");
    if (tensor.is_cuda() && impl_.backend != "nccl" && !impl_.alone()) {
      refuse(fmt::format("the tensor is on {} and this group has the backend {}; move it to the CPU or make the group "
                         "with nccl",
                         tensor.device().str(), impl_.backend));
    }
  }

  void require_root(int root) const {
    if (root < 0 || root >= impl_.place.size) {
      refuse(fmt::format("root is {}, expected one of 0..{}", root, impl_.place.size - 1));
    }
  }

  void require_like(const Tensor& tensor, const Tensor& like, const std::string& what) const {
    require_tensor(tensor);
    if (tensor.sizes() != like.sizes() || tensor.scalar_type() != like.scalar_type()) {
      refuse(fmt::format("{} is {}, expected {}", what, describe(tensor), describe(like)));
    }
  }

  void require_count(size_t found, size_t expected, const char* what) const {
    if (found != expected) refuse(fmt::format("{} {} were given, expected {}, one per rank", found, what, expected));
  }

  void require_divisible(const Tensor& tensor) const {
    if (tensor.dim() == 0 || tensor.size(0) % impl_.place.size != 0) {
      refuse(fmt::format("dimension 0 of {} cannot be cut into {} equal parts", describe(tensor), impl_.place.size));
    }
  }

  static std::string describe(const Tensor& tensor) {
    return fmt::format("{}[{}]", c10::toString(tensor.scalar_type()), fmt::join(tensor.sizes(), ", "));
  }

 private:
  const char* name_;
  const GroupImpl& impl_;
};

c10d::ReduceOp to_c10d(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:  // the sum, divided afterwards: Gloo has no mean
      return c10d::ReduceOp::SUM;
    case ReduceOp::kMin:
      return c10d::ReduceOp::MIN;
    case ReduceOp::kMax:
      return c10d::ReduceOp::MAX;
    case ReduceOp::kProduct:
      return c10d::ReduceOp::PRODUCT;
    case ReduceOp::kBitAnd:
      return c10d::ReduceOp::BAND;
    case ReduceOp::kBitOr:
      return c10d::ReduceOp::BOR;
    case ReduceOp::kBitXor:
      return c10d::ReduceOp::BXOR;
  }
  throw ConfigError("[ddp] unknown ReduceOp");
}

bool is_bitwise(ReduceOp op) {
  return op == ReduceOp::kBitAnd || op == ReduceOp::kBitOr || op == ReduceOp::kBitXor;
}

// On 0 and 1 the bitwise operations are the logical ones.
ReduceOp on_bool(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMax:
      return ReduceOp::kBitOr;
    case ReduceOp::kProduct:
    case ReduceOp::kMin:
      return ReduceOp::kBitAnd;
    default:
      return op;
  }
}

// A tensor that is reduced, as the backend can carry it: contiguous, of a dtype that it knows.
struct Wire {
  Tensor tensor;
  ReduceOp op;
};

Wire to_wire(const Call& call, const Tensor& tensor, ReduceOp op) {
  const auto dtype = tensor.scalar_type();
  const bool integral = c10::isIntegralType(dtype, /*includeBool=*/true);
  if (is_bitwise(op) && !integral) {
    call.refuse(fmt::format("a bitwise operation was asked of {}; it needs integers or bool", Call::describe(tensor)));
  }
  if (op == ReduceOp::kAvg && integral) {
    call.refuse(fmt::format("the mean of {} was asked; convert it to a floating-point type, or use kSum",
                            Call::describe(tensor)));
  }
  switch (dtype) {
    case torch::kFloat:
    case torch::kDouble:
    case torch::kHalf:
    case torch::kBFloat16:
    case torch::kInt8:
    case torch::kUInt8:
    case torch::kInt32:
    case torch::kInt64:
      return {tensor.contiguous(), op};
    case torch::kInt16:
      return {tensor.to(torch::kInt32).contiguous(), op};
    case torch::kBool:
      return {tensor.to(torch::kUInt8).contiguous(), on_bool(op)};
    case torch::kComplexFloat:
    case torch::kComplexDouble:
      if (op != ReduceOp::kSum && op != ReduceOp::kAvg) {
        call.refuse(fmt::format("{} can only be summed or averaged", Call::describe(tensor)));
      }
      return {torch::view_as_real(tensor.resolve_conj().contiguous()), op};
    default:
      call.refuse(fmt::format("the dtype of {} cannot be reduced; convert it to float32", Call::describe(tensor)));
  }
}

Tensor from_wire(const Tensor& wire, const Tensor& like, ReduceOp op, int size) {
  torch::NoGradGuard no_grad;
  Tensor value = wire;
  if (op == ReduceOp::kAvg) value.div_(size);
  if (like.is_complex()) value = torch::view_as_complex(value);
  return value.to(like.scalar_type());
}

void store_result(const Tensor& value, Tensor& tensor) {
  torch::NoGradGuard no_grad;
  if (!value.is_alias_of(tensor) || !tensor.is_contiguous()) tensor.copy_(value);
}

// Tensors that only travel do so as bytes, which every backend carries, whatever their dtype.
Tensor bytes_like(const Tensor& tensor) {
  return torch::empty({static_cast<int64_t>(tensor.nbytes())}, tensor.options().dtype(torch::kUInt8));
}

void store_bytes(const Tensor& bytes, Tensor tensor) {
  torch::NoGradGuard no_grad;
  tensor.copy_(bytes.view(tensor.scalar_type()).view(tensor.sizes()));
}

Work work_of(c10::intrusive_ptr<c10d::Work> work, std::function<void()> finish = nullptr) {
  auto impl = std::make_unique<Work::Impl>();
  impl->works.push_back(std::move(work));
  impl->finish = std::move(finish);
  return Work(std::move(impl));
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
  options.reduceOp = to_c10d(wire.op);
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
  std::vector<Tensor> bytes{group.rank() == root || tensor.is_contiguous() ? detail::bytes_of(tensor) : bytes_like(tensor)};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  auto work = group.impl()->backend_for(tensor.device())->broadcast(bytes, options);
  const bool in_place = bytes[0].is_alias_of(tensor) || group.rank() == root;
  return work_of(std::move(work), [tensor, bytes = bytes[0], in_place] {
    if (!in_place) store_bytes(bytes, tensor);
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
  options.reduceOp = to_c10d(wire.op);
  options.rootRank = root;
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
  if (group.size() == 1) {
    torch::NoGradGuard no_grad;
    outputs[0].copy_(tensor);
    return Work();
  }
  if (tensor.numel() == 0) return Work();
  std::vector<Tensor> inputs{detail::bytes_of(tensor)};
  std::vector<std::vector<Tensor>> gathered(1);
  for (const auto& output : outputs) gathered[0].push_back(bytes_like(output));
  auto work = group.impl()->backend_for(tensor.device())->allgather(gathered, inputs, c10d::AllgatherOptions());
  return work_of(std::move(work), [outputs = std::move(outputs), parts = gathered[0]] {
    for (size_t rank = 0; rank < outputs.size(); ++rank) store_bytes(parts[rank], outputs[rank]);
  });
}

Work gather_async(std::vector<Tensor> outputs, const Tensor& tensor, const ProcessGroup& group, int root) {
  const Call call("gather", group);
  call.require_tensor(tensor);
  call.require_root(root);
  const bool mine = group.rank() == root;
  call.require_count(outputs.size(), mine ? group.size() : 0, "outputs");
  for (const auto& output : outputs) call.require_like(output, tensor, "an output");
  if (group.size() == 1) {
    torch::NoGradGuard no_grad;
    outputs[0].copy_(tensor);
    return Work();
  }
  if (tensor.numel() == 0) return Work();
  std::vector<Tensor> inputs{detail::bytes_of(tensor)};
  std::vector<std::vector<Tensor>> gathered;
  if (mine) {
    gathered.emplace_back();
    for (const auto& output : outputs) gathered[0].push_back(bytes_like(output));
  }
  c10d::GatherOptions options;
  options.rootRank = root;
  auto work = group.impl()->backend_for(tensor.device())->gather(gathered, inputs, options);
  return work_of(std::move(work), [outputs = std::move(outputs), gathered] {
    for (size_t rank = 0; rank < outputs.size(); ++rank) store_bytes(gathered[0][rank], outputs[rank]);
  });
}

Work scatter_async(Tensor output, const std::vector<Tensor>& inputs, const ProcessGroup& group, int root) {
  const Call call("scatter", group);
  call.require_tensor(output);
  call.require_root(root);
  const bool mine = group.rank() == root;
  call.require_count(inputs.size(), mine ? group.size() : 0, "inputs");
  for (const auto& input : inputs) call.require_like(input, output, "an input");
  if (group.size() == 1) {
    torch::NoGradGuard no_grad;
    output.copy_(inputs[0]);
    return Work();
  }
  if (output.numel() == 0) return Work();
  std::vector<Tensor> outputs{bytes_like(output)};
  std::vector<std::vector<Tensor>> parts;
  if (mine) {
    parts.emplace_back();
    for (const auto& input : inputs) parts[0].push_back(detail::bytes_of(input));
  }
  c10d::ScatterOptions options;
  options.rootRank = root;
  auto work = group.impl()->backend_for(output.device())->scatter(outputs, parts, options);
  return work_of(std::move(work), [output, part = outputs[0], parts] { store_bytes(part, output); });
}

Work reduce_scatter_async(Tensor output, const Tensor& tensor, const ProcessGroup& group, ReduceOp op) {
  const Call call("reduce_scatter", group);
  call.require_tensor(tensor);
  call.require_divisible(tensor);
  const int64_t rows = tensor.size(0) / group.size();
  call.require_like(output, tensor.narrow(0, 0, rows), "the output");
  const Wire wire = to_wire(call, tensor, op);
  if (group.size() == 1) {
    torch::NoGradGuard no_grad;
    output.copy_(tensor);
    return Work();
  }
  if (tensor.numel() == 0) return Work();
  const auto backend = group.impl()->backend_for(tensor.device());
  const auto finish = [op, size = group.size()](const Tensor& part, Tensor output) {
    store_result(from_wire(part, output, op, size), output);
  };
  if (tensor.is_cuda()) {
    std::vector<std::vector<Tensor>> inputs{wire.tensor.chunk(group.size())};
    std::vector<Tensor> outputs{torch::empty_like(inputs[0][0])};
    c10d::ReduceScatterOptions options;
    options.reduceOp = to_c10d(wire.op);
    auto work = backend->reduce_scatter(outputs, inputs, options);
    return work_of(std::move(work), [finish, part = outputs[0], output] { finish(part, output); });
  }
  // Gloo's own reduce_scatter is an all_reduce as well.
  Tensor whole = wire.tensor.is_alias_of(tensor) ? wire.tensor.clone() : wire.tensor;
  std::vector<Tensor> tensors{whole.detach()};
  c10d::AllreduceOptions options;
  options.reduceOp = to_c10d(wire.op);
  auto work = backend->allreduce(tensors, options);
  const Tensor part = whole.narrow(0, rows * group.rank(), rows);
  return work_of(std::move(work), [finish, part, output] { finish(part, output); });
}

Work all_to_all_async(Tensor output, const Tensor& tensor, const ProcessGroup& group) {
  const Call call("all_to_all", group);
  call.require_tensor(tensor);
  call.require_divisible(tensor);
  call.require_like(output, tensor, "the output");
  if (group.size() == 1) {
    torch::NoGradGuard no_grad;
    output.copy_(tensor);
    return Work();
  }
  if (tensor.numel() == 0) return Work();
  GroupImpl& impl = *group.impl();
  const auto backend = impl.backend_for(tensor.device());
  std::vector<Tensor> outgoing = detail::bytes_of(tensor).chunk(group.size());
  const Tensor received = bytes_like(output);
  std::vector<Tensor> incoming = received.chunk(group.size());
  auto work = std::make_unique<Work::Impl>();
  if (tensor.is_cuda()) {
    work->works.push_back(backend->alltoall(incoming, outgoing, c10d::AllToAllOptions()));
  } else {
    // Gloo of libtorch 2.11 has no all_to_all of a list; messages between pairs are the same on every version.
    const int tag = impl.next_tag++;
    for (int step = 1; step < group.size(); ++step) {
      const int to = (group.rank() + step) % group.size(), from = (group.rank() - step + group.size()) % group.size();
      std::vector<Tensor> in{incoming[from]}, out{outgoing[to]};
      work->works.push_back(backend->recv(in, from, tag));
      work->works.push_back(backend->send(out, to, tag));
    }
    incoming[group.rank()].copy_(outgoing[group.rank()]);
  }
  work->finish = [output, received, outgoing] { store_bytes(received, output); };
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
  Tensor output = torch::empty_like(tensor.narrow(0, 0, tensor.size(0) / group.size()), torch::MemoryFormat::Contiguous);
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
