// A loop over batches in which ranks may have different numbers of them.
//
//   for (auto& turn : ddp::join(*loader, model)) {             // as many turns as the longest rank has batches, on all
//     if (turn) loss_of(model(turn->data), turn->target).backward();
//     optim.step(), model.zero_grad(), schedule.step();
//   }
//
// A rank that has run out takes part in the others' averages with gradients of zero, as in PyTorch's Join, and then has
// the same gradients as they: it steps its optimizer with them, so weights, optimizer state and schedule stay equal on
// all ranks. (In PyTorch it does not step; the weights are sent at the end, the optimizer's state differs from then
// on.)
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

#include "ddp/distributed_data_parallel.h"

namespace ddp {

/// What the sum of the gradients is divided by.
enum class DivideBy {
  kWorld,  ///< all ranks: a turn in which few have a batch gives small gradients
  kActive  ///< the ranks that have a batch in this turn
};

struct JoinOptions {
  DivideBy divide_by = DivideBy::kWorld;
  /// Error on all ranks, naming those that ran out, as soon as some ranks have no batch and others do.
  bool throw_on_early_end = false;
};

namespace detail {

/// What the ranks of a joined loop tell each other.
class JoinedRanks {
 public:
  JoinedRanks(std::shared_ptr<Replica> replica, JoinOptions options);
  JoinedRanks(const JoinedRanks&) = delete;
  JoinedRanks& operator=(const JoinedRanks&) = delete;
  ~JoinedRanks();

  /// Begins the next turn; `have`: whether this rank has a batch for it. Where it has none, averages with the others
  /// before it returns. Returns how many ranks have one; 0: the loop ends everywhere.
  int next(bool have);

 private:
  void require_averaged() const;

  const std::shared_ptr<Replica> replica_;
  const JoinOptions options_;
  int64_t turns_ = 0;
  int64_t averaged_ = 0;  // before this turn
  int last_ = 0;          // the highest rank that has a batch
};

}  // namespace detail

/// One turn of a joined loop on this rank.
template <class Batch>
class Turn {
 public:
  /// Whether this rank has a batch in this turn.
  explicit operator bool() const { return batch_ != nullptr; }
  /// Requires: it has one. The batch may be changed or moved from.
  Batch& operator*() const { return *batch_; }
  Batch* operator->() const { return batch_; }
  /// Ranks that have a batch in this turn, at least 1.
  int active() const { return active_; }

 private:
  template <class Loader>
  friend class Joined;
  Batch* batch_ = nullptr;
  int active_ = 0;
};

/// The range that `join` returns. Begun at most once.
template <class Loader>
class Joined {
  using Source = decltype(std::declval<Loader&>().begin());
  using SourceEnd = decltype(std::declval<Loader&>().end());
  using Reference = decltype(*std::declval<Source&>());
  // What a container holds is handed on where it lies; what an input iterator shows is gone with the next ++.
  static constexpr bool kStays = std::forward_iterator<Source> && std::is_lvalue_reference_v<Reference>;

 public:
  using Batch = std::conditional_t<kStays, std::remove_reference_t<Reference>, std::remove_cvref_t<Reference>>;

  Joined(Loader& loader, std::shared_ptr<detail::Replica> replica, JoinOptions options)
      : loader_(&loader), ranks_(std::move(replica), options) {}

  class Iterator {
   public:
    using value_type = Turn<Batch>;
    using difference_type = std::ptrdiff_t;
    explicit Iterator(Joined* joined) : joined_(joined) {}
    Turn<Batch>& operator*() const { return joined_->turn_; }
    Iterator& operator++() {
      joined_->advance();
      return *this;
    }
    void operator++(int) { joined_->advance(); }
    bool operator==(std::default_sentinel_t) const { return joined_->turn_.active_ == 0; }

   private:
    Joined* joined_;
  };

  Iterator begin() {
    advance();
    return Iterator(this);
  }
  std::default_sentinel_t end() const { return {}; }

 private:
  void advance() {
    turn_.batch_ = nullptr;
    if (read()) {
      if constexpr (kStays) {
        turn_.batch_ = std::addressof(**source_);
      } else {
        turn_.batch_ = std::addressof(batch_.emplace(std::move(**source_)));
      }
    }
    turn_.active_ = ranks_.next(turn_.batch_ != nullptr);
  }

  bool read() {
    if (exhausted_) return false;
    if (!source_) {
      source_.emplace(loader_->begin());
      end_.emplace(loader_->end());
    } else {
      ++*source_;
    }
    exhausted_ = *source_ == *end_;
    return !exhausted_;
  }

  Loader* loader_;
  detail::JoinedRanks ranks_;
  std::optional<Source> source_;
  std::optional<SourceEnd> end_;
  std::optional<std::conditional_t<kStays, char, Batch>> batch_;
  bool exhausted_ = false;
  Turn<Batch> turn_;
};

/// The turns of all ranks over their loaders, which may be anything with begin() and end(), for the one model that is
/// trained in the loop. Where a turn has a batch, the body runs exactly one synchronised backward of the model, and as
/// many passes under no_sync before it as it likes; else Error at the next turn. Buffers come from the highest rank
/// that has a batch, as in PyTorch's Join. Other collectives in the forward (SyncBatchNorm) are not taken part in by a
/// rank that has run out.
/// Collective: each turn begins with one small all_gather. Leave the loop early on all ranks or on none.
/// Source of the arithmetic: torch.distributed.algorithms.join, DistributedDataParallel.join.
template <class Loader, class M>
Joined<Loader> join(Loader& loader, const DistributedDataParallel<M>& model, JoinOptions options = {}) {
  return Joined<Loader>(loader, model.replica(), options);
}

}  // namespace ddp
