// Saves and resumes a training run: one file per checkpoint, in PyTorch's own format and layout, crash-safe.
//
//   ddp::Checkpointer checkpoints("runs/a", group, {.every = 500, .keep = 3});
//   checkpoints.track("model", model).track("optimizer", optim).track("sampler", sampler);
//   checkpoints.resume();                        // newest complete checkpoint, or a fresh start
//   optim.step(), checkpoints.step();            // counts the step, saves when it is due
//
// Files are checkpoint_epoch{E}_step{S}.pt, and checkpoint_latest.pt links to the newest;
// docs/checkpoint_format.md has the keys. In Python: torch.load(path, weights_only=True)["model_state_dict"].
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ddp/process_group.h"
#include "ddp/stateful.h"

namespace ddp {

struct CheckpointerOptions {
  int64_t every = 500;  ///< `step` saves when the count is a multiple of it; 0: only `save` does
  int64_t keep = 0;     ///< how many of the newest stay; 0: all
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

/// All ranks construct it alike; `resume`, `save` and a `step` that saves are collective. Rank 0 writes.
/// Every failure is a CheckpointError on every rank with path and reason, and training may go on: the
/// previous checkpoint stands.
///
/// Order of a save: every rank's random state goes to rank 0; the file under a temporary name, fsync, rename,
/// fsync of the directory; the link in one step; then old checkpoints are deleted, by number, never the
/// link's target, the newest or one of a later step. So checkpoint_latest.pt is a whole checkpoint at every
/// moment. Not thread-safe.
class Checkpointer {
 public:
  /// Touches no file. Throws ConfigError for negative options or an empty directory.
  Checkpointer(std::filesystem::path directory, ProcessGroup group, CheckpointerOptions options = {});

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
  /// Throws CheckpointError when there are checkpoints and none can be used.
  ///
  /// Each rank gets its own random state back. Ranks that the file does not know keep theirs, with a warning.
  /// A file that a Python program saved resumes too: schedule, sampler and random states are not in it, which
  /// is a warning; an object whose state has "epoch" or "step" is set to the file's.
  Resumed resume();
  /// Loads this file, by whatever name, or throws. It may lie outside of the directory, and may be a link.
  Resumed resume(const std::filesystem::path& file);

  /// One optimizer step has been completed. Returns true when it was saved.
  bool step();
  /// Saves now; does nothing when this step has been saved already.
  void save();

  /// Optimizer steps taken over the whole run.
  int64_t step_count() const { return step_; }
  /// The epoch in name and key, where no tracked object's state has one.
  void set_epoch(int64_t epoch) { epoch_ = epoch; }
  /// The key "loss" of the next checkpoints.
  void set_loss(double loss) { loss_ = loss; }

  const std::filesystem::path& directory() const { return directory_; }
  /// The last checkpoint that this object has saved, or found in the directory.
  const std::optional<std::filesystem::path>& last_saved() const { return last_saved_; }

 private:
  struct Tracked {
    std::string name;
    Stateful object;
    bool is_top_level() const { return object.module() || object.optimizer(); }
    std::string key() const { return name + "_state_dict"; }
  };
  struct Snapshot;  // a checkpoint in memory: capturing it is one thing, writing it another
  struct Decision;  // of rank 0: which file all ranks load
  struct Loaded;    // a file that was read and fits

  Snapshot capture(const std::vector<std::string>& parts) const;
  void commit(const Snapshot& snapshot) const;
  Decision choose(std::optional<Loaded>& loaded) const;
  Resumed follow(Decision decision, std::optional<Loaded> loaded);
  Loaded read(const std::filesystem::path& file, bool through_link) const;
  void check(Loaded& loaded) const;
  void apply(const State& state);
  void agree(const std::string& failure, const std::string& what) const;
  std::string who() const;

  std::filesystem::path directory_;
  ProcessGroup group_;
  CheckpointerOptions options_;
  std::vector<Tracked> tracked_;
  int64_t step_ = 0;
  int64_t epoch_ = 0;
  std::optional<double> loss_;
  std::optional<int64_t> saved_step_;
  std::optional<std::filesystem::path> last_saved_;
};

}  // namespace ddp
