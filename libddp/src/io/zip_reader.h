// Reads the zip files that torch.save writes: stored records under one folder, each with a checksum.
//
// libtorch's own PyTorchStreamReader is built without the checksum test and unpacks compressed records, so a
// flipped bit goes unseen and a small file can ask for any amount of memory. This one refuses both.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include "io/file_system.h"

namespace ddp::io {

/// One record: `size` bytes at `offset` of the file.
struct ZipRecord {
  std::string name;  ///< without the folder: "data.pkl", "data/0"
  uint64_t offset = 0;
  uint64_t size = 0;
  uint32_t crc = 0;
};

/// The directory of a file that is open for reading. Everything in it is checked against the file's size when
/// it is opened: records lie inside the file and do not overlap, so that all of them together are no larger
/// than the file.
class ZipReader {
 public:
  /// Throws CheckpointError naming the file and what is wrong with it. `follow`: the path may be a link.
  ZipReader(FileSystem& files, std::string path, bool follow);

  const std::string& path() const { return path_; }
  uint64_t file_size() const { return size_; }
  const std::vector<ZipRecord>& records() const { return records_; }

  /// nullptr where there is none.
  const ZipRecord* find(const std::string& name) const;

  /// Reads a record to `destination` (record.size bytes) and checks its checksum. Throws CheckpointError.
  void read(const ZipRecord& record, void* destination) const;
  /// Only checks the checksum.
  void verify(const ZipRecord& record) const;

  [[noreturn]] void fail(const std::string& reason) const;

 private:
  void read_at(uint64_t offset, void* data, size_t size, const char* what) const;
  void read_directory();
  ZipRecord read_entry(const std::string& directory, size_t& position) const;
  void locate(ZipRecord& record, const std::string& full_name) const;
  void check_layout(uint64_t directory_offset) const;
  void scan(const ZipRecord& record, const std::function<char*(uint64_t done)>& destination) const;

  FileSystem& files_;
  std::string path_;
  Descriptor file_;
  uint64_t size_ = 0;
  std::string folder_;  // with the slash
  std::vector<ZipRecord> records_;
  std::unordered_map<std::string, size_t> by_name_;
};

}  // namespace ddp::io
