#include "ddp/safetensors.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "ddp/atomic_file.h"
#include "ddp/error.h"
#include "ddp/stateful.h"
#include "io/file_system.h"
#include "io/safetensors_file.h"

namespace ddp {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kWrapperPrefix = "module.";  // of Python's DistributedDataParallel.state_dict()
constexpr size_t kNamesShown = 20;

std::string list(const std::vector<std::string>& names) {
  const auto shown = std::min(names.size(), kNamesShown);
  std::string text = fmt::format("{}", fmt::join(names.begin(), names.begin() + static_cast<long>(shown), ", "));
  if (shown < names.size()) text += fmt::format(" and {} more", names.size() - shown);
  return text;
}

std::string text(torch::IntArrayRef sizes) { return fmt::format("[{}]", fmt::join(sizes.begin(), sizes.end(), ", ")); }

// Puts the function's name before what the parts below say.
template <class Action>
auto as(const char* who, Action action) try {
  return action();
} catch (const CheckpointError& error) {
  const std::string message = error.what();
  if (message.starts_with('[')) throw;
  throw CheckpointError(fmt::format("[ddp::{}] {}", who, message));
}

bool all_prefixed(const NamedTensors& tensors) {
  return !tensors.is_empty() && std::all_of(tensors.begin(), tensors.end(),
                                            [](const auto& item) { return item.key().starts_with(kWrapperPrefix); });
}

bool is_same_view(const torch::Tensor& a, const torch::Tensor& b) {
  return a.const_data_ptr() == b.const_data_ptr() && a.device() == b.device() && a.scalar_type() == b.scalar_type() &&
         a.sizes() == b.sizes() && a.strides() == b.strides();
}

// Of tensors from files: on the CPU, contiguous, of equal sizes.
bool is_same_data(const torch::Tensor& a, const torch::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

NamedTensors tensors_of(const torch::nn::Module& module) {
  NamedTensors tensors;
  for (auto& [name, value] : state_dict(module).as_dict()) tensors.insert(name.as_string(), value.as_tensor());
  return tensors;
}

NamedTensors load(const fs::path& path) {
  io::FileSystem& files = io::file_system();
  const io::SafetensorsShards shards = io::find_safetensors(files, path);
  std::unordered_map<std::string_view, size_t> listed;
  for (const auto& [name, number] : shards.tensors) listed.emplace(name, number);

  NamedTensors tensors;
  for (size_t i = 0; i < shards.files.size(); ++i) {
    const io::SafetensorsFile file(files, shards.files[i], /*map=*/true);
    for (const io::SafetensorsEntry& entry : file.header().entries) {
      if (!shards.index.empty()) {
        const auto found = listed.find(entry.name);
        if (found == listed.end() || found->second != i) {
          throw CheckpointError(
              fmt::format("{}: tensor {} of {} {}", shards.index, entry.name, shards.files[i].filename().string(),
                          found == listed.end() ? "is not in weight_map" : "is to be in another file"));
        }
        listed.erase(found);
      }
      tensors.insert(entry.name, file.tensor(entry));
    }
  }
  std::vector<std::string> absent;
  for (const auto& [name, number] : shards.tensors) {
    if (listed.contains(name)) {
      absent.push_back(fmt::format("{} ({})", name, shards.files[number].filename().string()));
    }
  }
  if (!absent.empty()) {
    throw CheckpointError(
        fmt::format("{}: these tensors are not in the files that it names: {}", shards.index, list(absent)));
  }
  return tensors;
}

struct Pair {
  std::string name;
  torch::Tensor mine, theirs;
};

// Tensors that belong together, and in `problems` all that does not fit.
struct Matching {
  std::vector<Pair> pairs;
  SafetensorsLoaded loaded;
  std::vector<std::string> shapes, torn;

  std::string problems(bool strict) const {
    std::string all;
    auto add = [&](const char* what, const std::vector<std::string>& names) {
      if (!names.empty()) all += fmt::format("{}{}: {}", all.empty() ? "" : "; ", what, list(names));
    };
    if (strict) {
      add("missing", loaded.missing);
      add("unexpected", loaded.unexpected);
    }
    add("other shapes", shapes);
    add("one tensor here, in the file two that differ", torn);
    return all;
  }
};

Matching match(const NamedTensors& theirs, const NamedTensors& into) {
  Matching result;
  const bool strip = all_prefixed(theirs) && !all_prefixed(into), add = all_prefixed(into) && !all_prefixed(theirs);
  auto my_name = [&](const std::string& name) {
    return strip ? name.substr(kWrapperPrefix.size()) : add ? std::string(kWrapperPrefix) + name : name;
  };
  std::unordered_map<std::string, const torch::Tensor*> by_name;
  for (const auto& item : theirs) by_name.emplace(my_name(item.key()), &item.value());

  std::unordered_map<const void*, size_t> by_place;  // of pairs: who comes first with this memory
  std::vector<const NamedTensors::Item*> absent;
  for (const auto& item : into) {
    const auto found = by_name.find(item.key());
    if (found == by_name.end()) {
      absent.push_back(&item);
      continue;
    }
    const torch::Tensor &mine = item.value(), &given = *found->second;
    by_name.erase(found);
    if (mine.sizes() != given.sizes()) {
      result.shapes.push_back(fmt::format("{} {} instead of {}", item.key(), text(given.sizes()), text(mine.sizes())));
      continue;
    }
    if (mine.scalar_type() != given.scalar_type()) result.loaded.converted.push_back(item.key());
    const auto [first, is_new] = by_place.emplace(mine.const_data_ptr(), result.pairs.size());
    if (!is_new && mine.numel() > 0) {
      const Pair& twin = result.pairs[first->second];
      if (is_same_view(twin.mine, mine) && !is_same_data(twin.theirs, given)) {
        result.torn.push_back(fmt::format("{} and {}", twin.name, item.key()));
      }
    }
    result.pairs.push_back({item.key(), mine, given});
  }
  for (const auto* item : absent) {
    const auto tied = by_place.find(item->value().const_data_ptr());
    const bool comes_with = tied != by_place.end() && item->value().numel() > 0 &&
                            is_same_view(result.pairs[tied->second].mine, item->value());
    if (!comes_with) result.loaded.missing.push_back(item->key());
  }
  for (const auto& item : theirs) {  // in the file's order
    if (by_name.contains(my_name(item.key()))) result.loaded.unexpected.push_back(item.key());
  }
  return result;
}

// Memory that a tensor touches.
struct Extent {
  const char* begin;
  const char* end;
  size_t index;  // of the tensor
};

Extent extent(const torch::Tensor& tensor, size_t index) {
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  const auto* begin = static_cast<const char*>(tensor.const_data_ptr());
  return {begin, begin + (last + 1) * static_cast<int64_t>(tensor.element_size()), index};
}

// Groups of tensors, by index, that share memory.
std::vector<std::vector<size_t>> find_shared(const NamedTensors& tensors) {
  std::map<std::string, std::vector<Extent>> by_device;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const torch::Tensor& tensor = tensors[i].value();
    if (tensor.numel() > 0) by_device[tensor.device().str()].push_back(extent(tensor, i));
  }
  std::vector<std::vector<size_t>> groups;
  for (auto& [device, extents] : by_device) {
    std::sort(extents.begin(), extents.end(), [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
    const char* end = nullptr;
    for (const Extent& next : extents) {
      if (groups.empty() || end == nullptr || next.begin >= end) groups.emplace_back();
      end = std::max(end, next.end);
      groups.back().push_back(next.index);
    }
  }
  std::erase_if(groups, [](const auto& group) { return group.size() < 2; });
  for (auto& group : groups) std::sort(group.begin(), group.end());
  return groups;
}

// Which tensors are left out, and a word about each in the metadata.
std::vector<bool> drop_tied(const NamedTensors& tensors, Tied tied, SafetensorsMetadata& metadata) {
  std::vector<bool> dropped(tensors.size(), false);
  for (const auto& group : find_shared(tensors)) {
    const auto& kept = tensors[group.front()];
    std::vector<std::string> names;
    bool is_tied = true;
    for (size_t index : group) {
      names.push_back(tensors[index].key());
      is_tied &= is_same_view(tensors[index].value(), kept.value());
    }
    if (tied == Tied::kRefuse || !is_tied) {
      throw CheckpointError(
          fmt::format("{} share memory{}, which safetensors cannot express: {}clone what is to be written twice",
                      list(names), is_tied ? "" : " in part",
                      is_tied ? fmt::format("drop all but {} with .tied = ddp::Tied::kDrop, or ", kept.key()) : ""));
    }
    for (size_t index : group) {
      if (index == group.front()) continue;
      dropped[index] = true;
      metadata.emplace(tensors[index].key(), kept.key());
    }
  }
  return dropped;
}

std::vector<io::SafetensorsEntry> entries_of(const NamedTensors& tensors, const std::vector<bool>& dropped) {
  std::vector<io::SafetensorsEntry> entries;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (dropped[i]) continue;
    const torch::Tensor& tensor = tensors[i].value();
    entries.push_back({.name = tensors[i].key(), .dtype = tensor.scalar_type(), .sizes = tensor.sizes().vec()});
  }
  return entries;
}

void check_writable(const NamedTensors& tensors) {
  for (const auto& item : tensors) {
    const torch::Tensor& tensor = item.value();
    if (!tensor.defined()) throw CheckpointError(fmt::format("tensor {} is undefined", item.key()));
    if (tensor.layout() != torch::kStrided || tensor.is_meta() || !tensor.has_storage()) {
      throw CheckpointError(
          fmt::format("tensor {} has no plain storage (sparse, meta or of another backend)", item.key()));
    }
    if (!io::safetensors_dtype(tensor.scalar_type())) {
      throw CheckpointError(fmt::format("tensor {} has the dtype {}, which safetensors lacks", item.key(),
                                        c10::toString(tensor.scalar_type())));
    }
  }
}

}  // namespace

NamedTensors load_safetensors(const fs::path& path) {
  return as("load_safetensors", [&] { return load(path); });
}

SafetensorsMetadata safetensors_metadata(const fs::path& path) {
  return as("safetensors_metadata",
            [&] { return io::SafetensorsFile(io::file_system(), path, /*map=*/false).header().metadata; });
}

SafetensorsLoaded load_safetensors(const fs::path& path, const NamedTensors& into,
                                   const SafetensorsLoadOptions& options) {
  return as("load_safetensors", [&] {
    torch::NoGradGuard no_grad;
    const NamedTensors theirs = load(path);
    Matching matching = match(theirs, into);
    if (const std::string problems = matching.problems(options.strict); !problems.empty()) {
      throw CheckpointError(fmt::format("{}: does not fit: {}; nothing was changed", path.string(), problems));
    }
    for (Pair& pair : matching.pairs) pair.mine.copy_(pair.theirs);
    return std::move(matching.loaded);
  });
}

SafetensorsLoaded load_safetensors(const fs::path& path, torch::nn::Module& module,
                                   const SafetensorsLoadOptions& options) {
  return load_safetensors(path, tensors_of(module), options);
}

void save_safetensors(const fs::path& path, const NamedTensors& tensors, const SafetensorsMetadata& metadata,
                      const SafetensorsSaveOptions& options) {
  as("save_safetensors", [&] {
    torch::NoGradGuard no_grad;
    SafetensorsMetadata texts = metadata;
    texts.emplace("format", "pt");
    std::vector<io::SafetensorsEntry> entries;
    std::string header;
    try {
      check_writable(tensors);
      entries = entries_of(tensors, drop_tied(tensors, options.tied, texts));
      header = io::make_safetensors_header(entries, texts, path.string());
    } catch (const CheckpointError& error) {
      const std::string message = error.what();
      if (message.starts_with(path.string())) throw;
      throw CheckpointError(fmt::format("{}: {}", path.string(), message));
    }
    write_file_atomically(path, [&](const Append& append) {
      append(header.data(), header.size());
      for (const io::SafetensorsEntry& entry : entries) {
        const torch::Tensor plain = tensors[entry.name].resolve_conj().resolve_neg().cpu().contiguous();
        if (entry.bytes() > 0) append(plain.const_data_ptr(), entry.bytes());
      }
    });
  });
}

void save_safetensors(const fs::path& path, const torch::nn::Module& module, const SafetensorsMetadata& metadata,
                      const SafetensorsSaveOptions& options) {
  save_safetensors(path, tensors_of(module), metadata, options);
}

}  // namespace ddp
