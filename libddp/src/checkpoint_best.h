// The best checkpoint by a metric, in a file beside it: the file of the checkpoint was written before its metric was
// known. No torch in it.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

namespace ddp::detail {

inline constexpr const char* kBestPin = "best";
inline constexpr const char* kBestRecord = "checkpoint_best.json";  // {"checkpoint": ..., "metric": ...}

struct Best {
  std::string checkpoint;  ///< a name in the directory
  double metric = 0;
};

/// Nothing where there is no record, or its checkpoint is gone. Throws CheckpointError for one that cannot be read.
std::optional<Best> read_best(const std::filesystem::path& directory);

/// Atomically, durably. Throws CheckpointError.
void write_best(const std::filesystem::path& directory, const Best& best);

/// "checkpoint_<name>.pt", the link of a pin. Throws ConfigError for a name that cannot be one: other characters than
/// letters, digits, '-', '_' and '.', or one that means something else here, such as "latest".
std::string pin_link(const std::string& name);

/// Makes checkpoint_<name>.pt a link to `checkpoint`. Throws CheckpointError, for a file of that name that is no link
/// too: it would be lost.
void pin(const std::filesystem::path& directory, const std::string& name, const std::string& checkpoint);

}  // namespace ddp::detail
