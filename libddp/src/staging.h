// A private copy of a checkpoint's tensors, so that training goes on while a thread writes them.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <vector>

#include "io/pickle.h"

namespace ddp::detail {

/// The memory of the copy is kept from one checkpoint to the next: pages that are there already are copied to several
/// times faster than new ones. Of a CUDA device it is pinned, where the driver grants that. Not thread-safe.
class Staging {
 public:
  /// Bytes that `copy` would have to allocate.
  uint64_t missing(const std::vector<io::Pickled::Storage>& storages) const;

  /// Replaces each storage by a copy, complete when this returns. The copies are overwritten by the next call. On an
  /// exception (no memory) the storages are what they were.
  void copy(std::vector<io::Pickled::Storage>& storages);

  void release() { buffers_.clear(); }

 private:
  bool fits(size_t index, const io::Pickled::Storage& storage) const;

  std::vector<torch::Tensor> buffers_;  // uint8, by the number of the storage
};

}  // namespace ddp::detail
