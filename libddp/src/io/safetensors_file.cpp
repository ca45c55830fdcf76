#include "io/safetensors_file.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "ddp/error.h"

namespace ddp::io {
namespace {

int open_or_throw(FileSystem& files, const std::string& path, const std::string& where) {
  const int descriptor = retry_interrupted([&] { return files.open(path, /*follow=*/true); });
  if (descriptor < 0) throw CheckpointError(fmt::format("{}: cannot be opened: {}", where, std::strerror(-descriptor)));
  return descriptor;
}

}  // namespace

// The whole file, private to this process: who writes to a tensor gets a copy of the page.
class SafetensorsFile::Mapping {
 public:
  Mapping(int descriptor, uint64_t size) : size_(size) {
    base_ = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, descriptor, 0);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() {
    if (ok()) ::munmap(base_, size_);
  }
  bool ok() const { return base_ != MAP_FAILED; }
  char* at(uint64_t offset) const { return static_cast<char*>(base_) + offset; }

 private:
  void* base_;
  uint64_t size_;
};

SafetensorsFile::SafetensorsFile(FileSystem& files, const std::filesystem::path& path, bool map)
    : files_(files), where_(path.string()), file_(files, open_or_throw(files, path.string(), where_)) {
  const int64_t size = files_.size(file_.number());
  if (size < 0) {
    throw CheckpointError(fmt::format("{}: cannot be read: {}", where_, std::strerror(static_cast<int>(-size))));
  }
  const auto file_size = static_cast<uint64_t>(size);
  std::string start(std::min<uint64_t>(file_size, kSafetensorsLength), '\0');
  read_at(0, start.data(), start.size(), "the length of the header");
  std::string text(safetensors_header_size(start, file_size, where_), '\0');
  read_at(kSafetensorsLength, text.data(), text.size(), "the header");
  data_start_ = kSafetensorsLength + text.size();
  header_ = parse_safetensors_header(text, file_size - data_start_, where_);
  if (!map || file_size == data_start_) return;
  mapping_ = std::make_shared<Mapping>(file_.number(), file_size);
  if (!mapping_->ok()) mapping_.reset();  // a file system without mappings: read instead
}

torch::Tensor SafetensorsFile::tensor(const SafetensorsEntry& entry) const {
  const uint64_t offset = data_start_ + entry.begin;
  if (mapping_ && entry.bytes() > 0 && offset % c10::elementSize(entry.dtype) == 0) {
    return torch::from_blob(
        mapping_->at(offset), entry.sizes, [keep = mapping_](void*) {}, torch::dtype(entry.dtype));
  }
  auto tensor = torch::empty(entry.sizes, torch::dtype(entry.dtype));
  read_at(offset, tensor.mutable_data_ptr(), entry.bytes(), "tensor " + entry.name);
  return tensor;
}

void SafetensorsFile::read_at(uint64_t offset, void* data, uint64_t size, const std::string& what) const {
  auto* to = static_cast<char*>(data);
  while (size > 0) {
    const int64_t got = retry_interrupted([&] { return files_.read(file_.number(), to, size, offset); });
    if (got < 0) {
      throw CheckpointError(
          fmt::format("{}: reading {} failed: {}", where_, what, std::strerror(static_cast<int>(-got))));
    }
    if (got == 0) throw CheckpointError(fmt::format("{}: ends inside {}", where_, what));
    to += got, offset += static_cast<uint64_t>(got), size -= static_cast<uint64_t>(got);
  }
}

}  // namespace ddp::io
