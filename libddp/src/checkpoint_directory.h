// The names in a directory of checkpoints: which are there, which is the latest, which may go. No torch in
// it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
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

/// Deletes all but the `keep` newest of the checkpoints up to `written`, never `written` itself, the target
/// of latest or one of a later step (left there by another run). Returns what could not be deleted, a line
/// each. 0 keeps all. Requires: latest has been moved to `written`.
std::vector<std::string> rotate(const std::filesystem::path& directory, int64_t keep, const CheckpointName& written);

/// Deletes what killed saves have left: temporaries of atomic_file.h's pattern, nothing else. Returns how
/// many.
int sweep_temporaries(const std::filesystem::path& directory);

}  // namespace ddp::detail
