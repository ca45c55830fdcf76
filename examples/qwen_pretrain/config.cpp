#include "config.h"

#include <c10/util/StringUtil.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

namespace qwen {
namespace {

using Json = nlohmann::json;

// Keys that say nothing about the arithmetic.
const std::set<std::string> kIgnored = {
    "_attn_implementation", "_name_or_path",     "architectures", "bos_token_id",   "dtype",
    "eos_token_id",         "max_window_layers", "pad_token_id",  "sliding_window", "torch_dtype",
    "transformers_version", "use_cache"};

// Takes keys out of a config.json one by one; what is left at the end nobody has understood.
class Reader {
 public:
  explicit Reader(const std::filesystem::path& file) : file_(file) {
    std::ifstream in(file);
    if (!in) throw ddp::ConfigError(c10::str(file.string(), ": cannot be opened"));
    json_ = Json::parse(in, nullptr, /*allow_exceptions=*/false);
    if (!json_.is_object()) throw ddp::ConfigError(c10::str(file.string(), ": holds no JSON object"));
  }

  template <class T>
  T take(const std::string& key) {
    const auto found = json_.find(key);
    if (found == json_.end()) fail(key, "is missing");
    return convert<T>(key, take_json(found));
  }

  template <class T>
  T take(const std::string& key, T otherwise) {
    const auto found = json_.find(key);
    return found == json_.end() ? otherwise : convert<T>(key, take_json(found));
  }

  Json take_json(const std::string& key) {
    const auto found = json_.find(key);
    return found == json_.end() ? Json() : take_json(found);
  }

  // The one value of `key` that this model implements; a missing key has it.
  void require(const std::string& key, const Json& value) {
    const Json found = take_json(key);
    if (!found.is_null() && found != value) {
      fail(key, c10::str("is ", found.dump(), ", but this model implements ", value.dump(), " only"));
    }
  }

  void finish() const {
    for (const auto& [key, value] : json_.items()) {
      if (!kIgnored.contains(key)) {
        fail(key, c10::str("(", value.dump(), ") is not known and might change the model: remove it if it does not"));
      }
    }
  }

  [[noreturn]] void fail(const std::string& key, const std::string& why) const {
    throw ddp::ConfigError(c10::str(file_.string(), ": \"", key, "\" ", why));
  }

 private:
  Json take_json(Json::iterator found) {
    Json value = std::move(*found);
    json_.erase(found);
    return value;
  }

  template <class T>
  T convert(const std::string& key, const Json& value) const {
    const bool fits = std::is_same_v<T, bool>   ? value.is_boolean()
                      : std::is_integral_v<T>   ? value.is_number_integer()
                      : std::is_arithmetic_v<T> ? value.is_number()
                                                : value.is_string();
    if (!fits) fail(key, c10::str("has a value of another type: ", value.dump()));
    return value.get<T>();
  }

  std::filesystem::path file_;
  Json json_;
};

// transformers 5 writes {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, earlier ones "rope_theta".
double take_rope_theta(Reader& reader) {
  constexpr double kTransformersDefault = 10000;
  reader.require("rope_scaling", nullptr);
  const double theta = reader.take("rope_theta", kTransformersDefault);
  const Json rope = reader.take_json("rope_parameters");
  if (rope.is_null()) return theta;
  for (const auto& [key, value] : rope.items()) {
    const bool known = (key == "rope_type" && value == "default") || (key == "rope_theta" && value.is_number());
    if (!known)
      reader.fail("rope_parameters", c10::str("has ", key, " = ", value.dump(),
                                              ", which is not supported; take a config.json without it"));
  }
  return rope.value("rope_theta", theta);
}

void validate(const Config& config, const Reader& reader) {
  for (const auto& [key, value] : {std::pair{"vocab_size", config.vocab_size},
                                   {"hidden_size", config.hidden_size},
                                   {"intermediate_size", config.intermediate_size},
                                   {"num_hidden_layers", config.num_hidden_layers},
                                   {"num_attention_heads", config.num_attention_heads},
                                   {"num_key_value_heads", config.num_key_value_heads},
                                   {"max_position_embeddings", config.max_position_embeddings}}) {
    if (value < 1) reader.fail(key, c10::str("is ", value, ", expected at least 1"));
  }
  if (config.hidden_size % (2 * config.num_attention_heads) != 0) {
    reader.fail("hidden_size", c10::str("is ", config.hidden_size, ", expected a multiple of twice the ",
                                        config.num_attention_heads, " attention heads"));
  }
  if (config.num_attention_heads % config.num_key_value_heads != 0) {
    reader.fail("num_key_value_heads", c10::str("is ", config.num_key_value_heads, ", expected a divisor of the ",
                                                config.num_attention_heads, " attention heads"));
  }
}

}  // namespace

Config read_config(const std::filesystem::path& file) {
  Reader reader(file);
  reader.require("model_type", "qwen2");
  reader.require("hidden_act", "silu");
  reader.require("attention_dropout", 0.0);
  reader.require("use_sliding_window", false);
  reader.require("use_mrope", false);
  for (const Json& type : reader.take_json("layer_types")) {
    if (type != "full_attention")
      reader.fail("layer_types",
                  c10::str("has ", type.dump(), ", which is not supported; take a config.json without it"));
  }

  Config config;
  config.vocab_size = reader.take<int64_t>("vocab_size");
  config.hidden_size = reader.take<int64_t>("hidden_size");
  config.intermediate_size = reader.take<int64_t>("intermediate_size");
  config.num_hidden_layers = reader.take<int64_t>("num_hidden_layers");
  config.num_attention_heads = reader.take<int64_t>("num_attention_heads");
  config.num_key_value_heads = reader.take<int64_t>("num_key_value_heads");
  config.max_position_embeddings = reader.take<int64_t>("max_position_embeddings");
  config.rms_norm_eps = reader.take("rms_norm_eps", 1e-6);
  config.rope_theta = take_rope_theta(reader);
  config.initializer_range = reader.take("initializer_range", 0.02);
  config.tie_word_embeddings = reader.take<bool>("tie_word_embeddings");
  reader.require("head_dim", config.hidden_size / std::max<int64_t>(config.num_attention_heads, 1));
  reader.finish();
  validate(config, reader);
  return config;
}

}  // namespace qwen
