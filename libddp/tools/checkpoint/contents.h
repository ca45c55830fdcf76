// What ddp_checkpoint reads from files, and values as text.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "ddp/state.h"

namespace tool {

/// A file cannot be used; the message is one line that names it.
class Failure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The data of a tensor is not needed to list it.
enum class Data {
  kRead,     ///< every byte, checksums included
  kSkipped,  ///< names, dtypes and shapes only: touching an element would crash
};

struct Contents {
  ddp::State state = {};
  uint64_t file_size = 0;
  size_t records = 0;         ///< of the zip directory, 0 for safetensors
  std::string format = "pt";  ///< or "safetensors"
};

/// A checkpoint, anything else of torch.save's, or safetensors (a file, an index, a folder). Throws Failure.
Contents read(const std::string& path, Data data);

/// Tests all of a file and holds no tensor in memory. Throws Failure with what is wrong. Returns as `read` with
/// Data::kSkipped does.
Contents verify(const std::string& path);

/// The leaves of a tree by path, keys with "/" between them; the outermost dict's order.
std::vector<std::pair<std::string, const ddp::State*>> leaves(const ddp::State& state);

/// One line: "3", "\"text\"", "float32 [3, 4]", at most about 60 characters.
std::string describe(const ddp::State& value);
/// "float32" for a tensor, Python's type name for any other.
std::string type_of(const ddp::State& value);
std::string shape_of(const ddp::State& value);  ///< "[3, 4]" of a tensor, else ""
nlohmann::ordered_json to_json(const ddp::State& value);

/// Text of a file's in output: no control characters, whatever the file says.
std::string printable(const std::string& text);
std::string size_text(uint64_t bytes);  ///< "12.3 MiB"

/// "step", "epoch", "loss" of a checkpoint and "world_size", "version", "format" of its key "libddp"; null where absent.
nlohmann::ordered_json summary(const ddp::State& state);

}  // namespace tool
