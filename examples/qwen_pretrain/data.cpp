#include "data.h"

#include <ATen/CPUGeneratorImpl.h>
#include <c10/util/StringUtil.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <string>

#include "ddp/error.h"

namespace qwen {
namespace fs = std::filesystem;
namespace {

constexpr std::array kTextExtensions = {".h", ".hpp", ".txt", ".md"};

std::vector<std::string> text_files(const fs::path& path) {
  if (fs::is_regular_file(path)) return {path.string()};
  if (!fs::is_directory(path)) throw ddp::DataError(c10::str(path.string(), ": no such file or directory"));
  std::vector<std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(path, fs::directory_options::skip_permission_denied)) {
    const auto extension = entry.path().extension().string();
    if (std::ranges::count(kTextExtensions, extension) && entry.is_regular_file())
      files.push_back(entry.path().string());
  }
  std::ranges::sort(files);  // directories list their entries in any order; ranks must agree
  return files;
}

void append_file(const std::string& file, std::vector<char>& text) {
  std::ifstream in(file, std::ios::binary | std::ios::ate);
  const auto size = static_cast<std::streamoff>(in.tellg());
  if (!in || size < 0) throw ddp::DataError(c10::str(file, ": cannot be read"));
  const size_t begin = text.size();
  text.resize(begin + static_cast<size_t>(size));
  if (!in.seekg(0).read(text.data() + begin, size)) throw ddp::DataError(c10::str(file, ": cannot be read to its end"));
}

}  // namespace

torch::Tensor read_text(const std::vector<fs::path>& paths, size_t limit) {
  std::vector<char> text;
  for (const auto& path : paths) {
    const size_t before = text.size();
    for (const auto& file : text_files(path)) {
      if (text.size() >= limit) break;
      append_file(file, text);
    }
    if (text.size() == before && text.size() < limit) {
      throw ddp::DataError(c10::str(path.string(), ": holds no text (of a directory, .h .hpp .txt .md are read)"));
    }
  }
  return torch::from_blob(text.data(), {static_cast<int64_t>(text.size())}, torch::kUInt8).clone();
}

torch::Tensor random_tokens(int64_t count, int64_t vocab_size, uint64_t seed) {
  return torch::randint(vocab_size, {count}, at::make_generator<at::CPUGeneratorImpl>(seed), torch::kInt32);
}

Windows::Windows(torch::Tensor tokens, int64_t seq) : tokens_(std::move(tokens)), seq_(seq) {
  if (tokens_.numel() <= seq) {
    throw ddp::DataError(c10::str("the data has ", tokens_.numel(), " tokens, fewer than one window of ", seq, " + 1"));
  }
}

torch::data::Example<> Windows::get_batch(c10::ArrayRef<size_t> rows) {
  std::vector<torch::Tensor> windows;
  for (const size_t row : rows) windows.push_back(tokens_.narrow(0, static_cast<int64_t>(row) * seq_, seq_ + 1));
  const auto batch = torch::stack(windows).to(torch::kInt64);
  return {batch.narrow(1, 0, seq_), batch.narrow(1, 1, seq_)};
}

std::optional<size_t> Windows::size() const { return static_cast<size_t>((tokens_.numel() - 1) / seq_); }

}  // namespace qwen
