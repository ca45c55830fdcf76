// The names in a directory of checkpoints: which are there, which is the latest, which may go. No torch in
// it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace ddp::detail {

/// checkpoint_epoch{E}_step{S}.pt; ordered by step, then by epoch, as numbers.
struct CheckpointName {
  int64_t epoch = 0;
  int64_t step = 0;

  std::string text() const;
  /// Nothing for a name that `text` does not make: leading zeros, signs, anything before or after.
  static std::optional<CheckpointName> parse(std::string_view name);

  friend bool operator==(const CheckpointName&, const CheckpointName&) = default;
  friend bool operator<(const CheckpointName& a, const CheckpointName& b) {
    return a.step != b.step ? a.step < b.step : a.epoch < b.epoch;
  }
};

inline constexpr const char* kLatestName = "checkpoint_latest.pt";
inline constexpr const char* kTemporaryStem = "checkpoint";  // checkpoint_tmp.<nonce>.pt

/// What checkpoint_latest.pt stands for.
struct Latest {
  std::string name;     ///< a file in the directory; empty where there is none or it cannot be used
  std::string problem;  ///< why it cannot be used; empty where there is none
};

/// Never leaves the directory: a link to another one, to another link or to nothing is a problem. A plain
/// file in the link's place stands for itself. Throws CheckpointError when the directory cannot be read.
Latest resolve_latest(const std::filesystem::path& directory);

/// Newest first; nothing where the directory is missing. Throws CheckpointError when it cannot be read.
std::vector<CheckpointName> list_checkpoints(const std::filesystem::path& directory);

/// Names of the checkpoints that a link in the directory points to, whatever the link's name: checkpoint_latest.pt,
/// checkpoint_best.pt, one that was made by hand. Throws CheckpointError when it cannot be known.
std::set<std::string> linked_checkpoints(const std::filesystem::path& directory);

/// Which checkpoints stay.
struct Retention {
  int64_t keep = 0;        ///< the newest; 0: all
  int64_t keep_every = 0;  ///< those of steps that are a multiple of it; 0: none for that
};

/// Deletes the checkpoints up to `written` that are none of: the `keep` newest, a milestone, the target of a link,
/// `written` itself. One of a later step, left there by another run, stays. Returns what could not be deleted, a line
/// each. Requires: latest has been moved to `written`.
std::vector<std::string> rotate(const std::filesystem::path& directory, const Retention& retention,
                                const CheckpointName& written);

/// Deletes what killed saves have left: temporaries of atomic_file.h's pattern, nothing else. Returns how
/// many.
int sweep_temporaries(const std::filesystem::path& directory);

}  // namespace ddp::detail
