#include "output.h"

#include <limits.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

namespace ddprun {
namespace {

constexpr size_t kLongestLine = size_t{1} << 20;  // a longer one is broken
constexpr size_t kTail = 1500;

bool is_file(int fd) {
  struct stat status {};
  return ::fstat(fd, &status) == 0 && S_ISREG(status.st_mode);
}

bool same_place(int a, int b) {
  struct stat one {
  }, two{};
  if (::fstat(a, &one) != 0 || ::fstat(b, &two) != 0) return false;
  return one.st_dev == two.st_dev && one.st_ino == two.st_ino;
}

}  // namespace

// A pipe that poll calls writable takes PIPE_BUF bytes; a file takes anything.
Sink::Sink(int fd) : fd_(fd), portion_(is_file(fd) ? size_t{1} << 20 : PIPE_BUF) {}

void Sink::put(std::string_view text) {
  if (!gone_) text_ += text;
}

void Sink::write_some() {
  if (!waiting()) return;
  const ssize_t n = ::write(fd_, text_.data() + start_, std::min(portion_, text_.size() - start_));
  if (n < 0) {
    if (errno == EINTR || errno == EAGAIN) return;
    gone_ = true;  // EPIPE, EIO of a closed terminal, a full disk: the ranks go on
    clear();
    return;
  }
  start_ += static_cast<size_t>(n);
  if (start_ == text_.size()) {
    clear();
  } else if (start_ > kLimit / 4) {
    text_.erase(0, std::exchange(start_, 0));
  }
}

void Sink::give_up() {
  if (!waiting()) return;
  gone_ = true;
  clear();
}

void Sink::clear() {
  text_.clear();
  start_ = 0;
}

Output::Output() : out_(STDOUT_FILENO), err_(STDERR_FILENO), same_(same_place(STDOUT_FILENO, STDERR_FILENO)) {}

void Output::say(std::string_view text) { err().put("[ddprun] " + std::string(text) + "\n"); }

LineStream::LineStream(Fd pipe, Sink& sink, std::string prefix, Fd log)
    : pipe_(std::move(pipe)), log_(std::move(log)), sink_(&sink), prefix_(std::move(prefix)) {}

bool LineStream::read_some() {
  static std::vector<char> buffer(size_t{1} << 16);
  const ssize_t n = ::read(pipe_.get(), buffer.data(), buffer.size());
  if (n > 0) {
    add({buffer.data(), static_cast<size_t>(n)});
    return true;
  }
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  close();
  return false;
}

void LineStream::close() {
  if (!begun_.empty()) line(std::exchange(begun_, {}) + "\n");
  pipe_.close();
  log_.close();
}

void LineStream::add(std::string_view text) {
  log(text);
  while (!text.empty()) {
    const size_t end = text.find('\n');
    if (end == std::string_view::npos) {
      begun_ += text;
      if (begun_.size() >= kLongestLine) line(std::exchange(begun_, {}) + "\n");
      return;
    }
    if (begun_.empty()) {
      line(text.substr(0, end + 1));
    } else {
      begun_ += text.substr(0, end + 1);
      line(std::exchange(begun_, {}));
    }
    text.remove_prefix(end + 1);
  }
}

void LineStream::line(std::string_view text) {
  if (!prefix_.empty()) sink_->put(prefix_);
  sink_->put(text);
  tail_ += text.substr(text.size() - std::min(text.size(), kTail));
  if (tail_.size() > 2 * kTail) tail_.erase(0, tail_.size() - kTail);
}

void LineStream::log(std::string_view text) {
  while (log_ && !text.empty()) {
    const ssize_t n = ::write(log_.get(), text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      log_error_ = std::strerror(errno);
      log_.close();
      return;
    }
    text.remove_prefix(static_cast<size_t>(n));
  }
}

}  // namespace ddprun
