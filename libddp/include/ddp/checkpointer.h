// Saves and resumes a training run: one file per checkpoint, in PyTorch's own format and layout, crash-safe.
//
//   ddp::Checkpointer checkpoints("runs/a", group, {.every = 500, .keep = 3});
//   checkpoints.track("model", model).track("optimizer", optim).track("sampler", sampler);
//   checkpoints.resume();                        // newest complete checkpoint, or a fresh start
//   optim.step(), checkpoints.step();            // counts the step, saves when it is due
//   checkpoints.save();                          // at the end: returns when it is safe on the disk
//
// Files are checkpoint_epoch{E}_step{S}.pt, and checkpoint_latest.pt links to the newest;
// docs/checkpoint_format.md has the keys. In Python: torch.load(path, weights_only=True)["model_state_dict"].
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "ddp/process_group.h"
#include "ddp/stateful.h"

namespace ddp {

/// Which of two values of a metric is the better one.
enum class Better { kLower, kHigher };

struct CheckpointerOptions {
  int64_t every = 500;     ///< `step` saves when the count is a multiple of it; 0: only `save` does
  int64_t keep = 0;        ///< how many of the newest stay; 0: all
  int64_t keep_every = 0;  ///< a checkpoint of a step that is a multiple of it is never deleted; 0: none for that
  /// `step` copies rank 0's state and returns; a thread writes it meanwhile. Takes the memory of one more copy on rank 0,
  /// kept from save to save; where that is not there, the log says so and the save is done at once.
  bool async = false;
  Better better = Better::kLower;  ///< for `save_best`
  /// Learning rate, betas, weight decay and so on come from the file, as in Python; false keeps the
  /// program's. A log line tells where they differ. (What a tracked lr::Schedule sets, it sets again.)
  bool optimizer_options_from_file = true;
};

/// Where a run goes on.
struct Resumed {
  bool found = false;  ///< false: a fresh start, all else is empty
  int64_t step = 0;    ///< optimizer steps taken over the whole run
  int64_t epoch = 0;
  std::filesystem::path path;  ///< of the file that was loaded

  explicit operator bool() const { return found; }
};

/// All ranks construct it alike; `resume`, `save`, `save_best`, `pin`, `wait` and a `step` that saves are collective.
/// Rank 0 writes. Every failure is a CheckpointError on every rank with path and reason, and training may go on: the
/// previous checkpoint stands.
///
/// Order of a save: every rank's random state goes to rank 0; the file under a temporary name, fsync, rename,
/// fsync of the directory; the link in one step; then old checkpoints are deleted, by number, never the
/// link's target, a pinned one, the newest or one of a later step. So checkpoint_latest.pt is a whole checkpoint at
/// every moment. Not thread-safe.
///
/// From the first `resume()` or save on, rank 0 holds the lock of the directory: another run that wants it gets a
/// CheckpointError with host and process. Several Checkpointers of one process may share a directory.
class Checkpointer {
 public:
  /// Touches no file. Throws ConfigError for negative options or an empty directory.
  Checkpointer(std::filesystem::path directory, ProcessGroup group, CheckpointerOptions options = {});
  Checkpointer(Checkpointer&&) noexcept;
  Checkpointer& operator=(Checkpointer&&) noexcept;
  /// Waits for the thread, and does not communicate: what it failed to save is in the log only. Call `wait` before.
  ~Checkpointer();

  /// Saves and resumes `object` under `name`: see `stateful` for what it can be. A module or an optimizer is
  /// the file's key "<name>_state_dict", anything else goes under "libddp"; state that differs between ranks
  /// is that of rank 0. The object must outlive this. Throws ConfigError for a name that is empty or used
  /// twice.
  template <class T>
  Checkpointer& track(const std::string& name, T& object) {
    return add(name, stateful(object));
  }
  Checkpointer& add(const std::string& name, Stateful object);

  /// Loads the checkpoint that checkpoint_latest.pt names or, where that is damaged, missing or does not fit
  /// the tracked objects, the newest that is whole, with a warning that tells what was passed over and why.
  /// All ranks load the same file, or none and all throw. With no checkpoint in the directory: a fresh start.
  /// Throws CheckpointError when there are checkpoints and none can be used, or another run has the directory.
  ///
  /// Each rank gets its own random state back. Ranks that the file does not know keep theirs, with a warning.
  /// A file that a Python program saved resumes too: schedule, sampler and random states are not in it, which
  /// is a warning; an object whose state has "epoch" or "step" is set to the file's.
  Resumed resume();
  /// Loads this file, by whatever name, or throws. It may lie outside of the directory, and may be a link. Changes and
  /// locks nothing: so it reads what a running training saves.
  Resumed resume(const std::filesystem::path& file);

  /// One optimizer step has been completed. Returns true when it was saved or, with `async`, when its state has been
  /// copied and is being written. At most one is being written: the next save waits for it, and throws its failure on
  /// every rank after its own work is done (or begun). A `step` that saves nothing costs nothing.
  bool step();
  /// Saves now, with `async` too, and returns when the checkpoint is safe. Does nothing when this step is saved already.
  void save();
  /// Returns when nothing is being written. Throws CheckpointError on every rank when the last save on the thread failed.
  void wait();

  /// Saves this step, where it is not, and makes checkpoint_<name>.pt a link to it. What a link names is never deleted;
  /// the next `pin` of that name lets it go, removing the link too. Throws ConfigError for "latest" and names that would
  /// be taken for something else.
  void pin(const std::string& name);
  /// `pin("best")` when rank 0's `metric` is the best of the run by `options.better`, or the first; returns whether it
  /// was. Another life of the run knows the best one and its metric (checkpoint_best.json). NaN never is the best.
  bool save_best(double metric);
  /// The metric of checkpoint_best.pt, after `resume` or `save_best`.
  std::optional<double> best() const;

  /// Optimizer steps taken over the whole run.
  int64_t step_count() const;
  /// The epoch in name and key, where no tracked object's state has one.
  void set_epoch(int64_t epoch);
  /// The key "loss" of the next checkpoints.
  void set_loss(double loss);

  const std::filesystem::path& directory() const;
  /// The last checkpoint that this object knows to be safe: saved, or found in the directory.
  const std::optional<std::filesystem::path>& last_saved() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ddp
