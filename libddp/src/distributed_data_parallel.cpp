#include "ddp/distributed_data_parallel.h"

#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <optional>
#include <unordered_set>
#include <utility>

#include "broadcast_all.h"
#include "bucket_cap.h"
#include "ddp/error.h"
#include "ddp/log.h"
#include "group_impl.h"
#include "in_place_reducer.h"
#include "pass.h"
#include "reducer.h"
#include "same_model.h"

namespace ddp {
namespace detail {
namespace {

using torch::Tensor;

// Calls f after all callbacks that are queued now, and those that they queue in turn, `hops` levels deep.
void queue_last(int hops, std::function<void()> f) {
  torch::autograd::Engine::get_default_engine().queue_callback([hops, f = std::move(f)]() mutable {
    if (hops == 0) {
      f();
    } else {
      queue_last(hops - 1, std::move(f));
    }
  });
}

}  // namespace

// State that backward reaches from the autograd graph, which may outlive the wrapper.
struct Replica::Engine : std::enable_shared_from_this<Engine> {
  ProcessGroup group;
  std::vector<std::string> names;  // of the parameters, by the reducer's index
  bool static_graph = false;
  // One of the two; none in a world of one.
  std::shared_ptr<c10d::Reducer> reducer;
  std::unique_ptr<InPlaceReducer> in_place;
  std::shared_ptr<CallLog> log;  // of calls over Gloo

  bool expecting = false;       // a synchronised forward waits for its backward
  int backward = -1;            // graph task of the synchronised backward that runs now
  bool delay_enqueued = false;  // static graph: the first backward reduces at its end
  bool pending = false;         // gradients of no_sync passes wait to be averaged
  bool warned = false;
  Pass pass;
  std::optional<PassCheck> pass_check;  // over other backends, where the messages of the reducer say nothing
  std::vector<bool> sparse;             // gradients, by parameter
  int divisor = 1;                      // of the sum of gradients
  int64_t averaged = 0;                 // backwards

  std::string who() const { return fmt::format("[ddp::DistributedDataParallel] {}", group.place().name()); }

  // Over Gloo each call says in which pass it is made, so that gradients of different passes never meet.
  void say_pass() {
    if (log != nullptr) log->set_pass(pass);
  }

  void drop_pending() {
    pending = false;
    ++pass.dropped;
    say_pass();
  }

  // Called when the gradient of an output arrives: the begin of a backward, as far as this model is concerned.
  void on_output_gradient(bool synchronised) {
    if (!synchronised) {
      pending = true;
      return;
    }
    const int task = torch::autograd::get_current_graph_task_id();
    if (task == backward) return;
    if (!expecting) {
      throw Error(
          fmt::format("{}: this is the second backward since the last synchronised forward, and its gradients "
                      "would stay local; call forward again, or run all but the last backward under no_sync()",
                      who()));
    }
    expecting = false;
    if (!communicates()) return;
    backward = task;
    if (in_place != nullptr) in_place->begin();
    if (reducer != nullptr && log == nullptr && group.device().is_cpu()) pass_check.emplace(pass, 0, group);
    // The reducer finalises in a callback that it queues during backward, for a static graph in one that is queued by
    // another: three hops are after both.
    queue_last(3, [self = shared_from_this()] { self->on_backward_end(); });
    if (static_graph && !delay_enqueued) {
      delay_enqueued = true;
      torch::autograd::Engine::get_default_engine().queue_callback(
          [reducer = reducer] { reducer->delay_all_reduce(); });
    }
  }

  bool communicates() const { return reducer != nullptr || in_place != nullptr; }

  void on_backward_end() {
    backward = -1;
    if (pass_check) std::exchange(pass_check, std::nullopt)->finish();
    std::string without =
        in_place != nullptr ? in_place->average(pass, divisor) : names_without_gradient(*reducer, names);
    if (!without.empty()) {
      // The reducer knows of this rank alone.
      if (reducer != nullptr) without += fmt::format(" (rank {})", group.rank());
      const std::string why = fmt::format(
          "no gradient reached: {}; the other gradients of this step were not averaged. Use these parameters in the "
          "loss, "
          "or construct with {{.find_unused_parameters = true}}",
          without);
      // Ranks that did get theirs wait for this one's.
      if (log != nullptr) log->watch().accuse(why);
      throw Error(fmt::format("{}: {}", who(), why));
    }
    pending = false;
    ++averaged;
  }
};

namespace {

// Identity in the graph. When some outputs do not enter the loss, those that do drag the others through here with an
// undefined gradient, so that the reducer hears of every parameter.
class Sink : public torch::autograd::Function<Sink> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context, at::TensorList inputs,
                                                std::function<void()> begin) {
    context->set_materialize_grads(false);
    context->saved_data["begin"] = c10::IValue::make_capsule(c10::make_intrusive<Begin>(std::move(begin)));
    torch::autograd::variable_list outputs;
    for (const auto& input : inputs) outputs.push_back(input.clone());
    return outputs;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    static_cast<Begin*>(context->saved_data["begin"].toCapsule().get())->call();
    gradients.emplace_back();  // none for `begin`
    return gradients;
  }

 private:
  struct Begin : torch::CustomClassHolder {
    explicit Begin(std::function<void()> f) : call(std::move(f)) {}
    std::function<void()> call;
  };
};

// A sparse gradient of an embedding table none of whose rows was used.
Tensor no_rows_of(const Tensor& table) {
  auto shape = table.sizes().vec();
  shape[0] = 0;
  const auto options = table.options().requires_grad(false);
  return torch::sparse_coo_tensor(torch::empty({1, 0}, options.dtype(torch::kLong)), torch::empty(shape, options),
                                  table.sizes());
}

// A number that depends on all parameters, with gradients that are zero: what a rank adds that has no batch.
class Nothing : public torch::autograd::Function<Nothing> {
 public:
  using Gradients = std::function<torch::autograd::variable_list()>;

  static Tensor forward(torch::autograd::AutogradContext* context, at::TensorList parameters, Gradients gradients) {
    context->set_materialize_grads(false);
    context->saved_data["gradients"] = c10::IValue::make_capsule(c10::make_intrusive<Kept>(std::move(gradients)));
    return torch::zeros({}, parameters[0].options().requires_grad(false));
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list) {
    auto gradients = static_cast<Kept*>(context->saved_data["gradients"].toCapsule().get())->make();
    gradients.emplace_back();  // none for the function
    return gradients;
  }

 private:
  struct Kept : torch::CustomClassHolder {
    explicit Kept(Gradients f) : make(std::move(f)) {}
    Gradients make;
  };
};

}  // namespace

Replica::Replica(std::shared_ptr<torch::nn::Module> module, ProcessGroup group, DistributedDataParallelOptions options)
    : module_(std::move(module)), group_(std::move(group)), options_(std::move(options)) {
  const auto refuse = [&](const std::string& why) {
    throw ConfigError(fmt::format("[ddp::DistributedDataParallel] {}: {}", group_.place().name(), why));
  };
  if (module_ == nullptr) refuse("the module is null");
  if (options_.bucket_cap_mb < 0 || options_.first_bucket_mb <= 0) {
    refuse("bucket sizes must be positive, or kAutoBucketCap");
  }
  if (options_.hook && options_.compression != Compression::kNone) {
    refuse("hook and compression exclude each other; compress inside the hook");
  }
  module_->to(group_.device());

  std::vector<bool> expect_sparse;
  std::unordered_set<c10::TensorImpl*> seen;
  for (const auto& entry : module_->named_modules()) {
    const auto* embedding = entry.value()->as<torch::nn::EmbeddingImpl>();
    const auto* bag = entry.value()->as<torch::nn::EmbeddingBagImpl>();
    const bool sparse =
        (embedding != nullptr && embedding->options.sparse()) || (bag != nullptr && bag->options.sparse());
    for (const auto& parameter : entry.value()->named_parameters(/*recurse=*/false)) {
      if (!parameter.value().requires_grad() || !seen.insert(parameter.value().unsafeGetTensorImpl()).second) continue;
      const std::string prefix = entry.key().empty() ? "" : entry.key() + ".";
      parameters_.emplace_back(prefix + parameter.key(), parameter.value());
      expect_sparse.push_back(sparse);
    }
  }
  if (parameters_.empty())
    refuse("the module has no parameter that requires a gradient, so there is nothing to average");

  engine_ = std::make_shared<Engine>();
  engine_->group = group_;
  for (const auto& [name, tensor] : parameters_) engine_->names.push_back(name);
  engine_->static_graph = options_.static_graph;
  if (group_.size() == 1) return;

  // Gradients travel over connections of their own, and never meet a collective that the program calls.
  group_ = group_.duplicate("ddp");
  engine_->group = group_;
  engine_->divisor = group_.size();
  engine_->sparse = expect_sparse;
  require_same_model(parameters_, *module_, options_, group_);
  std::vector<Tensor> state;
  for (const auto& entry : module_->named_parameters()) state.push_back(entry.value());
  for (const auto& entry : module_->named_buffers()) state.push_back(entry.value());
  broadcast_all(state, group_);
  if (options_.bucket_cap_mb == kAutoBucketCap) options_.bucket_cap_mb = choose_bucket_mb(parameters_, group_);
  if (InPlaceReducer::can_serve(group_, options_, expect_sparse)) {
    engine_->in_place = std::make_unique<InPlaceReducer>(parameters_, group_, options_);
  } else {
    engine_->reducer = make_reducer(parameters_, expect_sparse, group_, options_);
    engine_->log = gloo_log(*group_.impl()->backend_for(group_.device()));
  }
}

Replica::~Replica() = default;

void Replica::before_forward() {
  if (!torch::GradMode::is_enabled() || !engine_->communicates()) return;
  // Somebody has dropped them who did not call this wrapper's zero_grad.
  if (engine_->pending && !has_gradients()) engine_->drop_pending();
  if (engine_->reducer != nullptr) {
    if (sync_) engine_->reducer->prepare_for_forward();
    engine_->reducer->rebuild_buckets();
  }
  if (buffers_due_ && options_.broadcast_buffers) broadcast_all(module_->buffers(), group_, buffers_from_);
}

bool Replica::has_gradients() const {
  return std::any_of(parameters_.begin(), parameters_.end(), [](const auto& p) { return p.second.grad().defined(); });
}

void Replica::after_forward(const std::vector<Tensor*>& outputs) {
  if (!torch::GradMode::is_enabled()) return;
  Engine& engine = *engine_;
  const bool synchronised = sync_;
  buffers_due_ = synchronised;
  if (synchronised) {
    engine.expecting = true;
    ++engine.pass.forwards;
    engine.say_pass();
  }

  std::vector<Tensor*> tracked;
  std::vector<Tensor> values;
  for (Tensor* output : outputs) {
    if (!output->defined() || !output->requires_grad()) continue;
    tracked.push_back(output);
    values.push_back(*output);
  }
  const bool search = options_.find_unused_parameters && !options_.static_graph;
  if (engine.reducer != nullptr && synchronised) {
    engine.reducer->prepare_for_backward(search ? values : std::vector<Tensor>{});
  }

  const auto begin = [engine = engine_, synchronised] { engine->on_output_gradient(synchronised); };
  const bool needs_sink = search || (options_.static_graph && !engine.delay_enqueued);
  if (engine.reducer == nullptr || !needs_sink) {
    for (Tensor* output : tracked) output->register_hook([begin](const Tensor&) { begin(); });
    return;
  }
  // A leaf has no place in the graph to put the sink behind.
  std::erase_if(tracked, [](const Tensor* output) { return output->is_leaf(); });
  values.clear();
  for (const Tensor* output : tracked) values.push_back(*output);
  if (values.empty()) return;
  const auto passed = Sink::apply(at::TensorList(values), std::function<void()>(begin));
  for (size_t i = 0; i < tracked.size(); ++i) *tracked[i] = passed[i];
}

void Replica::begin_turn(int divisor, int buffers_from) {
  buffers_from_ = buffers_from;
  engine_->divisor = divisor;
  if (engine_->reducer == nullptr) return;
  if (divisor != group_.size() && (options_.hook || options_.compression != Compression::kNone)) {
    throw ConfigError(
        fmt::format("[ddp::join] {}: hooks and compression divide by the number of all ranks; use "
                    "{{.divide_by = ddp::DivideBy::kWorld}}",
                    group_.place().name()));
  }
  set_divisor(*engine_->reducer, divisor == group_.size() ? 0 : divisor);
}

void Replica::shadow() {
  const torch::AutoGradMode enable_grad(true);
  before_forward();
  std::vector<Tensor> tensors;
  for (const auto& [name, tensor] : parameters_) tensors.push_back(tensor);
  // The reducer takes an undefined gradient for zero, and does not count the parameter as used.
  const bool dense = engine_->in_place != nullptr;
  Tensor output = Nothing::apply(at::TensorList(tensors), Nothing::Gradients([tensors, dense, engine = engine_] {
                                   torch::autograd::variable_list gradients;
                                   for (size_t i = 0; i < tensors.size(); ++i) {
                                     if (engine->sparse[i]) {
                                       gradients.push_back(no_rows_of(tensors[i]));
                                     } else {
                                       gradients.push_back(dense ? torch::zeros_like(tensors[i]) : Tensor());
                                     }
                                   }
                                   return gradients;
                                 }));
  after_forward({&output});
  output.backward();
}

void Replica::end_turns() {
  buffers_from_ = 0;
  engine_->divisor = group_.size();
  if (engine_->reducer != nullptr) set_divisor(*engine_->reducer, 0);
}

void Replica::send_buffers(int from) {
  if (group_.size() > 1 && options_.broadcast_buffers) broadcast_all(module_->buffers(), group_, from);
}

int64_t Replica::averaged() const { return engine_->averaged; }

void Replica::zero_grad() {
  if (engine_->pending && group_.size() > 1 && !engine_->warned) {
    engine_->warned = true;
    log::warn(group_,
              "[ddp::DistributedDataParallel] gradients of no_sync passes are dropped that were never averaged; run "
              "the last forward of a window without no_sync, or call reduce_gradients()");
  }
  if (engine_->pending) engine_->drop_pending();
  for (const auto& [name, tensor] : parameters_) tensor.mutable_grad().reset();
}

bool Replica::gradients_pending() const { return engine_->pending && group_.size() > 1; }

void Replica::require_synchronised(const char* who) const {
  if (!gradients_pending()) return;
  throw Error(
      fmt::format("[ddp::{}] {}: the gradients of no_sync passes have not been averaged yet; run the last forward of "
                  "the window without no_sync, or call reduce_gradients()",
                  who, group_.place().name()));
}

void Replica::reduce_gradients() {
  if (group_.size() > 1) average_all(parameters_, group_, options_.bucket_cap_mb);
  engine_->pending = false;
}

}  // namespace detail

NoSync::NoSync(std::shared_ptr<detail::Replica> replica, bool enabled)
    : replica_(std::move(replica)), previous_(replica_->sync()) {
  if (enabled) replica_->set_sync(false);
}

NoSync::~NoSync() {
  if (replica_ != nullptr) replica_->set_sync(previous_);
}

}  // namespace ddp
