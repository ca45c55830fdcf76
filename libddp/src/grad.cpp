#include "ddp/grad.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "bytes.h"
#include "ddp/collectives.h"
#include "ddp/error.h"
#include "fingerprint.h"

namespace ddp {
namespace {

using torch::Tensor;
using Named = std::vector<std::pair<std::string, Tensor>>;

constexpr int64_t kCompareBytes = int64_t{16} << 20;

int64_t hash_of(const Tensor& tensor) {
  const Tensor bytes = detail::bytes_of(tensor.detach().cpu());
  const auto* data = static_cast<const char*>(bytes.data_ptr());
  const auto size = static_cast<size_t>(bytes.numel());
  detail::Fingerprint fingerprint;
  fingerprint.add(static_cast<int64_t>(size));
  for (size_t at = 0; at < size; at += 8) {
    int64_t word = 0;
    std::memcpy(&word, data + at, std::min<size_t>(8, size - at));
    fingerprint.add(word);
  }
  return fingerprint.value();
}

// Throws when the bits of an entry differ over ranks. `who` is the function, `what` says what the entries are.
void require_equal(const Named& entries, const ProcessGroup& group, const char* who, const char* what) {
  if (group.size() == 1) return;
  Tensor hashes = torch::zeros({static_cast<int64_t>(entries.size())}, torch::kInt64);
  for (size_t i = 0; i < entries.size(); ++i) {
    if (entries[i].second.defined()) hashes[static_cast<int64_t>(i)] = hash_of(entries[i].second);
  }
  const auto everyone = all_gather(hashes, group);
  for (size_t i = 0; i < entries.size(); ++i) {
    const auto at = [&](int rank) { return everyone[rank][static_cast<int64_t>(i)].item<int64_t>(); };
    std::vector<int> different;
    for (int rank = 1; rank < group.size(); ++rank) {
      if (at(rank) != at(0)) different.push_back(rank);
    }
    if (different.empty()) continue;
    throw MismatchError(
        fmt::format("[ddp::{}] {}: {} {} differs from rank 0's on rank {}; restore a checkpoint, and look for "
                    "an update that not all ranks made",
                    who, group.place().name(), what, entries[i].first, fmt::join(different, ", ")));
  }
}

}  // namespace

Tensor clip_grad_norm(detail::Replica& replica, double max_norm) {
  if (!(max_norm > 0)) {
    throw ConfigError(fmt::format("[ddp::clip_grad_norm] {}: max_norm is {}; give a positive one",
                                  replica.group().place().name(), max_norm));
  }
  replica.require_synchronised("clip_grad_norm");
  torch::NoGradGuard no_grad;
  std::vector<Tensor> gradients;
  gradients.reserve(replica.parameters().size());
  for (const auto& [name, parameter] : replica.parameters()) {
    if (parameter.grad().defined()) gradients.push_back(parameter.grad());
  }
  if (gradients.empty()) return torch::zeros({}, replica.parameters().front().second.options().requires_grad(false));
  const Tensor norm = torch::stack(at::_foreach_norm(gradients, 2)).norm(2);
  // Python's `max_norm / tensor` is the reciprocal times max_norm, which is not always the quotient's bits.
  const Tensor factor = ((norm + 1e-6).reciprocal() * max_norm).clamp_max(1.0);
  // On the CPU the factor is known, and a second pass that multiplies by exactly 1 is left out: it would change no bit.
  // On a GPU reading it would be a wait. (The fused optimizers could scale on their way, but by a division: other bits.)
  if (factor.is_cpu() && factor.item<double>() == 1.0) return norm;
  at::_foreach_mul_(gradients, factor);
  return norm;
}

double token_weight(int64_t tokens, const ProcessGroup& group) {
  if (tokens < 0) {
    throw ConfigError(fmt::format("[ddp::token_weight] {}: {} tokens; give a count", group.place().name(), tokens));
  }
  Tensor total = torch::tensor({tokens});
  all_reduce(total, group);
  const auto sum = total.item<int64_t>();
  return sum == 0 ? 0.0 : static_cast<double>(group.size()) / static_cast<double>(sum);
}

bool replicas_equal(const std::vector<Tensor>& tensors, const ProcessGroup& group) {
  if (group.size() == 1) return true;
  torch::NoGradGuard no_grad;
  bool equal = true;
  for (const auto& tensor : tensors) {
    const Tensor bytes = detail::bytes_of(tensor.detach().cpu());
    for (const Tensor& part : bytes.split(kCompareBytes)) {
      // The maximum of x and of its complement: both are x's own only where all ranks have x.
      const Tensor mine = torch::stack({part, part.bitwise_not()});
      Tensor highest = mine.clone();
      all_reduce(highest, group, ReduceOp::kMax);
      equal = equal && torch::equal(highest, mine);
    }
  }
  return all(equal, group);
}

void check_replicas(detail::Replica& replica) {
  Named entries;
  for (const auto& entry : replica.module()->named_parameters()) entries.emplace_back(entry.key(), entry.value());
  require_equal(entries, replica.group(), "check_replicas", "parameter");
  entries.clear();
  for (const auto& entry : replica.module()->named_buffers()) entries.emplace_back(entry.key(), entry.value());
  require_equal(entries, replica.group(), "check_replicas", "buffer");
}

void check_gradients(detail::Replica& replica) {
  replica.require_synchronised("check_gradients");
  Named entries;
  for (const auto& [name, parameter] : replica.parameters()) entries.emplace_back(name, parameter.grad());
  require_equal(entries, replica.group(), "check_gradients", "gradient of");
}

}  // namespace ddp
