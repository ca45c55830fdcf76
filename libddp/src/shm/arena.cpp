#include "shm/arena.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace ddp::detail::shm {
namespace {

[[noreturn]] void fail(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

}  // namespace

Fd::~Fd() {
  if (fd_ >= 0) ::close(fd_);
}

Arena::Arena(Fd fd, size_t size) : fd_(std::move(fd)), size_(size), owner_(::getpid()) {
  void* mapped = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
  if (mapped == MAP_FAILED) fail(errno, fmt::format("mapping {} bytes of shared memory", size));
  data_ = static_cast<std::byte*>(mapped);
  ::madvise(mapped, size, MADV_DONTFORK);
}

Arena::~Arena() {
  if (data_ != nullptr && is_ours()) ::munmap(data_, size_);
}

Arena::Arena(Arena&& other) noexcept { *this = std::move(other); }

Arena& Arena::operator=(Arena&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(owner_, other.owner_);
  return *this;
}

bool Arena::is_ours() const { return owner_ == ::getpid(); }

Arena Arena::create(size_t size) {
  Fd fd(::memfd_create("libddp", MFD_CLOEXEC));
  if (!fd) fail(errno, "memfd_create");
  if (::ftruncate(fd.get(), static_cast<off_t>(size)) != 0) fail(errno, fmt::format("{} bytes of shared memory", size));
  return {std::move(fd), size};
}

Arena Arena::open(pid_t owner, int fd, size_t size) {
  const std::string path = fmt::format("/proc/{}/fd/{}", owner, fd);
  Fd opened(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!opened) fail(errno, path);
  struct stat status {};
  if (::fstat(opened.get(), &status) != 0) fail(errno, path);
  if (!S_ISREG(status.st_mode) || status.st_size != static_cast<off_t>(size)) fail(EINVAL, path);
  return {std::move(opened), size};
}

}  // namespace ddp::detail::shm
