#include "backend/shm.h"

#include <fmt/format.h>

#include <mutex>
#include <utility>
#include <vector>

#include "backend/checks.h"
#include "backend/plain.h"
#include "shm/collectives.h"
#include "shm/mailbox.h"

namespace ddp::detail {
namespace {

using at::Tensor;
using c10d::kUnsetTimeout;
using std::chrono::milliseconds;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// The caller has done the work when it gets this.
class DoneWork : public c10d::Work {
 public:
  explicit DoneWork(std::vector<Tensor> result) : result_(std::move(result)) {}

  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(milliseconds) override { return true; }
  void synchronize() override {}
  std::vector<Tensor> result() override { return result_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(result_));
    return future;
  }

 private:
  const std::vector<Tensor> result_;
};

class ShmBackend : public c10d::Backend {
 public:
  using ConnectGloo = std::function<c10::intrusive_ptr<c10d::Backend>()>;

  ShmBackend(std::unique_ptr<shm::Exchange> exchange, ConnectGloo connect_gloo)
      : Backend(exchange->place().rank, exchange->place().size),
        exchange_(std::move(exchange)),
        mailbox_(*exchange_),
        connect_gloo_(std::move(connect_gloo)) {}

  const std::string getBackendName() const override { return "shm"; }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return c10::make_intrusive<Options>("shm", exchange_->timeout());
  }
  void setTimeout(milliseconds timeout) override { exchange_->set_timeout(timeout); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return exchange_->calls(); }

  WorkPtr allreduce(std::vector<Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    if (tensors.size() == 1 && tensors[0].layout() == c10::kSparse) return gloo().allreduce(tensors, options);
    return all_reduce(tensors, options.reduceOp, options.timeout);
  }
  WorkPtr allreduce_sparse(std::vector<Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    return gloo().allreduce_sparse(tensors, options);
  }
  WorkPtr allreduce_coalesced(std::vector<Tensor>& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return all_reduce(tensors, options.reduceOp, options.timeout);
  }

  WorkPtr reduce(std::vector<Tensor>& tensors, const c10d::ReduceOptions& options) override {
    return run(options.timeout, tensors, [&] {
      for (const Tensor& tensor : tensors) {
        Plain plain("reduce", tensor);
        checks_.reducible("reduce", tensor, plain.buffer(), options.reduceOp);
        shm::reduce(*exchange_, plain.buffer(), root(options.rootRank), to_op("reduce", options.reduceOp));
        if (root(options.rootRank) == rank_) finish(plain, tensor, options.reduceOp);
      }
    });
  }

  WorkPtr broadcast(std::vector<Tensor>& tensors, const c10d::BroadcastOptions& options) override {
    return run(options.timeout, tensors, [&] {
      for (const Tensor& tensor : tensors) {
        Plain plain("broadcast", tensor);
        shm::broadcast(*exchange_, plain.buffer(), root(options.rootRank));
        plain.put_back();
      }
    });
  }

  WorkPtr allgather(std::vector<std::vector<Tensor>>& outputs, std::vector<Tensor>& inputs,
                    const c10d::AllgatherOptions& options) override {
    return run(options.timeout, outputs.at(0), [&] {
      for (size_t i = 0; i < inputs.size(); ++i) all_gather(outputs.at(i), inputs[i]);
    });
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    return run(options.timeout, {output}, [&] { all_gather(checks_.parts_of("all_gather", output), input); });
  }
  WorkPtr allgather_into_tensor_coalesced(std::vector<Tensor>& outputs, std::vector<Tensor>& inputs,
                                          const c10d::AllgatherOptions& options) override {
    return run(options.timeout, outputs, [&] {
      for (size_t i = 0; i < inputs.size(); ++i) all_gather(checks_.parts_of("all_gather", outputs.at(i)), inputs[i]);
    });
  }

  WorkPtr gather(std::vector<std::vector<Tensor>>& outputs, std::vector<Tensor>& inputs,
                 const c10d::GatherOptions& options) override {
    const bool mine = root(options.rootRank) == rank_;
    return run(options.timeout, mine ? outputs.at(0) : std::vector<Tensor>(), [&] {
      Plain input("gather", inputs.at(0));
      Plains parts("gather", mine ? checks_.like("gather", outputs.at(0), inputs.at(0)) : std::vector<Tensor>());
      shm::gather(*exchange_, input.buffer(), parts.buffers(), root(options.rootRank));
      parts.put_back();
    });
  }

  WorkPtr scatter(std::vector<Tensor>& outputs, std::vector<std::vector<Tensor>>& inputs,
                  const c10d::ScatterOptions& options) override {
    const bool mine = root(options.rootRank) == rank_;
    return run(options.timeout, outputs, [&] {
      Plain output("scatter", outputs.at(0));
      Plains parts("scatter", mine ? checks_.like("scatter", inputs.at(0), outputs.at(0)) : std::vector<Tensor>());
      shm::scatter(*exchange_, output.buffer(), parts.buffers(), root(options.rootRank));
      output.put_back();
    });
  }

  WorkPtr reduce_scatter(std::vector<Tensor>& outputs, std::vector<std::vector<Tensor>>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    return run(options.timeout, outputs, [&] {
      for (size_t i = 0; i < outputs.size(); ++i) reduce_scatter(outputs[i], inputs.at(i), options.reduceOp);
    });
  }
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return run(options.timeout, {output},
               [&] { reduce_scatter(output, checks_.parts_of("reduce_scatter", input), options.reduceOp); });
  }
  WorkPtr reduce_scatter_tensor_coalesced(std::vector<Tensor>& outputs, std::vector<Tensor>& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    return run(options.timeout, outputs, [&] {
      for (size_t i = 0; i < outputs.size(); ++i) {
        reduce_scatter(outputs[i], checks_.parts_of("reduce_scatter", inputs.at(i)), options.reduceOp);
      }
    });
  }

  WorkPtr alltoall(std::vector<Tensor>& outputs, std::vector<Tensor>& inputs,
                   const c10d::AllToAllOptions& options) override {
    return run(options.timeout, outputs, [&] { all_to_all(outputs, inputs); });
  }
  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override {
    return run(options.timeout, {output}, [&] {
      all_to_all(
          output_splits.empty() ? checks_.parts_of("all_to_all", output) : output.split_with_sizes(output_splits),
          input_splits.empty() ? checks_.parts_of("all_to_all", input) : input.split_with_sizes(input_splits));
    });
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return run(options.timeout, {}, [&] { shm::barrier(*exchange_); });
  }
  void monitoredBarrier(const c10d::BarrierOptions& options, bool) override { barrier(options); }

  WorkPtr send(std::vector<Tensor>& tensors, int to, int tag) override {
    return start(shm::Operation::kSend, tensors.at(0), to, tag);
  }
  WorkPtr recv(std::vector<Tensor>& tensors, int from, int tag) override {
    return start(shm::Operation::kRecv, tensors.at(0), from, tag);
  }

 private:
  // A message that may still be on its way.
  class MessageWork : public c10d::Work {
   public:
    MessageWork(c10::intrusive_ptr<ShmBackend> backend, shm::Operation operation, std::shared_ptr<Plain> plain,
                std::shared_ptr<shm::Message> message)
        : backend_(std::move(backend)), operation_(operation), plain_(std::move(plain)), message_(std::move(message)) {}

    bool isCompleted() override {
      std::lock_guard lock(backend_->mutex_);
      backend_->mailbox_.progress();
      return message_->done;
    }
    bool isSuccess() const override { return message_->done; }
    int sourceRank() const override { return message_->peer; }
    void synchronize() override { wait(kUnsetTimeout); }
    bool wait(milliseconds timeout) override {
      std::lock_guard lock(backend_->mutex_);
      const auto limit = timeout > milliseconds::zero() ? timeout : backend_->exchange_->timeout();
      backend_->mailbox_.wait(*message_, operation_, limit);
      if (operation_ == shm::Operation::kRecv) plain_->put_back();
      return true;
    }

   private:
    const c10::intrusive_ptr<ShmBackend> backend_;
    const shm::Operation operation_;
    const std::shared_ptr<Plain> plain_;
    const std::shared_ptr<shm::Message> message_;
  };

  // Does the work of a collective, in the caller's thread.
  template <class F>
  WorkPtr run(milliseconds timeout, std::vector<Tensor> result, F&& work) {
    std::lock_guard lock(mutex_);
    exchange_->set_idle(mailbox_.idle() ? std::function<void()>() : [this] { mailbox_.progress(); });
    const milliseconds usual = exchange_->timeout();
    if (timeout != kUnsetTimeout) exchange_->set_timeout(timeout);
    try {
      work();
    } catch (...) {
      exchange_->set_timeout(usual);
      throw;
    }
    exchange_->set_timeout(usual);
    return c10::make_intrusive<DoneWork>(std::move(result));
  }

  WorkPtr start(shm::Operation operation, const Tensor& tensor, int peer, int tag) {
    std::lock_guard lock(mutex_);
    const char* name = to_string(operation);
    if (peer < 0 || peer >= size_ || peer == rank_) {
      refuse(name, fmt::format("rank {}: the peer is {}; give another rank of 0..{}", rank_, peer, size_ - 1));
    }
    auto plain = std::make_shared<Plain>(name, tensor);
    const shm::Buffer buffer = plain->buffer();
    auto message = std::make_shared<shm::Message>(shm::Message{.peer = peer,
                                                               .tag = tag,
                                                               .data = buffer.data,
                                                               .bytes = buffer.bytes(),
                                                               .dtype = buffer.dtype,
                                                               .memory = plain});
    operation == shm::Operation::kSend ? mailbox_.send(message) : mailbox_.receive(message);
    return c10::make_intrusive<MessageWork>(c10::intrusive_ptr<ShmBackend>::unsafe_reclaim_from_nonowning(this),
                                            operation, std::move(plain), std::move(message));
  }

  // Of the tensors as of one.
  WorkPtr all_reduce(const std::vector<Tensor>& tensors, const c10d::ReduceOp& op, milliseconds timeout) {
    return run(timeout, tensors, [&] {
      Plains plains("all_reduce", tensors);
      for (size_t i = 0; i < tensors.size(); ++i) {
        checks_.reducible("all_reduce", tensors[i], plains.buffers()[i], op);
      }
      checks_.one_dtype("all_reduce", plains.buffers());
      shm::all_reduce(*exchange_, plains.buffers(), to_op("all_reduce", op), op == c10d::ReduceOp::AVG);
      plains.put_back();
    });
  }

  void reduce_scatter(const Tensor& output, const std::vector<Tensor>& inputs, const c10d::ReduceOp& op) {
    Plain plain("reduce_scatter", output);
    const Plains parts("reduce_scatter", checks_.like("reduce_scatter", inputs, output));
    checks_.reducible("reduce_scatter", output, plain.buffer(), op);
    shm::reduce_scatter(*exchange_, plain.buffer(), parts.buffers(), to_op("reduce_scatter", op));
    finish(plain, output, op);
  }

  void all_gather(const std::vector<Tensor>& outputs, const Tensor& input) {
    const Plain plain("all_gather", input);
    Plains parts("all_gather", checks_.like("all_gather", outputs, input));
    shm::all_gather(*exchange_, plain.buffer(), parts.buffers());
    parts.put_back();
  }

  void all_to_all(const std::vector<Tensor>& outputs, const std::vector<Tensor>& inputs) {
    checks_.one_per_rank("all_to_all", outputs), checks_.one_per_rank("all_to_all", inputs);
    Plains to("all_to_all", outputs);
    const Plains from("all_to_all", inputs);
    shm::all_to_all(*exchange_, to.buffers(), from.buffers());
    to.put_back();
  }

  void finish(Plain& plain, const Tensor& tensor, const c10d::ReduceOp& op) const {
    plain.put_back();
    at::NoGradGuard no_grad;
    if (op == c10d::ReduceOp::AVG) tensor.detach().div_(size_);
  }

  int root(int64_t rank) const { return static_cast<int>(rank); }

  c10d::Backend& gloo() {
    if (!gloo_) gloo_ = connect_gloo_();
    return *gloo_;
  }

  const Checks checks_{rank_, size_};
  std::mutex mutex_;
  const std::unique_ptr<shm::Exchange> exchange_;
  shm::Mailbox mailbox_;
  const ConnectGloo connect_gloo_;
  c10::intrusive_ptr<c10d::Backend> gloo_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_shm(std::unique_ptr<shm::Exchange> exchange,
                                           std::function<c10::intrusive_ptr<c10d::Backend>()> connect_gloo) {
  return c10::make_intrusive<ShmBackend>(std::move(exchange), std::move(connect_gloo));
}

}  // namespace ddp::detail
