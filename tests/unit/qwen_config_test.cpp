// examples/qwen_pretrain: presets, config.json and the command line.
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "../../examples/qwen_pretrain/options.h"
#include "support/catch.h"

namespace {

using ddp::test::ContainsSubstring;
using ddp::test::message_of;
using Json = nlohmann::json;

// What Qwen/Qwen2.5-0.5B has on Hugging Face.
Json published_config() {
  return Json::parse(R"({"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
    "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24, "model_type": "qwen2",
    "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1", "use_cache": true, "use_mrope": false, "use_sliding_window": false,
    "vocab_size": 151936})");
}

qwen::Config read(const Json& json) {
  const auto file = std::filesystem::temp_directory_path() / ("qwen_config_" + std::to_string(::getpid()) + ".json");
  std::ofstream(file) << json;
  struct Remove {
    std::filesystem::path file;
    ~Remove() { std::filesystem::remove(file); }
  } remove{file};
  return qwen::read_config(file);
}

qwen::Options parse(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "qwen_pretrain");
  std::vector<char*> argv;
  for (auto& argument : arguments) argv.push_back(argument.data());
  return qwen::parse_options(static_cast<int>(argv.size()), argv.data());
}

TEST_CASE("the published config.json of Qwen2.5-0.5B is preset qwen2.5-0.5b") {
  const auto config = read(published_config());
  const auto preset = qwen::preset("qwen2.5-0.5b");
  CHECK(config.vocab_size == preset.vocab_size);
  CHECK(config.hidden_size == preset.hidden_size);
  CHECK(config.intermediate_size == preset.intermediate_size);
  CHECK(config.num_hidden_layers == preset.num_hidden_layers);
  CHECK(config.num_attention_heads == preset.num_attention_heads);
  CHECK(config.num_key_value_heads == preset.num_key_value_heads);
  CHECK(config.max_position_embeddings == preset.max_position_embeddings);
  CHECK(config.rms_norm_eps == preset.rms_norm_eps);
  CHECK(config.rope_theta == preset.rope_theta);
  CHECK(config.initializer_range == preset.initializer_range);
  CHECK(config.tie_word_embeddings == preset.tie_word_embeddings);
}

TEST_CASE("a config.json that this model does not implement is refused with the key") {
  const std::vector<std::pair<std::string, Json>> faults = {
      {"model_type", "llama"},
      {"hidden_act", "gelu"},
      {"use_sliding_window", true},
      {"use_mrope", true},
      {"attention_dropout", 0.1},
      {"layer_types", {"full_attention", "sliding_attention"}},
      {"rope_scaling", {{"type", "yarn"}, {"factor", 4}}},
      {"rope_parameters", {{"rope_type", "yarn"}, {"rope_theta", 1e6}}},
      {"rope_parameters", {{"rope_type", "default"}, {"partial_rotary_factor", 0.5}}},
      {"head_dim", 128},
      {"num_experts", 60},
      {"hidden_size", 900},
      {"hidden_size", "896"},
      {"num_key_value_heads", 3},
      {"num_attention_heads", 0},
      {"vocab_size", 0},
      {"tie_word_embeddings", 1},
  };
  for (const auto& [key, value] : faults) {
    auto json = published_config();
    json[key] = value;
    INFO(key << " = " << value);
    CHECK_THAT(message_of<ddp::ConfigError>([&] { read(json); }), ContainsSubstring("\"" + key + "\""));
  }
  for (const std::string key : {"vocab_size", "tie_word_embeddings", "num_key_value_heads"}) {
    auto json = published_config();
    json.erase(key);
    CHECK_THAT(message_of<ddp::ConfigError>([&] { read(json); }), ContainsSubstring("\"" + key + "\" is missing"));
  }
  CHECK_THAT(message_of<ddp::ConfigError>([&] { read(Json::array()); }), ContainsSubstring("no JSON object"));
  CHECK_THROWS_AS(qwen::read_config("/no/such/config.json"), ddp::ConfigError);
}

TEST_CASE("rotary theta is read from both places that transformers has used") {
  auto json = published_config();
  json.erase("rope_theta");
  CHECK(read(json).rope_theta == 1e4);  // transformers' default
  json["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 5e5}};
  CHECK(read(json).rope_theta == 5e5);
}

TEST_CASE("the defaults of qwen_pretrain are those of the seed document") {
  const auto options = parse({"--random-data"});
  CHECK(options.preset == "qwen2.5-0.5b");
  CHECK(options.random_data == 10000);
  CHECK(options.seq == 512);
  CHECK(options.batch == 4);
  CHECK(options.accum == 2);
  CHECK(options.epochs == 3);
  CHECK(options.lr == 1e-4);
  CHECK(options.lr_scaling == "linear");
  CHECK(options.weight_decay == 0.01);
  CHECK(options.clip == 1.0);
  CHECK(options.dtype == "bfloat16");
  CHECK(options.log_every == 50);
  CHECK(options.checkpoint_every == 500);
  CHECK(options.seed == 42);
  CHECK(options.timeout_s == 30 * 60);
  CHECK(options.resume == "auto");
}

TEST_CASE("a preset sets the defaults, options on the command line win") {
  for (const auto& spelled : std::vector<std::vector<std::string>>{{"--preset", "tiny"}, {"--preset=tiny"}}) {
    auto arguments = spelled;
    arguments.insert(arguments.end(), {"--data", "/a", "/b", "--batch", "3"});
    const auto options = parse(arguments);
    CHECK(options.seq == 256);
    CHECK(options.batch == 3);
    CHECK(options.dtype == "float32");
    CHECK(options.data == std::vector<std::string>{"/a", "/b"});
    CHECK(qwen::model_config(options).hidden_size == 128);
  }
}

TEST_CASE("a command line that cannot be used is refused with its reason") {
  const std::vector<std::pair<std::vector<std::string>, std::string>> faults = {
      {{}, "either --data"},
      {{"--data", "/a", "--random-data"}, "either --data"},
      {{"--random-data", "--preset", "huge"}, "\"huge\""},
      {{"--random-data", "--dtype", "float16"}, "float32 or bfloat16"},
      {{"--random-data", "--schedule", "step"}, "--schedule"},
      {{"--random-data", "--lr-scaling", "cubic"}, "--lr-scaling"},
      {{"--random-data", "--accum", "0"}, "--accum"},
      {{"--random-data", "--seq", "40000"}, "32768 positions"},
      {{"--random-data", "--clip", "-1"}, "--clip"},
      {{"--random-data", "--lr", "nan"}, "--lr"},
      {{"--random-data", "--epoch", "3"}, "epoch"},  // no guessing of abbreviations
      {{"stray", "--random-data"}, "positional"},
      {{"--random-data", "--batch", "four"}, "four"},
  };
  for (const auto& [arguments, text] : faults) {
    INFO(text);
    CHECK_THAT(message_of<ddp::ConfigError>([&, &arguments = arguments] { parse(arguments); }),
               ContainsSubstring(text));
  }
}

}  // namespace
