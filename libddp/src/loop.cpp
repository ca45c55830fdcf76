#include "ddp/loop.h"

#include <ATen/ops/full.h>
#include <fmt/format.h>

#include "ddp/collectives.h"
#include "ddp/error.h"
#include "ddp/log.h"

namespace ddp {

Epochs::Iterator Epochs::begin() const {
  auto sampler = sampler_;
  auto first = sampler.complete() ? sampler.epoch() + 1 : sampler.epoch();
  if (first >= end_) {
    log::info(sampler.place(), fmt::format("[ddp::epochs] all {} epochs are done, nothing is left to do", end_));
  } else if (first > sampler.epoch()) {
    sampler.set_epoch(first);
  } else {
    sampler.continue_epoch();
  }
  return {static_cast<int>(first), end_, sampler};
}

Epochs::Iterator& Epochs::Iterator::operator++() {
  sampler_.set_epoch(++index_);
  return *this;
}

Epochs epochs(const DistributedSampler& sampler, int n) { return {sampler, n}; }

namespace detail {

void throw_window_size(int64_t n) {
  throw ConfigError(fmt::format("[ddp::accumulate] a window has at least 1 batch, found {}", n));
}

Agree agree_on_batches(const ProcessGroup& group) {
  return [group](int64_t have) {
    if (group.size() == 1) return have;
    auto smallest = at::full({1}, have, at::TensorOptions().dtype(at::kLong).device(group.device()));
    all_reduce(smallest, group, ReduceOp::kMin);
    auto count = smallest.item<int64_t>();
    if (count < have) {
      log::warn(group, fmt::format("[ddp::accumulate] another rank has no more batches; {} of this rank's last {} read "
                                   "and all later ones stay unused",
                                   have - count, have));
    }
    return count;
  };
}

}  // namespace detail
}  // namespace ddp
