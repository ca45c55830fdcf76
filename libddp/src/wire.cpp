#include "wire.h"

#include "bytes.h"

namespace ddp::detail {

using torch::Tensor;

namespace {

bool is_bitwise(ReduceOp op) { return op == ReduceOp::kBitAnd || op == ReduceOp::kBitOr || op == ReduceOp::kBitXor; }

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

bool keeps_dtype(const Tensor& tensor, const ProcessGroup& group) {
  return tensor.is_cpu() && group.impl()->backend_for(c10::kCPU)->getBackendName() == "shm";
}

}  // namespace

c10d::ReduceOp Wire::c10d_op() const {
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

Tensor carried(const Tensor& tensor, const ProcessGroup& group) {
  if (!keeps_dtype(tensor, group)) return bytes_of(tensor);
  return tensor.detach().resolve_conj().resolve_neg().contiguous();
}

Tensor room_for(const Tensor& tensor, const ProcessGroup& group) {
  if (keeps_dtype(tensor, group)) return torch::empty_like(tensor, torch::MemoryFormat::Contiguous).detach();
  return torch::empty({static_cast<int64_t>(tensor.nbytes())}, tensor.options().dtype(torch::kUInt8));
}

void unpack(const Tensor& carried, Tensor tensor) {
  torch::NoGradGuard no_grad;
  const bool bytes = carried.scalar_type() != tensor.scalar_type();
  tensor.copy_((bytes ? carried.view(tensor.scalar_type()) : carried).view(tensor.sizes()));
}

}  // namespace ddp::detail
