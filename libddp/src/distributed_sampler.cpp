#include "ddp/distributed_sampler.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randperm.h>
#include <fmt/format.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <array>
#include <deque>
#include <limits>
#include <mutex>
#include <sstream>

#include "ddp/collectives.h"
#include "ddp/error.h"
#include "ddp/log.h"

namespace ddp {
namespace {

// The order of one epoch. An empty tensor is the identity.
torch::Tensor draw_order(size_t size, uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  // The draws do not depend on the dtype, so the smaller one gives Python's permutation in half the memory.
  auto dtype = size <= static_cast<size_t>(std::numeric_limits<int32_t>::max()) ? torch::kInt32 : torch::kInt64;
  return at::randperm(static_cast<int64_t>(size), generator, at::TensorOptions().dtype(dtype));
}

// What must be equal on all ranks, and must not change between runs.
constexpr std::array kAgreedNames = {"dataset_size", "seed", "shuffle", "drop_last"};
using Agreed = std::array<std::string, kAgreedNames.size()>;

Agreed agreed_values(size_t size, const DistributedSamplerOptions& options) {
  return {std::to_string(size), std::to_string(options.seed), options.shuffle ? "true" : "false",
          options.drop_last ? "true" : "false"};
}

void check_equal_on_all_ranks(size_t size, const ProcessGroup& group, const DistributedSamplerOptions& options) {
  if (group.size() == 1) return;
  std::string line;
  for (const auto& value : agreed_values(size, options)) line += value + ' ';
  std::vector<Agreed> all;
  for (const auto& text : all_gather_object(line, group)) {
    std::istringstream words(text);
    for (auto& value : all.emplace_back()) words >> value;
  }
  auto other = std::find_if(all.begin(), all.end(), [&](const Agreed& values) { return values != all[0]; });
  if (other == all.end()) return;
  auto i = static_cast<size_t>(std::mismatch(all[0].begin(), all[0].end(), other->begin()).first - all[0].begin());
  throw MismatchError(fmt::format(
      "[ddp::DistributedSampler] {}: {} is {} on rank 0 and {} on rank {}; pass the same value on all ranks, otherwise "
      "rows come twice or not at all",
      group.place().name(), kAgreedNames[i], all[0][i], (*other)[i], other - all.begin()));
}

// Batches of equal size that were handed out one after the other.
struct Run {
  size_t batch_size;
  size_t batches;
};

}  // namespace

struct DistributedSampler::Shared {
  size_t size;
  Place place;
  Options options;

  mutable std::mutex mutex;
  int64_t epoch = 0;
  size_t consumed = 0;
  bool begun = false;       // the next reset() is another epoch
  bool ever_begun = false;  // there was a reset() at all

  // The iteration that the loader is in. It is detached when the epoch was set anew meanwhile: it goes on in its own
  // order, and what is consumed of it does not count.
  torch::Tensor order;
  size_t start = 0;  // position in the epoch where it began
  size_t drawn = 0;  // rows that this rank has drawn of it
  size_t count = 0;  // rows that this rank has in it
  bool detached = true;
  std::deque<Run> handed_out;

  size_t world() const { return static_cast<size_t>(place.size); }

  size_t rows_per_rank(size_t from) const {
    size_t left = size - std::min(from, size);
    return options.drop_last ? left / world() : (left + world() - 1) / world();
  }

  void move_to(int64_t new_epoch, size_t position) {
    epoch = new_epoch;
    consumed = position;
    begun = false;
    detach();
  }

  void detach() {
    detached = true;
    handed_out.clear();
  }

  size_t row(size_t position) const {
    size_t i = position < size ? position : position % size;
    if (!order.defined()) return i;
    return order.scalar_type() == torch::kInt32 ? static_cast<size_t>(order.const_data_ptr<int32_t>()[i])
                                                : static_cast<size_t>(order.const_data_ptr<int64_t>()[i]);
  }
};

DistributedSampler::DistributedSampler(size_t dataset_size, const Place& place, Options options)
    : shared_(std::make_shared<Shared>()) {
  if (dataset_size == 0) {
    throw ConfigError(fmt::format("[ddp::DistributedSampler] {}: the data set has no rows", place.name()));
  }
  if (place.size < 1 || place.rank < 0 || place.rank >= place.size) {
    throw ConfigError(fmt::format("[ddp::DistributedSampler] {}: expected 0 <= rank < size", place.name()));
  }
  shared_->size = dataset_size;
  shared_->place = place;
  shared_->options = options;
}

DistributedSampler::DistributedSampler(size_t dataset_size, const ProcessGroup& group, Options options)
    : DistributedSampler((check_equal_on_all_ranks(dataset_size, group, options), dataset_size), group.place(),
                         options) {}

void DistributedSampler::set_epoch(int64_t epoch) {
  if (epoch < 0) {
    throw ConfigError(fmt::format("[ddp::DistributedSampler] {}: epoch {} is negative", shared_->place.name(), epoch));
  }
  std::lock_guard lock(shared_->mutex);
  shared_->move_to(epoch, 0);
}

int64_t DistributedSampler::epoch() const {
  std::lock_guard lock(shared_->mutex);
  return shared_->epoch;
}

void DistributedSampler::continue_epoch() {
  std::lock_guard lock(shared_->mutex);
  shared_->move_to(shared_->epoch, shared_->consumed);
}

void DistributedSampler::reset(std::optional<size_t> new_size) {
  Shared& s = *shared_;
  std::lock_guard lock(s.mutex);
  if (new_size && *new_size != s.size) {
    throw ConfigError(
        fmt::format("[ddp::DistributedSampler] {}: made for {} rows, reset for {}; make a new sampler for another "
                    "data set",
                    s.place.name(), s.size, *new_size));
  }
  if (s.begun) s.move_to(s.epoch + 1, 0);
  s.begun = s.ever_begun = true;
  s.order = torch::Tensor();  // before the new one is drawn, so that only one is ever held
  if (s.options.shuffle) s.order = draw_order(s.size, s.options.seed + static_cast<uint64_t>(s.epoch));
  s.start = s.consumed;
  s.drawn = 0;
  s.count = s.rows_per_rank(s.start);
  s.detached = false;
  s.handed_out.clear();
}

std::optional<std::vector<size_t>> DistributedSampler::next(size_t batch_size) {
  Shared& s = *shared_;
  std::lock_guard lock(s.mutex);
  size_t rows = std::min(batch_size, s.count - s.drawn);
  if (rows == 0) return std::nullopt;
  std::vector<size_t> batch(rows);
  size_t position = s.start + s.drawn * s.world() + static_cast<size_t>(s.place.rank);
  for (size_t& row : batch) {
    row = s.row(position);
    position += s.world();
  }
  s.drawn += rows;
  if (!s.detached) {
    if (s.handed_out.empty() || s.handed_out.back().batch_size != rows) s.handed_out.push_back({rows, 0});
    ++s.handed_out.back().batches;
  }
  return batch;
}

void DistributedSampler::consume(size_t batches) {
  Shared& s = *shared_;
  std::lock_guard lock(s.mutex);
  if (s.detached && s.ever_begun) return;
  while (batches > 0) {
    if (s.handed_out.empty()) {
      throw ConfigError(fmt::format(
          "[ddp::DistributedSampler] {}: a batch was used that this sampler did not hand out; give the loader this "
          "sampler, or loop with ddp::accumulate(loader, n, group)",
          s.place.name()));
    }
    Run& run = s.handed_out.front();
    size_t taken = std::min(batches, run.batches);
    s.consumed += taken * run.batch_size * s.world();
    batches -= taken;
    run.batches -= taken;
    if (run.batches == 0) s.handed_out.pop_front();
  }
}

void DistributedSampler::finish_epoch() {
  Shared& s = *shared_;
  std::lock_guard lock(s.mutex);
  if (s.detached) return;
  if (s.consumed == 0 || s.rows_per_rank(s.consumed) > 0) s.consumed = s.size;
  s.handed_out.clear();
  s.count = s.drawn;
}

void DistributedSampler::stop() {
  std::lock_guard lock(shared_->mutex);
  shared_->count = shared_->drawn;
}

size_t DistributedSampler::consumed() const {
  std::lock_guard lock(shared_->mutex);
  return shared_->consumed;
}

bool DistributedSampler::complete() const {
  std::lock_guard lock(shared_->mutex);
  return shared_->consumed > 0 && shared_->rows_per_rank(shared_->consumed) == 0;
}

size_t DistributedSampler::num_samples() const { return shared_->rows_per_rank(0); }
size_t DistributedSampler::dataset_size() const { return shared_->size; }
Place DistributedSampler::place() const { return shared_->place; }
const DistributedSampler::Options& DistributedSampler::options() const { return shared_->options; }

State DistributedSampler::state_dict() const {
  const Shared& s = *shared_;
  std::lock_guard lock(s.mutex);
  return State::dict({{"epoch", s.epoch},
                      {"consumed", s.consumed},
                      {"dataset_size", s.size},
                      {"seed", static_cast<int64_t>(s.options.seed)},
                      {"shuffle", s.options.shuffle},
                      {"drop_last", s.options.drop_last},
                      {"world_size", s.place.size}});
}

void DistributedSampler::load_state_dict(const State& state) {
  Shared& s = *shared_;
  DistributedSamplerOptions saved{.shuffle = state.at("shuffle").as_bool(),
                                  .seed = static_cast<uint64_t>(state.at("seed").as_int()),
                                  .drop_last = state.at("drop_last").as_bool()};
  auto theirs = agreed_values(static_cast<size_t>(state.at("dataset_size").as_int()), saved);
  auto ours = agreed_values(s.size, s.options);
  for (size_t i = 0; i < ours.size(); ++i) {
    if (ours[i] == theirs[i]) continue;
    throw DataError(fmt::format(
        "[ddp::DistributedSampler] {}: {} was {} when the position was saved and is {} now, so the position means "
        "other rows; use the saved value, or begin without the sampler's state",
        s.place.name(), kAgreedNames[i], theirs[i], ours[i]));
  }
  int64_t epoch = state.at("epoch").as_int();
  int64_t consumed = state.at("consumed").as_int();
  int64_t world_size = state.at("world_size").as_int();
  // Padding ends less than one row per rank behind the last row.
  if (epoch < 0 || consumed < 0 || world_size < 1 || consumed >= static_cast<int64_t>(s.size) + world_size) {
    throw DataError(fmt::format(
        "[ddp::DistributedSampler] {}: the saved position is none: epoch {}, {} rows used of {}, world size {}",
        s.place.name(), epoch, consumed, s.size, world_size));
  }
  if (world_size != s.place.size) {
    log::info(s.place, fmt::format("[ddp::DistributedSampler] saved with {} ranks, goes on with {} at row {} of {} in "
                                   "epoch {}",
                                   world_size, s.place.size, consumed, s.size, epoch));
  }
  std::lock_guard lock(s.mutex);
  s.move_to(epoch, static_cast<size_t>(consumed));
}

void DistributedSampler::save(torch::serialize::OutputArchive& archive) const {
  for (const auto& [key, value] : state_dict().as_dict()) {
    archive.write(key.as_string(), value.is_bool() ? c10::IValue(value.as_bool()) : c10::IValue(value.as_int()));
  }
}

void DistributedSampler::load(torch::serialize::InputArchive& archive) {
  State state = State::dict();
  for (const auto& [key, value] : state_dict().as_dict()) {
    c10::IValue read;
    archive.read(key.as_string(), read);
    state.set(key, value.is_bool() ? State(read.toBool()) : State(read.toInt()));
  }
  load_state_dict(state);
}

}  // namespace ddp
