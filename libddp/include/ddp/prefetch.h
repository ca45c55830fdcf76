// Batches made ahead on a thread, in the sampler's order, so that training does not stand still for its data.
//
//   ddp::DistributedSampler sampler(*data.size(), group, {.shuffle = true, .seed = 42});
//   ddp::Prefetcher loader(sampler, /*batch_size=*/8, data, {.drop_last = true, .device = group.device()});
//   for (auto epoch : ddp::epochs(sampler, 10))
//     for (auto&& [batch, micro] : epoch.accumulate(loader, 4)) ...
//   loader.waited();                                       // seconds for which the loop had to wait for a batch
#pragma once

#include <torch/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "ddp/distributed_sampler.h"
#include "ddp/prefetch_queue.h"

namespace ddp {

/// Yields the batches of one epoch of a sampler in a range-for, as torch's data loader does, batch for batch, and does the
/// same to the sampler: `begin` begins an epoch, the position moves by what was used and never by what was made ahead,
/// and the loops of loop.h resume in mid-epoch. A loop may be left early, without a wait, and begun again: what was made
/// ahead is dropped, and only the batch that is in the making is finished first.
///
/// A batch may be of any type. On a CUDA device its tensors are found as in for_each_tensor.h (torch's Example is known,
/// too) and copied on a stream of their own; the loop's current stream waits for the copy, the host does not.
///
/// One thread uses it; several prefetchers may be at work at once. Requires: it outlives the loops over it.
template <class Batch>
class Prefetcher {
 public:
  using Options = PrefetcherOptions;

  /// `source` makes a batch: a function of the rows, `Batch(const std::vector<size_t>& rows)`, or a torch data set,
  /// whose get_batch is called. It runs on the prefetcher's thread, one call at a time, with grad mode off and one
  /// OpenMP thread; what it shares with the loop is its own care. What it draws at random should come from
  /// `ddp::make_generator(seed, place, row)`: the default generator is left to the loop. On the CPU, batches are handed
  /// on as they were made.
  /// Throws ConfigError for a batch size of 0, and for a device that is neither the CPU nor a CUDA device in reach.
  template <class Source>
  Prefetcher(DistributedSampler sampler, size_t batch_size, Source source, Options options = {})
      : queue_(detail::make_prefetch_queue(
            std::move(sampler), batch_size, options,
            // The source is shared because std::function wants to be copied, and a source need not be.
            [source = std::make_shared<Source>(std::move(source))](const std::vector<size_t>& rows) {
              return std::shared_ptr<void>(std::make_shared<Batch>(detail::batch_of(*source, rows)));
            },
            [](void* batch, const detail::TensorVisitor& f) { detail::visit_batch(*static_cast<Batch*>(batch), f); })) {
  }

  /// An input iterator. Its end, or that of the loop around it, stops the making of batches.
  class Iterator {
   public:
    using value_type = Batch;
    using difference_type = std::ptrdiff_t;
    explicit Iterator(detail::PrefetchQueue& queue) : pass_(queue), batch_(pass_.next()) {}

    /// May be changed or moved from.
    Batch& operator*() const { return *static_cast<Batch*>(batch_.get()); }
    Batch* operator->() const { return &**this; }

    /// Waits for the next batch. When it could not be made, throws DataError, which names the batch and its rows and
    /// has the source's exception nested in it (std::rethrow_if_nested), and again at every further call; batches
    /// before it were handed on. Throws DataError after the timeout, and ConfigError when another loop over the same
    /// prefetcher has begun meanwhile.
    Iterator& operator++() {
      batch_.reset();  // its memory is free for the next one
      batch_ = pass_.next();
      return *this;
    }
    void operator++(int) { ++*this; }
    bool operator==(std::default_sentinel_t) const { return batch_ == nullptr; }

   private:
    detail::PrefetchPass pass_;
    std::shared_ptr<void> batch_;
  };

  /// Resets the sampler and waits for the first batch; throws as ++ does.
  Iterator begin() { return Iterator(*queue_); }
  std::default_sentinel_t end() const { return {}; }

  /// Seconds that `begin` and ++ have taken so far, all loops together. Without a thread (depth 0) that includes the
  /// making of all batches.
  double waited() const { return queue_->waited(); }

 private:
  // Its destructor begins no further batch and waits for the one in the making.
  std::unique_ptr<detail::PrefetchQueue> queue_;
};

template <class Source>
Prefetcher(DistributedSampler, size_t, Source, PrefetcherOptions = {}) -> Prefetcher<detail::BatchOf<Source>>;

}  // namespace ddp
