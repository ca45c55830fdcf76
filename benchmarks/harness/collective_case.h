// One collective with its buffers: what is put in, the call, and what must come out.
//
//   auto test = bench::make_case("all_gather", {.bytes = 1 << 20}, group);
//   test.refill(), test.call();                    // timed: `call` alone
//   int64_t wrong = test.count_wrong();            // of the newest call, on this rank
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ddp/process_group.h"

namespace bench {

struct CaseOptions {
  int64_t bytes = 0;  ///< nccl-tests' size: of the whole buffer, cut into one part per rank where the operation does
  c10::ScalarType dtype = c10::kFloat;
};

struct Case {
  int64_t bytes;      ///< what was asked for, rounded down to whole elements per rank, at least one
  int64_t count;      ///< elements of it
  double bus_factor;  ///< busbw = algbw * this: what a link must carry, comparable between rank counts (nccl-tests)
  std::function<void()> refill;
  std::function<void()> call;
  std::function<int64_t()> count_wrong;
};

/// PyTorch's names, all_reduce to barrier.
const std::vector<std::string>& operations();

/// Throws ddp::ConfigError for an unknown operation.
Case make_case(const std::string& operation, CaseOptions options, const ddp::ProcessGroup& group);

/// "float32", "bfloat16", ...; throws ddp::ConfigError that lists them.
c10::ScalarType parse_dtype(const std::string& name);

}  // namespace bench
