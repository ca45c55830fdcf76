// Inside of prefetch.h: its options, and what does not depend on the type of a batch.
#pragma once

#include <torch/data/example.h>
#include <torch/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "ddp/distributed_sampler.h"
#include "ddp/for_each_tensor.h"

namespace ddp {

struct PrefetcherOptions {
  bool drop_last = false;  ///< leave out a last batch that is not full
  /// Batches made ahead of the one in use. `epoch.accumulate(loader, n)` takes n at once, so give it n or more. With 0
  /// there is no thread, and a batch is made when the loop asks for it.
  size_t depth = 2;
  /// Where batches go when it is a CUDA device. On the CPU they stay where `source` made them.
  torch::Device device = torch::kCPU;
  bool pin_memory = true;  ///< copy through page-locked memory, beside the device's work; CUDA only
  std::chrono::milliseconds timeout = std::chrono::minutes(10);  ///< of the wait for a batch; without a thread none
};

namespace detail {

using TensorVisitor = std::function<void(torch::Tensor&)>;
using MakeBatch = std::function<std::shared_ptr<void>(const std::vector<size_t>& rows)>;
using VisitBatch = std::function<void(void* batch, const TensorVisitor& f)>;

/// One thread at work for one loop at a time. `begin` gives the loop a number, which tells it from a later one.
class PrefetchQueue {
 public:
  virtual ~PrefetchQueue() = default;
  virtual uint64_t begin() = 0;
  virtual std::shared_ptr<void> next(uint64_t pass) = 0;  // null at the end of the epoch
  virtual void leave(uint64_t pass) noexcept = 0;
  virtual double waited() const = 0;
};

std::unique_ptr<PrefetchQueue> make_prefetch_queue(DistributedSampler sampler, size_t batch_size,
                                                   PrefetcherOptions options, MakeBatch make, VisitBatch visit);

/// A loop over the queue, from its begin until it is left.
class PrefetchPass {
 public:
  explicit PrefetchPass(PrefetchQueue& queue) : number_(queue.begin()), queue_(&queue) {}
  PrefetchPass(PrefetchPass&& other) noexcept : number_(other.number_), queue_(std::exchange(other.queue_, nullptr)) {}
  PrefetchPass& operator=(PrefetchPass&& other) noexcept {
    std::swap(number_, other.number_), std::swap(queue_, other.queue_);
    return *this;
  }
  ~PrefetchPass() {
    if (queue_ != nullptr) queue_->leave(number_);
  }
  std::shared_ptr<void> next() { return queue_->next(number_); }

 private:
  uint64_t number_;
  PrefetchQueue* queue_;
};

template <class Source>
decltype(auto) batch_of(Source& source, const std::vector<size_t>& rows) {
  if constexpr (requires { source.get_batch(rows); }) {
    return source.get_batch(rows);
  } else {
    return source(rows);
  }
}

template <class Source>
using BatchOf =
    std::remove_cvref_t<decltype(batch_of(std::declval<Source&>(), std::declval<const std::vector<size_t>&>()))>;

template <class T>
inline constexpr bool kIsExample = false;
template <class Data, class Target>
inline constexpr bool kIsExample<torch::data::Example<Data, Target>> = true;

[[noreturn]] void throw_unknown_batch(const char* type);

/// As `visit_tensors`, with two differences: torch's Example is known, and what is not known is an error only when it
/// is visited, because on the CPU a batch may be anything.
template <class T, class F>
void visit_batch(T& value, const F& f) {
  if constexpr (kIsExample<T>) {
    visit_batch(value.data, f);
    if constexpr (requires { value.target; }) visit_batch(value.target, f);
  } else if constexpr (std::is_same_v<T, torch::Tensor>) {
    f(value);
  } else if constexpr (HasOwnVisit<T>) {
    for_each_tensor(value, f);
  } else if constexpr (std::is_arithmetic_v<T> || std::is_enum_v<T> || std::is_same_v<T, std::string>) {
    // holds no tensor
  } else if constexpr (MapLike<T>) {
    for (auto& entry : value) visit_batch(entry.second, f);
  } else if constexpr (RangeLike<T>) {
    for (auto&& item : value) visit_batch(item, f);
  } else if constexpr (TupleLike<T>) {
    std::apply([&](auto&... items) { (visit_batch(items, f), ...); }, value);
  } else if constexpr (PointerLike<T>) {
    if (value) visit_batch(*value, f);
  } else {
    throw_unknown_batch(typeid(T).name());
  }
}

}  // namespace detail
}  // namespace ddp
