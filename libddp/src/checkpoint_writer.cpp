#include "checkpoint_writer.h"

#include <fmt/format.h>
#include <signal.h>

#include <system_error>
#include <utility>

#include "checkpoint_best.h"
#include "ddp/atomic_file.h"
#include "ddp/error.h"
#include "ddp/log.h"
#include "failure_of.h"
#include "io/file_system.h"
#include "io/torch_file.h"
#include "memory_limit.h"

namespace ddp::detail {
namespace {

using Clock = std::chrono::steady_clock;

// What a copy leaves to everything else: the thread's stack, the page cache's own needs.
constexpr uint64_t kMemoryReserve = uint64_t{64} << 20;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Signals are for the program's own threads. A write beyond RLIMIT_FSIZE then fails instead of ending the process.
class NoSignals {
 public:
  NoSignals() {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  NoSignals(const NoSignals&) = delete;
  NoSignals& operator=(const NoSignals&) = delete;
  ~NoSignals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

}  // namespace

std::string size_text(uint64_t bytes) {
  static constexpr const char* kUnits[] = {"kB", "MB", "GB", "TB"};
  if (bytes < 1000) return fmt::format("{} B", bytes);
  double value = static_cast<double>(bytes) / 1000;
  size_t unit = 0;
  while (value >= 999.95 && unit + 1 < std::size(kUnits)) value /= 1000, ++unit;
  return fmt::format("{:.1f} {}", value, kUnits[unit]);
}

CheckpointWriter::~CheckpointWriter() { finish(); }

void CheckpointWriter::warn(const std::string& text) const { log::warn(place_, "[ddp::Checkpointer] " + text); }

void CheckpointWriter::open(bool may_fail) {
  if (locked()) return;
  const std::string failure = failure_of([&] { make_directories(directory_); });
  if (!failure.empty() && !may_fail) throw CheckpointError(failure);
  lock_ = DirectoryLock::acquire(directory_);
  if (locked() || told_unlocked_) return;
  told_unlocked_ = true;
  warn(fmt::format("{} is not locked ({}); nothing stops another run from writing there", directory_.string(),
                   failure.empty() ? lock_->problem() : failure));
}

void CheckpointWriter::require_space(const Snapshot& snapshot) const {
  uint64_t have = 0;
  if (io::file_system().free_space(directory_.string(), have) < 0) return;  // writing will tell
  const uint64_t need = io::torch_file_size(snapshot.pickled);
  if (have >= need) return;
  throw CheckpointError(
      fmt::format("{} needs {} and {} has {} left; free some, or keep fewer checkpoints (the old ones are deleted "
                  "after the new one "
                  "is safe, so there is room for one more than `keep`)",
                  snapshot.name.text(), size_text(need), directory_.string(), size_text(have)));
}

void CheckpointWriter::commit(const Snapshot& snapshot) const {
  std::lock_guard turn(lock_->commits());
  require_space(snapshot);
  const std::string name = snapshot.name.text();
  write_file_atomically(
      directory_ / name, [&](const Append& append) { io::write_torch_file(snapshot.pickled, append); }, kTemporaryStem);
  swap_symlink(directory_ / kLatestName, name);

  // The new checkpoint is safe: what goes wrong from here on is no failed save.
  std::vector<std::string> problems;
  const std::string failure = failure_of([&] { problems = rotate(directory_, retention_, snapshot.name); });
  if (!failure.empty()) problems.push_back(failure);
  for (const std::string& problem : problems) warn(problem);
}

void CheckpointWriter::write(const Snapshot& snapshot) {
  const auto start = Clock::now();
  commit(snapshot);
  log::info(place_, fmt::format("saved {} in {:.2f} s ({})", (directory_ / snapshot.name.text()).string(),
                                seconds_since(start), size_text(io::torch_file_size(snapshot.pickled))));
}

bool CheckpointWriter::start(Snapshot& snapshot, Clock::time_point step_began) {
  const uint64_t need = staging_.missing(snapshot.pickled.storages), have = memory_headroom("");
  const auto refuse = [&](const std::string& why) {
    warn(fmt::format("{} is saved at once, not in the background: {}", snapshot.name.text(), why));
    return false;
  };
  if (need > 0 && (have < kMemoryReserve || need > have - kMemoryReserve)) {
    return refuse(
        fmt::format("a copy of the state needs {} more memory, {} are left", size_text(need), size_text(have)));
  }
  const std::string failure = failure_of([&] { staging_.copy(snapshot.pickled.storages); });
  if (!failure.empty()) {
    staging_.release();
    return refuse(failure);
  }
  const double waited = seconds_since(step_began);
  try {
    const NoSignals for_the_thread;
    thread_ = std::thread([this, waited, snapshot] {
      const auto start = Clock::now();
      failure_ = failure_of([&] { commit(snapshot); });
      const std::string path = (directory_ / snapshot.name.text()).string();
      if (failure_.empty()) {
        log::info(place_, fmt::format("saved {} in {:.2f} s ({}); training waited {:.3f} s", path, seconds_since(start),
                                      size_text(io::torch_file_size(snapshot.pickled)), waited));
      } else {
        log::error(place_, fmt::format("[ddp::Checkpointer] {} was not saved: {}", path, failure_));
      }
    });
  } catch (const std::system_error& error) {  // what was staged is as good to write now
    return refuse(error.what());
  }
  return true;
}

void CheckpointWriter::pin(const std::string& name, const std::string& checkpoint, std::optional<double> metric) {
  std::lock_guard turn(lock_->commits());
  if (metric) write_best(directory_, {.checkpoint = checkpoint, .metric = *metric});
  detail::pin(directory_, name, checkpoint);
}

std::string CheckpointWriter::finish() {
  if (thread_.joinable()) thread_.join();
  return std::exchange(failure_, "");
}

}  // namespace ddp::detail
