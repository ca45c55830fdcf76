#include "io/file_system.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstdio>

namespace ddp::io {
namespace {

static_assert(EINTR == 4, "retry_interrupted knows EINTR by its number");

template <class T>
T or_errno(T result) {
  return result < 0 ? static_cast<T>(-errno) : result;
}

class RealFileSystem final : public FileSystem {
 public:
  int create(const std::string& path) override {
    return or_errno(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666));
  }
  int open(const std::string& path, bool follow) override {
    return or_errno(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | (follow ? 0 : O_NOFOLLOW)));
  }
  int64_t write(int descriptor, const void* data, size_t size) override {
    return or_errno<int64_t>(::write(descriptor, data, size));
  }
  void start_writeback(int descriptor, uint64_t offset, uint64_t size) override {
    // Without the WAIT flags it takes no error away from a later fsync.
    ::sync_file_range(descriptor, static_cast<off64_t>(offset), static_cast<off64_t>(size), SYNC_FILE_RANGE_WRITE);
  }
  int64_t read(int descriptor, void* data, size_t size, uint64_t offset) override {
    return or_errno<int64_t>(::pread(descriptor, data, size, static_cast<off_t>(offset)));
  }
  int64_t size(int descriptor) override {
    struct stat status {};
    if (::fstat(descriptor, &status) < 0) return -errno;
    if (S_ISDIR(status.st_mode)) return -EISDIR;
    if (!S_ISREG(status.st_mode)) return -EINVAL;
    return status.st_size;
  }
  int sync(int descriptor) override { return or_errno(::fsync(descriptor)); }
  int close(int descriptor) override { return or_errno(::close(descriptor)); }
  int rename(const std::string& from, const std::string& to) override {
    return or_errno(::rename(from.c_str(), to.c_str()));
  }
  int symlink(const std::string& target, const std::string& link) override {
    return or_errno(::symlink(target.c_str(), link.c_str()));
  }
  int read_link(const std::string& link, std::string& target) override {
    char buffer[PATH_MAX];
    auto length = ::readlink(link.c_str(), buffer, sizeof buffer);
    if (length < 0) return -errno;
    target.assign(buffer, static_cast<size_t>(length));
    return 0;
  }
  int remove(const std::string& path) override { return or_errno(::unlink(path.c_str())); }
  int make_directory(const std::string& path) override { return or_errno(::mkdir(path.c_str(), 0777)); }
  int sync_directory(const std::string& path) override {
    int descriptor = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (descriptor < 0) return -errno;
    int result = or_errno(::fsync(descriptor));
    ::close(descriptor);
    return result;
  }
  int list(const std::string& directory, std::vector<std::string>& names) override {
    names.clear();
    DIR* stream = ::opendir(directory.c_str());
    if (!stream) return -errno;
    errno = 0;
    while (const dirent* entry = ::readdir(stream)) names.emplace_back(entry->d_name);
    int result = -errno;
    ::closedir(stream);
    return result;
  }
  int kind(const std::string& path, Kind& kind) override {
    struct stat status {};
    if (::lstat(path.c_str(), &status) < 0) {
      if (errno != ENOENT) return -errno;
      kind = Kind::kMissing;
      return 0;
    }
    kind = S_ISREG(status.st_mode)   ? Kind::kFile
           : S_ISDIR(status.st_mode) ? Kind::kDirectory
           : S_ISLNK(status.st_mode) ? Kind::kLink
                                     : Kind::kOther;
    return 0;
  }
  int free_space(const std::string& directory, uint64_t& bytes) override {
    struct statvfs status {};
    if (::statvfs(directory.c_str(), &status) < 0) return -errno;
    bytes = status.f_blocks == 0 ? UINT64_MAX : uint64_t{status.f_bavail} * status.f_frsize;
    return 0;
  }
  int lock(const std::string& path, std::string& owner) override {
    const int descriptor = ::open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (descriptor < 0) return -errno;
    if (::flock(descriptor, LOCK_EX | LOCK_NB) < 0) {
      const int error = errno;
      char text[512];
      const auto length = ::pread(descriptor, text, sizeof text, 0);
      owner.assign(text, length > 0 ? static_cast<size_t>(length) : 0);
      ::close(descriptor);
      return -error;
    }
    // For the reader of an error message only, so it may fail.
    if (::ftruncate(descriptor, 0) == 0) (void)!::pwrite(descriptor, owner.data(), owner.size(), 0);
    return descriptor;
  }
};

std::atomic<FileSystem*> replaced{nullptr};

}  // namespace

FileSystem& real_file_system() {
  static RealFileSystem real;
  return real;
}

FileSystem& file_system() {
  FileSystem* replacement = replaced.load();
  return replacement ? *replacement : real_file_system();
}

ScopedFileSystem::ScopedFileSystem(FileSystem& replacement) : previous_(replaced.exchange(&replacement)) {}
ScopedFileSystem::~ScopedFileSystem() { replaced.store(previous_); }

}  // namespace ddp::io
