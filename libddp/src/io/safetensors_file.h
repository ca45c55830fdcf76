// A safetensors file open for reading, and the index of a model in several of them.
#pragma once

#include <torch/types.h>

#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "io/file_system.h"
#include "io/safetensors_header.h"

namespace ddp::io {

/// The header is read and checked at once, the data when a tensor is asked for.
class SafetensorsFile {
 public:
  /// `map`: tensors are views of the mapped file where their place allows it; otherwise they are read. Links are
  /// followed. Throws CheckpointError naming the file and what is wrong.
  SafetensorsFile(FileSystem& files, const std::filesystem::path& path, bool map);

  const SafetensorsHeader& header() const { return header_; }
  torch::Tensor tensor(const SafetensorsEntry& entry) const;

 private:
  class Mapping;

  void read_at(uint64_t offset, void* data, uint64_t size, const std::string& what) const;

  FileSystem& files_;
  std::string where_;
  Descriptor file_;
  uint64_t data_start_ = 0;
  SafetensorsHeader header_;
  std::shared_ptr<Mapping> mapping_;
};

/// The files behind what a user names: a file, an index, or a folder with one of them, in the order in which the index
/// names them.
struct SafetensorsShards {
  std::string index;  ///< empty where there is none
  std::vector<std::filesystem::path> files;
  /// Of the index: names and which of `files` has them, in its order.
  std::vector<std::pair<std::string, size_t>> tensors;
};

/// Throws CheckpointError for a path that does not exist, a folder without a model, and an index that is malformed or
/// names files outside of its folder.
SafetensorsShards find_safetensors(FileSystem& files, const std::filesystem::path& path);

}  // namespace ddp::io
