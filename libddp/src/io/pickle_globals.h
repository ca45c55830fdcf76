// The names in a pickle that the reader knows. Nothing is ever looked up by name anywhere else.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <string_view>

namespace ddp::io {

enum class Global : int64_t {
  kOrderedDict,
  kSet,
  kSize,
  kEncode,
  kBytes,
  kTensorV2,
  kTensorV3,
  kParameter,
  kStorageClass,
  kUntypedStorage,
  kDtype
};

struct KnownGlobal {
  Global global;
  torch::ScalarType dtype = torch::kByte;  ///< of kStorageClass and kDtype
};

/// Nothing for a name that is not allowed.
std::optional<KnownGlobal> find_global(std::string_view module, std::string_view name);

}  // namespace ddp::io
