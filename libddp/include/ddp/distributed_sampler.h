// Each rank's part of a data set, in the order of Python's torch.utils.data.DistributedSampler, index for index.
//
//   ddp::DistributedSampler sampler(*data.size(), group, {.shuffle = true, .seed = 42});
//   auto loader = torch::data::make_data_loader(std::move(data), sampler, /*batch_size=*/8);   // shares the state
//   for (auto epoch : ddp::epochs(sampler, 10)) ...       // loop.h: sets the epoch, counts what is used
//   checkpoints.track("sampler", sampler);                // goes on at the same row, also with more or fewer ranks
#pragma once

#include <torch/data/samplers/base.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "ddp/place.h"
#include "ddp/state.h"

namespace ddp {

class ProcessGroup;

/// How the rows are ordered and divided.
struct DistributedSamplerOptions {
  bool shuffle = true;     ///< a new permutation each epoch; otherwise 0, 1, 2, ...
  uint64_t seed = 0;       ///< the same on all ranks; epoch e is drawn with seed + e
  bool drop_last = false;  ///< leave out the rows that do not fill all ranks; otherwise repeat from the order's start
};

/// A handle: copies share one state, so the loader's copy follows `set_epoch`. The order of an epoch is
/// torch::randperm(N, generator of seed + epoch), padded or cut to a multiple of the world size; rank r of W takes the
/// entries r, r + W, r + 2 W, ... One permutation of N int32 (int64 from 2^31 rows on) is held.
///
/// The position is the number of rows that all ranks together have used in this epoch. The loader reads ahead, so
/// handing a batch out does not move it: `consume` does, which the loops of loop.h call. After `load_state_dict` the
/// iteration begins at the position, without replaying, at any world size: no row comes twice, none is missing, and a
/// global step of the same number of rows has the same rows. Padding and cutting happen at the end of the epoch only.
///
/// Thread-safe.
class DistributedSampler : public torch::data::samplers::Sampler<> {
 public:
  using Options = DistributedSamplerOptions;

  /// No communication: the caller sees to it that all ranks give the same values.
  /// Throws ConfigError when the data set is empty or the place is none.
  DistributedSampler(size_t dataset_size, const Place& place, Options options = {});

  /// Collective: throws MismatchError on every rank, naming both ranks and values, when the ranks gave different ones.
  DistributedSampler(size_t dataset_size, const ProcessGroup& group, Options options = {});

  /// Epoch `epoch` from its first row, from the next `reset` on. A loader that is in the middle of an iteration ends
  /// that one in its old order; what it still uses does not count towards the new position. Requires: epoch >= 0.
  void set_epoch(int64_t epoch);
  int64_t epoch() const;

  /// The next `reset` goes on at the position in this epoch.
  void continue_epoch();

  /// Begins an iteration; the loader's begin() calls it. When neither `set_epoch`, `continue_epoch` nor
  /// `load_state_dict` came since the last one, the next epoch begins: an order is never repeated by forgetting
  /// `set_epoch`. Throws ConfigError for a `new_size` that is another one.
  void reset(std::optional<size_t> new_size = std::nullopt) override;

  /// The next rows of this rank, at most `batch_size`; nothing at the end of the epoch.
  std::optional<std::vector<size_t>> next(size_t batch_size) override;

  /// The oldest `batches` batches that were handed out have been used on every rank: moves the position.
  /// Throws ConfigError when fewer were handed out, i.e. when the loader does not draw from this sampler. Exact for
  /// loaders that keep the order of batches (torch's default `enforce_ordering`).
  void consume(size_t batches = 1);

  /// Ends the epoch: whatever is left is not used (a loader with drop_last leaves its last batch).
  void finish_epoch();

  /// Hands out nothing until the next `reset`; the position stays.
  void stop();

  /// Rows that all ranks together have used in this epoch, padding included.
  size_t consumed() const;
  /// Nothing is left of this epoch.
  bool complete() const;

  /// Rows per rank in a whole epoch, as Python's len(sampler).
  size_t num_samples() const;
  size_t dataset_size() const;
  Place place() const;
  const Options& options() const;

  /// Epoch, position, and the values that must not change: dataset_size, seed, shuffle, drop_last; world_size.
  State state_dict() const;
  /// Throws DataError that names both values when one of those that must not change differs. Another world size is
  /// fine, and is logged.
  void load_state_dict(const State& state);

  /// The same through torch's archives.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;
};

}  // namespace ddp
