// The inside of Checkpointer, shared by its sources: checkpointer.cpp (the interface), checkpoint_save.cpp,
// checkpoint_resume.cpp.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint_writer.h"
#include "ddp/checkpointer.h"

namespace ddp {

struct Checkpointer::Impl {
  Impl(std::filesystem::path directory, ProcessGroup group, CheckpointerOptions options);

  struct Tracked {
    std::string name;
    Stateful object;
    bool is_top_level() const { return object.module() || object.optimizer(); }
    std::string key() const { return name + "_state_dict"; }
  };
  struct Decision;  // of rank 0: which file all ranks load
  struct Loaded;    // a file that was read and fits

  // Saving.
  enum class When { kNow, kInBackground };
  void save(When when);
  /// Waits for what is being written. The failure, the same on every rank. Collective where something is.
  std::string settle();
  /// Saves and links; `metric` is recorded. Collective.
  void pin(const std::string& name, std::optional<double> metric);

  // Resuming.
  void settle_before_loading();
  Decision choose(std::optional<Loaded>& loaded) const;
  std::optional<double> find_best() const;
  Resumed follow(Decision decision, std::optional<Loaded> loaded);
  void sweep() const;

  std::string who() const;

  std::filesystem::path directory;
  ProcessGroup group;
  CheckpointerOptions options;
  std::vector<Tracked> tracked;
  int64_t step = 0;
  int64_t epoch = 0;
  std::optional<double> loss;
  std::optional<double> best;
  std::optional<int64_t> saved_step;
  std::optional<std::filesystem::path> last_saved;

  struct Pending {
    int64_t step;
    std::string name;
  };
  std::optional<Pending> pending;   // being written, as every rank knows
  detail::CheckpointWriter writer;  // used by rank 0

 private:
  std::string finished(const std::string& failure);
  detail::Snapshot capture(const std::vector<std::string>& parts) const;
  Loaded read(const std::filesystem::path& file, bool through_link) const;
  void check(Loaded& loaded) const;
  void apply(const State& state);
  void agree(const std::string& failure, const std::string& what) const;
};

}  // namespace ddp
