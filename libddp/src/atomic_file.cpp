#include "ddp/atomic_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>

#include "ddp/error.h"
#include "io/file_system.h"

namespace ddp {
namespace {

namespace fs = std::filesystem;

constexpr size_t kNonceDigits = 16;
// Handed to the disk as soon as it is written: by the fsync at the end most of a large file is there already.
constexpr uint64_t kWriteback = uint64_t{8} << 20;
constexpr std::string_view kLinkTemporary = ".latest.";

std::string nonce() {
  std::random_device device;
  return fmt::format("{:08x}{:08x}", device(), device());
}

bool is_nonce(std::string_view text) {
  return text.size() == kNonceDigits && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

[[noreturn]] void fail(std::string_view who, const fs::path& path, std::string_view operation, int64_t result) {
  throw CheckpointError(fmt::format("[ddp::{}] {}: {} failed: {}", who, path.string(), operation,
                                    std::strerror(static_cast<int>(-result))));
}

fs::path directory_of(const fs::path& path) { return path.has_parent_path() ? path.parent_path() : fs::path("."); }

void write_all(io::FileSystem& files, int descriptor, const char* data, size_t size, const fs::path& path) {
  while (size > 0) {
    int64_t written = io::retry_interrupted([&] { return files.write(descriptor, data, size); });
    if (written == 0) written = -EIO;  // no progress: never an endless loop
    if (written < 0) fail("write_file_atomically", path, "write", written);
    data += written;
    size -= static_cast<size_t>(written);
  }
}

void sync_directory(std::string_view who, io::FileSystem& files, const fs::path& path) {
  int result = io::retry_interrupted([&] { return files.sync_directory(directory_of(path).string()); });
  if (result < 0) fail(who, path, "fsync of the directory", result);
}

/// Removes a file unless told to keep it.
class Cleanup {
 public:
  Cleanup(io::FileSystem& files, const fs::path& path) : files_(files), path_(path) {}
  Cleanup(const Cleanup&) = delete;
  Cleanup& operator=(const Cleanup&) = delete;
  ~Cleanup() {
    if (armed_) files_.remove(path_.string());
  }
  void release() { armed_ = false; }

 private:
  io::FileSystem& files_;
  const fs::path& path_;
  bool armed_ = true;
};

}  // namespace

void write_file_atomically(const fs::path& path, const std::function<void(const Append&)>& writer,
                           const std::string& temporary) {
  constexpr std::string_view kWho = "write_file_atomically";
  io::FileSystem& files = io::file_system();
  const fs::path draft =
      directory_of(path) / fmt::format("{}_tmp.{}{}", temporary.empty() ? path.stem().string() : temporary, nonce(),
                                       path.extension().string());
  int descriptor = io::retry_interrupted([&] { return files.create(draft.string()); });
  if (descriptor < 0) fail(kWho, path, fmt::format("creating the temporary {}", draft.filename().string()), descriptor);
  Cleanup cleanup(files, draft);
  {
    io::Descriptor file(files, descriptor);
    uint64_t written = 0, handed_over = 0;
    writer([&](const void* data, size_t size) {
      const auto* from = static_cast<const char*>(data);
      while (size > 0) {
        const size_t piece = std::min<uint64_t>(size, kWriteback);
        write_all(files, descriptor, from, piece, path);
        from += piece, size -= piece, written += piece;
        if (written - handed_over < kWriteback) continue;
        files.start_writeback(descriptor, handed_over, written - handed_over);
        handed_over = written;
      }
    });
    if (int result = files.sync(descriptor); result < 0) fail(kWho, path, "fsync", result);
    if (int result = file.close(); result < 0) fail(kWho, path, "close", result);
  }
  int result = io::retry_interrupted([&] { return files.rename(draft.string(), path.string()); });
  if (result < 0) fail(kWho, path, "rename", result);
  cleanup.release();
  sync_directory(kWho, files, path);
}

void swap_symlink(const fs::path& link, const std::string& target) {
  constexpr std::string_view kWho = "swap_symlink";
  io::FileSystem& files = io::file_system();
  const fs::path draft = directory_of(link) / (std::string(kLinkTemporary) + nonce());
  int result = io::retry_interrupted([&] { return files.symlink(target, draft.string()); });
  if (result < 0) fail(kWho, link, fmt::format("symlink to {}", target), result);
  Cleanup cleanup(files, draft);
  result = io::retry_interrupted([&] { return files.rename(draft.string(), link.string()); });
  if (result < 0) fail(kWho, link, "rename", result);
  cleanup.release();
  sync_directory(kWho, files, link);
}

bool is_temporary_name(std::string_view name, std::string_view temporary, std::string_view extension) {
  if (name.starts_with(kLinkTemporary)) return is_nonce(name.substr(kLinkTemporary.size()));
  const std::string prefix = std::string(temporary) + "_tmp.";
  if (!name.starts_with(prefix) || !name.ends_with(extension)) return false;
  if (name.size() != prefix.size() + kNonceDigits + extension.size()) return false;
  return is_nonce(name.substr(prefix.size(), kNonceDigits));
}

void make_directories(const fs::path& path) {
  constexpr std::string_view kWho = "make_directories";
  io::FileSystem& files = io::file_system();
  fs::path so_far;
  for (const fs::path& part : path) {
    so_far /= part;
    int result = io::retry_interrupted([&] { return files.make_directory(so_far.string()); });
    if (result == 0) {
      sync_directory(kWho, files, so_far);
    } else if (result != -EEXIST) {
      fail(kWho, so_far, "mkdir", result);
    }
  }
  // What exists may be a file; a link to a directory is as good as one.
  std::vector<std::string> names;
  if (int result = files.list(path.string(), names); result < 0) fail(kWho, path, "opening the directory", result);
}

}  // namespace ddp
