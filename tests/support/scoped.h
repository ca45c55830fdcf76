// State of the process that a test changes for its own duration.
//
//   ScopedEnv rank("RANK", "1");            // unset or restored at the end; std::nullopt unsets
//   CapturedStderr errors;  ...  errors.text()
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>

namespace ddp::test {

class ScopedEnv {
 public:
  ScopedEnv(std::string name, const std::optional<std::string>& value) : name_(std::move(name)) {
    if (const char* old = std::getenv(name_.c_str())) old_ = old;
    set(value);
  }
  ~ScopedEnv() { set(old_); }
  ScopedEnv(const ScopedEnv&) = delete;
  ScopedEnv& operator=(const ScopedEnv&) = delete;

 private:
  void set(const std::optional<std::string>& value) {
    if (value) {
      ::setenv(name_.c_str(), value->c_str(), 1);
    } else {
      ::unsetenv(name_.c_str());
    }
  }

  std::string name_;
  std::optional<std::string> old_;
};

/// File descriptor 2 goes into a file meanwhile.
class CapturedStderr {
 public:
  CapturedStderr() : file_(std::tmpfile()), saved_(::dup(STDERR_FILENO)) {
    std::fflush(stderr);
    ::dup2(::fileno(file_), STDERR_FILENO);
  }
  ~CapturedStderr() {
    std::fflush(stderr);
    ::dup2(saved_, STDERR_FILENO);
    ::close(saved_);
    std::fclose(file_);
  }
  CapturedStderr(const CapturedStderr&) = delete;
  CapturedStderr& operator=(const CapturedStderr&) = delete;

  std::string text() const {
    std::string all;
    std::array<char, 4096> buffer;
    for (off_t at = 0;; at += static_cast<off_t>(buffer.size())) {
      const ssize_t n = ::pread(::fileno(file_), buffer.data(), buffer.size(), at);
      if (n > 0) all.append(buffer.data(), static_cast<size_t>(n));
      if (n < static_cast<ssize_t>(buffer.size())) return all;
    }
  }

 private:
  std::FILE* file_;
  int saved_;
};

}  // namespace ddp::test
