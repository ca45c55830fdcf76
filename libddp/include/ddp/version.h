// The one place where the version is written; CMake reads it from here.
#pragma once

#define LIBDDP_VERSION_MAJOR 0
#define LIBDDP_VERSION_MINOR 1
#define LIBDDP_VERSION_PATCH 0

#include <string>

namespace ddp {

/// The version of the library that is linked, "major.minor.patch".
std::string version();

/// A few lines for a bug report: libddp and libtorch versions, the backends that are compiled in and whether
/// a CUDA device can be seen. Touches CUDA only where the module `libddp_cuda` is installed.
std::string build_info();

}  // namespace ddp
