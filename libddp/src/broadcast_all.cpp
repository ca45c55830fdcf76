#include "broadcast_all.h"

#include <fmt/format.h>

#include <map>

#include "bytes.h"
#include "ddp/collectives.h"
#include "ddp/error.h"
#include "group_impl.h"

namespace ddp::detail {
namespace {

using torch::Tensor;

constexpr int64_t kMessageBytes = int64_t{64} << 20;

// Calls f for runs of consecutive tensors of at most `limit` bytes together, and at least one tensor.
template <class F>
void in_messages(const std::vector<Tensor>& tensors, int64_t limit, F&& f) {
  std::vector<Tensor> message;
  int64_t bytes = 0;
  for (const auto& tensor : tensors) {
    if (!message.empty() && bytes + static_cast<int64_t>(tensor.nbytes()) > limit) {
      f(message);
      message.clear(), bytes = 0;
    }
    message.push_back(tensor);
    bytes += static_cast<int64_t>(tensor.nbytes());
  }
  if (!message.empty()) f(message);
}

}  // namespace

void broadcast_all(const std::vector<Tensor>& tensors, const ProcessGroup& group, int root) {
  if (tensors.empty() || group.size() == 1) return;
  torch::NoGradGuard no_grad;
  std::map<std::string, std::vector<Tensor>> by_device;
  for (const auto& tensor : tensors) by_device[tensor.device().str()].push_back(tensor.variable_data());
  for (const auto& [device, on_device] : by_device) {
    in_messages(on_device, kMessageBytes, [&](const std::vector<Tensor>& message) {
      std::vector<Tensor> bytes;
      for (const auto& tensor : message) bytes.push_back(bytes_of(tensor));
      Tensor flat = bytes.size() == 1 ? bytes[0] : torch::cat(bytes);
      broadcast(flat, group, root);
      if (group.rank() == root) return;
      int64_t offset = 0;
      for (const auto& tensor : message) {
        const auto size = static_cast<int64_t>(tensor.nbytes());
        // Cloned: a slice need not begin where the dtype may be read.
        const Tensor part = flat.narrow(0, offset, size).clone();
        tensor.copy_(part.view(tensor.scalar_type()).view(tensor.sizes()));
        offset += size;
      }
    });
  }
}

void average_all(const std::vector<std::pair<std::string, Tensor>>& parameters, const ProcessGroup& group,
                 double message_mb) {
  torch::NoGradGuard no_grad;
  Tensor used = torch::zeros({static_cast<int64_t>(parameters.size())}, torch::kUInt8);
  for (size_t i = 0; i < parameters.size(); ++i) used[static_cast<int64_t>(i)] = parameters[i].second.grad().defined();
  all_reduce(used, group, ReduceOp::kMax);

  std::map<std::string, std::vector<Tensor>> by_kind;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (used[static_cast<int64_t>(i)].item<int64_t>() == 0) continue;
    const auto& [name, parameter] = parameters[i];
    Tensor& grad = parameter.mutable_grad();
    if (!grad.defined()) grad = torch::zeros_like(parameter);
    if (grad.layout() != torch::kStrided) {
      throw MismatchError(
          fmt::format("[ddp::reduce_gradients] {}: the gradient of {} is sparse; let a synchronised backward "
                      "average it",
                      group.place().name(), name));
    }
    by_kind[fmt::format("{} {}", grad.device().str(), c10::toString(grad.scalar_type()))].push_back(grad);
  }
  // Scaled before the sum, as the reducer does: the same bits.
  const double share = 1.0 / group.size();
  for (const auto& [kind, gradients] : by_kind) {
    in_messages(gradients, static_cast<int64_t>(message_mb * 1024 * 1024), [&](const std::vector<Tensor>& message) {
      if (group.backend() == "shm") {  // takes them as they lie
        std::vector<Tensor> tensors = message;
        c10d::AllreduceCoalescedOptions options;
        options.reduceOp = c10d::ReduceOp::AVG;
        group.impl()->backend_for(c10::kCPU)->allreduce_coalesced(tensors, options)->wait();
        return;
      }
      std::vector<Tensor> parts;
      for (const auto& grad : message) parts.push_back(grad.contiguous().view(-1));
      Tensor flat = torch::cat(parts).mul_(share);
      all_reduce(flat, group);
      int64_t offset = 0;
      for (const auto& grad : message) {
        grad.copy_(flat.narrow(0, offset, grad.numel()).view(grad.sizes()));
        offset += grad.numel();
      }
    });
  }
}

}  // namespace ddp::detail
