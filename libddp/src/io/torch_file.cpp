#include "io/torch_file.h"

#include <c10/core/CPUAllocator.h>
#include <caffe2/serialize/inline_container.h>
#include <fmt/format.h>
#include <torch/types.h>

#include <exception>
#include <unordered_set>

#include "ddp/error.h"
#include "io/zip_reader.h"

namespace ddp::io {
namespace {

// A record beside its bytes: padding to 64, two headers with its name, a data descriptor.
constexpr uint64_t kRecordOverhead = 64 + 320;
constexpr uint64_t kFileOverhead = 8 * kRecordOverhead;  // the records beside the storages, the zip directory's end

// Storage on another device is brought over as bytes, one at a time.
torch::Tensor bytes_on_cpu(const Pickled::Storage& storage) {
  auto options = torch::dtype(torch::kByte).device(storage.storage.device());
  auto bytes = torch::empty({0}, options).set_(storage.storage, 0, {static_cast<int64_t>(storage.bytes)}, {1});
  return bytes.to(torch::kCPU);
}

}  // namespace

void write_torch_file(const State& state, const Append& append, const std::vector<std::string>& ordered) {
  torch::NoGradGuard no_grad;
  write_torch_file(pickle(state, ordered), append);
}

uint64_t torch_file_size(const Pickled& pickled) {
  uint64_t bytes = pickled.data.size() + kFileOverhead;
  for (const auto& storage : pickled.storages) bytes += storage.bytes + kRecordOverhead;
  return bytes;
}

void write_torch_file(const Pickled& pickled, const Append& append) {
  torch::NoGradGuard no_grad;
  // The stream writer finishes its file in its destructor and ends the process when that fails, so it is
  // never told of a failure: the first exception is kept, and what would be written after it is dropped.
  std::exception_ptr failure;
  caffe2::serialize::PyTorchStreamWriter writer([&](const void* data, size_t size) {
    if (failure) return size;
    try {
      append(data, size);
    } catch (...) {
      failure = std::current_exception();
    }
    return size;
  });
  auto record = [&](const std::string& name, const void* data, size_t size) {
    if (!failure) writer.writeRecord(name, size > 0 ? data : "", size);
  };
  auto text_record = [&](const std::string& name, std::string_view text) { record(name, text.data(), text.size()); };

  // Names, order and values as in torch/serialization.py, _save (torch 2.15).
  text_record("data.pkl", pickled.data);
  text_record(".format_version", "1");
  text_record(".storage_alignment", "64");
  text_record("byteorder", "little");
  for (size_t i = 0; i < pickled.storages.size(); ++i) {
    const auto& storage = pickled.storages[i];
    const std::string name = fmt::format("data/{}", i);
    if (storage.storage.device_type() == torch::kCPU) {
      record(name, storage.storage.data(), storage.bytes);
    } else {
      const torch::Tensor copy = bytes_on_cpu(storage);
      record(name, copy.const_data_ptr(), storage.bytes);
    }
  }
  writer.writeEndOfFile();
  if (failure) std::rethrow_exception(failure);
}

State read_torch_file(const std::string& path, bool follow) {
  torch::NoGradGuard no_grad;
  const ZipReader zip(file_system(), path, follow);

  auto text_record = [&](const std::string& name) {
    const ZipRecord* record = zip.find(name);
    if (!record) zip.fail(fmt::format("record {} is missing", name));
    std::string text(record->size, '\0');
    zip.read(*record, text.data());
    return text;
  };
  if (zip.find("byteorder") && text_record("byteorder") != "little") zip.fail("was written on a big-endian machine");

  std::unordered_set<std::string> read;
  auto load_storage = [&](const std::string& key) {
    const std::string name = "data/" + key;
    const ZipRecord* record = zip.find(name);
    if (!record) zip.fail(fmt::format("record {} is missing", name));
    read.insert(name);
    auto* allocator = c10::GetCPUAllocator();
    auto memory = allocator->allocate(record->size);
    zip.read(*record, memory.get());
    return c10::Storage(c10::Storage::use_byte_size_t(), record->size, std::move(memory), allocator,
                        /*resizable=*/false);
  };
  State state = unpickle(text_record("data.pkl"), load_storage, path + ": data.pkl");
  for (const ZipRecord& record : zip.records()) {
    if (!read.contains(record.name) && record.name != "data.pkl" && record.name != "byteorder") zip.verify(record);
  }
  return state;
}

}  // namespace ddp::io
