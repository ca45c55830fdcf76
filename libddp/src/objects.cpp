// The collectives of strings and decisions, on top of those of tensors.
#include <algorithm>
#include <cstring>

#include "ddp/collectives.h"

namespace ddp {
namespace {

torch::Tensor tensor_of(const std::string& bytes) {
  auto tensor = torch::empty({static_cast<int64_t>(bytes.size())}, torch::kUInt8);
  std::memcpy(tensor.data_ptr(), bytes.data(), bytes.size());
  return tensor;
}

std::string string_of(const torch::Tensor& tensor, int64_t size) {
  return std::string(static_cast<const char*>(tensor.data_ptr()), static_cast<size_t>(size));
}

}  // namespace

std::string broadcast_object(const std::string& bytes, const ProcessGroup& group, int root) {
  auto size = torch::tensor({static_cast<int64_t>(bytes.size())});
  broadcast(size, group, root);
  if (group.size() == 1) return bytes;
  auto content = group.rank() == root ? tensor_of(bytes) : torch::empty({size.item<int64_t>()}, torch::kUInt8);
  broadcast(content, group, root);
  return string_of(content, content.numel());
}

std::vector<std::string> all_gather_object(const std::string& bytes, const ProcessGroup& group) {
  if (group.size() == 1) return {bytes};
  const auto sizes = all_gather(torch::tensor({static_cast<int64_t>(bytes.size())}), group);
  int64_t largest = 0;
  for (const auto& size : sizes) largest = std::max(largest, size.item<int64_t>());
  auto padded = torch::zeros({largest}, torch::kUInt8);
  std::memcpy(padded.data_ptr(), bytes.data(), bytes.size());
  const auto contents = all_gather(padded, group);
  std::vector<std::string> objects;
  for (int rank = 0; rank < group.size(); ++rank) {
    objects.push_back(string_of(contents[rank], sizes[rank].item<int64_t>()));
  }
  return objects;
}

bool any(bool value, const ProcessGroup& group) {
  auto flag = torch::tensor({value ? 1 : 0});
  all_reduce(flag, group, ReduceOp::kMax);
  return flag.item<int64_t>() != 0;
}

bool all(bool value, const ProcessGroup& group) { return !any(!value, group); }

}  // namespace ddp
