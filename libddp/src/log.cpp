#include "ddp/log.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>

#include "stderr_line.h"

namespace ddp {

void detail::write_stderr_line(std::string line) {
  line += '\n';
  std::string_view rest = line;
  while (!rest.empty()) {
    const ssize_t n = ::write(STDERR_FILENO, rest.data(), rest.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return;
    rest.remove_prefix(static_cast<size_t>(n));
  }
}

namespace log {
namespace {

struct Output {
  std::mutex mutex;
  Sink sink;
};

// Never destroyed: a thread may still log while the process ends.
Output& output() {
  static Output& instance = *new Output;
  return instance;
}

void emit(Level level, std::string line) {
  Output& out = output();
  std::lock_guard lock(out.mutex);
  if (out.sink) {
    out.sink(level, line);
  } else {
    detail::write_stderr_line(std::move(line));
  }
}

std::string_view without_newline(std::string_view message) {
  if (message.ends_with('\n')) message.remove_suffix(1);
  return message;
}

}  // namespace

void info(const Place& place, std::string_view message) {
  if (place.is_root()) emit(Level::kInfo, fmt::format("[ddp] {}", without_newline(message)));
}

void warn(const Place& place, std::string_view message) {
  emit(Level::kWarning, fmt::format("[ddp] {}: warning: {}", place.name(), without_newline(message)));
}

void error(const Place& place, std::string_view message) {
  emit(Level::kError, fmt::format("[ddp] {}: error: {}", place.name(), without_newline(message)));
}

void set_sink(Sink sink) {
  Output& out = output();
  std::lock_guard lock(out.mutex);
  out.sink = std::move(sink);
}

}  // namespace log
}  // namespace ddp
