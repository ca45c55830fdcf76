#include "cuda_module.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "ddp/error.h"

namespace ddp::detail {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFile = "libddp_cuda.so";

// Beside the library (or program) that this function is linked into, which is where both are built and installed.
fs::path module_path() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&cuda_module_available), &info) == 0 || info.dli_fname == nullptr) return {};
  std::error_code ignored;
  const fs::path here = fs::canonical(info.dli_fname, ignored).parent_path();
  for (const fs::path& folder : {here, here / "../lib"}) {
    if (fs::exists(folder / kFile, ignored)) return folder / kFile;
  }
  return {};
}

const CudaModule& load() {
  const fs::path path = module_path();
  if (path.empty()) {
    throw ConfigError(fmt::format(
        "[ddp] a CUDA device or the nccl backend was asked for, but {} is not beside libddp: built without NCCL; "
        "build libddp with LIBDDP_CUDA=ON against a libtorch that has CUDA, or use the CPU and gloo",
        kFile));
  }
  // RTLD_GLOBAL: libtorch_cuda registers its hooks and operators with the libraries that are loaded already.
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (handle == nullptr) throw ConfigError(fmt::format("[ddp] {} cannot be loaded: {}", path.string(), dlerror()));
  const auto* module = static_cast<const CudaModule*>(dlsym(handle, "ddp_cuda_module"));
  if (module == nullptr) {
    throw ConfigError(fmt::format("[ddp] {} is not a module of this libddp: {}", path.string(), dlerror()));
  }
  return *module;
}

bool driver_present() {
  std::error_code ignored;
  return fs::exists("/dev/nvidiactl", ignored) || fs::exists("/dev/dxg", ignored) ||
         fs::exists("/dev/nvhost-ctrl-gpu", ignored);
}

}  // namespace

const CudaModule& cuda_module() {
  static const CudaModule& module = load();
  return module;
}

bool cuda_module_available() { return !module_path().empty(); }

int visible_cuda_devices() {
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (visible != nullptr && (*visible == '\0' || std::string_view(visible) == "-1")) return 0;
  if (!driver_present() || !cuda_module_available()) return 0;
  return cuda_module().device_count();
}

}  // namespace ddp::detail
