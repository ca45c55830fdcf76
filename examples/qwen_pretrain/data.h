// Training data: a long row of tokens, cut into windows. Text is read as bytes, so a token is a byte.
//
//   qwen::Windows data(qwen::read_text({"/usr/include"}), /*seq=*/256);
//   auto [tokens, next_tokens] = data.get_batch({0, 1, 2});       // int64, {3, 256} each
#pragma once

#include <torch/data/datasets/base.h>
#include <torch/data/example.h>

#include <filesystem>
#include <vector>

namespace qwen {

/// The bytes of the given files, uint8. Of a directory: its .h, .hpp, .txt and .md files, at any depth, in the order of
/// their paths. Stops after the file that brings the total to `limit`.
/// Throws ddp::DataError for a path that does not exist or holds no text.
torch::Tensor read_text(const std::vector<std::filesystem::path>& paths, size_t limit = 64 << 20);

/// `count` uniformly random tokens below `vocab_size`, int32. A generator of its own makes them the same on all ranks.
torch::Tensor random_tokens(int64_t count, int64_t vocab_size, uint64_t seed);

/// Window i holds the tokens [i * seq, (i + 1) * seq) and, as targets, their successors.
class Windows : public torch::data::datasets::BatchDataset<Windows, torch::data::Example<>> {
 public:
  /// `tokens` has one dimension and any integer type. Throws ddp::DataError when it is shorter than one window.
  Windows(torch::Tensor tokens, int64_t seq);

  torch::data::Example<> get_batch(c10::ArrayRef<size_t> rows) override;
  std::optional<size_t> size() const override;

 private:
  torch::Tensor tokens_;
  int64_t seq_;
};

}  // namespace qwen
