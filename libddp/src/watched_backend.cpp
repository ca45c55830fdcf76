#include "watched_backend.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <thread>
#include <utility>
#include <vector>

#include "ddp/error.h"
#include "error_text.h"

namespace ddp::detail {
namespace {

using c10d::Work;
using WorkPtr = c10::intrusive_ptr<Work>;

bool contains(const std::string& text, std::initializer_list<const char*> words) {
  return std::any_of(words.begin(), words.end(),
                     [&](const char* word) { return text.find(word) != std::string::npos; });
}

class WatchedWork : public Work {
 public:
  WatchedWork(WorkPtr inner, std::shared_ptr<CallLog> log, uint64_t number, const char* operation)
      : inner_(std::move(inner)), log_(std::move(log)), number_(number), operation_(operation) {}

  bool isCompleted() override { return inner_->isCompleted(); }
  bool isSuccess() const override { return inner_->isSuccess(); }
  std::exception_ptr exception() const override { return inner_->exception(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  std::vector<at::Tensor> result() override { return inner_->result(); }
  void synchronize() override { inner_->synchronize(); }
  void abort() override { inner_->abort(); }

  bool wait(std::chrono::milliseconds timeout) override {
    try {
      return inner_->wait(timeout);
    } catch (...) {
      std::rethrow_exception(log_->translate(std::current_exception(), number_, operation_));
    }
  }

  // The reducer waits for this one.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto inner = inner_->getFuture();
    auto translated = inner->createInstance(inner->elementType());
    inner->addCallback([translated, log = log_, number = number_, operation = operation_](c10::ivalue::Future& done) {
      if (done.hasError()) {
        translated->setError(log->translate(done.exception_ptr(), number, operation));
      } else {
        translated->markCompleted(done.value());
      }
    });
    return translated;
  }

 private:
  const WorkPtr inner_;
  const std::shared_ptr<CallLog> log_;
  const uint64_t number_;
  const char* const operation_;
};

class WatchedBackend : public c10d::Backend {
 public:
  WatchedBackend(c10::intrusive_ptr<c10d::Backend> inner, std::shared_ptr<CallLog> log)
      : Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)), log_(std::move(log)) {}

  const std::string getBackendName() const override { return inner_->getBackendName(); }
  c10::intrusive_ptr<Options> getBackendOptions() override { return inner_->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override { inner_->setTimeout(timeout); }

  WorkPtr broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) override {
    return call("broadcast", [&] { return inner_->broadcast(tensors, options); });
  }
  WorkPtr allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    return call("all_reduce", [&] { return inner_->allreduce(tensors, options); });
  }
  WorkPtr allreduce_sparse(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    return call("all_reduce", [&] { return inner_->allreduce_sparse(tensors, options); });
  }
  WorkPtr allreduce_coalesced(std::vector<at::Tensor>& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override {
    return call("all_reduce", [&] { return inner_->allreduce_coalesced(tensors, options); });
  }
  WorkPtr reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& options) override {
    return call("reduce", [&] { return inner_->reduce(tensors, options); });
  }
  WorkPtr allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                    const c10d::AllgatherOptions& options) override {
    return call("all_gather", [&] { return inner_->allgather(outputs, inputs, options); });
  }
  WorkPtr gather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                 const c10d::GatherOptions& options) override {
    return call("gather", [&] { return inner_->gather(outputs, inputs, options); });
  }
  WorkPtr scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                  const c10d::ScatterOptions& options) override {
    return call("scatter", [&] { return inner_->scatter(outputs, inputs, options); });
  }
  WorkPtr reduce_scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    return call("reduce_scatter", [&] { return inner_->reduce_scatter(outputs, inputs, options); });
  }
  WorkPtr alltoall(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                   const c10d::AllToAllOptions& options) override {
    return call("all_to_all", [&] { return inner_->alltoall(outputs, inputs, options); });
  }
  WorkPtr send(std::vector<at::Tensor>& tensors, int to, int tag) override {
    return call("send", [&] { return inner_->send(tensors, to, tag); });
  }
  WorkPtr recv(std::vector<at::Tensor>& tensors, int from, int tag) override {
    return call("recv", [&] { return inner_->recv(tensors, from, tag); });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return call("barrier", [&] { return inner_->barrier(options); });
  }

 private:
  template <class F>
  WorkPtr call(const char* operation, F&& f) {
    const uint64_t number = log_->begin(operation);
    WorkPtr work;
    try {
      work = f();
    } catch (...) {
      std::rethrow_exception(log_->translate(std::current_exception(), number, operation));
    }
    // On a GPU the future carries stream events that a wrapper would lose; errors there come from NCCL's own watchdog.
    if (inner_->getBackendName() != "gloo") return work;
    return c10::make_intrusive<WatchedWork>(std::move(work), log_, number, operation);
  }

  const c10::intrusive_ptr<c10d::Backend> inner_;
  const std::shared_ptr<CallLog> log_;
};

}  // namespace

CallLog::CallLog(c10::intrusive_ptr<c10d::Store> store, Place place, std::string group,
                 std::chrono::milliseconds timeout)
    : store_(std::move(store)), place_(place), group_(std::move(group)), timeout_(timeout) {}

uint64_t CallLog::begin(const char* operation) {
  last_.store(operation, std::memory_order_relaxed);
  return count_.fetch_add(1, std::memory_order_relaxed) + 1;
}

std::string CallLog::ask_peers() {
  const auto key = [](int rank) { return fmt::format("failed/{}", rank); };
  std::string said;
  try {
    store_->setTimeout(std::chrono::seconds(1));
    store_->set(key(place_.rank), fmt::format("{} #{}", last_.load(), count_.load()));
    // Peers notice within a moment of each other; one that does not answer is dead, stopped or still at work.
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(800);
    std::vector<int> silent;
    for (int rank = 0; rank < place_.size; ++rank) {
      if (rank != place_.rank) silent.push_back(rank);
    }
    while (!silent.empty() && std::chrono::steady_clock::now() < deadline) {
      std::erase_if(silent, [&](int rank) {
        if (!store_->check({key(rank)})) return false;
        said += fmt::format("; rank {} was in {}", rank, store_->get_to_str(key(rank)));
        return true;
      });
      if (!silent.empty()) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    if (!silent.empty()) said += fmt::format("; no word from rank {}", fmt::join(silent, ", "));
    // The store ends with the rank that serves it: let the others read before this one ends.
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
  } catch (const std::exception&) {
    said += "; the store is gone, so the rank that serves it has ended";
  }
  return said;
}

std::exception_ptr CallLog::translate(const std::exception_ptr& error, uint64_t number, const char* operation) {
  const std::string text = error_text(error);
  std::lock_guard lock(failed_mutex_);
  if (peers_.empty()) peers_ = ask_peers();
  const std::string where = fmt::format("[ddp::{}] {}: ", operation, place_.name());
  const std::string what = fmt::format("call #{} in group \"{}\"", number, group_);
  if (contains(text, {"Timed out", "timed out", "imeout"})) {
    return std::make_exception_ptr(TimeoutError(
        fmt::format("{}{} waited {:.3g} s{}; look at the rank that did not come, or raise the group's timeout ({})",
                    where, what, std::chrono::duration<double>(timeout_).count(), peers_, text)));
  }
  if (contains(text, {"Connection closed by peer", "Connection reset", "Broken pipe", "Connection refused"})) {
    return std::make_exception_ptr(PeerError(fmt::format(
        "{}{}: a peer closed its connection, its own message comes first{} ({})", where, what, peers_, text)));
  }
  return std::make_exception_ptr(CommError(fmt::format("{}{} failed{} ({})", where, what, peers_, text)));
}

c10::intrusive_ptr<c10d::Backend> watch(c10::intrusive_ptr<c10d::Backend> inner, std::shared_ptr<CallLog> log) {
  return c10::make_intrusive<WatchedBackend>(std::move(inner), std::move(log));
}

}  // namespace ddp::detail
