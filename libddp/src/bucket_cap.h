// How large gradient buckets should be on a given connection.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "ddp/process_group.h"

namespace ddp::detail {

/// What an all_reduce costs: a time that does not depend on its size, and a rate.
struct LinkCost {
  double latency_s;
  double bytes_per_s;
};

/// The bucket size in MiB, from 1 to 100, that leaves the least communication exposed. Buckets of c bytes for S bytes of
/// gradients cost S/c latencies, and the last one, which nothing hides, takes c / rate: S/c * latency + c / rate is
/// least at c = sqrt(S * latency * rate), the segment size of a pipelined transfer (van de Geijn, J. Parallel Distrib.
/// Comput. 22 (1994)).
double best_bucket_mb(int64_t gradient_bytes, LinkCost cost);

/// That of the gradients of `parameters`, for what a few all_reduces take: less than a second on a slow network. The same
/// on all ranks; rank 0 logs it. Collective.
double choose_bucket_mb(const std::vector<std::pair<std::string, torch::Tensor>>& parameters,
                        const ProcessGroup& group);

}  // namespace ddp::detail
