#include "sharded_update.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "ddp/collectives.h"
#include "ddp/error.h"
#include "ddp/log.h"
#include "first_difference.h"
#include "fused_step.h"
#include "shared_memory_tensors.h"

namespace ddp::detail {
namespace {

using torch::Tensor;
// Parts begin at multiples of so many elements: a multiple of every vector's length, so that each element is in the
// same place of its vector, or in the same remainder, as when one rank updates the whole, and has the same bits.
constexpr int64_t kUnit = 64;

std::vector<Tensor> unique_parameters(const Groups& groups) {
  std::vector<Tensor> unique;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& group : groups) {
    for (const Tensor& parameter : group.params()) {
      if (seen.insert(parameter.unsafeGetTensorImpl()).second) unique.push_back(parameter);
    }
  }
  return unique;
}

// Whether nobody else looks at its memory: another tensor on the same storage would be left behind.
bool can_be_shared(const Tensor& parameter) {
  return parameter.device().is_cpu() && parameter.layout() == torch::kStrided && parameter.numel() > 0 &&
         parameter.is_non_overlapping_and_dense() && parameter.storage_offset() == 0 &&
         parameter.storage().nbytes() == parameter.nbytes() && parameter.storage().use_count() == 1;
}

void require_same_parameters(const std::string& who, const std::vector<Tensor>& parameters, const ProcessGroup& group) {
  std::vector<std::string> lines;
  for (const Tensor& parameter : parameters) {
    lines.push_back(fmt::format("{}[{}] of strides [{}]", c10::toString(parameter.scalar_type()),
                                fmt::join(parameter.sizes(), ", "), fmt::join(parameter.strides(), ", ")));
  }
  if (const auto difference = first_difference(lines, group)) {
    throw MismatchError(
        fmt::format("{}: shard_over: parameter {} is {} on rank 0 and {} on rank {}; give the same parameters in the "
                    "same order on all ranks",
                    who, difference->line, difference->expected, difference->found, difference->rank));
  }
}

// Those that can be shared on all ranks.
std::vector<Tensor> choose_shared(const std::vector<Tensor>& parameters, const ProcessGroup& group) {
  Tensor flags = torch::zeros({static_cast<int64_t>(parameters.size())}, torch::kUInt8);
  for (size_t i = 0; i < parameters.size(); ++i) flags.data_ptr<uint8_t>()[i] = can_be_shared(parameters[i]);
  all_reduce(flags, group, ReduceOp::kMin);
  std::vector<Tensor> chosen;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (flags.data_ptr<uint8_t>()[i] != 0) chosen.push_back(parameters[i]);
  }
  return chosen;
}

// The ranks' parts cut all parameters together into equal shares of bytes, so that most small ones stay whole.
class Cut {
 public:
  Cut(const std::vector<Tensor>& parameters, int ranks) : ranks_(ranks) {
    for (const Tensor& parameter : parameters) total_ += static_cast<int64_t>(parameter.nbytes());
  }

  // Where the part of `rank` begins in a parameter whose memory begins at byte `start` of all. `rank` may be the
  // number of ranks: where the last part ends.
  int64_t border(int rank, const Tensor& parameter, int64_t start) const {
    const int64_t bytes = total_ / ranks_ * rank + total_ % ranks_ * rank / ranks_ - start;
    const int64_t elements = std::max<int64_t>(bytes, 0) / static_cast<int64_t>(parameter.element_size());
    return elements >= parameter.numel() ? parameter.numel() : elements / kUnit * kUnit;
  }

 private:
  const int ranks_;
  int64_t total_ = 0;
};

Tensor flat(const Tensor& tensor, int64_t begin, int64_t count) {
  return tensor.as_strided({count}, {1}, tensor.storage_offset() + begin);
}

}  // namespace

Tensor Shard::part_of(const Tensor& tensor) const { return flat(laid_out_like(tensor, whole), begin, count); }

const Tensor& Shard::hold(size_t slot, const Tensor& value) const {
  if (!value.defined()) {
    state_parts[slot].zero_();  // it may hold what was there before a checkpoint was loaded
  } else if (value.const_data_ptr() != state[slot].const_data_ptr()) {
    state_parts[slot].copy_(part_of(value));
  }
  return state[slot];
}

ShardedUpdate::ShardedUpdate(std::string optimizer, ProcessGroup group)
    : optimizer_(std::move(optimizer)), group_(std::move(group)), agreed_(torch::empty({3}, torch::kInt64)) {}

std::unique_ptr<ShardedUpdate> ShardedUpdate::make(const char* optimizer, const Groups& groups,
                                                   const std::optional<ProcessGroup>& over, size_t slots,
                                                   const std::function<at::ScalarType(const Tensor&)>& state_dtype) {
  if (!over || over->size() == 1) return nullptr;
  const auto each_alone = [&](const std::string& why) {
    log::info(*over, fmt::format("[ddp::{}] shard_over: {}; each rank updates all parameters", optimizer, why));
    return nullptr;
  };
  if (over->backend() != "shm") return each_alone(fmt::format("backend {} shares no memory", over->backend()));

  torch::NoGradGuard no_grad;
  // Connections of its own: its meetings can never be taken for a collective that the program calls.
  std::unique_ptr<ShardedUpdate> made(new ShardedUpdate(optimizer, over->duplicate("optimizer")));
  const ProcessGroup& group = made->group_;
  const auto all = unique_parameters(groups);
  require_same_parameters(fmt::format("[ddp::{}] {}", optimizer, group.place().name()), all, group);
  for (const Tensor& parameter : all) {
    if (is_shared_tensor(parameter) && !can_be_shared(parameter)) require_own_memory(parameter, optimizer);
  }
  const auto chosen = choose_shared(all, group);
  if (chosen.empty()) return each_alone("no parameter has memory of its own");

  std::vector<Tensor> like = chosen;  // then the first slot of each, and so on
  for (size_t slot = 0; slot < slots; ++slot) {
    for (const Tensor& parameter : chosen) {
      like.push_back(torch::empty_strided(parameter.sizes(), parameter.strides(),
                                          torch::dtype(state_dtype(parameter)).device(torch::kMeta)));
    }
  }
  const auto shared = make_shared_tensors(like, group);
  if (!shared.why_not.empty()) return each_alone(shared.why_not);

  const Cut cut(chosen, group.size());
  int64_t start = 0;
  for (size_t i = 0; i < chosen.size(); ++i) {
    const Tensor& parameter = chosen[i];
    Shard shard;
    shard.whole = shared.tensors[i];
    shard.begin = cut.border(group.rank(), parameter, start);
    shard.count = cut.border(group.rank() + 1, parameter, start) - shard.begin;
    shard.part = flat(shard.whole, shard.begin, shard.count);
    for (size_t slot = 0; slot < slots; ++slot) {
      shard.state.push_back(shared.tensors[(slot + 1) * chosen.size() + i]);
      shard.state_parts.push_back(flat(shard.state.back(), shard.begin, shard.count));
    }
    if (group.is_root()) shard.whole.copy_(parameter.detach());
    start += static_cast<int64_t>(parameter.nbytes());
    made->shards_.emplace(parameter.unsafeGetTensorImpl(), std::move(shard));
  }
  barrier(group);  // rank 0's values are there
  for (const Tensor& parameter : chosen) {
    // The parameter stays the object that modules, autograd and reducers hold; only its memory is another.
    parameter.set_data(made->shards_.at(parameter.unsafeGetTensorImpl()).whole);
    parameter.unsafeGetTensorImpl()->bump_version();
  }
  log::info(group,
            fmt::format("[ddp::{}] shard_over: {} of {} parameters ({:.1f} MiB) and their state are held once by "
                        "{} ranks, each updates a part",
                        optimizer, chosen.size(), all.size(), static_cast<double>(start) / (1 << 20), group.size()));
  return made;
}

const Shard* ShardedUpdate::find(const Tensor& parameter) const {
  const auto found = shards_.find(parameter.unsafeGetTensorImpl());
  if (found == shards_.end()) return nullptr;
  if (parameter.const_data_ptr() == found->second.whole.const_data_ptr()) return &found->second;
  throw ConfigError(
      fmt::format("[ddp::{}] {}: a parameter [{}] was moved or converted after the optimizer was made with shard_over, "
                  "so it is no longer in the memory that ranks share; make the optimizer afterwards",
                  optimizer_, group_.place().name(), fmt::join(parameter.sizes(), ", ")));
}

// Two meetings a step, and why each is needed.
//
// Before the update: no rank may write while another still reads the old parameters. The averaging at the end of
// backward is a meeting of all ranks too, but not one that could serve here: a rank may read parameters after it (a
// forward for evaluation, a norm that is logged, a checkpoint on rank 0) while another is already in `step`. After
// it: no rank may read before all parts are written. Between the last meeting of one step and the first of the next,
// nobody writes; so rank 0 reads a whole state when it saves, whatever the other ranks do meanwhile.
//
// The first meeting carries a fingerprint, so that ranks which would update different parameters, or with different
// options, hear so before a parameter is half old and half new.
bool ShardedUpdate::begin(const Fingerprint& fingerprint, bool flag) {
  const int64_t mine = fingerprint.value();
  int64_t* const agreed = agreed_.data_ptr<int64_t>();
  // The maxima of x and of its complement are x's own only where all ranks have x.
  agreed[0] = mine, agreed[1] = ~mine, agreed[2] = flag;
  all_reduce(agreed_, group_, ReduceOp::kMax);
  if (agreed[0] == mine && agreed[1] == ~mine) return agreed[2] != 0;

  const auto everyone = all_gather(torch::full({1}, mine, torch::kInt64), group_);
  std::vector<int> others;
  for (int rank = 1; rank < group_.size(); ++rank) {
    if (everyone[rank].item<int64_t>() != everyone[0].item<int64_t>()) others.push_back(rank);
  }
  throw MismatchError(fmt::format(
      "[ddp::{}] {}: the update that rank 0 is about to make is not that of rank {}: gradients for other "
      "parameters, other options (lr, ...) or another step count; nothing was changed. Let all ranks use the "
      "same parameters and follow the same schedule, or leave shard_over out",
      optimizer_, group_.place().name(), fmt::join(others, ", ")));
}

void ShardedUpdate::end() { barrier(group_); }

}  // namespace ddp::detail
