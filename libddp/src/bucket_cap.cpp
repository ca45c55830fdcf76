#include "bucket_cap.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <vector>

#include "ddp/collectives.h"
#include "ddp/log.h"

namespace ddp::detail {
namespace {

constexpr double kMiB = 1024.0 * 1024.0;

// Seconds of an all_reduce of so many bytes: the median of a few, after one that opens connections.
double all_reduce_s(int64_t bytes, int repeats, const ProcessGroup& group) {
  auto tensor = torch::zeros({bytes / 4}, torch::TensorOptions().dtype(torch::kFloat32).device(group.device()));
  std::vector<double> seconds;
  for (int i = 0; i <= repeats; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    all_reduce(tensor, group);
    if (tensor.is_cuda()) tensor[0].item<float>();  // waits for the device
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
    if (i > 0) seconds.push_back(taken.count());
  }
  std::nth_element(seconds.begin(), seconds.begin() + repeats / 2, seconds.end());
  return seconds[static_cast<size_t>(repeats / 2)];
}

}  // namespace

double best_bucket_mb(int64_t gradient_bytes, LinkCost cost) {
  const double bytes = std::sqrt(static_cast<double>(gradient_bytes) * cost.latency_s * cost.bytes_per_s);
  return std::clamp(bytes / kMiB, 1.0, 100.0);
}

namespace {

// Measured with a few all_reduces; the same on all ranks.
LinkCost measure_link(const ProcessGroup& group) {
  constexpr int64_t kSmall = 4096, kLarge = int64_t{4} << 20;
  const double small = all_reduce_s(kSmall, 5, group);
  const double more = std::max(all_reduce_s(kLarge, 3, group) - small, 1e-9);
  auto cost = torch::tensor({small, static_cast<double>(kLarge - kSmall) / more}, torch::kFloat64).to(group.device());
  broadcast(cost, group);  // clocks differ over ranks, bucket plans must not
  cost = cost.cpu();
  return {.latency_s = cost[0].item<double>(), .bytes_per_s = cost[1].item<double>()};
}

}  // namespace

double choose_bucket_mb(const std::vector<std::pair<std::string, torch::Tensor>>& parameters,
                        const ProcessGroup& group) {
  int64_t bytes = 0;
  for (const auto& [name, tensor] : parameters) bytes += static_cast<int64_t>(tensor.nbytes());
  const LinkCost cost = measure_link(group);
  const double mb = best_bucket_mb(bytes, cost);
  log::info(group,
            fmt::format("[ddp::DistributedDataParallel] buckets of {:.1f} MiB: an all_reduce takes {:.2f} ms and "
                        "{:.2f} GB/s",
                        mb, cost.latency_s * 1e3, cost.bytes_per_s / 1e9));
  return mb;
}

}  // namespace ddp::detail
