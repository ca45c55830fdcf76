#include "checkpoint_contents.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/types.h>

#include <cstring>
#include <unordered_map>

#include "ddp/error.h"
#include "io/pickle.h"

namespace ddp::detail {
namespace {

State to_bytes(const torch::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return State::Bytes{std::string(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes())};
}

torch::Tensor to_tensor(const State& bytes) {
  if (bytes.is_null()) return {};
  const std::string& data = bytes.as_bytes();
  auto tensor = torch::empty({static_cast<int64_t>(data.size())}, torch::kByte);
  std::memcpy(tensor.mutable_data_ptr(), data.data(), data.size());
  return tensor;
}

std::string text(const State& parameter) {
  const auto& name = parameter.as_tuple().at(0).as_string();
  std::vector<int64_t> sizes;
  for (const State& size : parameter.as_tuple().at(1).as_tuple()) sizes.push_back(size.as_int());
  return fmt::format("{} [{}]", name.empty() ? "an unnamed one" : name, fmt::join(sizes, ", "));
}

}  // namespace

std::string encode(const RankPart& part) {
  return io::pickle(State::dict({{"step", part.step},
                                 {"cpu", to_bytes(part.random.cpu)},
                                 {"cuda", to_bytes(part.random.cuda)},
                                 {"failure", State::Bytes{part.failure}}}))
      .data;
}

RankPart decode_part(const std::string& bytes) {
  const State state = io::unpickle(bytes, nullptr, "a rank's part");
  return {.step = state.at("step").as_int(),
          .random = {.cpu = to_tensor(state.at("cpu")), .cuda = to_tensor(state.at("cuda"))},
          .failure = state.at("failure").as_bytes()};
}

void set_random_states(State& libddp, const std::vector<RandomState>& by_rank) {
  State::List cpu, cuda;
  bool any_cuda = false;
  for (const RandomState& state : by_rank) {
    cpu.items.emplace_back(state.cpu);
    cuda.items.push_back(state.cuda.defined() ? State(state.cuda) : State());
    any_cuda |= state.cuda.defined();
  }
  libddp.set("cpu_rng_states", std::move(cpu));
  if (any_cuda) libddp.set("cuda_rng_states", std::move(cuda));
}

std::vector<RandomState> random_states(const State& libddp) {
  std::vector<RandomState> states;
  for (const State& cpu : libddp.at("cpu_rng_states").as_list()) {
    states.push_back({.cpu = cpu.as_tensor(), .cuda = {}});
    check_random_state(states.back());
  }
  if (const State* cuda = libddp.find("cuda_rng_states")) {
    if (cuda->as_list().size() != states.size())
      throw CheckpointError("cuda_rng_states has another length than cpu_rng_states");
    for (size_t i = 0; i < states.size(); ++i) {
      if (!cuda->as_list()[i].is_null()) states[i].cuda = cuda->as_list()[i].as_tensor();
    }
  }
  return states;
}

State parameter_order(const torch::optim::Optimizer& optimizer,
                      const std::vector<std::pair<std::string, const torch::nn::Module*>>& modules) {
  std::unordered_map<const void*, std::string> names;
  for (const auto& [prefix, module] : modules) {
    for (const auto& item : module->named_parameters()) {
      names.emplace(item.value().unsafeGetTensorImpl(), prefix + "." + item.key());
    }
  }
  State::List groups;
  for (const auto& group : optimizer.param_groups()) {
    State::List params;
    for (const auto& param : group.params()) {
      const auto found = names.find(param.unsafeGetTensorImpl());
      State::Tuple sizes{{param.sizes().begin(), param.sizes().end()}};
      params.items.push_back(State::tuple({found == names.end() ? std::string() : found->second, std::move(sizes)}));
    }
    groups.items.emplace_back(std::move(params));
  }
  return groups;
}

void check_parameter_order(const State& here, const State& in_file) {
  const auto &mine = here.as_list(), &theirs = in_file.as_list();
  for (size_t g = 0; g < std::min(mine.size(), theirs.size()); ++g) {
    const auto &my_params = mine[g].as_list(), &their_params = theirs[g].as_list();
    for (size_t i = 0; i < std::min(my_params.size(), their_params.size()); ++i) {
      if (my_params[i] == their_params[i]) continue;
      throw CheckpointError(fmt::format(
          "parameter {} of group {} is {} in the file and {} here: the optimizer was given its parameters in "
          "another order, so state would go to the wrong ones",
          i, g, text(their_params[i]), text(my_params[i])));
    }
  }
}

int64_t counter(const State& state, const char* key) {
  const State* value = state.is_dict() ? state.find(key) : nullptr;
  if (!value) throw CheckpointError(fmt::format("the key \"{}\" is missing", key));
  if (!value->is_int() || value->as_int() < 0) throw CheckpointError(fmt::format("\"{}\" is no count", key));
  return value->as_int();
}

}  // namespace ddp::detail
