#include "backend/hierarchy.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <utility>

#include "backend/checks.h"
#include "backend/pair_messages.h"
#include "backend/plain.h"
#include "backend/worker.h"
#include "ddp/error.h"

namespace ddp::detail {
namespace {

using at::Tensor;
using c10d::kUnsetTimeout;
using shm::Operation;
using std::chrono::milliseconds;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// What only travels does so as bytes: Gloo refuses some dtypes, and reads other strides wrongly. The memory lives for as
// long as Gloo has it.
std::vector<Tensor> as_bytes(const std::shared_ptr<Plains>& plains) {
  std::vector<Tensor> tensors;
  for (const auto& buffer : plains->buffers()) {
    tensors.push_back(at::from_blob(
        buffer.data, {buffer.bytes()}, [keep = plains](void*) {}, at::TensorOptions(at::kByte)));
  }
  return tensors;
}

class Hierarchy : public c10d::Backend {
 public:
  explicit Hierarchy(TwoLevelsOptions options)
      : Backend(options.place.rank, options.place.size),
        timeout_(options.timeout),
        messages_(c10::make_intrusive<c10d::PrefixStore>("messages", options.store), options.place, options.group,
                  options.timeout),
        levels_(std::move(options)) {}

  const std::string getBackendName() const override { return kHierarchy; }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return c10::make_intrusive<Options>(kHierarchy, timeout_.load());
  }
  void setTimeout(milliseconds timeout) override { timeout_ = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return started_; }

  WorkPtr allreduce(std::vector<Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    if (tensors.size() == 1 && tensors[0].layout() == c10::kSparse) return allreduce_sparse(tensors, options);
    return all_reduce(tensors, options.reduceOp, options.timeout);
  }
  WorkPtr allreduce_coalesced(std::vector<Tensor>& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return all_reduce(tensors, options.reduceOp, options.timeout);
  }
  WorkPtr allreduce_sparse(std::vector<Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    return through_gloo(
        Operation::kAllReduce, options.timeout, tensors, {}, {},
        [tensors, options](c10d::Backend& gloo, auto&, auto&) mutable { return gloo.allreduce(tensors, options); });
  }

  WorkPtr reduce(std::vector<Tensor>& tensors, const c10d::ReduceOptions& options) override {
    const shm::Op op = to_op("reduce", options.reduceOp);
    auto plains = plain("reduce", tensors, options.reduceOp);
    return run(options.timeout, tensors, [this, plains, tensors, op, options] {
      const int root = static_cast<int>(options.rootRank);
      for (const auto& buffer : plains->buffers()) levels_.reduce(buffer, op, root);
      if (root != rank_) return;
      plains->put_back();
      divide(tensors, options.reduceOp);
    });
  }

  WorkPtr broadcast(std::vector<Tensor>& tensors, const c10d::BroadcastOptions& options) override {
    auto plains = std::make_shared<Plains>("broadcast", tensors);
    return run(options.timeout, tensors, [this, plains, root = static_cast<int>(options.rootRank)] {
      for (const auto& buffer : plains->buffers()) levels_.broadcast({&buffer, 1}, root);
      plains->put_back();
    });
  }

  WorkPtr allgather(std::vector<std::vector<Tensor>>& outputs, std::vector<Tensor>& inputs,
                    const c10d::AllgatherOptions& options) override {
    return all_gather(outputs, inputs, outputs.at(0), options.timeout);
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    std::vector<Tensor> result{output}, inputs{input};
    return all_gather({checks_.parts_of("all_gather", output)}, inputs, result, options.timeout);
  }
  WorkPtr allgather_into_tensor_coalesced(std::vector<Tensor>& outputs, std::vector<Tensor>& inputs,
                                          const c10d::AllgatherOptions& options) override {
    std::vector<std::vector<Tensor>> parts;
    for (const Tensor& output : outputs) parts.push_back(checks_.parts_of("all_gather", output));
    return all_gather(parts, inputs, outputs, options.timeout);
  }

  WorkPtr gather(std::vector<std::vector<Tensor>>& outputs, std::vector<Tensor>& inputs,
                 const c10d::GatherOptions& options) override {
    const bool mine = options.rootRank == rank_;
    const auto parts = mine ? checks_.like("gather", outputs.at(0), inputs.at(0)) : std::vector<Tensor>();
    return through_gloo(
        Operation::kGather, options.timeout, parts, parts, inputs,
        [options, mine](c10d::Backend& gloo, std::vector<Tensor>& to, std::vector<Tensor>& from) {
          std::vector<std::vector<Tensor>> outputs;
          if (mine) outputs.push_back(to);
          return gloo.gather(outputs, from, options);
        },
        static_cast<int>(options.rootRank));
  }
  WorkPtr scatter(std::vector<Tensor>& outputs, std::vector<std::vector<Tensor>>& inputs,
                  const c10d::ScatterOptions& options) override {
    const bool mine = options.rootRank == rank_;
    const auto parts = mine ? checks_.like("scatter", inputs.at(0), outputs.at(0)) : std::vector<Tensor>();
    return through_gloo(
        Operation::kScatter, options.timeout, outputs, outputs, parts,
        [options, mine](c10d::Backend& gloo, std::vector<Tensor>& to, std::vector<Tensor>& from) {
          std::vector<std::vector<Tensor>> inputs;
          if (mine) inputs.push_back(from);
          return gloo.scatter(to, inputs, options);
        },
        static_cast<int>(options.rootRank));
  }

  WorkPtr reduce_scatter(std::vector<Tensor>& outputs, std::vector<std::vector<Tensor>>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    for (size_t i = 0; i < outputs.size(); ++i) checks_.like("reduce_scatter", inputs.at(i), outputs[i]);
    return reduce_scatter_of(outputs, inputs, options);
  }
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    std::vector<Tensor> outputs{output};
    return reduce_scatter_of(outputs, {checks_.parts_of("reduce_scatter", input)}, options);
  }
  WorkPtr reduce_scatter_tensor_coalesced(std::vector<Tensor>& outputs, std::vector<Tensor>& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    std::vector<std::vector<Tensor>> parts;
    for (const Tensor& input : inputs) parts.push_back(checks_.parts_of("reduce_scatter", input));
    return reduce_scatter_of(outputs, parts, options);
  }

  WorkPtr alltoall(std::vector<Tensor>& outputs, std::vector<Tensor>& inputs,
                   const c10d::AllToAllOptions& options) override {
    checks_.one_per_rank("all_to_all", outputs), checks_.one_per_rank("all_to_all", inputs);
    return all_to_all(outputs, outputs, inputs, options);
  }
  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override {
    const auto cut = [&](const Tensor& tensor, const std::vector<int64_t>& splits) {
      return splits.empty() ? checks_.parts_of("all_to_all", tensor) : tensor.split_with_sizes(splits);
    };
    return all_to_all({output}, cut(output, output_splits), cut(input, input_splits), options);
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return run(options.timeout, {}, [this] { levels_.barrier(); });
  }
  void monitoredBarrier(const c10d::BarrierOptions& options, bool) override { barrier(options)->wait(); }

  WorkPtr send(std::vector<Tensor>& tensors, int to, int tag) override {
    return messages_.send(tensors.at(0), to, tag);
  }
  WorkPtr recv(std::vector<Tensor>& tensors, int from, int tag) override {
    return messages_.receive(tensors.at(0), from, tag);
  }

 private:
  WorkPtr run(milliseconds timeout, std::vector<Tensor> result, std::function<void()> task) {
    auto work = c10::make_intrusive<TaskWork>(std::move(result));
    ++started_;
    const milliseconds limit = timeout == kUnsetTimeout ? timeout_.load() : timeout;
    worker_.add(work, [this, limit, task = std::move(task)] {
      levels_.set_timeout(limit);
      task();
    });
    return work;
  }

  // Of the tensors as of one.
  WorkPtr all_reduce(const std::vector<Tensor>& tensors, const c10d::ReduceOp& op, milliseconds timeout) {
    if (tensors.empty()) refuse("all_reduce", fmt::format("rank {}: no tensor was given; give one at least", rank_));
    const shm::Op how = to_op("all_reduce", op);
    auto plains = plain("all_reduce", tensors, op);
    checks_.one_dtype("all_reduce", plains->buffers());
    const double scale = op == c10d::ReduceOp::AVG ? 1.0 / size_ : 1.0;
    return run(timeout, tensors, [this, plains, how, scale] {
      levels_.all_reduce(plains->buffers(), how, scale);
      plains->put_back();
    });
  }

  WorkPtr all_gather(const std::vector<std::vector<Tensor>>& outputs, const std::vector<Tensor>& inputs,
                     std::vector<Tensor> result, milliseconds timeout) {
    for (size_t i = 0; i < inputs.size(); ++i) checks_.like("all_gather", outputs.at(i), inputs[i]);
    if (levels_.even()) {
      std::vector<std::pair<std::shared_ptr<Plain>, std::shared_ptr<Plains>>> calls;
      for (size_t i = 0; i < inputs.size(); ++i) {
        calls.emplace_back(std::make_shared<Plain>("all_gather", inputs[i]),
                           std::make_shared<Plains>("all_gather", outputs[i]));
      }
      return run(timeout, std::move(result), [this, calls] {
        for (const auto& [input, parts] : calls) {
          levels_.all_gather(input->buffer(), parts->buffers());
          parts->put_back();
        }
      });
    }
    WorkPtr last;
    for (size_t i = 0; i < inputs.size(); ++i) {
      last = through_gloo(Operation::kAllGather, timeout, result, outputs[i], {inputs[i]},
                          [](c10d::Backend& gloo, std::vector<Tensor>& to, std::vector<Tensor>& from) {
                            std::vector<std::vector<Tensor>> outputs{to};
                            return gloo.allgather(outputs, from, c10d::AllgatherOptions());
                          });
    }
    return last;
  }

  WorkPtr reduce_scatter_of(const std::vector<Tensor>& outputs, const std::vector<std::vector<Tensor>>& inputs,
                            const c10d::ReduceScatterOptions& options) {
    const shm::Op op = to_op("reduce_scatter", options.reduceOp);
    std::vector<Tensor> wholes;
    for (const auto& parts : inputs) {
      std::vector<Tensor> flat;
      for (const Tensor& part : parts) flat.push_back(part.detach().reshape(-1));
      wholes.push_back(at::cat(flat));
    }
    auto plains = plain("reduce_scatter", wholes, options.reduceOp);
    return run(options.timeout, outputs, [this, plains, wholes, outputs, op, options] {
      for (size_t i = 0; i < outputs.size(); ++i) {
        levels_.all_reduce(plains->buffers().subspan(i, 1), op, 1.0);
        const int64_t count = outputs[i].numel();
        outputs[i].detach().copy_(wholes[i].narrow(0, rank_ * count, count).view(outputs[i].sizes()));
      }
      divide(outputs, options.reduceOp);
    });
  }

  // Gloo of libtorch 2.11 has no all_to_all of lists: they travel as one tensor.
  WorkPtr all_to_all(std::vector<Tensor> result, const std::vector<Tensor>& outputs, const std::vector<Tensor>& inputs,
                     const c10d::AllToAllOptions& options) {
    auto to = std::make_shared<Plains>("all_to_all", outputs), from = std::make_shared<Plains>("all_to_all", inputs);
    return run(options.timeout, std::move(result), [this, to, from, options] {
      std::vector<int64_t> to_sizes, from_sizes;
      for (const auto& buffer : to->buffers()) to_sizes.push_back(buffer.bytes());
      for (const auto& buffer : from->buffers()) from_sizes.push_back(buffer.bytes());
      Tensor sent = at::cat(as_bytes(from));
      Tensor received = at::empty({std::accumulate(to_sizes.begin(), to_sizes.end(), int64_t{0})}, at::kByte);
      levels_.through_gloo({.operation = static_cast<int8_t>(Operation::kAllToAll)}, [&](c10d::Backend& gloo) {
        auto to_counts = to_sizes, from_counts = from_sizes;  // Gloo takes them
        return gloo.alltoall_base(received, sent, to_counts, from_counts, options);
      });
      const auto parts = received.split_with_sizes(to_sizes);
      const auto targets = as_bytes(to);
      for (size_t rank = 0; rank < parts.size(); ++rank) targets[rank].copy_(parts[rank]);
      to->put_back();
    });
  }

  // `start` gets `outputs` and `inputs` as bytes.
  using Start = std::function<WorkPtr(c10d::Backend& gloo, std::vector<Tensor>& outputs, std::vector<Tensor>& inputs)>;
  WorkPtr through_gloo(Operation operation, milliseconds timeout, std::vector<Tensor> result,
                       const std::vector<Tensor>& outputs, const std::vector<Tensor>& inputs, Start start,
                       int root = -1) {
    auto to = std::make_shared<Plains>(to_string(operation), outputs);
    auto from = std::make_shared<Plains>(to_string(operation), inputs);
    return run(timeout, std::move(result), [this, operation, to, from, start = std::move(start), root] {
      auto out = as_bytes(to), in = as_bytes(from);
      levels_.through_gloo({.root = root, .operation = static_cast<int8_t>(operation)},
                           [&](c10d::Backend& gloo) { return start(gloo, out, in); });
      to->put_back();
    });
  }

  std::shared_ptr<Plains> plain(const char* operation, const std::vector<Tensor>& tensors,
                                const c10d::ReduceOp& op) const {
    auto plains = std::make_shared<Plains>(operation, tensors);
    for (size_t i = 0; i < tensors.size(); ++i) checks_.reducible(operation, tensors[i], plains->buffers()[i], op);
    return plains;
  }

  void divide(const std::vector<Tensor>& tensors, const c10d::ReduceOp& op) const {
    if (op != c10d::ReduceOp::AVG) return;
    for (const Tensor& tensor : tensors) tensor.detach().div_(size_);
  }

  const Checks checks_{rank_, size_};
  std::atomic<milliseconds> timeout_;
  std::atomic<uint64_t> started_ = 0;
  PairMessages messages_;
  TwoLevels levels_;  // of the worker's thread
  Worker worker_;     // ends first
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_hierarchy(TwoLevelsOptions options) {
  return c10::make_intrusive<Hierarchy>(std::move(options));
}

std::string describe_hosts(const shm::Hosts& hosts) {
  std::vector<size_t> sizes;
  for (const auto& ranks : hosts) sizes.push_back(ranks.size());
  const auto [least, most] = std::minmax_element(sizes.begin(), sizes.end());
  const std::string counts = *least == *most     ? fmt::format("{}", *most)
                             : sizes.size() <= 4 ? fmt::format("{}", fmt::join(sizes, " and "))
                                                 : fmt::format("{} to {}", *least, *most);
  return fmt::format("{} hosts of {} ranks: shared memory inside each, Gloo between {} {} of each", sizes.size(),
                     counts, *least, *least == 1 ? "leader" : "leaders");
}

}  // namespace ddp::detail
