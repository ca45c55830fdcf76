// Model weights to and from safetensors, the file format of Hugging Face.
//
//   ddp::NamedTensors weights = ddp::load_safetensors("model.safetensors");     // or a folder, or the index of shards
//   ddp::load_safetensors("model.safetensors", *model);                         // strict: names and shapes must fit
//   ddp::save_safetensors("out.safetensors", *model, {}, {.tied = ddp::Tied::kDrop});
//   from safetensors.torch import load_file; load_file("out.safetensors")       # in Python
//
// Format: https://github.com/huggingface/safetensors, "Format". Files written here are, byte for byte, those of the
// Python package 0.8, as long as there is one entry of metadata at most (the package writes those in any order).
// Every failure is a CheckpointError naming the file and the place. The functions may be called from several threads.
#pragma once

#include <torch/nn/module.h>
#include <torch/ordered_dict.h>
#include <torch/types.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace ddp {

/// Tensors by name, in order.
using NamedTensors = torch::OrderedDict<std::string, torch::Tensor>;

/// The free text of a file, its key "__metadata__".
using SafetensorsMetadata = std::map<std::string, std::string>;

/// Rules for loading into tensors that exist.
struct SafetensorsLoadOptions {
  /// A name that only the file or only the program has is an error; false reports it in the result.
  bool strict = true;
};

/// What `load_safetensors` found beside tensors that fit.
struct SafetensorsLoaded {
  std::vector<std::string> missing;     ///< names of the program that the file does not have; they were not changed
  std::vector<std::string> unexpected;  ///< names of the file that the program does not have
  std::vector<std::string> converted;   ///< names whose dtype was converted to the program's
};

/// The tensors of a file on the CPU, in the order of their data. `path` is a file; the index of a sharded model
/// ("model.safetensors.index.json"), whose shards are read in the order in which it names them; or a folder with
/// model.safetensors or that index.
///
/// The file is mapped: a tensor is a view of its pages, copied on write, and lives after the file was replaced or
/// removed. A tensor whose place is no multiple of its element's size is copied (files of the Python package have
/// none). The file must not be truncated while its tensors are in use: the kernel would end the process.
///
/// A file is read only if all of it makes sense: a header within the file, of UTF-8, with each name once; known
/// dtypes; data that covers the rest of the file without hole or overlap. Memory beyond the mapping is at most the
/// file's size + 16 MiB, whatever the file says. Refused, though the format has them: 4 and 6 bit floats; fields
/// of a tensor other than dtype, shape and data_offsets; names and texts above 1 MiB; and files with so many empty
/// or tiny tensors that describing them takes more memory than that.
NamedTensors load_safetensors(const std::filesystem::path& path);

/// The key "__metadata__" of one file, empty where there is none.
SafetensorsMetadata safetensors_metadata(const std::filesystem::path& path);

/// Copies the tensors of a file or of shards into those of `into`, to their dtype and device. Names may begin with
/// "module." on either side, all of them or none. All shapes must be equal. Names of `into` that share memory are one
/// tensor (tied weights): the file may have any of them, and if it has several they must be equal.
///
/// Nothing is changed unless everything fits: throws CheckpointError that lists what does not.
SafetensorsLoaded load_safetensors(const std::filesystem::path& path, const NamedTensors& into,
                                   const SafetensorsLoadOptions& options = {});
/// The same for a module's parameters and buffers.
SafetensorsLoaded load_safetensors(const std::filesystem::path& path, torch::nn::Module& module,
                                   const SafetensorsLoadOptions& options = {});

/// What to do with names that share memory, which the format cannot express.
enum class Tied {
  kRefuse,  ///< an error that lists them, as in Python's save_file
  kDrop,    ///< the first of them is written, the others are named in the metadata, as in Python's save_model. (That
            ///< keeps the first by the alphabet; transformers wants the embedding, which comes first in the model.)
};

struct SafetensorsSaveOptions {
  Tied tied = Tied::kRefuse;
};

/// Writes `path`, whole or not at all (see atomic_file.h). Any device, any strides; conjugated and negated views are
/// resolved, one tensor at a time. `metadata` gets "format": "pt" unless it has a "format": transformers asks for it.
///
/// Throws CheckpointError naming the tensor: one without plain storage (sparse, meta, quantized), a dtype that the
/// format lacks (complex128, complex32), a name that is no UTF-8 or is "__metadata__", a header above 100 MB, or
/// memory that names share in part only.
void save_safetensors(const std::filesystem::path& path, const NamedTensors& tensors,
                      const SafetensorsMetadata& metadata = {}, const SafetensorsSaveOptions& options = {});
/// The same of a module's parameters and buffers, in the module's own names.
void save_safetensors(const std::filesystem::path& path, const torch::nn::Module& module,
                      const SafetensorsMetadata& metadata = {}, const SafetensorsSaveOptions& options = {});

}  // namespace ddp
