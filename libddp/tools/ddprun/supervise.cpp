#include "supervise.h"

#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <filesystem>
#include <optional>
#include <string>
#include <system_error>

#include "child.h"
#include "environment.h"
#include "port.h"
#include "ranks.h"
#include "report.h"

namespace ddprun {
namespace {

namespace fs = std::filesystem;

// Where error files and logs of this job go: kept below --log-dir, else a temporary folder that is removed at the end.
class Folder {
 public:
  explicit Folder(const std::string& log_dir) {
    if (log_dir.empty()) {
      std::string name = (fs::temp_directory_path() / "ddprun-XXXXXX").string();
      if (::mkdtemp(name.data()) == nullptr) throw std::system_error(errno, std::generic_category(), name);
      path_ = name;
      temporary_ = true;
    } else {
      const std::time_t now = std::time(nullptr);
      std::tm local{};
      ::localtime_r(&now, &local);
      char text[32];
      std::strftime(text, sizeof text, "%Y-%m-%dT%H-%M-%S", &local);
      path_ = fs::absolute(log_dir) / (std::string(text) + "." + std::to_string(::getpid()));
      fs::create_directories(path_);
    }
  }
  ~Folder() {
    std::error_code ignored;
    if (temporary_) fs::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
  bool temporary_ = false;
};

// What was said before something failed is still said.
struct FlushAtEnd {
  Host& host;
  ~FlushAtEnd() { flush(host); }
};

// Whether the ranks ended as they did because somebody signalled the job.
bool asked_for(const Host& host, const Ending& first) {
  if (first.signal != 0 && std::ranges::find(host.passed_on, first.signal) != host.passed_on.end()) return true;
  return host.stop_signal != 0 && first.secondary();
}

int exit_code(const Host& host, const Ending* first) {
  if (host.hard_stop_signal != 0) return 128 + host.hard_stop_signal;
  return first == nullptr ? 0 : first->exit_code();
}

}  // namespace

int supervise(const Options& options) {
  const Program program = find_program(options.command);
  const Folder folder(options.log_dir);
  Host host{.options = options, .program = program};
  const FlushAtEnd flush_at_end{host};
  if (const int threads = threads_per_rank(options)) {
    host.output.say("OMP_NUM_THREADS is not set: " + std::to_string(threads) + " for each of " +
                    std::to_string(options.ranks) + " ranks (" + std::to_string(usable_cores()) + " cores)");
  }
  if (!options.log_dir.empty()) host.output.say("logs: " + folder.path().string());

  std::optional<HeldPort> port;
  Life life{.run_id = options.nodes == 1 ? "ddprun-" + std::to_string(::getpid()) : "ddprun"};
  int code = 0;
  for (life.attempt = 0;; ++life.attempt) {
    life.folder = folder.path() / ("attempt_" + std::to_string(life.attempt));
    if (options.master) {
      life.master = *options.master;
    } else {
      HeldPort next;  // bound while the last is still held: another number, which no straggler knows
      port = std::move(next);
      life.master = {.host = "127.0.0.1", .port = port->number()};
    }
    const auto start = SystemClock::now();
    const auto endings = [&] {
      Ranks ranks(host, life);
      return ranks.wait();
    }();
    const Ending* first = first_failure(endings);
    code = exit_code(host, first);
    if (first == nullptr) break;
    if (asked_for(host, *first)) {
      const int signal = host.stop_signal != 0 ? host.stop_signal : first->signal;
      host.output.say("ended by " + signal_name(signal) + "; exit code " + std::to_string(code));
      break;
    }
    host.output.say(summary(endings, options.world(), start));
    while (const auto signal = host.signals.next()) {  // one that came after the last rank's end
      if (*signal != SIGCHLD && *signal != SIGTSTP) host.note(*signal);
    }
    if (host.stop_signal != 0 || life.attempt == options.max_restarts) break;
    host.output.say("restart " + std::to_string(life.attempt + 1) + " of " + std::to_string(options.max_restarts));
  }
  return code;
}

}  // namespace ddprun
