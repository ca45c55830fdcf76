#include "watched_backend.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "backend/gloo.h"
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

// How long a wait goes on before it looks whether the ranks disagree.
constexpr std::chrono::milliseconds kSlice(200);

class WatchedWork : public Work {
 public:
  /// `pending` is null where ranks need not make the call alike: for messages between two.
  WatchedWork(WorkPtr inner, std::shared_ptr<CallLog> log, uint64_t number, const char* operation,
              std::shared_ptr<CallWatch::Pending> pending)
      : inner_(std::move(inner)),
        log_(std::move(log)),
        number_(number),
        operation_(operation),
        pending_(std::move(pending)) {}

  bool isCompleted() override { return inner_->isCompleted(); }
  bool isSuccess() const override { return inner_->isSuccess(); }
  std::exception_ptr exception() const override { return inner_->exception(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  std::vector<at::Tensor> result() override { return inner_->result(); }
  void synchronize() override { inner_->synchronize(); }
  void abort() override { inner_->abort(); }

  bool wait(std::chrono::milliseconds timeout) override {
    try {
      const bool result = pending_ == nullptr ? inner_->wait(timeout) : wait_in_slices(timeout);
      if (pending_ != nullptr) pending_->done = true;
      return result;
    } catch (const MismatchError&) {
      throw;
    } catch (...) {
      if (pending_ != nullptr) pending_->done = true;
      std::rethrow_exception(log_->translate(std::current_exception(), number_, operation_));
    }
  }

  // The reducer waits for this one.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto inner = inner_->getFuture();
    auto translated = inner->createInstance(inner->elementType());
    auto settled = std::make_shared<std::atomic<bool>>(false);
    inner->addCallback([translated, settled, pending = pending_, log = log_, number = number_,
                        operation = operation_](c10::ivalue::Future& done) {
      if (pending != nullptr) pending->done = true;
      if (settled->exchange(true)) return;
      if (done.hasError()) {
        translated->setError(log->translate(done.exception_ptr(), number, operation));
      } else {
        translated->markCompleted(done.value());
      }
    });
    if (pending_ != nullptr) {
      // Holds the log weakly: the call is in the keeping of the thread that the log's end waits for.
      log_->watch().on_verdict(
          pending_, [translated, settled, weak = std::weak_ptr(log_), number = number_, operation = operation_] {
            const auto log = weak.lock();
            if (log != nullptr && !settled->exchange(true)) translated->setError(log->disagreement(number, operation));
          });
    }
    return translated;
  }

 private:
  // Gloo itself goes on waiting when ranks disagree.
  bool wait_in_slices(std::chrono::milliseconds timeout) {
    const auto begin = CallWatch::Clock::now();
    for (;;) {
      try {
        return inner_->wait(kSlice);
      } catch (...) {
        if (inner_->isCompleted()) throw;  // its own error
        if (!log_->watch().verdict().empty()) std::rethrow_exception(log_->disagreement(number_, operation_));
        if (timeout.count() > 0 && CallWatch::Clock::now() - begin >= timeout) throw;
      }
    }
  }

  const WorkPtr inner_;
  const std::shared_ptr<CallLog> log_;
  const uint64_t number_;
  const char* const operation_;
  const std::shared_ptr<CallWatch::Pending> pending_;
};

class WatchedBackend : public c10d::Backend {
 public:
  WatchedBackend(c10::intrusive_ptr<c10d::Backend> inner, std::shared_ptr<CallLog> log)
      : Backend(inner->getRank(), inner->getSize()),
        inner_(std::move(inner)),
        log_(std::move(log)),
        is_gloo_(inner_->getBackendName() == "gloo") {}

  ~WatchedBackend() override {
    // Where ranks disagreed, calls wait in Gloo until the timeout, and its destructor would wait for them.
    if (is_gloo_ && !log_->watch().verdict().empty()) (void)inner_.release();
  }

  bool is_gloo() const { return is_gloo_; }
  const std::shared_ptr<CallLog>& log() const { return log_; }

  const std::string getBackendName() const override { return inner_->getBackendName(); }
  c10::intrusive_ptr<Options> getBackendOptions() override { return inner_->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override { inner_->setTimeout(timeout); }

  WorkPtr broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) override {
    return call(of("broadcast", tensors, -1, options.rootRank), [&] { return inner_->broadcast(tensors, options); });
  }
  WorkPtr allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    return call(of("all_reduce", tensors, options.reduceOp), [&] { return inner_->allreduce(tensors, options); });
  }
  WorkPtr allreduce_sparse(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    return call(of("sparse all_reduce", tensors, options.reduceOp),
                [&] { return inner_->allreduce_sparse(tensors, options); });
  }
  WorkPtr allreduce_coalesced(std::vector<at::Tensor>& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override {
    return call(of("all_reduce", tensors, options.reduceOp),
                [&] { return inner_->allreduce_coalesced(tensors, options); });
  }
  WorkPtr reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& options) override {
    return call(of("reduce", tensors, options.reduceOp, options.rootRank),
                [&] { return inner_->reduce(tensors, options); });
  }
  WorkPtr allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                    const c10d::AllgatherOptions& options) override {
    return call(of("all_gather", inputs), [&] { return inner_->allgather(outputs, inputs, options); });
  }
  WorkPtr gather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                 const c10d::GatherOptions& options) override {
    return call(of("gather", inputs, -1, options.rootRank), [&] { return inner_->gather(outputs, inputs, options); });
  }
  WorkPtr scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                  const c10d::ScatterOptions& options) override {
    return call(of("scatter", outputs, -1, options.rootRank),
                [&] { return inner_->scatter(outputs, inputs, options); });
  }
  WorkPtr reduce_scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    return call(of("reduce_scatter", outputs, options.reduceOp),
                [&] { return inner_->reduce_scatter(outputs, inputs, options); });
  }
  WorkPtr alltoall(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                   const c10d::AllToAllOptions& options) override {
    return call(of("all_to_all", {}), [&] { return inner_->alltoall(outputs, inputs, options); });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return call(of("barrier", {}), [&] { return inner_->barrier(options); });
  }

  // Between two ranks: the others do not make the call.
  WorkPtr send(std::vector<at::Tensor>& tensors, int to, int tag) override {
    return message("send", [&] { return inner_->send(tensors, to, tag); });
  }
  WorkPtr recv(std::vector<at::Tensor>& tensors, int from, int tag) override {
    return message("recv", [&] { return inner_->recv(tensors, from, tag); });
  }

 private:
  Signature of(const char* operation, const std::vector<at::Tensor>& tensors, int op = -1, int64_t root = -1) const {
    Signature signature;
    signature.operation = operation;
    signature.op = static_cast<int16_t>(op);
    if (!tensors.empty()) signature.dtype = static_cast<int16_t>(tensors[0].scalar_type());
    for (const at::Tensor& tensor : tensors) signature.count += tensor.numel();
    if (const Intent* intent = Intent::current()) intent->describe(signature);
    signature.root = static_cast<int32_t>(root);
    signature.pass = log_->pass();
    return signature;
  }

  template <class F>
  WorkPtr call(const Signature& signature, F&& f) {
    std::lock_guard lock(mutex_);  // a tag and its call must not be torn apart
    const uint64_t number = ++calls_;
    log_->begin(signature.operation, number);
    if (!is_gloo_) return started(number, signature.operation, f);
    if (!log_->watch().verdict().empty()) std::rethrow_exception(log_->disagreement(number, signature.operation));
    auto pending = log_->watch().begin(number, signature);
    set_next_tag(*inner_, tag_of(signature, number));
    return c10::make_intrusive<WatchedWork>(started(number, signature.operation, f), log_, number, signature.operation,
                                            std::move(pending));
  }

  template <class F>
  WorkPtr message(const char* operation, F&& f) {
    const uint64_t number = calls_;
    auto work = started(number, operation, f);
    // On a GPU the future carries stream events that a wrapper would lose; errors there come from NCCL's own watchdog.
    if (!is_gloo_) return work;
    return c10::make_intrusive<WatchedWork>(std::move(work), log_, number, operation, nullptr);
  }

  template <class F>
  WorkPtr started(uint64_t number, const char* operation, F&& f) {
    try {
      return f();
    } catch (...) {
      std::rethrow_exception(log_->translate(std::current_exception(), number, operation));
    }
  }

  c10::intrusive_ptr<c10d::Backend> inner_;
  const std::shared_ptr<CallLog> log_;
  const bool is_gloo_;
  std::mutex mutex_;
  std::atomic<uint64_t> calls_ = 0;
};

}  // namespace

CallLog::CallLog(c10::intrusive_ptr<c10d::Store> store, Place place, std::string group,
                 std::chrono::milliseconds timeout)
    : store_(std::move(store)), place_(place), group_(std::move(group)), timeout_(timeout), watch_(store_, place) {}

void CallLog::begin(const char* operation, uint64_t number) {
  last_.store(operation, std::memory_order_relaxed);
  count_.store(number, std::memory_order_relaxed);
}

void CallLog::set_pass(Pass pass) {
  std::lock_guard lock(pass_mutex_);
  pass_ = pass;
}

Pass CallLog::pass() const {
  std::lock_guard lock(pass_mutex_);
  return pass_;
}

std::exception_ptr CallLog::disagreement(uint64_t number, const char* operation) const {
  return std::make_exception_ptr(MismatchError(fmt::format("[ddp::{}] {}: call #{} in group \"{}\": {}", operation,
                                                           place_.name(), number, group_, watch_.verdict())));
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
  if (!watch_.ask(number).empty()) return disagreement(number, operation);
  const bool closed =
      contains(text, {"Connection closed by peer", "Connection reset", "Broken pipe", "Connection refused"});
  if (peers_.empty()) {
    // Who has ended first: those who saw it before this rank may have ended too, when others have been asked.
    for (const auto* peer : local_peers_.ended(std::chrono::milliseconds(closed ? 200 : 0))) {
      peers_ += fmt::format("; rank {} (process {}) has ended", peer->rank, peer->pid);
    }
    peers_ += ask_peers();
  }
  const std::string where = fmt::format("[ddp::{}] {}: ", operation, place_.name());
  const std::string what = fmt::format("call #{} in group \"{}\"", number, group_);
  if (contains(text, {"Timed out", "timed out", "imeout"})) {
    return std::make_exception_ptr(TimeoutError(
        fmt::format("{}{} waited {:.3g} s{}; look at the rank that did not come, or raise the group's timeout ({})",
                    where, what, std::chrono::duration<double>(timeout_).count(), peers_, text)));
  }
  if (closed) {
    return std::make_exception_ptr(PeerError(fmt::format(
        "{}{}: a peer closed its connection, its own message comes first{} ({})", where, what, peers_, text)));
  }
  return std::make_exception_ptr(CommError(fmt::format("{}{} failed{} ({})", where, what, peers_, text)));
}

c10::intrusive_ptr<c10d::Backend> watch(c10::intrusive_ptr<c10d::Backend> inner, std::shared_ptr<CallLog> log) {
  return c10::make_intrusive<WatchedBackend>(std::move(inner), std::move(log));
}

std::shared_ptr<CallLog> gloo_log(c10d::Backend& backend) {
  const auto* watched = dynamic_cast<const WatchedBackend*>(&backend);
  return watched != nullptr && watched->is_gloo() ? watched->log() : nullptr;
}

}  // namespace ddp::detail
