// The ranks' output, in whole lines, without ever blocking ddprun.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "fd.h"

namespace ddprun {

/// Text on its way to stdout or stderr. Written only when poll says that there is room, so that a reader who pauses does
/// not keep ddprun from its signals; when too much waits, the ranks' pipes are left alone until it is gone.
class Sink {
 public:
  explicit Sink(int fd);

  int fd() const { return fd_; }
  bool waiting() const { return start_ < text_.size(); }
  bool full() const { return text_.size() - start_ > kLimit; }

  void put(std::string_view text);
  /// Writes what certainly does not block. Call it when poll reports room. A reader who has gone is no error: from then
  /// on text is dropped.
  void write_some();
  /// Drops what waits and all that comes, when somebody waits for it in vain.
  void give_up();

 private:
  void clear();

  static constexpr size_t kLimit = size_t{1} << 20;

  int fd_;
  size_t portion_;  // bytes that one write takes without blocking
  size_t start_ = 0;
  std::string text_;
  bool gone_ = false;
};

/// stdout and stderr. They are one sink when both lead to the same file, pipe or terminal: lines stay whole there too.
class Output {
 public:
  Output();
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  Sink& out() { return out_; }
  Sink& err() { return same_ ? out_ : err_; }
  bool waiting() const { return out_.waiting() || err_.waiting(); }
  bool full() const { return out_.full() || err_.full(); }
  void give_up() { out_.give_up(), err_.give_up(); }
  /// One line of ddprun itself on stderr, or several.
  void say(std::string_view text);

 private:
  Sink out_, err_;
  bool same_;
};

/// One stream of one rank: pieces in, whole lines out to its sink, and all of it as it is to a log file where there is
/// one. A last line without an end gets one.
class LineStream {
 public:
  LineStream(Fd pipe, Sink& sink, std::string prefix, Fd log);

  int fd() const { return pipe_.get(); }
  bool open() const { return static_cast<bool>(pipe_); }
  Sink& sink() { return *sink_; }
  /// Reads once. False when nothing was there; at the end the stream closes itself.
  bool read_some();
  void close();
  /// The last lines.
  const std::string& tail() const { return tail_; }
  /// Why the log is incomplete; "" when it is not.
  const std::string& log_error() const { return log_error_; }

 private:
  void add(std::string_view text);
  void log(std::string_view text);
  void line(std::string_view text);  // with its end

  Fd pipe_, log_;
  Sink* sink_;
  std::string prefix_, begun_, tail_, log_error_;
};

}  // namespace ddprun
