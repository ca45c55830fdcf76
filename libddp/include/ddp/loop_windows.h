// Inside of loop.h: reads a loader in windows of n batches.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "ddp/distributed_sampler.h"

namespace ddp {

class ProcessGroup;

/// Where a batch stands in its window.
class Micro {
 public:
  Micro(int64_t index, int64_t count) : index_(index), count_(count) {}

  int64_t index() const { return index_; }  ///< 0 to count() - 1
  int64_t count() const { return count_; }  ///< batches in this window
  bool last() const { return index_ + 1 == count_; }

 private:
  int64_t index_;
  int64_t count_;
};

/// What a window yields. The batch may be changed or moved from.
template <class Batch>
struct MicroBatch {
  Batch& batch;
  Micro micro;
};

namespace detail {

/// Given how many batches this rank has for a window, how many all ranks use.
using Agree = std::function<int64_t(int64_t have)>;
Agree agree_on_batches(const ProcessGroup& group);

[[noreturn]] void throw_window_size(int64_t n);

// torch's loaders cannot be begun again while workers hold batches, so what they hold is read out when a loop is left.
template <class Loader>
constexpr bool kHasWorkers = requires(Loader& loader) {
  loader.options().workers;
  loader.join();
};

template <class Loader>
class Windows {
  using Source = decltype(std::declval<Loader&>().begin());
  using SourceEnd = decltype(std::declval<Loader&>().end());
  using Reference = decltype(*std::declval<Source&>());
  // A container's elements stay where they are and are handed on by reference; what an input iterator shows is gone
  // with the next ++ and is moved out.
  static constexpr bool kStays = std::forward_iterator<Source> && std::is_lvalue_reference_v<Reference>;

 public:
  using Batch = std::conditional_t<kStays, std::remove_reference_t<Reference>, std::remove_cvref_t<Reference>>;

  Windows(Loader& loader, int64_t n, DistributedSampler sampler) : loader_(&loader), n_(n), sampler_(sampler) {
    if (n < 1) throw_window_size(n);
  }
  Windows(Loader& loader, int64_t n, Agree agree) : loader_(&loader), n_(n), agree_(std::move(agree)) {
    if (n < 1) throw_window_size(n);
  }
  Windows(const Windows&) = delete;
  Windows& operator=(const Windows&) = delete;

  ~Windows() {
    if (!source_ || exhausted_ || !sampler_ || std::uncaught_exceptions() > exceptions_) return;
    try {
      sampler_->stop();
      drain();
    } catch (...) {  // a worker's fault in a batch that nobody wants any more
    }
  }

  class Iterator {
   public:
    using value_type = MicroBatch<Batch>;
    using difference_type = std::ptrdiff_t;
    explicit Iterator(Windows* windows) : windows_(windows) {}
    MicroBatch<Batch> operator*() const { return windows_->current(); }
    Iterator& operator++() {
      windows_->advance();
      return *this;
    }
    void operator++(int) { windows_->advance(); }
    bool operator==(std::default_sentinel_t) const { return windows_->count_ == 0; }

   private:
    Windows* windows_;
  };

  /// Begins the loader. At most once.
  Iterator begin() {
    fill();
    return Iterator(this);
  }
  std::default_sentinel_t end() const { return {}; }

 private:
  using Slot = std::conditional_t<kStays, Batch*, std::optional<Batch>>;

  MicroBatch<Batch> current() { return {*slots_[static_cast<size_t>(index_)], Micro(index_, count_)}; }

  void advance() {
    if constexpr (!kStays) slots_[static_cast<size_t>(index_)].reset();  // its memory is free for the next one
    if (++index_ == count_) {
      fill();
    } else {
      count_used();
    }
  }

  // Reads no further than the window, so that what the loader has ready is what its own options say.
  void fill() {
    slots_.clear();
    index_ = 0;
    while (!last_window_ && static_cast<int64_t>(slots_.size()) < n_ && read()) {
    }
    auto have = static_cast<int64_t>(slots_.size());
    count_ = agree_ && !last_window_ ? agree_(have) : have;
    // Fewer than n: some rank has no more, and every rank knows.
    if (count_ < n_) last_window_ = true;
    if (count_ < have) {
      slots_.resize(static_cast<size_t>(count_));
      if (!exhausted_) drain();
    }
    if (count_ > 0) {
      count_used();
    } else if (sampler_) {
      sampler_->finish_epoch();
    }
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
    if (exhausted_) return false;
    if constexpr (kStays) {
      slots_.push_back(std::addressof(**source_));
    } else {
      slots_.emplace_back(std::in_place, std::move(**source_));
    }
    return true;
  }

  void count_used() {
    if (sampler_ && index_ + 1 == count_) sampler_->consume(static_cast<size_t>(count_));
  }

  void drain() {
    if constexpr (kHasWorkers<Loader>) {
      while (!(*source_ == *end_)) ++*source_;
      exhausted_ = true;
    }
  }

  Loader* loader_;
  int64_t n_;
  std::optional<DistributedSampler> sampler_;
  Agree agree_;
  int exceptions_ = std::uncaught_exceptions();

  std::optional<Source> source_;
  std::optional<SourceEnd> end_;
  bool exhausted_ = false;
  bool last_window_ = false;
  std::vector<Slot> slots_;
  int64_t index_ = 0;
  int64_t count_ = 0;
};

template <class Loader>
class Batches {
 public:
  using Batch = typename Windows<Loader>::Batch;

  Batches(Loader& loader, DistributedSampler sampler) : windows_(loader, 1, std::move(sampler)) {}

  class Iterator {
   public:
    using value_type = Batch;
    using difference_type = std::ptrdiff_t;
    explicit Iterator(typename Windows<Loader>::Iterator it) : it_(it) {}
    Batch& operator*() const { return (*it_).batch; }
    Iterator& operator++() {
      ++it_;
      return *this;
    }
    void operator++(int) { ++it_; }
    bool operator==(std::default_sentinel_t end) const { return it_ == end; }

   private:
    typename Windows<Loader>::Iterator it_;
  };

  Iterator begin() { return Iterator(windows_.begin()); }
  std::default_sentinel_t end() const { return {}; }

 private:
  Windows<Loader> windows_;
};

}  // namespace detail
}  // namespace ddp
