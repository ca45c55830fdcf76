#include "ddp/autograd.h"

#include <torch/csrc/autograd/custom_function.h>

#include <fmt/format.h>

#include "ddp/error.h"

namespace ddp::autograd {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The group travels to the backward inside the graph.
struct Context : torch::CustomClassHolder {
  Context(ProcessGroup g, ReduceOp o) : group(std::move(g)), op(o) {}
  const ProcessGroup group;
  const ReduceOp op;
};

void keep(AutogradContext* context, const ProcessGroup& group, ReduceOp op) {
  context->saved_data["context"] = c10::IValue::make_capsule(c10::make_intrusive<Context>(group, op));
}

const Context& kept(AutogradContext* context) {
  return *static_cast<const Context*>(context->saved_data["context"].toCapsule().get());
}

struct AllReduce : torch::autograd::Function<AllReduce> {
  static Tensor forward(AutogradContext* context, const Tensor& tensor, const ProcessGroup& group, ReduceOp op) {
    keep(context, group, op);
    Tensor result = tensor.detach().clone(torch::MemoryFormat::Contiguous);
    ddp::all_reduce(result, group, op);
    return result;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const Context& call = kept(context);
    Tensor gradient = gradients[0].clone(torch::MemoryFormat::Contiguous);
    ddp::all_reduce(gradient, call.group, call.op);
    return {gradient, Tensor(), Tensor()};
  }
};

struct AllGather : torch::autograd::Function<AllGather> {
  static Tensor forward(AutogradContext* context, const Tensor& tensor, const ProcessGroup& group) {
    keep(context, group, ReduceOp::kSum);
    return torch::cat(ddp::all_gather(tensor.detach(), group));
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    return {ddp::reduce_scatter(gradients[0], kept(context).group), Tensor()};
  }
};

struct ReduceScatter : torch::autograd::Function<ReduceScatter> {
  static Tensor forward(AutogradContext* context, const Tensor& tensor, const ProcessGroup& group, ReduceOp op) {
    keep(context, group, op);
    return ddp::reduce_scatter(tensor.detach(), group, op);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const Context& call = kept(context);
    Tensor gradient = torch::cat(ddp::all_gather(gradients[0], call.group));
    if (call.op == ReduceOp::kAvg) gradient.div_(call.group.size());
    return {gradient, Tensor(), Tensor()};
  }
};

void require_linear(const char* name, const ProcessGroup& group, ReduceOp op) {
  if (op == ReduceOp::kSum || op == ReduceOp::kAvg) return;
  throw MismatchError(
      fmt::format("[ddp::autograd::{}] {}: only the sum and the mean have a gradient here; call ddp::{} for "
                  "other operations",
                  name, group.place().name(), name));
}

}  // namespace

Tensor all_reduce(const Tensor& tensor, const ProcessGroup& group, ReduceOp op) {
  require_linear("all_reduce", group, op);
  return AllReduce::apply(tensor, group, op);
}

Tensor all_gather(const Tensor& tensor, const ProcessGroup& group) { return AllGather::apply(tensor, group); }

Tensor reduce_scatter(const Tensor& tensor, const ProcessGroup& group, ReduceOp op) {
  require_linear("reduce_scatter", group, op);
  return ReduceScatter::apply(tensor, group, op);
}

}  // namespace ddp::autograd
