// What is inside a checkpoint beside the tracked objects: the key "libddp", and what ranks tell each other
// about files.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ddp/state.h"
#include "ddp/stateful.h"
#include "random_state.h"

namespace ddp::detail {

inline constexpr int64_t kCheckpointFormat = 1;
inline constexpr const char* kLibddpKey = "libddp";

/// A rank's part of a checkpoint, as bytes.
struct RankPart {
  int64_t step = 0;
  RandomState random;
  std::string failure;  ///< why there is no part
};
std::string encode(const RankPart& part);
/// Throws CheckpointError.
RankPart decode_part(const std::string& bytes);

/// "cpu_rng_states" and, where a rank has one, "cuda_rng_states": lists by rank.
void set_random_states(State& libddp, const std::vector<RandomState>& by_rank);
/// Those of a file. Throws CheckpointError or libtorch's error for what is none.
std::vector<RandomState> random_states(const State& libddp);

/// Names and shapes of an optimizer's parameters, by group: [[("model.weight", (4, 4)), ...], ...]. A
/// parameter of no tracked module has the name "".
State parameter_order(const torch::optim::Optimizer& optimizer,
                      const std::vector<std::pair<std::string, const torch::nn::Module*>>& modules);
/// Throws CheckpointError that names the first difference.
void check_parameter_order(const State& here, const State& in_file);

/// A file's "step" and "epoch". Throws CheckpointError for a missing key or a negative number.
int64_t counter(const State& state, const char* key);

}  // namespace ddp::detail
