// The one member of gloo::Context that ProcessGroupGloo.hpp calls inline; contexts are made and owned by libtorch.
#pragma once

#include <chrono>

#include "gloo/transport/unbound_buffer.h"

namespace gloo {

class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};

}  // namespace gloo
