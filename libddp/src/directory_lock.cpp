#include "directory_lock.h"

#include <fmt/format.h>
#include <pthread.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <ctime>
#include <map>
#include <thread>

#include "ddp/error.h"

namespace ddp::detail {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;

// A killed process holds the lock until the kernel has torn it down.
constexpr std::chrono::milliseconds kPatience = 1s, kPause = 20ms;

// The locks of this process, by directory.
struct Registry {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<DirectoryLock>> locks;
};

std::string owner() {
  char host[256] = "an unnamed host";
  ::gethostname(host, sizeof host - 1);
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  ::gmtime_r(&now, &utc);
  char since[32];
  std::strftime(since, sizeof since, "%Y-%m-%dT%H:%M:%SZ", &utc);
  return fmt::format("process {} on {} since {}\n", ::getpid(), host, since);
}

// Two paths of one directory are one key; a directory that is missing has a key, too.
std::string key_of(const fs::path& directory) {
  std::error_code ignored;
  const fs::path real = fs::weakly_canonical(fs::absolute(directory, ignored), ignored);
  return real.empty() ? directory.string() : real.string();
}

}  // namespace

std::shared_ptr<DirectoryLock> DirectoryLock::acquire(const fs::path& directory) {
  // Never destroyed: a Checkpointer may be a static object. A forked child shares the open file, and with it the lock,
  // for as long as it lives, so it lets go at once.
  static Registry& registry = *[] {
    static Registry* made = new Registry;
    ::pthread_atfork([] { made->mutex.lock(); }, [] { made->mutex.unlock(); },
                     [] {
                       for (auto& entry : made->locks) {
                         if (auto lock = entry.second.lock()) lock->file_.reset();
                       }
                       made->locks.clear();
                       made->mutex.unlock();
                     });
    return made;
  }();

  std::lock_guard guard(registry.mutex);
  std::erase_if(registry.locks, [](const auto& entry) { return entry.second.expired(); });
  const std::string key = key_of(directory);
  if (auto found = registry.locks.find(key); found != registry.locks.end()) {
    if (auto lock = found->second.lock(); lock && lock->held()) return lock;
  }

  const std::string path = (directory / kLockName).string();
  io::FileSystem& files = io::file_system();
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  std::string holder;
  int descriptor = 0;
  while (true) {
    holder = owner();
    descriptor = io::retry_interrupted([&] { return files.lock(path, holder); });
    if (descriptor != -EWOULDBLOCK || std::chrono::steady_clock::now() >= deadline) break;
    std::this_thread::sleep_for(kPause);
  }
  if (descriptor == -EWOULDBLOCK) {
    if (holder.ends_with('\n')) holder.pop_back();
    throw CheckpointError(
        fmt::format("{} is in use by another run: {} holds {}. Two runs in one directory would delete each other's "
                    "checkpoints: end "
                    "that one, or give this one a directory of its own",
                    directory.string(), holder.empty() ? "a process that does not say its name" : holder, path));
  }

  std::shared_ptr<DirectoryLock> lock(new DirectoryLock);
  if (descriptor >= 0) {
    lock->file_.emplace(files, descriptor);
  } else {
    lock->problem_ = fmt::format("{}: {}", path, std::strerror(-descriptor));
  }
  registry.locks[key] = lock;
  return lock;
}

}  // namespace ddp::detail
