// libFuzzer's entry point: see CMakeLists.txt beside this file.
#include "fuzz/targets.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  ddp::fuzz::read_pickle({reinterpret_cast<const char*>(data), size});
  return 0;
}
