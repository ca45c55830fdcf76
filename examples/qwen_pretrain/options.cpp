#include "options.h"

#include <c10/util/StringUtil.h>

#include <algorithm>

#include "../common/command_line.h"

namespace qwen {
namespace {

using example::option;

// --preset decides the defaults of all other options, so it is looked for first.
std::string find_preset(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--preset" && i + 1 < argc) return argv[i + 1];
    if (argument.starts_with("--preset=")) return argument.substr(std::string("--preset=").size());
  }
  return Options().preset;
}

void require_one_of(const char* name, const std::string& value, std::initializer_list<const char*> allowed) {
  if (!std::ranges::count(allowed, value)) {
    throw ddp::ConfigError(c10::str("--", name, " is \"", value, "\", expected ", c10::Join(" or ", allowed)));
  }
}

void require_at_least(const char* name, double value, double least) {
  if (!(value >= least)) throw ddp::ConfigError(c10::str("--", name, " is ", value, ", expected at least ", least));
}

void validate(const Options& options) {
  if (options.data.empty() == (options.random_data == 0)) {
    throw ddp::ConfigError("give either --data PATH... (text, read as bytes) or --random-data");
  }
  require_one_of("lr-scaling", options.lr_scaling, {"none", "linear", "sqrt"});
  require_one_of("schedule", options.schedule, {"constant", "cosine", "linear"});
  require_one_of("dtype", options.dtype, {"float32", "bfloat16"});
  require_one_of("kernels", options.kernels, {"auto", "fused", "plain"});
  for (const auto& [name, value] : {std::pair{"seq", options.seq},
                                    {"batch", options.batch},
                                    {"accum", options.accum},
                                    {"epochs", options.epochs},
                                    {"log-every", options.log_every},
                                    {"checkpoint-every", options.checkpoint_every},
                                    {"timeout", options.timeout_s}}) {
    require_at_least(name, static_cast<double>(value), 1);
  }
  for (const auto& [name, value] : {std::pair{"random-data", options.random_data},
                                    {"max-steps", options.max_steps},
                                    {"warmup", options.warmup},
                                    {"sample", options.sample}}) {
    require_at_least(name, static_cast<double>(value), 0);
  }
  require_at_least("lr", options.lr, 0);
  require_at_least("weight-decay", options.weight_decay, 0);
  require_at_least("clip", options.clip, 0);

  const Config model = model_config(options);
  if (options.seq > model.max_position_embeddings) {
    throw ddp::ConfigError(
        c10::str("--seq is ", options.seq, ", but the model has ", model.max_position_embeddings, " positions"));
  }
  if (model.vocab_size < 256) {
    throw ddp::ConfigError(c10::str("the vocabulary has ", model.vocab_size, " tokens, but text is read as 256 bytes"));
  }
}

}  // namespace

Options preset_options(const std::string& name) {
  preset(name);  // refuses what it does not know
  Options options;
  options.preset = name;
  options.checkpoint_dir = "checkpoints/" + name;
  if (name == "tiny" || name == "small") {
    const bool tiny = name == "tiny";
    options.seq = tiny ? 256 : 512;
    options.batch = tiny ? 8 : 4;
    options.epochs = 1;
    options.max_steps = tiny ? 150 : 1000;
    options.lr = 3e-3;
    options.lr_scaling = "none";
    options.warmup = tiny ? 40 : 100;
    options.schedule = "cosine";
    options.dtype = "float32";
    options.log_every = 10;
    options.checkpoint_every = 50;
    options.sample = 400;
  }
  return options;
}

Options parse_options(int argc, char** argv) {
  namespace po = boost::program_options;
  Options options = preset_options(find_preset(argc, argv));
  po::options_description description("qwen_pretrain");
  // clang-format off
  description.add_options()
      ("data", po::value(&options.data)->multitoken(), "text files, or directories of .h .hpp .txt .md, read as bytes")
      ("random-data", po::value(&options.random_data)->implicit_value(10000), "so many windows of random tokens")
      ("preset", option(options.preset), "tiny, small or qwen2.5-0.5b: the model, and the defaults below")
      ("config", option(options.config), "a config.json of Hugging Face instead of the preset's model")
      ("seq", option(options.seq), "tokens of a window")
      ("batch", option(options.batch), "windows of one forward pass on one rank")
      ("accum", option(options.accum), "forward passes per optimizer step")
      ("epochs", option(options.epochs), "passes over the data")
      ("max-steps", option(options.max_steps), "optimizer steps; 0: all of the epochs")
      ("lr", option(options.lr), "learning rate")
      ("lr-scaling", option(options.lr_scaling), "with the number of ranks: none, linear or sqrt")
      ("warmup", option(options.warmup), "optimizer steps of linear warm-up")
      ("schedule", option(options.schedule), "constant, cosine or linear")
      ("weight-decay", option(options.weight_decay), "of AdamW")
      ("clip", option(options.clip), "largest norm of the gradients; 0: any")
      ("dtype", option(options.dtype), "float32 or bfloat16")
      ("kernels", option(options.kernels), "fused (CPU only), plain (libtorch's operators) or auto")
      ("log-every", option(options.log_every), "optimizer steps between two reports of the loss")
      ("checkpoint-every", option(options.checkpoint_every), "optimizer steps between two checkpoints")
      ("checkpoint-dir", option(options.checkpoint_dir), "where checkpoints and the loss plot go")
      ("resume", option(options.resume), "auto: the newest checkpoint, if there is one; never; or a checkpoint file")
      ("seed", option(options.seed), "of weights, order of the data and random tokens")
      ("timeout", option(options.timeout_s), "seconds that a rank waits for the others")
      ("backend", option(options.backend), "auto, shm, gloo or nccl")
      ("sample", option(options.sample), "bytes of text that the trained model writes at the end")
      ("summary", option(options.summary), "write times and losses to this JSON file");
  // clang-format on
  example::parse_command_line(argc, argv, description);
  validate(options);
  return options;
}

Config model_config(const Options& options) {
  return options.config.empty() ? preset(options.preset) : read_config(options.config);
}

}  // namespace qwen
