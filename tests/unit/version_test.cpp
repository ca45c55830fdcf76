#include "ddp/version.h"

#include <torch/version.h>

#include "support/catch.h"

using ddp::test::ContainsSubstring;

TEST_CASE("version: the linked library is of the age of its headers", "[version]") {
  CHECK(ddp::version() == std::to_string(LIBDDP_VERSION_MAJOR) + "." + std::to_string(LIBDDP_VERSION_MINOR) + "." +
                              std::to_string(LIBDDP_VERSION_PATCH));
}

TEST_CASE("build_info: names libddp, the libtorch that runs and the backends", "[version]") {
  const std::string info = ddp::build_info();
  CHECK_THAT(info, ContainsSubstring("libddp " + ddp::version() + "\n"));
  // Headers and library are of one installation in the tests.
  CHECK_THAT(info, ContainsSubstring(std::string("libtorch ") + TORCH_VERSION + " (compiled against " + TORCH_VERSION +
                                     ")\n"));
  CHECK_THAT(info, ContainsSubstring("backends: gloo"));
  const bool nccl = info.find("nccl") != std::string::npos;
  CHECK_THAT(info,
             ContainsSubstring(nccl ? "libddp_cuda: installed\n" : "libddp_cuda: not installed, built without NCCL\n"));
  CHECK_THAT(info, ContainsSubstring("CUDA devices visible: "));
}
