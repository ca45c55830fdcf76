#include "io/zip_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "ddp/error.h"
#include "io/crc32.h"

namespace ddp::io {
namespace {

// Signatures and sizes of APPNOTE.TXT (PKWARE), sections 4.3.7 to 4.3.16.
constexpr uint32_t kLocalHeader = 0x04034b50, kDirectoryEntry = 0x02014b50;
constexpr uint32_t kEnd = 0x06054b50, kEnd64 = 0x06064b50, kEnd64Locator = 0x07064b50;
constexpr size_t kLocalHeaderSize = 30, kDirectoryEntrySize = 46, kEndSize = 22, kEnd64Size = 56, kLocatorSize = 20;
constexpr uint16_t kZip64Field = 1;
constexpr uint32_t kIn64 = 0xffffffff;  // "the value is in the zip64 field"
constexpr uint16_t kEncrypted = 1;

// Read and checked piece by piece, while a piece is in the cache.
constexpr size_t kPiece = 1 << 20;

template <class T>
T get(const char* data) {
  T value;
  std::memcpy(&value, data, sizeof value);  // little-endian, as the machine
  return value;
}

// A link may be moved, and its old target deleted, between the kernel's look at the one and at the other.
int open_or_throw(FileSystem& files, const std::string& path, bool follow) {
  std::string target, before;
  int descriptor = 0;
  do {
    before = target;
    if (!follow || files.read_link(path, target) < 0) target = before;
    descriptor = retry_interrupted([&] { return files.open(path, follow); });
  } while (descriptor == -ENOENT && target != before);
  if (descriptor < 0) throw CheckpointError(fmt::format("{}: cannot be opened: {}", path, std::strerror(-descriptor)));
  return descriptor;
}

}  // namespace

ZipReader::ZipReader(FileSystem& files, std::string path, bool follow)
    : files_(files), path_(std::move(path)), file_(files, open_or_throw(files, path_, follow)) {
  int64_t size = files_.size(file_.number());
  if (size < 0) fail(fmt::format("cannot be read: {}", std::strerror(static_cast<int>(-size))));
  size_ = static_cast<uint64_t>(size);
  read_directory();
}

void ZipReader::fail(const std::string& reason) const { throw CheckpointError(path_ + ": " + reason); }

void ZipReader::read_at(uint64_t offset, void* data, size_t size, const char* what) const {
  if (offset > size_ || size > size_ - offset) fail(fmt::format("{} lies outside the file of {} bytes", what, size_));
  auto* to = static_cast<char*>(data);
  while (size > 0) {
    int64_t got = retry_interrupted([&] { return files_.read(file_.number(), to, size, offset); });
    if (got < 0) fail(fmt::format("reading {} failed: {}", what, std::strerror(static_cast<int>(-got))));
    if (got == 0) fail(fmt::format("ends inside {}", what));
    to += got, offset += static_cast<uint64_t>(got), size -= static_cast<size_t>(got);
  }
}

void ZipReader::read_directory() {
  char end[kEndSize];
  if (size_ < kEndSize) fail(fmt::format("is no checkpoint: {} bytes are too few for a zip file", size_));
  read_at(size_ - kEndSize, end, kEndSize, "the end of the zip directory");
  if (get<uint32_t>(end) != kEnd || get<uint16_t>(end + 20) != 0) {
    fail(
        "is no complete checkpoint: the zip directory is not at its end (truncated, overwritten or no .pt "
        "file)");
  }
  uint64_t count = get<uint16_t>(end + 10), bytes = get<uint32_t>(end + 12), offset = get<uint32_t>(end + 16);
  uint64_t directory_end = size_ - kEndSize;

  char locator[kLocatorSize];
  if (directory_end >= kLocatorSize + kEnd64Size) {
    read_at(directory_end - kLocatorSize, locator, kLocatorSize, "the zip64 locator");
    if (get<uint32_t>(locator) == kEnd64Locator) {
      directory_end -= kLocatorSize + kEnd64Size;
      char end64[kEnd64Size];
      if (get<uint64_t>(locator + 8) != directory_end)
        fail("the zip64 locator does not point at the zip64 directory end");
      read_at(directory_end, end64, kEnd64Size, "the zip64 directory end");
      if (get<uint32_t>(end64) != kEnd64) fail("the zip64 directory end is damaged");
      const uint64_t count64 = get<uint64_t>(end64 + 32), bytes64 = get<uint64_t>(end64 + 40);
      const uint64_t offset64 = get<uint64_t>(end64 + 48);
      // The short fields say the same, as far as they reach.
      if (count != std::min<uint64_t>(count64, 0xffff) || bytes != std::min<uint64_t>(bytes64, kIn64) ||
          offset != std::min<uint64_t>(offset64, kIn64)) {
        fail("the two ends of the zip directory disagree");
      }
      count = count64, bytes = bytes64, offset = offset64;
    }
  }
  if (offset > directory_end || bytes != directory_end - offset || count > bytes / kDirectoryEntrySize || count == 0) {
    fail(fmt::format("the zip directory ({} records, {} bytes at {}) does not fit the file of {} bytes", count, bytes,
                     offset, size_));
  }

  std::string directory(bytes, '\0');
  read_at(offset, directory.data(), directory.size(), "the zip directory");
  records_.reserve(count);
  size_t position = 0;
  for (uint64_t i = 0; i < count; ++i) {
    records_.push_back(read_entry(directory, position));
    const std::string full_name = records_.back().name;
    if (i == 0) {
      folder_ = full_name.substr(0, full_name.find('/') + 1);
      if (folder_.empty()) fail(fmt::format("record {} is not in a folder, as torch.save has it", full_name));
    }
    if (!full_name.starts_with(folder_)) fail(fmt::format("record {} is outside the folder {}", full_name, folder_));
    locate(records_.back(), full_name);
    records_.back().name = full_name.substr(folder_.size());
    if (!by_name_.emplace(records_.back().name, i).second) fail(fmt::format("record {} is there twice", full_name));
  }
  if (position != directory.size()) fail("the zip directory has bytes that belong to no record");
  check_layout(offset);
}

ZipRecord ZipReader::read_entry(const std::string& directory, size_t& position) const {
  if (directory.size() - position < kDirectoryEntrySize) fail("the zip directory ends inside an entry");
  const char* entry = directory.data() + position;
  if (get<uint32_t>(entry) != kDirectoryEntry) fail("an entry of the zip directory is damaged");
  const uint16_t flags = get<uint16_t>(entry + 8), method = get<uint16_t>(entry + 10);
  const size_t name_size = get<uint16_t>(entry + 28), extra_size = get<uint16_t>(entry + 30);
  const size_t comment_size = get<uint16_t>(entry + 32);
  uint64_t stored = get<uint32_t>(entry + 20), size = get<uint32_t>(entry + 24), offset = get<uint32_t>(entry + 42);
  if (directory.size() - position - kDirectoryEntrySize < name_size + extra_size + comment_size) {
    fail("the zip directory ends inside an entry");
  }
  ZipRecord record;
  record.name.assign(entry + kDirectoryEntrySize, name_size);
  record.crc = get<uint32_t>(entry + 16);

  const char* extra = entry + kDirectoryEntrySize + name_size;
  const char* extra_end = extra + extra_size;
  while (extra_end - extra >= 4) {
    const uint16_t id = get<uint16_t>(extra), field_size = get<uint16_t>(extra + 2);
    const char* field = extra + 4;
    if (extra_end - field < field_size) fail(fmt::format("record {} has a damaged extra field", record.name));
    if (id == kZip64Field) {
      const char* field_end = field + field_size;
      for (uint64_t* value : {&size, &stored, &offset}) {
        if (*value != kIn64) continue;
        if (field_end - field < 8) fail(fmt::format("record {} has a damaged zip64 field", record.name));
        *value = get<uint64_t>(field);
        field += 8;
      }
    }
    extra += 4 + field_size;
  }
  if (flags & kEncrypted) fail(fmt::format("record {} is encrypted", record.name));
  if (method != 0 || stored != size)
    fail(fmt::format("record {} is compressed, which torch.save never does", record.name));
  record.size = size;
  record.offset = offset;  // of the local header, for `locate`
  position += kDirectoryEntrySize + name_size + extra_size + comment_size;
  return record;
}

void ZipReader::locate(ZipRecord& record, const std::string& full_name) const {
  std::string header(kLocalHeaderSize + full_name.size(), '\0');
  const std::string what = "the header of record " + full_name;
  read_at(record.offset, header.data(), header.size(), what.c_str());
  if (get<uint32_t>(header.data()) != kLocalHeader || get<uint16_t>(header.data() + 26) != full_name.size() ||
      header.compare(kLocalHeaderSize, full_name.size(), full_name) != 0) {
    fail(what + " is damaged");
  }
  record.offset += header.size() + get<uint16_t>(header.data() + 28);
}

void ZipReader::check_layout(uint64_t directory_offset) const {
  std::vector<const ZipRecord*> order;
  for (const auto& record : records_) order.push_back(&record);
  std::sort(order.begin(), order.end(), [](auto* a, auto* b) { return a->offset < b->offset; });
  uint64_t free_from = 0;
  for (const ZipRecord* record : order) {
    if (record->offset > directory_offset || record->size > directory_offset - record->offset) {
      fail(fmt::format("record {} ({} bytes at {}) runs into the zip directory", record->name, record->size,
                       record->offset));
    }
    if (record->offset < free_from) fail(fmt::format("record {} overlaps the one before it", record->name));
    free_from = record->offset + record->size;
  }
}

const ZipRecord* ZipReader::find(const std::string& name) const {
  auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &records_[found->second];
}

void ZipReader::read(const ZipRecord& record, void* destination) const {
  scan(record, [&](uint64_t done) { return static_cast<char*>(destination) + done; });
}

void ZipReader::verify(const ZipRecord& record) const {
  std::string buffer(std::min<uint64_t>(kPiece, record.size), '\0');
  scan(record, [&](uint64_t) { return buffer.data(); });
}

void ZipReader::scan(const ZipRecord& record, const std::function<char*(uint64_t done)>& destination) const {
  const std::string what = "record " + record.name;
  uint32_t crc = 0;
  for (uint64_t done = 0; done < record.size;) {
    const size_t piece = std::min<uint64_t>(kPiece, record.size - done);
    char* to = destination(done);
    read_at(record.offset + done, to, piece, what.c_str());
    crc = crc32(to, piece, crc);
    done += piece;
  }
  if (crc == record.crc) return;
  fail(fmt::format(
      "{} is damaged: its checksum is {:08x}, the directory says {:08x}{}", what, crc, record.crc,
      record.crc == 0 ? " (files saved under torch.serialization.set_crc32_options(False) have none)" : ""));
}

}  // namespace ddp::io
