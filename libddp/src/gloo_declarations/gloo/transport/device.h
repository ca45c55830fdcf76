// Held by shared_ptr only.
#pragma once

namespace gloo::transport {

class Device;

}  // namespace gloo::transport
