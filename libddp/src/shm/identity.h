// Which host a process is on, and whether it lives.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <iosfwd>
#include <string>

#include "shm/arena.h"

namespace ddp::detail::shm {

/// What a process says of itself: which kernel, process numbers and network interfaces it sees.
struct Identity {
  std::string kernel = "?";
  uint64_t processes = 0;
  uint64_t network = 0;
  std::string pretended = "-";
  pid_t pid = 0;

  std::string text() const;
  static Identity parse(std::istream& in);

  /// How this one's host differs from `other`'s, "" where it does not.
  std::string apart_from(const Identity& other) const;
};

Identity identify_this_process();

/// For tests: ranks that pretend different names are on different hosts. Set before a group is made; "" in programs.
void pretend_host(const std::string& name);

/// A pidfd of a process of this host; none where the kernel has no pidfds, or the process is gone.
Fd open_process(pid_t pid);

/// Whether a process of this host has ended; `process` is its pidfd, or none.
bool has_ended(pid_t pid, const Fd& process);

}  // namespace ddp::detail::shm
