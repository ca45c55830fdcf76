#include "ranks.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

namespace ddprun {
namespace {

using namespace std::chrono_literals;

// A second signal sooner than this is an echo of the first: timeout(1) sends SIGTERM to its child and to the group.
constexpr auto kEcho = 500ms;

// When one has failed the others are given so long to end by themselves: the one that caused it all may be among them,
// and end a moment after those who noticed.
constexpr auto kOwnEnd = 500ms;

// Of what a rank's pipe still holds after its end; more comes from a process that has left the group and goes on writing.
constexpr int kLastReads = 64;

int poll_timeout(Clock::time_point until) {
  if (until == Clock::time_point::max()) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 60'000));
}

Fd open_log(const std::string& path) {
  Fd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (!fd) throw std::system_error(errno, std::generic_category(), path);
  return fd;
}

SystemClock::time_point modified(const std::string& path, SystemClock::time_point otherwise) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) return otherwise;
  const auto since = std::chrono::seconds(status.st_mtim.tv_sec) + std::chrono::nanoseconds(status.st_mtim.tv_nsec);
  return SystemClock::time_point(std::chrono::duration_cast<SystemClock::duration>(since));
}

void add_sinks(std::vector<pollfd>& fds, Output& output) {
  const auto add = [&](const Sink& sink) {
    if (sink.waiting()) fds.push_back({.fd = sink.fd(), .events = POLLOUT, .revents = 0});
  };
  add(output.out());
  if (&output.err() != &output.out()) add(output.err());
}

std::string text_of(std::chrono::milliseconds time) {
  return time % 1s == 0ms ? std::to_string(time / 1s) + " s" : std::to_string(time.count()) + " ms";
}

// After poll: those of `add_sinks`, which come at index `at` and later.
void write_sinks(const std::vector<pollfd>& fds, size_t at, Output& output) {
  for (; at < fds.size(); ++at) {
    if (fds[at].revents == 0) continue;
    (fds[at].fd == output.out().fd() ? output.out() : output.err()).write_some();
  }
}

}  // namespace

bool Host::note(int signal) {
  passed_on.push_back(signal);
  if (!ends_the_job(signal)) return false;
  if (stop_signal == 0) {
    stop_signal = signal;
    stopped_at = Clock::now();
    return false;
  }
  if ((signal != SIGTERM && signal != SIGINT) || Clock::now() - stopped_at < kEcho) return false;
  hard_stop_signal = signal;
  return true;
}

Ranks::Ranks(Host& host, const Life& life) : host_(host), life_(life) {
  try {
    for (int local = 0; local < host.options.ranks; ++local) start(local);
  } catch (...) {
    kill_all();  // a destructor runs for what was constructed only
    for (Rank& rank : ranks_) ::waitpid(rank.pid, nullptr, 0), host_.keeper.forget(rank.pid);
    throw;
  }
}

Ranks::~Ranks() {
  for (Rank& rank : ranks_) {
    ::kill(-rank.pid, SIGKILL);  // the rank is alive or a zombie, so the number is still its group's
    while (::waitpid(rank.pid, nullptr, 0) < 0 && errno == EINTR) {
    }
    host_.keeper.forget(rank.pid);
  }
}

void Ranks::start(int local) {
  const Options& options = host_.options;
  const int number = options.first_rank() + local;
  const std::string folder = life_.folder + "/" + std::to_string(local);
  std::filesystem::create_directories(folder);
  Fd out_log, err_log;
  if (!options.log_dir.empty()) {
    out_log = open_log(folder + "/stdout.log");
    err_log = open_log(folder + "/stderr.log");
  }
  Child child =
      ddprun::start(host_.program, environment(options, life_, local), host_.signals.old_mask(), host_.keeper);
  std::string prefix;
  if (options.prefix) prefix.append("[").append(std::to_string(number)).append("] ");
  ranks_.push_back({.pid = child.pid,
                    .folder = folder,
                    .out = LineStream(std::move(child.out), host_.output.out(), prefix, std::move(out_log)),
                    .err = LineStream(std::move(child.err), host_.output.err(), prefix, std::move(err_log)),
                    .ending = {.rank = number}});
}

bool Ranks::any_alive() const {
  return std::ranges::any_of(ranks_, [](const Rank& rank) { return !rank.ended; });
}

bool Ranks::any_open() const {
  return std::ranges::any_of(ranks_, [](const Rank& rank) { return rank.out.open() || rank.err.open(); });
}

std::vector<Ending> Ranks::wait() {
  while (any_alive()) turn();
  // A signal ends a wrapper script at once, and its program, which saves, a little later: as long as somebody in the
  // group can still write, there is grace. Otherwise what a rank leaves behind ends with the ranks.
  while (host_.stop_signal != 0 && host_.hard_stop_signal == 0 && !killed_ && any_open()) {
    if (host_.output.full()) flush(host_);  // a reader who takes nothing would hide that they have ended
    turn();
  }
  kill_all();
  drain();

  std::vector<Ending> endings;
  for (Rank& rank : ranks_) {
    for (const LineStream* stream : {&rank.out, &rank.err}) {
      if (!stream->log_error().empty()) host_.output.say(rank.folder + ": a log is incomplete: " + stream->log_error());
    }
    rank.ending.tail = rank.err.tail();
    endings.push_back(rank.ending);
  }
  return endings;
}

void Ranks::turn() {
  std::vector<pollfd> fds{{.fd = host_.signals.fd(), .events = POLLIN, .revents = 0}};
  std::vector<LineStream*> streams;
  for (Rank& rank : ranks_) {
    for (LineStream* stream : {&rank.out, &rank.err}) {
      if (!stream->open() || stream->sink().full()) continue;
      streams.push_back(stream);
      fds.push_back({.fd = stream->fd(), .events = POLLIN, .revents = 0});
    }
  }
  add_sinks(fds, host_.output);
  if (::poll(fds.data(), fds.size(), poll_timeout(std::min(kill_at_, stop_others_at_))) < 0 && errno != EINTR) {
    throw std::system_error(errno, std::generic_category(), "poll");
  }
  write_sinks(fds, 1 + streams.size(), host_.output);
  for (size_t i = 0; i < streams.size(); ++i) {
    if (fds[1 + i].revents != 0) streams[i]->read_some();
  }
  if (fds[0].revents != 0) take_signals();
  if (Clock::now() >= stop_others_at_) stop_others();
  if (!killed_ && Clock::now() >= kill_at_) kill_all();
}

void Ranks::take_signals() {
  bool ended = false;
  while (const auto signal = host_.signals.next()) {
    if (*signal == SIGCHLD) {
      ended = true;
    } else if (*signal == SIGTSTP) {  // Ctrl-Z: the ranks are in other groups than the terminal's
      for (const Rank& rank : ranks_) ::kill(-rank.pid, SIGSTOP);
      ::raise(SIGSTOP);
      for (const Rank& rank : ranks_) ::kill(-rank.pid, SIGCONT);
    } else if (host_.note(*signal)) {
      host_.output.say("a second " + signal_name(*signal) + ": the ranks are killed");
      kill_all();
    } else {
      pass_on(*signal);
    }
  }
  if (ended) collect_ended();
}

void Ranks::pass_on(int signal) {
  const bool ends = ends_the_job(signal);
  for (Rank& rank : ranks_) {
    ::kill(-rank.pid, signal);
    if (!ends) continue;
    ::kill(-rank.pid, SIGCONT);  // a stopped one could not heed it
    if (!rank.ended) rank.ending.told_to_stop = true;
  }
  if (ends) kill_at_ = std::min(kill_at_, Clock::now() + host_.options.grace);
}

void Ranks::collect_ended() {
  for (size_t local = 0; local < ranks_.size(); ++local) {
    Rank& rank = ranks_[local];
    siginfo_t info{};
    // Left as a zombie, so that the number of its group stays taken until the group is killed.
    if (rank.ended || ::waitid(P_PID, static_cast<id_t>(rank.pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0 ||
        info.si_pid != rank.pid) {
      continue;
    }
    rank.ended = true;
    (info.si_code == CLD_EXITED ? rank.ending.code : rank.ending.signal) = info.si_status;
    rank.ending.at = SystemClock::now();
    if (!rank.ending.failed()) continue;
    const std::string file = error_file(life_, static_cast<int>(local));
    rank.ending.report = read_error_file(file);
    if (rank.ending.report) rank.ending.at = modified(file, rank.ending.at);
    if (stop_others_at_ != Clock::time_point::max() || !why_stop_.empty()) continue;
    why_stop_.append("rank ").append(std::to_string(rank.ending.rank)).append("/");
    why_stop_.append(std::to_string(host_.options.world())).append(" ended with ").append(rank.ending.how());
    stop_others_at_ = Clock::now() + kOwnEnd;
  }
}

void Ranks::stop_others() {
  stop_others_at_ = Clock::time_point::max();
  if (kill_at_ != Clock::time_point::max() || killed_ || !any_alive()) return;
  host_.output.say(why_stop_ + ": the others get SIGTERM, and SIGKILL after " + text_of(host_.options.grace));
  for (Rank& rank : ranks_) {
    if (rank.ended) continue;
    rank.ending.told_to_stop = true;
    ::kill(-rank.pid, SIGTERM);
    ::kill(-rank.pid, SIGCONT);
  }
  kill_at_ = Clock::now() + host_.options.grace;
}

void Ranks::kill_all() {
  killed_ = true;
  kill_at_ = Clock::time_point::max();
  for (Rank& rank : ranks_) {
    if (!rank.ended) rank.ending.told_to_stop = rank.ending.killed = true;
    ::kill(-rank.pid, SIGKILL);
  }
}

void Ranks::drain() {
  std::vector<std::pair<LineStream*, int>> left;
  for (Rank& rank : ranks_) {
    for (LineStream* stream : {&rank.out, &rank.err}) left.emplace_back(stream, kLastReads);
  }
  while (!left.empty()) {
    std::erase_if(left, [](auto& entry) {
      auto& [stream, reads] = entry;
      if (!stream->open()) return true;
      if (stream->sink().full()) return false;
      return --reads < 0 || !stream->read_some();
    });
    if (std::ranges::any_of(left, [](auto& entry) { return entry.first->sink().full(); })) flush(host_);
  }
  for (Rank& rank : ranks_) rank.out.close(), rank.err.close();
}

void flush(Host& host) {
  auto until = Clock::time_point::max();
  while (host.output.waiting()) {
    if (host.stop_signal != 0 && until == Clock::time_point::max()) until = Clock::now() + 2s;
    std::vector<pollfd> fds{{.fd = host.signals.fd(), .events = POLLIN, .revents = 0}};
    add_sinks(fds, host.output);
    ::poll(fds.data(), fds.size(), poll_timeout(until));
    write_sinks(fds, 1, host.output);
    while (const auto signal = host.signals.next()) {
      if (*signal != SIGCHLD && *signal != SIGTSTP) host.note(*signal);
    }
    if (host.hard_stop_signal != 0 || Clock::now() >= until) return host.output.give_up();
  }
}

}  // namespace ddprun
