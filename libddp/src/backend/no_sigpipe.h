// Gloo writes to sockets without MSG_NOSIGNAL: where a peer has closed its end, SIGPIPE would end this process before any
// error is seen. The signal goes to the thread that writes, and threads inherit what is blocked.
//
//   { const NoSigpipe guard; gloo = make_gloo(...); }      // none for the threads of this gloo
#pragma once

#include <csignal>
#include <ctime>

namespace ddp::detail {

/// Blocks SIGPIPE in this thread, and for good in the threads that are started meanwhile.
class NoSigpipe {
 public:
  NoSigpipe() { ::pthread_sigmask(SIG_BLOCK, &sigpipe(), &before_); }
  ~NoSigpipe() {
    if (sigismember(&before_, SIGPIPE) == 1) return;
    // One that has come meanwhile must not be delivered now.
    const timespec at_once{};
    while (::sigtimedwait(&sigpipe(), nullptr, &at_once) == SIGPIPE) {
    }
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  NoSigpipe(const NoSigpipe&) = delete;
  NoSigpipe& operator=(const NoSigpipe&) = delete;

  static const sigset_t& sigpipe() {
    static const sigset_t set = [] {
      sigset_t set;
      sigemptyset(&set);
      sigaddset(&set, SIGPIPE);
      return set;
    }();
    return set;
  }

 private:
  sigset_t before_;
};

}  // namespace ddp::detail
