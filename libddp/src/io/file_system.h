// The seam between checkpoints and the kernel: the system calls that a save or a load makes, and nothing
// above them. Tests replace it to make calls fail, write short or lose what was not synced.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace ddp::io {

/// What a path names, without following a link.
enum class Kind { kMissing, kFile, kDirectory, kLink, kOther };

/// One call each: returns what the system call returns, or -errno. No retries here; they belong to the
/// callers, so that tests see them.
class FileSystem {
 public:
  virtual ~FileSystem() = default;

  /// A new file for writing, never an existing one, never through a link. Returns its descriptor.
  virtual int create(const std::string& path) = 0;
  /// For reading; `follow` also through a link.
  virtual int open(const std::string& path, bool follow) = 0;
  virtual int64_t write(int descriptor, const void* data, size_t size) = 0;
  /// Lets the disk begin with bytes that were written, so that `sync` finds less to do. A hint: nothing depends on it.
  virtual void start_writeback(int descriptor, uint64_t offset, uint64_t size) = 0;
  virtual int64_t read(int descriptor, void* data, size_t size, uint64_t offset) = 0;
  virtual int64_t size(int descriptor) = 0;
  virtual int sync(int descriptor) = 0;
  virtual int close(int descriptor) = 0;

  virtual int rename(const std::string& from, const std::string& to) = 0;
  virtual int symlink(const std::string& target, const std::string& link) = 0;
  virtual int read_link(const std::string& link, std::string& target) = 0;
  virtual int remove(const std::string& path) = 0;
  virtual int make_directory(const std::string& path) = 0;
  virtual int sync_directory(const std::string& path) = 0;
  virtual int list(const std::string& directory, std::vector<std::string>& names) = 0;
  virtual int kind(const std::string& path, Kind& kind) = 0;
  /// Bytes that this process may add to the file system of a directory; the largest number where it does not tell.
  virtual int free_space(const std::string& directory, uint64_t& bytes) = 0;

  /// Takes a lock on a file, which is made where it is missing, and writes `owner` into it. The kernel gives the lock
  /// back when the descriptor is closed or the process has died. Returns the descriptor, or -EWOULDBLOCK when another
  /// process has it: `owner` is then what that one wrote.
  virtual int lock(const std::string& path, std::string& owner) = 0;
};

/// The file system in use: the real one unless a test has replaced it.
FileSystem& file_system();

/// Replaces the file system of this process while it lives. For tests.
class ScopedFileSystem {
 public:
  explicit ScopedFileSystem(FileSystem& replacement);
  ScopedFileSystem(const ScopedFileSystem&) = delete;
  ScopedFileSystem& operator=(const ScopedFileSystem&) = delete;
  ~ScopedFileSystem();

 private:
  FileSystem* previous_;
};

/// The real one, for replacements that pass calls on.
FileSystem& real_file_system();

/// A call that is repeated while it is interrupted by a signal.
template <class Call>
auto retry_interrupted(Call call) {
  constexpr int kInterrupted = -4;  // -EINTR, without <cerrno> in a header
  auto result = call();
  while (result == kInterrupted) result = call();
  return result;
}

/// An open file that closes itself.
class Descriptor {
 public:
  Descriptor(FileSystem& files, int number) : files_(&files), number_(number) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (number_ >= 0) files_->close(number_);
  }
  int number() const { return number_; }
  /// Closes now and tells how that went; -EINTR too, since the descriptor is gone then.
  int close() {
    int number = number_;
    number_ = -1;
    return files_->close(number);
  }

 private:
  FileSystem* files_;
  int number_;
};

}  // namespace ddp::io
