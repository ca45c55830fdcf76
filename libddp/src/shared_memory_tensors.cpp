#include "shared_memory_tensors.h"

#include <ATen/ops/from_blob.h>
#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <random>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "ddp/collectives.h"
#include "shm/arena.h"
#include "shm/layout.h"

namespace ddp::detail {
namespace {

using torch::Tensor;
using Token = std::array<uint64_t, 2>;

constexpr size_t kPage = 4096;

size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

// What each storage holds on to. Its deleter is also what tells such a storage from others.
using Memory = std::shared_ptr<shm::Arena>;

void release(void* memory) { delete static_cast<Memory*>(memory); }

// Where each tensor lies: a page with the token first, then one after another on lines of their own.
struct Plan {
  explicit Plan(const std::vector<Tensor>& like) {
    for (const Tensor& tensor : like) {
      offsets.push_back(bytes);
      bytes = round_up(bytes + tensor.nbytes(), shm::kLine);
    }
    bytes = round_up(bytes, kPage);
  }

  std::vector<size_t> offsets;
  size_t bytes = kPage;
};

// How rank 0 tells the others where its memory is, or why there is none.
struct Invitation {
  pid_t pid = 0;
  int fd = -1;
  Token token = {};
  std::string problem = "";

  std::string text() const { return fmt::format("{} {} {} {} {}", pid, fd, token[0], token[1], problem); }

  static Invitation parse(const std::string& text) {
    Invitation made;
    std::istringstream in(text);
    in >> made.pid >> made.fd >> made.token[0] >> made.token[1] >> std::ws;
    std::getline(in, made.problem);
    return made;
  }
};

shm::Arena create(size_t bytes, Invitation& invitation) {
  try {
    auto arena = shm::Arena::create(bytes);
    std::random_device random;
    for (auto& part : invitation.token) part = static_cast<uint64_t>(random()) << 32 | random();
    std::memcpy(arena.data(), invitation.token.data(), sizeof(Token));
    invitation.pid = ::getpid();
    invitation.fd = arena.fd();
    return arena;
  } catch (const std::exception& e) {
    invitation.problem = e.what();
    return {};
  }
}

// The token tells rank 0's memory from another's that took its place meanwhile.
shm::Arena open(size_t bytes, const Invitation& invitation) {
  auto arena = shm::Arena::open(invitation.pid, invitation.fd, bytes);
  if (std::memcmp(arena.data(), invitation.token.data(), sizeof(Token)) != 0) {
    throw std::runtime_error("it is another's memory");
  }
  return arena;
}

}  // namespace

SharedTensors make_shared_tensors(const std::vector<Tensor>& like, const ProcessGroup& group) {
  const Plan plan(like);
  shm::Arena arena;
  Invitation invitation;
  if (group.is_root()) arena = create(plan.bytes, invitation);
  invitation = Invitation::parse(broadcast_object(invitation.text(), group));
  if (!invitation.problem.empty()) return {{}, fmt::format("rank 0: {}", invitation.problem)};

  std::string problem;
  if (!group.is_root()) {
    try {
      arena = open(plan.bytes, invitation);
    } catch (const std::exception& e) {
      problem = fmt::format("rank {} cannot open rank 0's memory: {}", group.rank(), e.what());
    }
  }
  for (const auto& other : all_gather_object(problem, group)) {
    if (!other.empty()) return {{}, other};
  }
  arena.close_fd();  // all have opened it

  const auto memory = std::make_shared<shm::Arena>(std::move(arena));
  SharedTensors made;
  for (size_t i = 0; i < like.size(); ++i) {
    made.tensors.push_back(at::for_blob(memory->data() + plan.offsets[i], like[i].sizes())
                               .strides(like[i].strides())
                               .context(new Memory(memory), &release)
                               .options(torch::dtype(like[i].scalar_type()))
                               .make_tensor());
  }
  return made;
}

bool is_shared_tensor(const Tensor& tensor) {
  return tensor.has_storage() && tensor.storage().data_ptr().get_deleter() == &release;
}

}  // namespace ddp::detail
