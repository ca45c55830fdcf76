#include "ddp/sync_batch_norm.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/functional/batchnorm.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ddp/collectives.h"
#include "ddp/error.h"

namespace ddp {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What one forward needs beside its tensors; travels to the backward inside the graph.
struct Call : torch::CustomClassHolder {
  Call(ProcessGroup g, double e) : group(std::move(g)), eps(e) {}
  const ProcessGroup group;
  const double eps;
  double count = 0;  // values per channel, on all ranks
};

int64_t values_per_channel(const Tensor& input) { return input.size(1) == 0 ? 0 : input.numel() / input.size(1); }

// {C} as {1, C, 1, ...}, to be combined with `input`.
Tensor along_channels(const Tensor& tensor, const Tensor& input) {
  std::vector<int64_t> shape(input.dim(), 1);
  shape[1] = tensor.numel();
  return tensor.to(input.scalar_type()).view(shape);
}

Tensor like(const Tensor& tensor, const Tensor& other) {
  return tensor.defined() ? tensor.to(other.scalar_type()) : tensor;
}

// Statistics are kept in float32 for the 16-bit types, as BatchNorm does.
torch::ScalarType statistics_type(const Tensor& input) {
  return input.scalar_type() == torch::kDouble ? torch::kDouble : torch::kFloat;
}

struct Statistics {
  Tensor mean, variance;  // biased
  double count = 0;
};

// Sums over ranks of count, x and x^2 for each channel. They travel in float64: mean and variance are taken from them
// by a difference.
Statistics statistics_of(const Tensor& input, const ProcessGroup& group) {
  const int64_t channels = input.size(1);
  const auto options = input.options().dtype(torch::kDouble).requires_grad(false);
  const auto count = static_cast<double>(values_per_channel(input));
  Tensor sums = torch::zeros({2 * channels + 1}, options);
  if (count > 0) {
    std::vector<int64_t> all_but_channels;
    for (int64_t d = 0; d < input.dim(); ++d) {
      if (d != 1) all_but_channels.push_back(d);
    }
    const Tensor wide = input.to(statistics_type(input));
    auto [variance, mean] = torch::var_mean(wide, all_but_channels, /*unbiased=*/false);
    mean = mean.to(torch::kDouble), variance = variance.to(torch::kDouble);
    sums.narrow(0, 0, channels).copy_(mean * count);
    sums.narrow(0, channels, channels).copy_((variance + mean * mean) * count);
    sums[2 * channels] = count;
  }
  all_reduce(sums, group);
  const double total = sums[2 * channels].item<double>();
  if (total <= 1) {
    throw DataError(fmt::format(
        "[ddp::SyncBatchNorm] {}: the batches of all ranks have {} value(s) per channel, at least 2 are needed "
        "for a variance; give larger batches, or call eval()",
        group.place().name(), total));
  }
  const Tensor mean = sums.narrow(0, 0, channels) / total;
  const Tensor variance = (sums.narrow(0, channels, channels) / total - mean * mean).clamp_min(0);
  return {mean.to(statistics_type(input)), variance.to(statistics_type(input)), total};
}

// y = (x - mean) / sqrt(variance + eps) * weight + bias, with sums of dy and of dy * (x - mean) / sqrt(variance + eps)
// over all ranks in the gradient of x.
struct Normalize : torch::autograd::Function<Normalize> {
  static Tensor forward(AutogradContext* context, const Tensor& input, const std::optional<Tensor>& optional_weight,
                        const std::optional<Tensor>& optional_bias, const Tensor& mean, const Tensor& variance,
                        const c10::intrusive_ptr<Call>& call) {
    const Tensor weight = optional_weight.value_or(Tensor()), bias = optional_bias.value_or(Tensor());
    context->save_for_backward({input, weight, mean, variance});
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    if (input.numel() == 0) return torch::empty_like(input);
    // With given statistics, as in evaluation: one pass over the input.
    return std::get<0>(at::native_batch_norm(input, like(weight, mean), like(bias, mean), mean, variance,
                                             /*training=*/false, /*momentum=*/0.0, call->eps));
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const Tensor &input = saved[0], &weight = saved[1], &mean = saved[2], &variance = saved[3];
    const auto& call = *static_cast<const Call*>(context->saved_data["call"].toCapsule().get());
    const int64_t channels = input.size(1);
    const auto options = mean.options();
    const bool empty = input.numel() == 0;

    // As if the statistics were constants: gradients of input, weight and bias.
    Tensor grad_input, grad_weight, grad_bias;
    if (empty) {
      grad_input = torch::zeros_like(input);
      grad_weight = torch::zeros({channels}, options), grad_bias = torch::zeros({channels}, options);
    } else {
      // The kernel gives the sums of the weight and the bias also where there are none to be trained.
      const Tensor scale = weight.defined() ? like(weight, mean) : torch::ones({channels}, options);
      std::tie(grad_input, grad_weight, grad_bias) =
          at::native_batch_norm_backward(gradients[0], input, scale, mean, variance, Tensor(), Tensor(),
                                         /*train=*/false, call.eps, {true, true, true});
    }
    if (context->needs_input_grad(0)) {
      Tensor sums = torch::cat({grad_bias.to(options), grad_weight.to(options)});
      all_reduce(sums, call.group);
      if (!empty) {
        // What the mean and the variance add: a constant and a multiple of x - mean for each channel.
        const Tensor inverse = (variance + call.eps).rsqrt();
        const Tensor scale = weight.defined() ? inverse * weight.to(options) : inverse;
        const Tensor constant = scale * sums.narrow(0, 0, channels) / call.count;
        const Tensor slope = scale * inverse * sums.narrow(0, channels, channels) / call.count;
        grad_input = grad_input - along_channels(constant, input) -
                     (input - along_channels(mean, input)) * along_channels(slope, input);
      }
    }
    const bool affine = weight.defined();
    return {grad_input,
            affine ? grad_weight.to(weight.scalar_type()) : Tensor(),
            affine ? grad_bias.to(weight.scalar_type()) : Tensor(),
            Tensor(),
            Tensor(),
            Tensor()};
  }
};

const torch::nn::BatchNormOptions* batch_norm_options(const torch::nn::Module& module) {
  if (const auto* norm = module.as<torch::nn::BatchNorm1dImpl>()) return &norm->options;
  if (const auto* norm = module.as<torch::nn::BatchNorm2dImpl>()) return &norm->options;
  if (const auto* norm = module.as<torch::nn::BatchNorm3dImpl>()) return &norm->options;
  return nullptr;
}

using Replacements = std::unordered_map<const torch::nn::Module*, std::shared_ptr<SyncBatchNormImpl>>;

// Where a container keeps `child`; null when it is a member of a class of its own.
torch::nn::AnyModule* slot_in_sequential(torch::nn::Module& parent, const torch::nn::Module& child) {
  auto* sequential = parent.as<torch::nn::SequentialImpl>();
  if (sequential == nullptr) return nullptr;
  for (auto& entry : *sequential) {
    if (entry.ptr().get() == &child) return &entry;
  }
  return nullptr;
}
std::shared_ptr<torch::nn::Module>* slot_in_list(torch::nn::Module& parent, const torch::nn::Module& child) {
  auto* list = parent.as<torch::nn::ModuleListImpl>();
  if (list == nullptr) return nullptr;
  for (auto& entry : *list) {
    if (entry.get() == &child) return &entry;
  }
  return nullptr;
}

void find_members(torch::nn::Module& module, const std::string& path, std::vector<std::string>& names) {
  for (const auto& child : module.named_children()) {
    const std::string name = path.empty() ? child.key() : path + "." + child.key();
    if (batch_norm_options(*child.value()) != nullptr && slot_in_sequential(module, *child.value()) == nullptr &&
        slot_in_list(module, *child.value()) == nullptr) {
      names.push_back(name);
    }
    find_members(*child.value(), name, names);
  }
}

void replace(torch::nn::Module& module, const ProcessGroup& group, Replacements& done) {
  for (const auto& child : module.named_children()) {
    if (batch_norm_options(*child.value()) == nullptr) {
      replace(*child.value(), group, done);
      continue;
    }
    auto& sync = done[child.value().get()];
    if (sync == nullptr) {
      sync = std::make_shared<SyncBatchNormImpl>(*batch_norm_options(*child.value()), group);
      sync->take(*child.value());
    }
    if (auto* slot = slot_in_sequential(module, *child.value())) {
      *slot = torch::nn::AnyModule(sync);
    } else {
      *slot_in_list(module, *child.value()) = sync;
    }
    module.replace_module(child.key(), sync);
  }
}

}  // namespace

void SyncBatchNormImpl::_check_input_dim(const Tensor& input) {
  if (input.dim() >= 2 && input.size(1) == options.num_features()) return;
  throw ConfigError(fmt::format("[ddp::SyncBatchNorm] {}: the input is {}[{}], expected [N, {}, ...]",
                                group_.place().name(), c10::toString(input.scalar_type()),
                                fmt::join(input.sizes(), ", "), options.num_features()));
}

Tensor SyncBatchNormImpl::forward(const Tensor& input) {
  _check_input_dim(input);
  double share = options.momentum().value_or(0.0);  // of this batch in the running statistics
  if (is_training() && num_batches_tracked.defined()) {
    num_batches_tracked += 1;
    if (!options.momentum()) share = 1.0 / num_batches_tracked.item<double>();
  }
  if (!is_training() || group_.size() == 1) {
    return torch::nn::functional::detail::batch_norm(input, running_mean, running_var, weight, bias,
                                                     is_training() || !options.track_running_stats(), share,
                                                     options.eps());
  }
  auto call = c10::make_intrusive<Call>(group_, options.eps());
  Statistics statistics;
  {
    torch::NoGradGuard no_grad;
    statistics = statistics_of(input, group_);
    call->count = statistics.count;
    if (running_mean.defined()) {
      const Tensor unbiased = statistics.variance * (statistics.count / (statistics.count - 1));
      running_mean.mul_(1 - share).add_(statistics.mean.to(running_mean.scalar_type()), share);
      running_var.mul_(1 - share).add_(unbiased.to(running_var.scalar_type()), share);
    }
  }
  const auto optional = [](const Tensor& tensor) { return tensor.defined() ? std::optional(tensor) : std::nullopt; };
  return Normalize::apply(input, optional(weight), optional(bias), statistics.mean, statistics.variance, call);
}

void SyncBatchNormImpl::take(const torch::nn::Module& norm) {
  // The parameters themselves; buffers by their memory, because a module does not hand out its place for them.
  for (const auto& entry : norm.named_parameters(/*recurse=*/false)) {
    (entry.key() == "weight" ? weight : bias) = parameters_[entry.key()] = entry.value();
  }
  const auto mine = named_buffers(/*recurse=*/false);
  for (const auto& entry : norm.named_buffers(/*recurse=*/false)) {
    Tensor buffer = mine[entry.key()];
    buffer.set_data(entry.value());
  }
  train(norm.is_training());
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << fmt::format("ddp::SyncBatchNorm({}, eps={}, momentum={}, affine={}, track_running_stats={}, {} rank(s))",
                        options.num_features(), options.eps(),
                        options.momentum() ? fmt::format("{}", *options.momentum()) : std::string("None"),
                        options.affine(), options.track_running_stats(), group_.size());
}

namespace detail {

void convert_batch_norms(torch::nn::Module& module, const ProcessGroup& group) {
  std::vector<std::string> names;
  if (batch_norm_options(module) != nullptr) names.emplace_back("the module itself");
  find_members(module, "", names);
  if (!names.empty()) {
    throw ConfigError(fmt::format(
        "[ddp::convert_sync_batch_norm] {}: not in a Sequential or ModuleList, and so called by the type that "
        "their owner gave them: {}; declare them there as ddp::SyncBatchNorm",
        group.place().name(), fmt::join(names, ", ")));
  }
  Replacements done;
  replace(module, group, done);
}

}  // namespace detail
}  // namespace ddp
