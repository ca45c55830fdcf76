#include "backend/gloo.h"

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "backend/no_sigpipe.h"

namespace ddp::detail {
namespace {

// ProcessGroupGloo numbers its collectives and gives the number to Gloo as the tag of their messages.
class TaggedGloo : public c10d::ProcessGroupGloo {
 public:
  using ProcessGroupGloo::ProcessGroupGloo;
  void set_next_tag(uint32_t tag) { collectiveCounter_ = tag; }
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_gloo(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                            std::chrono::milliseconds timeout) {
  const NoSigpipe guard;
  auto options = c10d::ProcessGroupGloo::Options::create_default(timeout);
  return c10::make_intrusive<TaggedGloo>(store, rank, size, options);
}

void set_next_tag(c10d::Backend& gloo, uint32_t tag) { static_cast<TaggedGloo&>(gloo).set_next_tag(tag); }

}  // namespace ddp::detail
