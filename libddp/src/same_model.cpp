#include "same_model.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ddp/error.h"
#include "first_difference.h"

namespace ddp::detail {
namespace {

std::string describe(const torch::Tensor& tensor) {
  return fmt::format("{}[{}]", c10::toString(tensor.scalar_type()), fmt::join(tensor.sizes(), ", "));
}

std::string describe(const DistributedDataParallelOptions& options) {
  return fmt::format(
      "options: buckets of {} and {} MiB, find_unused_parameters {}, static_graph {}, broadcast_buffers {}, "
      "compression {}, "
      "{} hook",
      options.first_bucket_mb, options.bucket_cap_mb, options.find_unused_parameters, options.static_graph,
      options.broadcast_buffers, static_cast<int>(options.compression), options.hook ? "a" : "no");
}

}  // namespace

void require_same_model(const std::vector<std::pair<std::string, torch::Tensor>>& parameters,
                        const torch::nn::Module& module, const DistributedDataParallelOptions& options,
                        const ProcessGroup& group) {
  std::vector<std::string> lines;
  for (const auto& [name, tensor] : parameters) lines.push_back(fmt::format("parameter {} {}", name, describe(tensor)));
  for (const auto& entry : module.named_buffers()) {
    lines.push_back(fmt::format("buffer {} {}", entry.key(), describe(entry.value())));
  }
  lines.push_back(describe(options));
  if (const auto difference = first_difference(lines, group)) {
    throw MismatchError(
        fmt::format("[ddp::DistributedDataParallel] {}: ranks built different models: rank 0 has {}, rank "
                    "{} has {}; build the same module on all ranks, and wrap it with the same options",
                    group.place().name(), difference->expected, difference->rank, difference->found));
  }
}

}  // namespace ddp::detail
