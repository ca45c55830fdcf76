// The command line of qwen_pretrain. Each preset is a model with the settings that train it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "config.h"

namespace qwen {

/// The defaults are those of preset qwen2.5-0.5b.
struct Options {
  std::string preset = "qwen2.5-0.5b";
  std::string config;             ///< a config.json; the preset then gives the settings only
  std::vector<std::string> data;  ///< text files or directories
  int64_t random_data = 0;        ///< or so many windows of random tokens

  int64_t seq = 512;
  int64_t batch = 4;  ///< windows of one forward pass on one rank
  int64_t accum = 2;  ///< forward passes per optimizer step
  int64_t epochs = 3;
  int64_t max_steps = 0;  ///< optimizer steps; 0: all of the epochs

  double lr = 1e-4;
  std::string lr_scaling = "linear";
  int64_t warmup = 0;  ///< optimizer steps
  std::string schedule = "constant";
  double weight_decay = 0.01;
  double clip = 1.0;  ///< largest norm of the gradients; 0: any
  std::string dtype = "bfloat16";
  std::string kernels = "auto";  ///< "auto": the fused ones on the CPU, libtorch's operators elsewhere

  int64_t log_every = 50;
  int64_t checkpoint_every = 500;
  std::string checkpoint_dir;  ///< "" becomes checkpoints/<preset>
  std::string resume = "auto";

  uint64_t seed = 42;
  int64_t timeout_s = 1800;
  std::string backend = "auto";
  int64_t sample = 0;  ///< bytes of text at the end
  std::string summary;
};

/// The settings of a preset. Throws ddp::ConfigError for a name that is not known.
Options preset_options(const std::string& preset);

/// Reads and checks a command line; `--help` prints it and ends the program. Throws ddp::ConfigError.
Options parse_options(int argc, char** argv);

/// The model that `options` ask for.
Config model_config(const Options& options);

}  // namespace qwen
