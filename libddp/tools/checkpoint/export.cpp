#include <fmt/format.h>
#include <torch/types.h>

#include <algorithm>
#include <iostream>

#include "checkpoint/commands.h"
#include "checkpoint/contents.h"
#include "ddp/error.h"
#include "ddp/safetensors.h"

namespace tool {
namespace {

using ddp::State;
using nlohmann::ordered_json;

constexpr std::string_view kPrefix = "module.";  // of Python's DistributedDataParallel.state_dict()

bool is_weights(const State& state) {
  return state.is_dict() && !state.as_dict().empty() &&
         std::all_of(state.as_dict().begin(), state.as_dict().end(),
                     [](const auto& item) { return item.first.is_string() && item.second.is_tensor(); });
}

const State& find_weights(const std::string& from, const State& state, const std::string& key) {
  if (const State* found = state.is_dict() ? state.find(key) : nullptr) {
    if (is_weights(*found)) return *found;
    throw Failure(fmt::format("{}: {} is no dict of names and tensors", from, key));
  }
  if (is_weights(state)) return state;  // a bare state_dict
  std::string others;
  if (state.is_dict()) {
    for (const auto& [name, value] : state.as_dict()) {
      if (name.is_string() && is_weights(value)) {
        others += fmt::format("{}{}", others.empty() ? "; --key can be " : ", ", printable(name.as_string()));
      }
    }
  }
  throw Failure(fmt::format("{}: has no key {}{}", from, key, others));
}

// A tensor that repeats few bytes many times (stride 0) must not fill disk and memory.
void check_size(const std::string& from, const std::string& name, const torch::Tensor& tensor) {
  constexpr uint64_t kSmall = 64 << 20;
  const uint64_t bytes = static_cast<uint64_t>(tensor.numel()) * tensor.element_size();
  if (bytes > kSmall && bytes > tensor.storage().nbytes()) {
    throw Failure(fmt::format("{}: {} {} is a view of {} bytes only; it is not written out", from, printable(name),
                              describe(tensor), tensor.storage().nbytes()));
  }
}

}  // namespace

int export_weights(const std::string& from, const std::string& to, const ExportOptions& options) {
  const Contents contents = read(from, Data::kRead);
  const State::Pairs& weights = find_weights(from, contents.state, options.key).as_dict();
  const bool strip = std::all_of(weights.begin(), weights.end(),
                                 [](const auto& item) { return item.first.as_string().starts_with(kPrefix); });
  ddp::NamedTensors tensors;
  for (const auto& [name, value] : weights) {
    check_size(from, name.as_string(), value.as_tensor());
    tensors.insert(strip ? name.as_string().substr(kPrefix.size()) : name.as_string(), value.as_tensor());
  }
  ddp::SafetensorsMetadata metadata{{"format", "pt"}};
  try {
    ddp::save_safetensors(to, tensors, metadata, {.tied = options.drop_tied ? ddp::Tied::kDrop : ddp::Tied::kRefuse});
    metadata = ddp::safetensors_metadata(to);
  } catch (const ddp::Error& error) {
    throw Failure(error.what());
  }
  metadata.erase("format");

  if (options.json) {
    ordered_json report{{"file", to}, {"tensors", tensors.size() - metadata.size()}, {"tied", ordered_json::object()}};
    for (const auto& [dropped, kept] : metadata) report["tied"][dropped] = kept;
    print(report);
    return kYes;
  }
  for (const auto& [dropped, kept] : metadata) {
    std::cout << printable(dropped) << " is tied to " << printable(kept) << " and not written\n";
  }
  std::cout << to << ": " << tensors.size() - metadata.size() << " tensors\n";
  return kYes;
}

}  // namespace tool
