#include "reducer.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/logger.hpp>

#include <algorithm>
#include <limits>
#include <sstream>
#include <unordered_map>

#include "error_text.h"
#include "group_impl.h"

namespace ddp::detail {
namespace {

using c10d::GradBucket;
using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

// Rounds a bucket to 16 bits for the wire; the mean is taken after rounding, as PyTorch's compression hooks do.
class CompressionHook : public c10d::CppCommHookInterface<c10::intrusive_ptr<c10d::ProcessGroup>> {
 public:
  CompressionHook(c10::intrusive_ptr<c10d::ProcessGroup> group, at::ScalarType dtype)
      : CppCommHookInterface(std::move(group)), dtype_(dtype) {}

  FuturePtr runHook(GradBucket& bucket) override {
    std::vector<at::Tensor> compressed{bucket.getBuffer().to(dtype_).div_(state_->getSize())};
    auto future = state_->allreduce(compressed)->getFuture();
    return future->then(
        [buffer = bucket.getBuffer(), compressed](c10::ivalue::Future& done) {
          done.value();  // throws the error of the all_reduce, if it has one
          buffer.copy_(compressed[0]);
          return c10::IValue(buffer);
        },
        c10::TensorType::get());
  }

 private:
  const at::ScalarType dtype_;
};

class UserHook : public c10d::CppCommHookInterface<GradientHook> {
 public:
  UserHook(GradientHook hook, ProcessGroup group) : CppCommHookInterface(std::move(hook)), group_(std::move(group)) {}

  FuturePtr runHook(GradBucket& bucket) override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::TensorType::get(), bucket.getBuffer().is_cuda() ? std::vector<c10::Device>{bucket.getBuffer().device()}
                                                             : std::vector<c10::Device>{});
    future->markCompleted(c10::IValue(state_(bucket.getBuffer(), group_)));
    return future;
  }

 private:
  const ProcessGroup group_;
};

}  // namespace

std::shared_ptr<c10d::Reducer> make_reducer(const std::vector<std::pair<std::string, torch::Tensor>>& parameters,
                                            const std::vector<bool>& expect_sparse, const ProcessGroup& group,
                                            const DistributedDataParallelOptions& options) {
  constexpr double kMiB = 1024.0 * 1024.0;
  const auto cap = static_cast<int64_t>(options.bucket_cap_mb * kMiB);
  const auto first_cap = std::min(cap, static_cast<int64_t>(options.first_bucket_mb * kMiB));

  std::vector<at::Tensor> tensors;
  std::unordered_map<size_t, std::string> names;
  for (const auto& [name, tensor] : parameters) {
    names.emplace(tensors.size(), name);
    tensors.push_back(tensor);
  }
  // Until the first backward has shown the order of gradients there is one bucket, unless buckets are never rebuilt.
  std::vector<size_t> limits{std::numeric_limits<int64_t>::max()};
  if (options.find_unused_parameters && !options.static_graph) {
    limits = {static_cast<size_t>(first_cap), static_cast<size_t>(cap)};
  }
  auto [buckets, bucket_limits] = c10d::compute_bucket_assignment_by_size(tensors, limits, expect_sparse);
  std::reverse(buckets.begin(), buckets.end());  // about the order in which gradients appear

  const auto& c10d_group = group.impl()->group;
  auto reducer = std::make_shared<c10d::Reducer>(
      tensors, buckets, c10d_group, expect_sparse, cap, options.find_unused_parameters, options.gradient_as_bucket_view,
      names, first_cap, /*skip_all_reduce_unused_params=*/false, /*use_python_reducer=*/false, std::vector<int64_t>{});

  if (options.hook) {
    reducer->register_comm_hook(std::make_unique<UserHook>(options.hook, group));
  } else if (options.compression != Compression::kNone) {
    const auto dtype = options.compression == Compression::kFloat16 ? at::kHalf : at::kBFloat16;
    reducer->register_comm_hook(std::make_unique<CompressionHook>(c10d_group, dtype));
  }
  if (options.static_graph) reducer->set_static_graph();
  // When unused parameters change, the reducer writes to its logger without asking whether there is one. The logger owns
  // the reducer, so that one pointer keeps both.
  auto logger = std::make_shared<c10d::Logger>(reducer);
  reducer->set_logger(logger);
  return {std::move(logger), reducer.get()};
}

// The reducer asks an all_reduce of the forward how many ranks take part. Here they are known, so it gets one that is
// done.
void set_divisor(c10d::Reducer& reducer, int divisor) {
  if (divisor == 0) return reducer.set_forward_pass_work_handle(nullptr, /*useStaticWorldSize=*/true);
  auto count = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  count->markCompleted(c10::IValue(std::vector<at::Tensor>{at::full({}, divisor, at::kInt)}));
  reducer.set_forward_pass_work_handle(c10d::Work::create_from_future(count), /*useStaticWorldSize=*/false);
}

std::string names_without_gradient(c10d::Reducer& reducer, const std::vector<std::string>& names) {
  std::string text;
  try {
    reducer.check_finalized();
    return "";
  } catch (const std::exception& e) {
    text = error_text(e);
  }
  // The reducer's text ends in "Parameter indices which did not receive grad for rank 0: 1 2".
  const auto rank = text.rfind("did not receive grad for rank ");
  if (rank == std::string::npos) return text;
  std::istringstream indices(text.substr(text.find(':', rank) + 1));
  std::vector<std::string> found;
  for (size_t index = 0; indices >> index;) found.push_back(index < names.size() ? names[index] : "?");
  return fmt::format("{}", fmt::join(found, ", "));
}

}  // namespace ddp::detail
