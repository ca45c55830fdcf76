#include "io/pickle_globals.h"

#include "io/dtypes.h"

namespace ddp::io {
namespace {

struct Entry {
  std::string_view module, name;
  Global global;
};

// __builtin__ is what Python 2 called builtins; protocol 2 still says so.
constexpr Entry kEntries[] = {
    {"collections", "OrderedDict", Global::kOrderedDict},
    {"_codecs", "encode", Global::kEncode},
    {"__builtin__", "set", Global::kSet},
    {"builtins", "set", Global::kSet},
    {"__builtin__", "bytes", Global::kBytes},
    {"builtins", "bytes", Global::kBytes},
    {"torch", "Size", Global::kSize},
    {"torch.storage", "UntypedStorage", Global::kUntypedStorage},
    {"torch._utils", "_rebuild_tensor_v2", Global::kTensorV2},
    {"torch._utils", "_rebuild_tensor_v3", Global::kTensorV3},
    {"torch._utils", "_rebuild_parameter", Global::kParameter},
};

}  // namespace

std::optional<KnownGlobal> find_global(std::string_view module, std::string_view name) {
  for (const Entry& entry : kEntries) {
    if (entry.module == module && entry.name == name) return KnownGlobal{entry.global};
  }
  if (module != "torch") return std::nullopt;
  if (auto dtype = dtype_of_storage_class(name)) return KnownGlobal{Global::kStorageClass, dtype->dtype};
  if (auto dtype = dtype_of_name(name)) return KnownGlobal{Global::kDtype, dtype->dtype};
  return std::nullopt;
}

}  // namespace ddp::io
