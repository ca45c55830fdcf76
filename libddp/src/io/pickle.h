// Values to and from pickle, protocol 2, as torch.save writes it and torch.load(weights_only=True) reads it.
//
// The reader builds plain data and tensors, nothing else: a name that it does not know is an error, never a
// call.
#pragma once

#include <c10/core/Storage.h>

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "ddp/state.h"

namespace ddp::io {

/// Nesting of lists, tuples and dicts beyond this is refused, in both directions.
inline constexpr int kMaxDepth = 100;

/// A pickle and the storages that it names "0", "1", ...; each is written once, however many tensors view it.
struct Pickled {
  struct Storage {
    c10::Storage storage;
    uint64_t bytes = 0;
  };
  std::string data;
  std::vector<Storage> storages;
};

/// `ordered` are the keys of the outermost dict whose dicts become a collections.OrderedDict, as Python's
/// Module.state_dict() is. Throws CheckpointError with the place of a value that cannot be written: a sparse
/// or quantized tensor, a str that is no UTF-8, nesting beyond kMaxDepth.
Pickled pickle(const State& state, const std::vector<std::string>& ordered = {});

/// The storage that a pickle names `key`.
using StorageLoader = std::function<c10::Storage(const std::string& key)>;

/// Throws CheckpointError beginning with `where`, with the byte and what stands there, for anything but None,
/// bool, int (64 bits), float, str, bytes, list, tuple, dict, OrderedDict (attributes are dropped), set
/// (becomes a list), torch.Size (a tuple), tensors and parameters (become tensors on the CPU that require no
/// gradient). Memory beside the storages is at most 16 MiB + 16 * data.size(); shapes are checked against their
/// storages.
State unpickle(std::string_view data, const StorageLoader& load_storage, const std::string& where);

}  // namespace ddp::io
