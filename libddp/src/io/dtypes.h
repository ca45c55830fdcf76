// The names that torch.save gives to dtypes.
#pragma once

#include <torch/types.h>

#include <optional>
#include <string_view>

namespace ddp::io {

/// A dtype has a storage class of its own ("FloatStorage"), or is younger than those and is written by its
/// own name
/// ("float8_e4m3fn") beside an UntypedStorage.
struct DtypeName {
  torch::ScalarType dtype;
  std::string_view name;
  bool has_storage_class;
};

/// Nothing for a dtype that is not written (quantized ones, bit fields).
std::optional<DtypeName> dtype_name(torch::ScalarType dtype);
std::optional<DtypeName> dtype_of_storage_class(std::string_view name);
std::optional<DtypeName> dtype_of_name(std::string_view name);

}  // namespace ddp::io
