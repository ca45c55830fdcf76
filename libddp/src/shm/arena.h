// Memory that processes of one host share. It has no name in any file system: when the last process that maps it ends,
// however it ends, nothing is left.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <utility>

namespace ddp::detail::shm {

/// A file descriptor that closes itself.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  ~Fd();
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

/// A mapped region of zeroed memory. Children made by fork do not inherit it, programs started by exec neither.
class Arena {
 public:
  Arena() = default;
  ~Arena();
  Arena(Arena&& other) noexcept;
  Arena& operator=(Arena&& other) noexcept;

  /// New memory of `size` bytes. Throws std::system_error where the system refuses it.
  static Arena create(size_t size);
  /// The memory that process `owner` of this host holds as its descriptor `fd`. Throws std::system_error where it may not
  /// be opened, or is not of `size` bytes.
  static Arena open(pid_t owner, int fd, size_t size);

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  /// Whether this process mapped it: a child made by fork has the object, but not the memory.
  bool is_ours() const;
  int fd() const { return fd_.get(); }
  /// Others have opened it: the descriptor is needed no more.
  void close_fd() { fd_ = Fd(); }

 private:
  Arena(Fd fd, size_t size);

  Fd fd_;
  std::byte* data_ = nullptr;
  size_t size_ = 0;
  pid_t owner_ = 0;
};

}  // namespace ddp::detail::shm
