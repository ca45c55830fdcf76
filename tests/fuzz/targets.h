// One input through each reader of files. It is read, or it is a CheckpointError; anything else is a finding.
//
// Used by unit/reader_fuzz_test.cpp, which mutates files from fixed seeds, and by the libFuzzer programs beside this.
#pragma once

#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>
#include <torch/types.h>
#include <unistd.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>

#include "ddp/error.h"
#include "ddp/safetensors.h"
#include "ddp/state.h"
#include "io/file_system.h"
#include "io/pickle.h"
#include "io/safetensors_file.h"
#include "io/torch_file.h"

namespace ddp::fuzz {

/// What came of an input: "" when it was read, otherwise the message.
using Outcome = std::string;

/// A file in memory, with a path.
class MemoryFile {
 public:
  explicit MemoryFile(std::string_view bytes) : descriptor_(::memfd_create("fuzz", MFD_CLOEXEC)) {
    if (descriptor_ < 0 || ::write(descriptor_, bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size())) {
      throw std::runtime_error("memfd_create or write failed");
    }
  }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  ~MemoryFile() { ::close(descriptor_); }
  std::string path() const { return "/proc/self/fd/" + std::to_string(descriptor_); }

 private:
  int descriptor_;
};

/// Reads every byte that a tensor may read, once.
inline void touch(const torch::Tensor& tensor) {
  const auto* bytes = static_cast<const volatile char*>(tensor.storage().data());
  for (size_t i = 0; i < tensor.storage().nbytes(); ++i) (void)bytes[i];
  if (tensor.numel() == 0) return;
  int64_t last = 0;  // the farthest element
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  const auto item = static_cast<int64_t>(tensor.element_size());
  const auto* data = static_cast<const volatile char*>(tensor.unsafeGetTensorImpl()->data());
  for (int64_t i = 0; i < item; ++i) (void)data[i], (void)data[last * item + i];
}

inline void touch(const State& state) {
  if (state.is_tensor()) return touch(state.as_tensor());
  if (state.is_list() || state.is_tuple()) {
    for (const State& item : state.is_list() ? state.as_list() : state.as_tuple()) touch(item);
  } else if (state.is_dict()) {
    for (const auto& item : state.as_dict()) touch(item.second);
  }
}

template <class Read>
Outcome outcome_of(std::string_view input, Read read) {
  try {
    touch(read());
    return "";
  } catch (const CheckpointError& error) {
    const std::string message = error.what();
    // Memory that could not be had is a finding, whoever turned it into an error.
    for (std::string_view word : {"bad_alloc", "allocate"}) {
      if (message.find(word) != std::string::npos && input.find(word) == std::string_view::npos) {
        throw std::runtime_error("the reader ran out of memory: " + message);
      }
    }
    return message.empty() ? "an error without a message" : message;
  }
}

/// data.pkl alone; the storages "0" to "9" have 64 bytes each.
inline Outcome read_pickle(std::string_view bytes) {
  return outcome_of(bytes, [&] {
    return io::unpickle(
        bytes,
        [](const std::string& key) {
          if (key.size() != 1 || key[0] < '0' || key[0] > '9')
            throw CheckpointError("record data/" + key + " is missing");
          auto* allocator = c10::GetCPUAllocator();
          auto memory = allocator->allocate(64);
          std::memset(memory.get(), key[0], 64);
          return c10::Storage(c10::Storage::use_byte_size_t(), 64, std::move(memory), allocator, /*resizable=*/false);
        },
        "fuzz");
  });
}

/// A whole .pt file.
inline Outcome read_torch(std::string_view bytes) {
  const MemoryFile file(bytes);
  return outcome_of(bytes, [&] { return io::read_torch_file(file.path(), /*follow=*/true); });
}

/// A safetensors file, mapped and read.
inline Outcome read_safetensors(std::string_view bytes, bool map = true) {
  const MemoryFile file(bytes);
  return outcome_of(bytes, [&] {
    const io::SafetensorsFile tensors(io::file_system(), file.path(), map);
    State::List all;
    for (const auto& entry : tensors.header().entries) all.items.emplace_back(tensors.tensor(entry));
    return State(std::move(all));
  });
}

}  // namespace ddp::fuzz
