#include "in_place_reducer.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <algorithm>
#include <limits>

#include "ddp/collectives.h"
#include "group_impl.h"
#include "pass.h"

namespace ddp::detail {

using torch::Tensor;

namespace {

size_t bytes_of_mb(double mb) { return static_cast<size_t>(mb * 1024.0 * 1024.0); }

std::vector<Tensor> tensors_of(const InPlaceReducer::Named& parameters) {
  std::vector<Tensor> tensors;
  for (const auto& [name, tensor] : parameters) tensors.push_back(tensor);
  return tensors;
}

}  // namespace

bool InPlaceReducer::can_serve(const ProcessGroup& group, const DistributedDataParallelOptions& options,
                               const std::vector<bool>& expect_sparse) {
  const bool sparse = std::find(expect_sparse.begin(), expect_sparse.end(), true) != expect_sparse.end();
  return group.backend() == "shm" && !sparse && !options.hook && options.compression == Compression::kNone &&
         !options.find_unused_parameters && !options.static_graph;
}

InPlaceReducer::InPlaceReducer(const Named& parameters, ProcessGroup group,
                               const DistributedDataParallelOptions& options)
    : parameters_(parameters),
      group_(std::move(group)),
      first_cap_(std::min(bytes_of_mb(options.first_bucket_mb), bytes_of_mb(options.bucket_cap_mb))),
      cap_(bytes_of_mb(options.bucket_cap_mb)),
      reached_(torch::zeros({static_cast<int64_t>(parameters.size())}, torch::kUInt8)) {
  // As the reducer: one bucket of all until the first backward has shown the order of gradients.
  const auto tensors = tensors_of(parameters_);
  buckets_ = std::get<0>(c10d::compute_bucket_assignment_by_size(
      tensors, {static_cast<size_t>(std::numeric_limits<int64_t>::max())}, std::vector<bool>(tensors.size(), false)));
  for (size_t i = 0; i < parameters_.size(); ++i) {
    auto accumulator = torch::autograd::impl::grad_accumulator(parameters_[i].second);
    const auto key = accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
        [this, i](const torch::autograd::variable_list& outputs, const torch::autograd::variable_list&) {
          auto& reached = reached_.data_ptr<uint8_t>()[i];
          if (reached == 0 && parameters_[i].second.grad().defined()) {
            reached = 1;
            arrived_.push_back(i);
          }
          return outputs;
        }));
    hooks_.emplace_back(std::move(accumulator), key);
  }
}

InPlaceReducer::~InPlaceReducer() {
  for (const auto& [accumulator, key] : hooks_) accumulator->del_post_hook(key);
}

void InPlaceReducer::begin() {
  reached_.zero_();
  arrived_.clear();
}

std::string InPlaceReducer::average(const Pass& pass, int divisor) {
  torch::NoGradGuard no_grad;
  const auto complete = PassCheck(pass, arrived_.size() == parameters_.size() ? 1 : 0, group_).finish();
  if (std::find(complete.begin(), complete.end(), 0) != complete.end()) return parameters_without_gradient();
  const auto backend = group_.impl()->backend_for(c10::kCPU);
  c10d::AllreduceCoalescedOptions options;
  const bool mean = divisor == group_.size();
  options.reduceOp = mean ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM;
  std::vector<Tensor> gradients;
  for (const auto& bucket : buckets_) {
    gradients.clear();
    for (const size_t i : bucket) gradients.push_back(parameters_[i].second.grad());
    if (!mean) at::_foreach_mul_(gradients, 1.0 / divisor);  // before the sum, as the reducer does
    backend->allreduce_coalesced(gradients, options)->wait();
  }
  if (!rebuilt_) rebuild_layout();
  return "";
}

// In the order in which gradients came on rank 0, as the reducer.
void InPlaceReducer::rebuild_layout() {
  rebuilt_ = true;
  Tensor order = torch::empty({static_cast<int64_t>(arrived_.size())}, torch::kInt64);
  std::copy(arrived_.begin(), arrived_.end(), order.data_ptr<int64_t>());
  broadcast(order, group_);
  std::vector<int64_t> indices(order.data_ptr<int64_t>(), order.data_ptr<int64_t>() + order.numel());
  std::vector<Tensor> tensors;
  for (const int64_t i : indices) tensors.push_back(parameters_[i].second);
  buckets_ = std::get<0>(c10d::compute_bucket_assignment_by_size(tensors, {first_cap_, cap_},
                                                                 std::vector<bool>(tensors.size(), false), indices));
}

std::string InPlaceReducer::parameters_without_gradient() {
  const auto everyone = all_gather(reached_, group_);
  std::vector<std::string> names;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    std::vector<int> ranks;
    for (int rank = 0; rank < group_.size(); ++rank) {
      if (everyone[rank].data_ptr<uint8_t>()[i] == 0) ranks.push_back(rank);
    }
    if (ranks.empty()) continue;
    const bool on_all = std::ssize(ranks) == group_.size();
    names.push_back(parameters_[i].first + (on_all ? "" : fmt::format(" (rank {})", fmt::join(ranks, ", "))));
  }
  return fmt::format("{}", fmt::join(names, ", "));
}

}  // namespace ddp::detail
