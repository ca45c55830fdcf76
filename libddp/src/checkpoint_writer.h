// Rank 0's hand on a directory of checkpoints: the lock, the order of writes, and the thread that writes.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "checkpoint_directory.h"
#include "ddp/place.h"
#include "directory_lock.h"
#include "io/pickle.h"
#include "staging.h"

namespace ddp::detail {

/// A checkpoint in memory: the tensors are those of the model until they are staged.
struct Snapshot {
  CheckpointName name;
  io::Pickled pickled;
};

/// "812 B", "9.6 MB", "2.0 GB".
std::string size_text(uint64_t bytes);

/// Not thread-safe. Its methods throw CheckpointError and touch no collective.
class CheckpointWriter {
 public:
  CheckpointWriter(std::filesystem::path directory, Place place, Retention retention)
      : directory_(std::move(directory)), place_(place), retention_(retention) {}
  /// Waits for the thread.
  ~CheckpointWriter();

  /// Makes the directory where it is missing and takes its lock. Where neither is possible and nobody else has the lock
  /// it goes on without, for a run that only loads; `may_fail` false makes that an error.
  void open(bool may_fail);
  bool locked() const { return lock_ && lock_->held(); }

  /// Writes, links and deletes; `snapshot` is safe when it returns. Requires: opened, `finish` called.
  void write(const Snapshot& snapshot);

  /// The same on a thread, of a copy that is made before this returns. False, with a warning, when there is no memory
  /// for it: nothing has begun, and `snapshot` is as it was. Requires: opened, `finish` called.
  bool start(Snapshot& snapshot, std::chrono::steady_clock::time_point step_began);

  /// Links "checkpoint_<name>.pt" to a checkpoint; with a metric, its record first, which `resume` goes by when a kill
  /// came between. Requires: opened.
  void pin(const std::string& name, const std::string& checkpoint, std::optional<double> metric);

  /// Waits for the thread; the reason when what it wrote was not saved, else empty.
  std::string finish();

 private:
  void commit(const Snapshot& snapshot) const;
  void require_space(const Snapshot& snapshot) const;
  void warn(const std::string& text) const;

  std::filesystem::path directory_;
  Place place_;
  Retention retention_;
  std::shared_ptr<DirectoryLock> lock_;
  bool told_unlocked_ = false;
  Staging staging_;
  std::thread thread_;
  std::string failure_;  // the thread's until it is joined
};

}  // namespace ddp::detail
