#include "losses.h"

#include <torch/torch.h>

#include <cmath>
#include <numeric>

namespace qwen {

void Losses::add(const torch::Tensor& share, bool completes_step) {
  const auto value = share.detach().to(torch::kFloat64);
  step_ = step_.defined() ? step_ + value : value;
  if (!completes_step) return;
  local_.push_back(step_);
  step_.reset();
}

void Losses::reduce(const ddp::ProcessGroup& group) {
  if (local_.empty()) return;  // on every rank or on none: all take the same steps
  // Gathered and averaged here, because the order in which an all_reduce adds may depend on how many values it has: a
  // resumed run must have the same bits.
  const auto mean = torch::stack(ddp::all_gather(torch::stack(local_), group)).mean(0).cpu();
  values_.insert(values_.end(), mean.data_ptr<double>(), mean.data_ptr<double>() + mean.numel());
  local_.clear();
}

double Losses::last() const { return values_.empty() ? NAN : values_.back(); }

double Losses::mean_since(size_t begin) const {
  if (begin >= values_.size()) return NAN;
  return std::accumulate(values_.begin() + static_cast<std::ptrdiff_t>(begin), values_.end(), 0.0) /
         static_cast<double>(values_.size() - begin);
}

ddp::State Losses::state_dict() const {
  return ddp::State::dict({{"losses", torch::tensor(values_, torch::kFloat64)}});
}

void Losses::load_state_dict(const ddp::State& state) {
  const auto saved = state.at("losses").as_tensor().to(torch::kFloat64).contiguous();
  values_.assign(saved.data_ptr<double>(), saved.data_ptr<double>() + saved.numel());
  local_.clear();
  step_.reset();
}

}  // namespace qwen
