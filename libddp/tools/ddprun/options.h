// ddprun's command line.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace ddprun {

/// A command line that cannot be meant: one line, exit code 2.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Endpoint {
  std::string host;
  uint16_t port = 0;
};

struct Options {
  int ranks = 0;                        ///< processes on this host
  int nodes = 1;                        ///< hosts
  int node_rank = 0;                    ///< which of them this is
  std::optional<Endpoint> master = {};  ///< where rank 0 serves; nothing: this host, a free port in each life
  int max_restarts = 0;                 ///< lives after the first
  std::chrono::milliseconds grace = std::chrono::seconds(30);  ///< from SIGTERM to SIGKILL
  bool prefix = false;                                         ///< "[rank] " before each line
  std::string log_dir = {};  ///< copies of the output, and the error files; "": none are kept
  std::vector<std::pair<std::string, std::string>> env = {};
  std::vector<std::string> command = {};  ///< the program and its arguments
  bool help = false;

  int world() const { return ranks * nodes; }
  int first_rank() const { return ranks * node_rank; }
};

/// Throws UsageError.
Options parse_options(int argc, char** argv);

extern const char* const kHelp;

/// Cores that this process may use, at least 1.
int usable_cores();

/// GPUs that a rank may use, as far as can be told without CUDA: the entries of CUDA_VISIBLE_DEVICES, else /dev/nvidia*.
int visible_gpus();

}  // namespace ddprun
