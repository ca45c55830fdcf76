// A launcher for machines without Python: processes with torchrun's variables, ended together, restarted together.
//
//   ddprun -n 2 ./train                      two ranks on this host
//   ddprun -n auto --max-restarts 3 ./train  one per GPU; after a failure all start again, three times at most
//   ddprun --help
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <string>

#include "ddprun/child.h"
#include "ddprun/options.h"
#include "ddprun/supervise.h"

namespace {

// Pipes must not get the numbers of the standard streams, where somebody has closed these.
void open_standard_streams() {
  int fd = 0;
  do {
    fd = ::open("/dev/null", O_RDWR);
  } while (fd >= 0 && fd <= STDERR_FILENO);
  if (fd >= 0) ::close(fd);
}

int fail(int code, const std::string& text) {
  std::fprintf(stderr, "ddprun: %s\n", text.c_str());
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  open_standard_streams();
  try {
    const auto options = ddprun::parse_options(argc, argv);
    if (options.help) {
      std::fputs(ddprun::kHelp, stdout);
      return std::fflush(stdout) == 0 ? 0 : 1;
    }
    return ddprun::supervise(options);
  } catch (const ddprun::UsageError& e) {
    return fail(2, std::string(e.what()) + " (ddprun --help)");
  } catch (const ddprun::ProgramError& e) {
    return fail(e.exit_code, e.text);
  } catch (const std::exception& e) {
    return fail(1, e.what());
  }
}
