// Whole files in torch.save's format.
#pragma once

#include <string>
#include <vector>

#include "ddp/atomic_file.h"
#include "ddp/state.h"
#include "io/pickle.h"

namespace ddp::io {

/// Writes the records of torch.save through `append`, tensors straight from their memory. `ordered` as in
/// `pickle`. Throws what `append` throws, CheckpointError for a value that cannot be written.
void write_torch_file(const State& state, const Append& append, const std::vector<std::string>& ordered = {});
/// The same of what `pickle` returned. Uses nothing but the storages, so any thread may do it.
void write_torch_file(const Pickled& pickled, const Append& append);

/// Bytes of that file, a little more rather than less.
uint64_t torch_file_size(const Pickled& pickled);

/// Reads a file of torch.save's or ours; every record's checksum is tested, those that the pickle does not
/// name too. `follow`: the path may be a link. Throws CheckpointError naming the file and what is wrong.
State read_torch_file(const std::string& path, bool follow);

}  // namespace ddp::io
