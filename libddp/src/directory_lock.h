// One run at a time writes into a directory of checkpoints. No torch in it.
//
//   auto lock = detail::DirectoryLock::acquire("runs/a");     // CheckpointError names the run that has it
//   if (!lock->held()) warn(lock->problem());                 // a read-only directory, say
//   std::lock_guard turn(lock->commits());
#pragma once

#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "io/file_system.h"

namespace ddp::detail {

inline constexpr const char* kLockName = "checkpoint.lock";

/// The lock of a directory, held by this process while a copy of the pointer lives. The kernel gives it back when the
/// process dies, however it dies, so what a dead run left is no obstacle; the file stays, and means nothing without a
/// holder. All who lock the same directory in one process share the lock and take turns by `commits`. A forked child
/// does not have it.
class DirectoryLock {
 public:
  /// Waits a second for a holder that is on its way out. Throws CheckpointError with host, process and time of the run
  /// that has it. Thread-safe.
  static std::shared_ptr<DirectoryLock> acquire(const std::filesystem::path& directory);

  bool held() const { return file_.has_value(); }
  /// Why it is not held although nobody else has it: the directory is missing or cannot be written, or its file system
  /// knows no locks.
  const std::string& problem() const { return problem_; }

  /// Held over each change, so that two who share the lock never mix theirs.
  std::mutex& commits() { return commits_; }

 private:
  DirectoryLock() = default;

  std::optional<io::Descriptor> file_;
  std::string problem_;
  std::mutex commits_;
};

}  // namespace ddp::detail
