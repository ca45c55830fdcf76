#include "environment.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <string_view>

extern char** environ;

namespace ddprun {

std::string error_file(const Life& life, int local) {
  return life.folder + "/" + std::to_string(local) + "/error.json";
}

int threads_per_rank(const Options& options) {
  for (const auto& [name, value] : options.env) {
    if (name == "OMP_NUM_THREADS") return 0;
  }
  if (options.ranks == 1 || std::getenv("OMP_NUM_THREADS") != nullptr) return 0;
  return std::max(1, usable_cores() / options.ranks);
}

std::vector<std::string> environment(const Options& options, const Life& life, int local) {
  std::map<std::string, std::string> variables;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const auto equals = text.find('=');
    if (equals != std::string_view::npos) variables.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  if (const int threads = threads_per_rank(options)) variables["OMP_NUM_THREADS"] = std::to_string(threads);
  for (const auto& [name, value] : options.env) variables[name] = value;

  const int rank = options.first_rank() + local;
  variables["RANK"] = variables["ROLE_RANK"] = std::to_string(rank);
  variables["WORLD_SIZE"] = variables["ROLE_WORLD_SIZE"] = std::to_string(options.world());
  variables["LOCAL_RANK"] = std::to_string(local);
  variables["LOCAL_WORLD_SIZE"] = std::to_string(options.ranks);
  variables["GROUP_RANK"] = std::to_string(options.node_rank);
  variables["GROUP_WORLD_SIZE"] = std::to_string(options.nodes);
  variables["ROLE_NAME"] = "default";
  variables["MASTER_ADDR"] = life.master.host;
  variables["MASTER_PORT"] = std::to_string(life.master.port);
  variables["TORCHELASTIC_RESTART_COUNT"] = std::to_string(life.attempt);
  variables["TORCHELASTIC_MAX_RESTARTS"] = std::to_string(options.max_restarts);
  variables["TORCHELASTIC_RUN_ID"] = life.run_id;
  variables["TORCHELASTIC_ERROR_FILE"] = error_file(life, local);
  variables["TORCHELASTIC_USE_AGENT_STORE"] = "False";  // rank 0 serves, whatever an outer launcher said

  std::vector<std::string> result;
  for (const auto& [name, value] : variables) result.push_back(name + "=" + value);
  return result;
}

}  // namespace ddprun
