#include "ddp/preemption.h"

#include <unistd.h>

#include <thread>

#include "ddp/error.h"
#include "ddp/log.h"
#include "support/catch.h"
#include "support/spawn.h"

using namespace std::chrono_literals;
using ddp::Preemption;
using ddp::test::ContainsSubstring;
using ddp::test::spawn_ranks;

namespace {

volatile std::sig_atomic_t g_old_handler_ran = 0;

struct Lines {
  Lines() {
    ddp::log::set_sink([this](auto, std::string_view line) { text += line, ++count; });
  }
  ~Lines() { ddp::log::set_sink({}); }
  std::string text;
  int count = 0;
};

}  // namespace

TEST_CASE("each of the signals is a request, named once in the log, afterwards the old handlers are back") {
  ddp::ProcessGroup alone;
  for (int signal : {SIGTERM, SIGINT, SIGUSR1}) {
    std::signal(signal, [](int) { g_old_handler_ran = 1; });
    Lines lines;
    {
      Preemption preemption(alone);
      CHECK_FALSE(preemption.requested());
      std::raise(signal);
      CHECK(preemption.requested());
      CHECK(preemption.requested());
      CHECK(lines.count == 1);
      CHECK_THAT(lines.text, ContainsSubstring(signal == SIGTERM  ? "received SIGTERM"
                                               : signal == SIGINT ? "received SIGINT"
                                                                  : "received SIGUSR1"));
    }
    g_old_handler_ran = 0;
    std::raise(signal);
    CHECK(g_old_handler_ran == 1);
    std::signal(signal, SIG_DFL);
  }
}

TEST_CASE("a stop from code, a fresh start, every third call") {
  ddp::ProcessGroup alone;
  {
    Preemption preemption(alone);
    preemption.stop();
    CHECK(preemption.requested());
  }
  Preemption preemption(alone, {.every = 3});
  preemption.stop();
  CHECK_FALSE(preemption.requested());
  CHECK_FALSE(preemption.requested());
  CHECK(preemption.requested());
}

TEST_CASE("only one at a time, and only signals that can be caught") {
  ddp::ProcessGroup alone;
  {
    Preemption one(alone);
    CHECK_THAT(ddp::test::message_of<ddp::ConfigError>([&] { Preemption two(alone); }),
               ContainsSubstring("another Preemption lives"));
  }
  struct sigaction before {
  }, after{};
  ::sigaction(SIGTERM, nullptr, &before);
  CHECK_THAT(ddp::test::message_of<ddp::ConfigError>([&] {
               Preemption(alone, {.signals = {SIGTERM, SIGKILL}});
             }),
             ContainsSubstring("SIGKILL cannot be caught"));
  ::sigaction(SIGTERM, nullptr, &after);
  CHECK(before.sa_handler == after.sa_handler);
  CHECK_THROWS_AS(Preemption(alone, {.every = 0}), ddp::ConfigError);
  CHECK_NOTHROW(Preemption(alone));
}

TEST_CASE("after a stop an echo does no harm, without one the default action is back") {
  auto later = [](bool stop) {
    return spawn_ranks(1, [=](int) {
      for (int life = 0; life < 2; ++life) {
        Preemption preemption(ddp::ProcessGroup{});
        if (stop) ::kill(::getpid(), SIGTERM);
        DDP_CHECK(preemption.requested() == stop);
      }
      ::kill(::getpid(), SIGTERM);
    })[0];
  };
  CHECK(later(true).ok());
  CHECK(later(false).signal == SIGTERM);
}

TEST_CASE("a second signal ends the process at once, its echo does not") {
  auto twice = [](std::chrono::milliseconds apart) {
    return spawn_ranks(1, [=](int) {
      Preemption preemption(ddp::ProcessGroup(), {.again_after = 200ms});
      ::kill(::getpid(), SIGINT);
      std::this_thread::sleep_for(apart);
      ::kill(::getpid(), SIGTERM);
      std::this_thread::sleep_for(10ms);
      DDP_CHECK(preemption.requested());
    })[0];
  };
  CHECK(twice(0ms).ok());
  CHECK(twice(300ms).signal == SIGTERM);
}
