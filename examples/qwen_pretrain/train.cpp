#include "train.h"

#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <numeric>

#include "../common/summary.h"
#include "data.h"
#include "ddp/ddp.h"
#include "ddp/prefetch.h"
#include "fused/model.h"
#include "losses.h"
#include "model.h"
#include "plot.h"
#include "progress.h"
#include "sample.h"

namespace qwen {
namespace {

using example::Clock;

Windows load_data(const Options& options, const Config& config) {
  if (options.random_data == 0) return {read_text({options.data.begin(), options.data.end()}), options.seq};
  return {random_tokens(options.random_data * options.seq + 1, config.vocab_size, options.seed), options.seq};
}

// The fused kernels know the CPU only.
bool takes_fused_kernels(const Options& options, const torch::Device& device) {
  if (options.kernels == "fused" && !device.is_cpu()) {
    throw ddp::ConfigError(
        c10::str("--kernels is fused, which runs on the CPU, and this run is on ", device, ": take auto or plain"));
  }
  return device.is_cpu() && options.kernels != "plain";
}

CausalLM make_model(const Options& options, const Config& config, const torch::Device& device) {
  CausalLM model = takes_fused_kernels(options, device) ? fused::make_causal_lm(config) : CausalLM(config);
  model->to(options.dtype == "bfloat16" ? torch::kBFloat16 : torch::kFloat32);
  return model;
}

// After the warm-up the learning rate stays as it is, or falls to a tenth.
ddp::lr::Curve make_curve(const Options& options, int64_t total_steps) {
  constexpr double kFinal = 0.1;
  const auto warmup = ddp::lr::warmup(options.warmup);
  if (options.schedule == "cosine") return warmup * ddp::lr::cosine(total_steps, kFinal);
  if (options.schedule == "linear") return warmup * ddp::lr::linear_decay(total_steps, kFinal);
  return warmup;
}

int64_t count_parameters(const CausalLM& model) {
  int64_t count = 0;
  for (const auto& parameter : model->parameters()) count += parameter.numel();
  return count;
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

void train(const Options& options, Clock::time_point process_start) {
  auto group =
      ddp::ProcessGroup::from_env({.backend = options.backend, .timeout = std::chrono::seconds(options.timeout_s)});
  ddp::seed_all(options.seed, group);

  // Data: windows of tokens, each rank its own. A last batch that is not full is left out.
  const Config config = model_config(options);
  Windows data = load_data(options, config);
  ddp::DistributedSampler sampler(*data.size(), group, {.shuffle = true, .seed = options.seed});
  ddp::Prefetcher loader(
      sampler, options.batch, data,
      {.drop_last = true, .depth = static_cast<size_t>(options.accum) + 1, .device = group.device()});
  const int64_t batches = static_cast<int64_t>(sampler.num_samples()) / options.batch;
  const int64_t steps_per_epoch = ceil_div(batches, options.accum);
  if (batches == 0) {
    throw ddp::DataError(c10::str("the data has ", *data.size(), " windows, fewer than a batch on each rank"));
  }
  int64_t total_steps = steps_per_epoch * options.epochs;
  if (options.max_steps > 0) total_steps = std::min(total_steps, options.max_steps);

  // Model, optimizer, learning rate.
  ddp::DistributedDataParallel model(make_model(options, config, group.device()), group);
  const ddp::lr::BatchPlan plan{.micro_batch = options.batch,
                                .accumulation = options.accum,
                                .world_size = group.size(),
                                .base_batch = options.batch * options.accum};
  const auto scaling = ddp::lr::rule(options.lr_scaling);
  ddp::AdamW optim(model->parameters(), {.lr = scaling(options.lr, plan), .weight_decay = options.weight_decay});
  ddp::lr::Schedule schedule(optim, make_curve(options, total_steps), {.plan = plan, .place = group});
  Losses losses;

  // Checkpoints: what is tracked is saved and comes back.
  ddp::Checkpointer checkpoints(options.checkpoint_dir, group, {.every = options.checkpoint_every, .keep = 3});
  checkpoints.track("model", model).track("optimizer", optim).track("lr", schedule).track("sampler", sampler);
  checkpoints.track("losses", losses);
  if (options.resume == "auto") {
    checkpoints.resume();
  } else if (options.resume != "never") {
    checkpoints.resume(options.resume);
  }
  ddp::Preemption preemption(group);

  const int64_t parameters = count_parameters(model.module());
  ddp::log::info(group, c10::str("model: ", parameters, " parameters, ", options.dtype, ", ",
                                 takes_fused_kernels(options, group.device()) ? "fused" : "plain", " kernels"));
  ddp::log::info(group,
                 c10::str("data: ", *data.size(), " windows of ", options.seq, " tokens, ", total_steps, " steps"));
  ddp::log::info(group, ddp::lr::describe(scaling, options.lr, plan));

  Progress progress(group, checkpoints.step_count(), total_steps, plan.effective() * options.seq);
  bool stopped = false;
  const auto done = [&] { return stopped || checkpoints.step_count() >= total_steps; };
  double first_step_s = 0;
  std::vector<double> step_s;

  for (auto epoch : ddp::epochs(sampler, done() ? 0 : options.epochs)) {
    auto step_start = Clock::now();
    for (auto&& [batch, micro] : epoch.accumulate(loader, options.accum)) {
      auto guard = model.no_sync(!micro.last());
      const auto loss = model(batch.data, batch.target) / micro.count();
      loss.backward();
      losses.add(loss, micro.last());
      if (!micro.last()) continue;

      if (options.clip > 0) ddp::clip_grad_norm(model, options.clip);
      const double lr = schedule.lr();
      optim.step(), model.zero_grad(), schedule.step();
      stopped = preemption.requested();
      step_s.push_back(example::seconds_since(step_start));
      if (step_s.size() == 1) first_step_s = example::seconds_since(process_start);

      const int64_t step = checkpoints.step_count() + 1;
      const bool milestone = step % options.log_every == 0 || step_s.size() == 1 || step == total_steps || stopped;
      if (milestone || step % options.checkpoint_every == 0) {
        losses.reduce(group);
        checkpoints.set_loss(losses.last());
      }
      progress.update(step, losses.last(), lr, milestone);
      checkpoints.step();
      if (done()) break;
      step_start = Clock::now();
    }
    losses.reduce(group);
    if (checkpoints.step_count() == (epoch.index() + 1) * steps_per_epoch) {  // not stopped on the way
      const auto epoch_begin = static_cast<size_t>(epoch.index() * steps_per_epoch);
      progress.note(c10::str("epoch ", epoch.index(), " | mean loss ", losses.mean_since(epoch_begin)));
    }
    if (done()) break;
  }
  checkpoints.save();
  progress.finish();
  if (!group.is_root()) return;

  if (stopped) std::printf("stopped by a signal; the same command goes on from step %ld\n", checkpoints.step_count());
  if (!stopped && options.sample > 0) {
    const SampleOptions sampling{.bytes = options.sample, .context = options.seq, .seed = options.seed};
    std::printf("sample:\n%s\n", sample(model.module(), "\n", sampling).c_str());
  }
  const auto plot = checkpoints.directory() / "loss.svg";
  write_loss_plot(plot, losses.values(), c10::str("Qwen2, ", parameters, " parameters, ", group.size(), " ranks"));
  std::printf("checkpoint: %s\nloss plot: %s\n", checkpoints.last_saved()->c_str(), plot.c_str());

  const double step_median = example::median(step_s);
  const double all_steps = std::accumulate(step_s.begin(), step_s.end(), 0.0);
  example::write_summary(options.summary,
                         {{"params", parameters},
                          {"step_s", step_median},
                          {"tokens_per_s", static_cast<double>(plan.effective() * options.seq) / step_median},
                          {"first_step_s", first_step_s},
                          {"data_wait", loader.waited() / all_steps},  // the share of the time of all steps
                          {"first_loss", losses.values().front()},
                          {"last_loss", losses.last()},
                          {"peak_rss_mb", example::peak_rss_mb()},
                          {"losses", losses.values()}});
}

}  // namespace qwen
