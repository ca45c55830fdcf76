// Saving: what every rank hands over, what rank 0 makes of it, and what all are told.
#include <fmt/format.h>

#include <chrono>
#include <utility>

#include "checkpoint_contents.h"
#include "checkpointer_impl.h"
#include "ddp/collectives.h"
#include "ddp/error.h"
#include "ddp/version.h"
#include "failure_of.h"
#include "io/pickle.h"

namespace ddp {
namespace {

namespace fs = std::filesystem;
using detail::failure_of;

State bytes(std::string data) { return State::Bytes{std::move(data)}; }

// What rank 0 tells all at the end of a save.
struct Outcome {
  std::string earlier;  // why what was being written was not saved
  std::string failure;  // the same of this one
  std::string name;     // of the file
  bool in_background = false;

  std::string encode() const {
    return io::pickle(State::dict({{"earlier", bytes(earlier)},
                                   {"failure", bytes(failure)},
                                   {"name", bytes(name)},
                                   {"in_background", in_background}}))
        .data;
  }
  static Outcome decode(const std::string& data) {
    const State state = io::unpickle(data, nullptr, "rank 0's outcome");
    return {.earlier = state.at("earlier").as_bytes(),
            .failure = state.at("failure").as_bytes(),
            .name = state.at("name").as_bytes(),
            .in_background = state.at("in_background").as_bool()};
  }
};

}  // namespace

void Checkpointer::Impl::save(When when) {
  if (pending && pending->step == step) {  // it is on its way
    const std::string failure = settle();
    if (!failure.empty()) throw CheckpointError(fmt::format("{} {}", who(), failure));
  }
  if (saved_step == step) return;

  const auto start = std::chrono::steady_clock::now();
  detail::RankPart part{.step = step, .random = {}, .failure = ""};
  part.failure = failure_of([&] { part.random = detail::random_state(group.device()); });
  const auto parts = all_gather_object(detail::encode(part), group);

  Outcome outcome;
  if (group.is_root()) {
    outcome.earlier = writer.finish();
    outcome.failure = failure_of([&] {
      writer.open(/*may_fail=*/false);
      detail::Snapshot snapshot = capture(parts);
      outcome.name = snapshot.name.text();
      outcome.in_background = when == When::kInBackground && writer.start(snapshot, start);
      if (!outcome.in_background) writer.write(snapshot);
    });
  }
  outcome = Outcome::decode(broadcast_object(outcome.encode(), group));

  const std::string earlier = pending ? finished(outcome.earlier) : "";
  if (!outcome.failure.empty()) {
    throw CheckpointError(fmt::format("{} step {} was not saved to {}: {}; the previous checkpoint stands{}", who(),
                                      step, directory.string(), outcome.failure,
                                      earlier.empty() ? "" : fmt::format(". Before that, {}", earlier)));
  }
  if (outcome.in_background) {
    pending = {.step = step, .name = outcome.name};
  } else {
    saved_step = step;
    last_saved = directory / outcome.name;
  }
  if (!earlier.empty()) {
    throw CheckpointError(fmt::format("{} {}; step {} {}", who(), earlier, step,
                                      outcome.in_background ? "is being written" : "has been saved"));
  }
}

std::string Checkpointer::Impl::settle() {
  if (!pending) return "";
  return finished(broadcast_object(group.is_root() ? writer.finish() : "", group));
}

// What was being written is no longer: `failure` is why it was not saved.
std::string Checkpointer::Impl::finished(const std::string& failure) {
  const Pending done = *std::exchange(pending, std::nullopt);
  if (failure.empty()) {
    saved_step = done.step;
    last_saved = directory / done.name;
    return "";
  }
  return fmt::format("step {} was not saved to {}: {}; the checkpoint before it stands", done.step, directory.string(),
                     failure);
}

void Checkpointer::Impl::pin(const std::string& name, std::optional<double> metric) {
  save(When::kNow);
  const std::string file = last_saved->filename().string();
  std::string failure;
  if (group.is_root()) {
    failure = failure_of([&] {
      writer.open(/*may_fail=*/false);
      writer.pin(name, file, metric);
    });
  }
  failure = broadcast_object(failure, group);
  if (!failure.empty()) {
    throw CheckpointError(fmt::format("{} {} was saved, but not pinned as \"{}\": {}", who(), file, name, failure));
  }
}

detail::Snapshot Checkpointer::Impl::capture(const std::vector<std::string>& parts) const {
  std::vector<detail::RandomState> random;
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    detail::RankPart part = detail::decode_part(parts[rank]);
    if (!part.failure.empty()) throw CheckpointError(fmt::format("rank {}: {}", rank, part.failure));
    if (part.step != step) {
      throw CheckpointError(fmt::format("rank {} has taken {} steps, rank 0 {}", rank, part.step, step));
    }
    random.push_back(std::move(part.random));
  }

  detail::CheckpointName name{.epoch = epoch, .step = step};
  State::Dict top_level, others, orders;
  std::vector<std::string> ordered;  // the keys that are Python's OrderedDict
  std::vector<std::pair<std::string, const torch::nn::Module*>> modules;
  for (const Tracked& item : tracked) {
    if (item.object.module()) modules.emplace_back(item.name, item.object.module());
  }
  bool has_epoch = false;
  for (const Tracked& item : tracked) {
    State state = item.object.save();
    if (item.object.module()) ordered.push_back(item.key());
    if (item.object.optimizer()) {
      orders.items.emplace_back(item.name, detail::parameter_order(*item.object.optimizer(), modules));
    }
    if (item.is_top_level()) {
      top_level.items.emplace_back(item.key(), std::move(state));
      continue;
    }
    const State* its_epoch = state.is_dict() ? state.find("epoch") : nullptr;
    if (!has_epoch && its_epoch && its_epoch->is_int()) {
      has_epoch = true;
      name.epoch = its_epoch->as_int();
    }
    others.items.emplace_back(item.name, std::move(state));
  }

  State libddp = State::dict({{"format", detail::kCheckpointFormat},
                              {"version", version()},
                              {"world_size", group.size()},
                              {"tracked", std::move(others)},
                              {"parameter_order", std::move(orders)}});
  detail::set_random_states(libddp, random);
  State all = State::dict();
  all.set("epoch", name.epoch);
  all.set("step", step);
  for (auto& [key, state] : top_level.items) all.set(key, std::move(state));
  all.set("loss", loss ? State(*loss) : State());
  all.set(detail::kLibddpKey, std::move(libddp));
  return {.name = name, .pickled = io::pickle(all, ordered)};
}

}  // namespace ddp
