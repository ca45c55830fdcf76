// What the tests of checkpoints share: a small run, the names in a directory, the log.
#pragma once

#include <torch/torch.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "ddp/atomic_file.h"
#include "ddp/checkpointer.h"
#include "ddp/log.h"
#include "directory_lock.h"
#include "io/torch_file.h"

namespace ddp::test {

using Names = std::set<std::string>;

/// What is in a directory, without the lock's file, which stays there.
inline Names names(const std::filesystem::path& directory) {
  Names found;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) found.insert(entry.path().filename());
  found.erase(detail::kLockName);
  return found;
}

inline void touch(const std::filesystem::path& path, const std::string& text = "x") { std::ofstream(path) << text; }

inline void cut(const std::filesystem::path& path, uintmax_t bytes) {
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - bytes);
}

inline std::string content(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline State load(const std::filesystem::path& path) { return io::read_torch_file(path.string(), true); }
inline void save(const std::filesystem::path& path, const State& state) {
  write_file_atomically(path, [&](const Append& append) { io::write_torch_file(state, append); });
}

/// Lines of the log while it lives.
class Log {
 public:
  Log() {
    log::set_sink([this](log::Level, std::string_view line) { text += std::string(line) + "\n"; });
  }
  ~Log() { log::set_sink({}); }
  std::string text;
};

/// How often a test repeats: `ci`, or `all` with LIBDDP_LONG=1.
inline int rounds(int ci, int all) {
  const char* is_long = std::getenv("LIBDDP_LONG");
  return is_long && std::string_view(is_long) == "1" ? all : ci;
}

/// A folder whose fsync costs nothing, for TMPDIR: what is tested there is the order of calls.
inline std::optional<std::string> memory_folder() {
  if (::access("/dev/shm", W_OK) == 0) return "/dev/shm";
  const char* usual = std::getenv("TMPDIR");
  return usual ? std::optional<std::string>(usual) : std::nullopt;
}

struct Position {
  int64_t epoch = 0, consumed = 0;
  State state_dict() const { return State::dict({{"epoch", epoch}, {"consumed", consumed}}); }
  void load_state_dict(const State& state) {
    epoch = state.at("epoch").as_int();
    consumed = state.at("consumed").as_int();
  }
};

/// A small run: a model whose dropout draws random numbers.
struct Run {
  explicit Run(const std::filesystem::path& directory, CheckpointerOptions options = {}, double lr = 0.1)
      : optim(model->parameters(), torch::optim::AdamWOptions(lr)), checkpoints(directory, {}, options) {
    {
      torch::NoGradGuard no_grad;
      model->weight.fill_(0.5);
      model->bias.fill_(0);
    }
    checkpoints.track("model", model).track("optimizer", optim).track("sampler", position);
  }
  double step() {
    auto loss = torch::dropout(model(torch::ones({8, 4})), 0.5, true).square().sum();
    model->zero_grad();
    loss.backward();
    optim.step();
    ++position.consumed;
    checkpoints.step();
    return loss.item<double>();
  }
  void steps(int count) {
    for (int i = 0; i < count; ++i) step();
  }

  torch::nn::Linear model{4, 4};
  torch::optim::AdamW optim;
  Position position;
  Checkpointer checkpoints;
};

/// A tensor whose every element is a function of the step, so that any mixture of two saves is seen.
struct Weights {
  explicit Weights(int64_t elements) : values(torch::zeros({elements})) {}
  void set(int64_t step) { values.copy_(torch::arange(values.numel()) % 1000 + step); }
  bool holds(int64_t step) const {
    return values.equal((torch::arange(values.numel()) % 1000 + step).to(torch::kFloat));
  }
  State state_dict() const { return State::dict({{"values", values}}); }
  void load_state_dict(const State& state) { values.copy_(state.at("values").as_tensor()); }
  torch::Tensor values;
};

}  // namespace ddp::test
