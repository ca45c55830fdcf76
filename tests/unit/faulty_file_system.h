// A file system that misbehaves, over the real one.
//
//   FaultyFileSystem faulty;
//   faulty.fail_at = 3, faulty.error = ENOSPC;                   // the third call fails, once
//   ddp::io::ScopedFileSystem scope(faulty);
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "io/file_system.h"

namespace ddp::test {

class FaultyFileSystem final : public io::FileSystem {
 public:
  int fail_at = 0;          ///< the number of the call that fails, from 1; 0: none
  std::set<int> fail_also;  ///< and of others, for faults in the middle of faults
  int error = EIO;          ///< as what
  bool forever = false;     ///< all calls from fail_at on
  bool all_calls = false;   ///< look-ups, reads and deletions count and fail too, not only changes and syncs
  size_t longest_write = SIZE_MAX;
  int interruptions = 0;            ///< how many reads and writes are interrupted by a signal, in turns
  uint64_t space = UINT64_MAX;      ///< what is left on the disk, as far as `free_space` tells
  bool tells_space = true;          ///< or that it cannot say
  std::function<void()> on_create;  ///< called before a file is made
  std::function<int()> on_open;     ///< called before a file is opened for reading; 0, or the error that it fails as
  std::vector<std::string> calls;   ///< those that count, by name

  int create(const std::string& path) override {
    if (on_create) on_create();
    if (failing("create")) return -error;
    return writing_ = real().create(path);
  }
  int open(const std::string& path, bool follow) override {
    if (failing_look("open")) return -error;
    if (const int refused = on_open ? on_open() : 0; refused != 0) return -refused;
    return real().open(path, follow);
  }
  int64_t write(int descriptor, const void* data, size_t size) override {
    if (failing("write")) return -error;
    if (interrupted()) return -EINTR;
    return real().write(descriptor, data, std::min(size, longest_write));
  }
  void start_writeback(int descriptor, uint64_t offset, uint64_t size) override {
    real().start_writeback(descriptor, offset, size);
  }
  int64_t read(int descriptor, void* data, size_t size, uint64_t offset) override {
    if (failing_look("read")) return -error;
    if (interrupted()) return -EINTR;
    return real().read(descriptor, data, std::min(size, longest_write), offset);
  }
  int64_t size(int descriptor) override { return failing_look("size") ? -error : real().size(descriptor); }
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
  int read_link(const std::string& link, std::string& target) override {
    return failing_look("read link") ? -error : real().read_link(link, target);
  }
  int remove(const std::string& path) override {
    if (all_calls) return failing("remove") ? -error : real().remove(path);
    calls.push_back("remove");
    return real().remove(path);
  }
  int make_directory(const std::string& path) override {
    return failing_look("mkdir") ? -error : real().make_directory(path);
  }
  int sync_directory(const std::string& path) override {
    return failing("fsync directory") ? -error : real().sync_directory(path);
  }
  int list(const std::string& directory, std::vector<std::string>& names) override {
    return failing_look("list") ? -error : real().list(directory, names);
  }
  int kind(const std::string& path, io::Kind& kind) override {
    return failing_look("kind") ? -error : real().kind(path, kind);
  }
  int free_space(const std::string& directory, uint64_t& bytes) override {
    if (failing_look("free space")) return -error;
    if (!tells_space) return -ENOSYS;
    const int result = real().free_space(directory, bytes);
    bytes = std::min(bytes, space);
    return result;
  }
  int lock(const std::string& path, std::string& owner) override {
    return failing_look("lock") ? -error : real().lock(path, owner);
  }

  int count() const { return count_; }

 private:
  static io::FileSystem& real() { return io::real_file_system(); }

  bool failing(const char* name) {
    calls.push_back(name);
    ++count_;
    if (fail_also.contains(count_)) return true;
    // An interruption that never ends would be waited for without end, and rightly so.
    return fail_at > 0 && (forever && error != EINTR ? count_ >= fail_at : count_ == fail_at);
  }
  bool failing_look(const char* name) { return all_calls && failing(name); }
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
