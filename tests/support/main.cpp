// The tests' main, for Catch2 2.13 and 3.
#define CATCH_CONFIG_RUNNER
#include "support/catch.h"

#include <ATen/Parallel.h>

#include "support/spawn.h"

int main(int argc, char** argv) {
  if (auto code = ddp::test::run_named_program(argc, argv)) return *code;
  // No pool of threads in a process that forks ranks: a child would wait for threads that it does not have.
  at::set_num_threads(1);
  Catch::Session session;
  if (const int wrong = session.applyCommandLine(argc, argv)) return wrong;
#if !__has_include(<catch2/catch_all.hpp>)
  // As Catch2 3 does: a name that fits no test is a failure. CMake cuts names at a semicolon.
  session.configData().warnings =
      static_cast<Catch::WarnAbout::What>(session.configData().warnings | Catch::WarnAbout::NoTests);
#endif
  return session.run();
}
