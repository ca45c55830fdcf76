#include <fmt/format.h>
#include <fmt/ranges.h>

#include <utility>
#include <vector>

#include "ddp/collectives.h"
#include "ddp/error.h"
#include "ddp/join.h"

namespace ddp::detail {

JoinedRanks::JoinedRanks(std::shared_ptr<Replica> replica, JoinOptions options)
    : replica_(std::move(replica)), options_(options), averaged_(replica_->averaged()) {}

JoinedRanks::~JoinedRanks() { replica_->end_turns(); }

int JoinedRanks::next(bool have) {
  const ProcessGroup& group = replica_->group();
  if (group.size() == 1) return have ? 1 : 0;
  require_averaged();

  const auto everyone = all_gather(torch::full({1}, have ? 1 : 0, torch::kInt64).to(group.device()), group);
  std::vector<int> active, without;
  for (int rank = 0; rank < group.size(); ++rank) {
    (everyone[rank].item<int64_t>() != 0 ? active : without).push_back(rank);
  }
  if (active.empty()) {
    // Batches may have changed them on the ranks that had some.
    if (turns_ > 0) replica_->send_buffers(last_);
    replica_->end_turns();
    return 0;
  }
  if (options_.throw_on_early_end && !without.empty()) {
    throw Error(
        fmt::format("[ddp::join] {}: after {} turns rank {} has no more batches and rank {} has; give all ranks as "
                    "many, or allow it with {{.throw_on_early_end = false}}",
                    group.place().name(), turns_, fmt::join(without, ", "), fmt::join(active, ", ")));
  }
  ++turns_;
  last_ = active.back();
  averaged_ = replica_->averaged();
  replica_->begin_turn(options_.divide_by == DivideBy::kActive ? static_cast<int>(active.size()) : group.size(), last_);
  if (!have) replica_->shadow();
  return static_cast<int>(active.size());
}

void JoinedRanks::require_averaged() const {
  if (turns_ == 0) return;
  const int64_t backwards = replica_->averaged() - averaged_;
  if (backwards == 1) return;
  throw Error(
      fmt::format("[ddp::join] {}: turn {} had {} synchronised backwards of the model; run exactly one in each turn "
                  "that has a batch, and the others under no_sync()",
                  replica_->group().place().name(), turns_, backwards));
}

}  // namespace ddp::detail
