// The training loop: epochs that begin where a resume left off, and windows of batches for gradient accumulation.
//
//   for (auto epoch : ddp::epochs(sampler, 10))
//     for (auto [batch, micro] : epoch.accumulate(*loader, 4)) {        // or: for (auto& batch : epoch.batches(*loader))
//       auto guard = model.no_sync(!micro.last());
//       (loss_of(batch) / micro.count()).backward();
//       if (micro.last()) optim.step(), model.zero_grad(), schedule.step(), checkpoints.step();
//     }
//
// A loader is anything with begin() and end(): torch's data loaders, a prefetcher, a std::vector. Leaving any of these
// loops early (break, return, an exception) is fine.
#pragma once

#include <cstdint>
#include <iterator>
#include <utility>

#include "ddp/distributed_sampler.h"
#include "ddp/loop_windows.h"

namespace ddp {

class ProcessGroup;

/// One pass over the data set.
class Epoch {
 public:
  Epoch(int index, DistributedSampler sampler) : index_(index), sampler_(std::move(sampler)) {}

  int index() const { return index_; }
  operator int() const { return index_; }  // NOLINT: an epoch prints and compares as its number

  /// Pairs [batch, micro]: up to `n` batches are read first, then handed on one by one with their place `micro` in this
  /// window. The last window of the epoch may be shorter; `micro.count()` says so on each of its batches, so no gradient
  /// is lost or weighted wrongly. All ranks have the same windows, because the sampler gives each the same number of
  /// batches. The sampler's position moves when the last batch of a window is handed on: what is saved after the
  /// optimizer step is exact, and what is saved within a window repeats that window.
  /// Requires: `loader` draws from the sampler of this epoch; n >= 1.
  template <class Loader>
  detail::Windows<Loader> accumulate(Loader& loader, int64_t n) const {
    return detail::Windows<Loader>(loader, n, sampler_);
  }

  /// The batches alone, each a window of its own.
  template <class Loader>
  detail::Batches<Loader> batches(Loader& loader) const {
    return detail::Batches<Loader>(loader, sampler_);
  }

 private:
  int index_;
  DistributedSampler sampler_;
};

/// The range that `epochs` returns.
class Epochs {
 public:
  Epochs(DistributedSampler sampler, int end) : sampler_(std::move(sampler)), end_(end) {}

  class Iterator {
   public:
    Iterator(int index, int end, DistributedSampler sampler) : index_(index), end_(end), sampler_(std::move(sampler)) {}
    Epoch operator*() const { return {index_, sampler_}; }
    Iterator& operator++();
    friend bool operator==(const Iterator& it, std::default_sentinel_t) { return it.index_ >= it.end_; }

   private:
    int index_;
    int end_;
    DistributedSampler sampler_;
  };

  Iterator begin() const;
  std::default_sentinel_t end() const { return {}; }

 private:
  DistributedSampler sampler_;
  int end_;
};

/// The epochs from the sampler's own up to, not including, `n`: all of them in a fresh run, those that are left after a
/// resume, beginning in the middle of one where the sampler's position is, or with the next one where an epoch had just
/// been completed. Sets the epoch of the sampler. When none is left it says so in the log.
Epochs epochs(const DistributedSampler& sampler, int n);

/// As `Epoch::accumulate` for a loader that draws from no DistributedSampler, so that ranks may have different numbers
/// of batches: before each window the ranks agree by one small all-reduce on the smallest number that any of them has.
/// All ranks run the same number of steps; batches that a rank has more than another stay unused, which it logs.
/// Collective; every rank must iterate in step. A torch loader with workers that is left early cannot be begun again:
/// that is torch's rule.
template <class Loader>
detail::Windows<Loader> accumulate(Loader& loader, int64_t n, const ProcessGroup& group) {
  return detail::Windows<Loader>(loader, n, detail::agree_on_batches(group));
}

}  // namespace ddp
