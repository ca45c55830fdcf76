// File systems that misbehave, over the real one.
//
//   FaultyFileSystem faulty{.fail_at = 3, .error = ENOSPC};      // the third call fails, once
//   ddp::io::ScopedFileSystem scope(faulty);
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <string>
#include <vector>

#include "io/file_system.h"

namespace ddp::test {

class FaultyFileSystem final : public io::FileSystem {
 public:
  int fail_at = 0;       ///< the number of the call that fails, from 1; 0: none
  int error = EIO;       ///< as what
  bool forever = false;  ///< all calls from there on
  size_t longest_write = SIZE_MAX;
  int interruptions = 0;           ///< how many reads and writes are interrupted by a signal, in turns
  std::vector<std::string> calls;  ///< changes and syncs, by name

  int create(const std::string& path) override {
    if (failing("create")) return -error;
    return writing_ = real().create(path);
  }
  int open(const std::string& path, bool follow) override { return real().open(path, follow); }
  int64_t write(int descriptor, const void* data, size_t size) override {
    if (failing("write")) return -error;
    if (interrupted()) return -EINTR;
    return real().write(descriptor, data, std::min(size, longest_write));
  }
  int64_t read(int descriptor, void* data, size_t size, uint64_t offset) override {
    if (interrupted()) return -EINTR;
    return real().read(descriptor, data, std::min(size, longest_write), offset);
  }
  int64_t size(int descriptor) override { return real().size(descriptor); }
  int sync(int descriptor) override { return failing("fsync") ? -error : real().sync(descriptor); }
  int close(int descriptor) override {
    const int result = real().close(descriptor);
    if (descriptor != writing_) return result;  // of a file that was read
    writing_ = -1;
    return failing("close") ? -error : result;
  }
  int rename(const std::string& from, const std::string& to) override {
    return failing("rename") ? -error : real().rename(from, to);
  }
  int symlink(const std::string& target, const std::string& link) override {
    return failing("symlink") ? -error : real().symlink(target, link);
  }
  int read_link(const std::string& link, std::string& target) override { return real().read_link(link, target); }
  int remove(const std::string& path) override {
    calls.push_back("remove");
    return real().remove(path);
  }
  int make_directory(const std::string& path) override { return real().make_directory(path); }
  int sync_directory(const std::string& path) override {
    return failing("fsync directory") ? -error : real().sync_directory(path);
  }
  int list(const std::string& directory, std::vector<std::string>& names) override {
    return real().list(directory, names);
  }
  int kind(const std::string& path, io::Kind& kind) override { return real().kind(path, kind); }

 private:
  static io::FileSystem& real() { return io::real_file_system(); }

  bool failing(const char* name) {
    calls.push_back(name);
    ++count_;
    return fail_at > 0 && (forever ? count_ >= fail_at : count_ == fail_at);
  }
  bool interrupted() {
    if (interruptions == 0) return false;
    last_interrupted_ = !last_interrupted_;
    if (last_interrupted_) --interruptions;
    return last_interrupted_;
  }

  int count_ = 0;
  int writing_ = -1;
  bool last_interrupted_ = false;
};

}  // namespace ddp::test
