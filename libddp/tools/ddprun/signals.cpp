#include "signals.h"

#include <sys/signalfd.h>

#include <cerrno>
#include <system_error>

namespace ddprun {

Signals::Signals() {
  struct sigaction action {};
  action.sa_handler = SIG_DFL;
  ::sigaction(SIGCHLD, &action, nullptr);  // ignored, the kernel would forget how a rank ended
  action.sa_handler = SIG_IGN;
  ::sigaction(SIGPIPE, &action, nullptr);

  sigset_t set;
  ::sigemptyset(&set);
  for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP, SIGCHLD}) {
    struct sigaction old {};
    ::sigaction(signal, nullptr, &old);
    if (old.sa_handler != SIG_IGN || signal == SIGCHLD) ::sigaddset(&set, signal);
  }
  ::sigprocmask(SIG_BLOCK, &set, &old_mask_);
  fd_ = Fd(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd_) throw std::system_error(errno, std::generic_category(), "signalfd");
}

std::optional<int> Signals::next() {
  signalfd_siginfo info{};
  if (::read(fd_.get(), &info, sizeof info) != static_cast<ssize_t>(sizeof info)) return std::nullopt;
  return static_cast<int>(info.ssi_signo);
}

bool ends_the_job(int signal) { return signal == SIGTERM || signal == SIGINT || signal == SIGHUP || signal == SIGQUIT; }

}  // namespace ddprun
