// Held by pointer in ProcessGroupGloo's send and receive works, which destroy it virtually.
#pragma once

namespace gloo::transport {

class UnboundBuffer {
 public:
  virtual ~UnboundBuffer();
};

}  // namespace gloo::transport
