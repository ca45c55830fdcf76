// The header of a safetensors file: which tensors, and where.
// Format: https://github.com/huggingface/safetensors, README.md, "Format".
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ddp::io {

/// Longer headers are refused, in both directions, as in the Python package (safetensors/src/tensor.rs).
inline constexpr uint64_t kMaxSafetensorsHeader = 100'000'000;
inline constexpr size_t kSafetensorsLength = 8;  // bytes before the header: its length

/// A tensor in a file.
struct SafetensorsEntry {
  std::string name = {};
  torch::ScalarType dtype = torch::kFloat;
  std::vector<int64_t> sizes = {};
  uint64_t begin = 0, end = 0;  ///< bytes of the data, which begins after the header

  uint64_t bytes() const { return end - begin; }
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  ///< in the order of their data
  std::map<std::string, std::string> metadata;
};

/// A dtype of the format and its place in the order in which tensors are written: wider ones first.
struct SafetensorsDtype {
  torch::ScalarType dtype;
  std::string_view name;
  int rank;
};
/// Nothing for a dtype that the format lacks.
std::optional<SafetensorsDtype> safetensors_dtype(torch::ScalarType dtype);

/// The length of the header from the first 8 bytes of a file. Throws CheckpointError beginning with `where`.
uint64_t safetensors_header_size(std::string_view first_bytes, uint64_t file_size, const std::string& where);

/// The header from its text; `data_size` bytes come after it. Checks all that a header can say against that: see
/// ddp/safetensors.h. Memory is at most the file's size + 13 MiB. Throws CheckpointError beginning with `where`.
SafetensorsHeader parse_safetensors_header(std::string_view text, uint64_t data_size, const std::string& where);

/// The first bytes of a file with these tensors: length, header, padding to a multiple of 8. Sorts `entries` as the
/// Python package does and sets `begin` and `end`. Throws CheckpointError beginning with `where`.
std::string make_safetensors_header(std::vector<SafetensorsEntry>& entries,
                                    const std::map<std::string, std::string>& metadata, const std::string& where);

/// Refuses JSON that a parser should not be given: nothing but an object, no UTF-8, nesting beyond `max_depth`, a
/// string above 1 MiB, a number or word above 64 characters. So what a parser allocates is bounded.
void check_json_text(std::string_view text, int max_depth, const std::string& where);

}  // namespace ddp::io
