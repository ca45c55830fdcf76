#include "pass.h"

#include <fmt/format.h>

#include "ddp/error.h"

namespace ddp::detail {

PassCheck::PassCheck(const Pass& pass, int64_t value, const ProcessGroup& group)
    : group_(group), mine_(torch::tensor({pass.forwards, pass.dropped, value}, torch::kInt64)) {
  for (int rank = 0; rank < group.size(); ++rank) everyone_.push_back(torch::empty_like(mine_));
  work_ = all_gather_async(everyone_, mine_, group_);
}

std::vector<int64_t> PassCheck::finish() {
  work_.wait();
  std::vector<int64_t> values;
  std::vector<Pass> passes;
  for (const auto& said : everyone_) {
    const auto* numbers = said.data_ptr<int64_t>();
    passes.push_back({.forwards = numbers[0], .dropped = numbers[1]});
    values.push_back(numbers[2]);
  }
  for (int rank = 1; rank < group_.size(); ++rank) {
    if (passes[rank] == passes[0]) continue;
    throw MismatchError(
        fmt::format("[ddp::DistributedDataParallel] {}: ranks disagree: rank 0 averages gradients {}, rank {} {}; run "
                    "a forward that no "
                    "backward follows under torch::NoGradGuard, skip a step on all ranks or none, and give no_sync() "
                    "the same windows",
                    group_.place().name(), describe(passes[0]), rank, describe(passes[rank])));
  }
  return values;
}

}  // namespace ddp::detail
