// A TCP port that stays free until rank 0 listens on it.
#pragma once

#include <cstdint>

#include "fd.h"

namespace ddprun {

/// Binds a port and holds it without listening. The kernel then gives it to nobody who asks for any port or connects,
/// while rank 0, which names it and sets SO_REUSEADDR as libddp's and PyTorch's stores do, can listen there. Throws
/// std::system_error.
class HeldPort {
 public:
  HeldPort();
  uint16_t number() const { return number_; }

 private:
  Fd socket_;
  uint16_t number_ = 0;
};

}  // namespace ddprun
