#include "support/launch.h"

#include <unistd.h>

#include <fstream>
#include <iterator>
#include <sstream>

namespace ddp::test {

const std::string& ddprun() {
  static const std::string path = test_bin("ddprun");
  return path;
}

bool has_ddprun() { return ::access(ddprun().c_str(), X_OK) == 0; }

Result launch(const Words& arguments, const Options& options) {
  return run_command(Words{ddprun()} + arguments, options);
}

Result launch_sh(const Words& arguments, const std::string& script, const Options& options) {
  return launch(arguments + Words{"sh", "-c", script}, options);
}

bool has_program(const std::string& name) { return run_command({"sh", "-c", "command -v " + name}).ok(); }

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

std::vector<std::string> lines_with(const std::string& text, const std::string& part) {
  auto lines = lines_of(text);
  std::erase_if(lines, [&](const std::string& line) { return line.find(part) == std::string::npos; });
  return lines;
}

size_t count_of(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size())) ++count;
  return count;
}

std::string read_file(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// A zombie that nobody has reaped yet has no command line.
const std::string kCountAlive =
    "n=0; alive=1; while [ $alive != 0 ] && [ $n -lt 50 ]; do sleep 0.05; n=$((n+1)); alive=0; for p in $(cat pids); "
    "do "
    "tr -d '\\0' 2>/dev/null </proc/$p/cmdline | grep -q . && alive=$((alive+1)); done; done 2>/dev/null\n"
    "echo alive $alive of $(wc -l <pids)\n";

void check_losses_of_two_ranks(const std::string& output) {
  for (const char* line : {"Step 0, Loss 1.327328\n", "Step 1, Loss 1.102471\n", "Step 2, Loss 0.901366\n",
                           "Step 3, Loss 0.723889\n", "Step 4, Loss 0.569610\n", "replicas equal: yes\n"}) {
    CHECK_THAT(output, ContainsSubstring(line));
  }
}

}  // namespace ddp::test
