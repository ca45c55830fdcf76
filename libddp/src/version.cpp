#include "ddp/version.h"

#include <ATen/Version.h>
#include <fmt/format.h>
#include <torch/version.h>

#include "cuda_module.h"
#include "error_text.h"

namespace ddp {
namespace {

// The library that runs may be another than the headers: its configuration text has "TORCH_VERSION=2.15.0, ".
std::string running_libtorch() {
  const std::string config = at::show_config();
  const std::string key = "TORCH_VERSION=";
  const auto at = config.find(key);
  if (at == std::string::npos) return "unknown";
  const auto begin = at + key.size();
  return config.substr(begin, config.find_first_of(", \n", begin) - begin);
}

std::string cuda_devices() {
  try {
    return std::to_string(detail::visible_cuda_devices());
  } catch (const std::exception& e) {
    return "unknown, " + detail::error_text(e);
  }
}

}  // namespace

std::string version() {
  return fmt::format("{}.{}.{}", LIBDDP_VERSION_MAJOR, LIBDDP_VERSION_MINOR, LIBDDP_VERSION_PATCH);
}

std::string build_info() {
  const bool module = detail::cuda_module_available();
  return fmt::format(
      "libddp {}\n"
      "libtorch {} (compiled against {})\n"
      "backends: gloo{}\n"
      "libddp_cuda: {}\n"
      "CUDA devices visible: {}\n",
      version(), running_libtorch(), TORCH_VERSION, module ? ", nccl" : "",
      module ? "installed" : "not installed, built without NCCL", module ? cuda_devices() : "0");
}

}  // namespace ddp
