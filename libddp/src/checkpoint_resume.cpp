// Resuming: rank 0 chooses a file, all ranks load it, or none does.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/types.h>

#include "checkpoint_best.h"
#include "checkpoint_contents.h"
#include "checkpoint_directory.h"
#include "checkpointer_impl.h"
#include "ddp/collectives.h"
#include "ddp/error.h"
#include "ddp/log.h"
#include "ddp/version.h"
#include "failure_of.h"
#include "io/pickle.h"
#include "io/torch_file.h"

namespace ddp {
namespace {

namespace fs = std::filesystem;
using detail::failure_of;

// How often the link may move while its target is looked for: only beside a run that saves, from a directory that
// cannot be locked.
constexpr int kMoves = 10;

State bytes(std::string data) { return State::Bytes{std::move(data)}; }

// Where an object of the user's stands, for files that do not have it: from Python, which has no word for it.
State moved_to(State state, int64_t epoch, int64_t step) {
  if (!state.is_dict()) return state;
  if (const State* value = state.find("epoch"); value && value->is_int()) state.set("epoch", epoch);
  if (const State* value = state.find("step"); value && value->is_int()) state.set("step", step);
  return state;
}

}  // namespace

struct Checkpointer::Impl::Loaded {
  State state;
  Remarks remarks, warnings;
};

struct Checkpointer::Impl::Decision {
  std::string failure;  // why nothing can be loaded
  std::string file;     // empty: a fresh start
  bool through_link = false;
  bool is_latest = false;
  std::optional<double> best;  // metric of checkpoint_best.pt

  std::string encode() const {
    return io::pickle(State::dict({{"failure", bytes(failure)},
                                   {"file", bytes(file)},
                                   {"through_link", through_link},
                                   {"is_latest", is_latest},
                                   {"best", best ? State(*best) : State()}}))
        .data;
  }
  static Decision decode(const std::string& data) {
    const State state = io::unpickle(data, nullptr, "rank 0's decision");
    return {.failure = state.at("failure").as_bytes(),
            .file = state.at("file").as_bytes(),
            .through_link = state.at("through_link").as_bool(),
            .is_latest = state.at("is_latest").as_bool(),
            .best = state.at("best").is_null() ? std::nullopt : std::optional(state.at("best").as_double())};
  }
};

Resumed Checkpointer::resume() {
  Impl& impl = *impl_;
  impl.settle_before_loading();
  Impl::Decision decision;
  std::optional<Impl::Loaded> loaded;
  if (impl.group.is_root()) {
    const std::string failure = failure_of([&] {
      impl.writer.open(/*may_fail=*/true);
      decision = impl.choose(loaded);
      decision.best = impl.find_best();
    });
    if (!failure.empty()) decision.failure = failure;
  }
  const Resumed resumed = impl.follow(std::move(decision), std::move(loaded));
  if (impl.group.is_root()) impl.sweep();
  return resumed;
}

Resumed Checkpointer::resume(const fs::path& file) {
  Impl& impl = *impl_;
  impl.settle_before_loading();
  Impl::Decision decision{
      .failure = "", .file = file.string(), .through_link = true, .is_latest = false, .best = std::nullopt};
  if (impl.group.is_root()) decision.best = impl.find_best();
  return impl.follow(std::move(decision), std::nullopt);
}

// Loading falls back by itself, so a failed save is no reason against it.
void Checkpointer::Impl::settle_before_loading() {
  const std::string failure = settle();
  if (!failure.empty() && group.is_root()) log::warn(group, "[ddp::Checkpointer] " + failure);
}

std::optional<double> Checkpointer::Impl::find_best() const {
  std::optional<double> metric;
  const std::string problem = failure_of([&] {
    const auto record = detail::read_best(directory);
    if (!record) return;
    metric = record->metric;
    // A kill between the record and the link.
    if (writer.locked() && !detail::linked_checkpoints(directory).contains(record->checkpoint)) {
      detail::pin(directory, detail::kBestPin, record->checkpoint);
    }
  });
  if (!problem.empty()) log::warn(group, "[ddp::Checkpointer] " + problem);
  return metric;
}

void Checkpointer::Impl::sweep() const {
  const std::string problem = failure_of([&] { detail::sweep_temporaries(directory); });
  if (!problem.empty()) log::warn(group, "[ddp::Checkpointer] " + problem);
}

Checkpointer::Impl::Decision Checkpointer::Impl::choose(std::optional<Loaded>& loaded) const {
  for (int move = 1;; ++move) {
    const detail::Latest latest = detail::resolve_latest(directory);
    std::vector<std::string> candidates, rejected;
    if (!latest.problem.empty()) rejected.push_back(fmt::format("{} {}", detail::kLatestName, latest.problem));
    if (!latest.name.empty()) candidates.push_back(latest.name);
    for (const auto& name : detail::list_checkpoints(directory)) {
      if (name.text() != latest.name) candidates.push_back(name.text());
    }

    for (const std::string& name : candidates) {
      const std::string failure = failure_of([&] { loaded = read(directory / name, /*through_link=*/false); });
      if (!failure.empty()) {
        rejected.push_back(failure);
        continue;
      }
      if (!rejected.empty()) {
        log::warn(group, fmt::format("[ddp::Checkpointer] falling back to {}: {}", name, fmt::join(rejected, "; ")));
      }
      // A plain file in the link's place is loaded, and the next save puts a link there.
      const bool is_latest = name == latest.name && detail::CheckpointName::parse(name).has_value();
      return {.failure = "",
              .file = (directory / name).string(),
              .through_link = false,
              .is_latest = is_latest,
              .best = std::nullopt};
    }
    if (rejected.empty()) return {};
    if (!writer.locked() && move < kMoves && detail::resolve_latest(directory).name != latest.name) continue;
    throw CheckpointError(fmt::format(
        "no checkpoint in {} can be used: {}. To start anew, give another directory or move what is there away",
        directory.string(), fmt::join(rejected, "; ")));
  }
}

Resumed Checkpointer::Impl::follow(Decision decision, std::optional<Loaded> loaded) {
  decision = Decision::decode(broadcast_object(decision.encode(), group));
  if (!decision.failure.empty()) throw CheckpointError(fmt::format("{} {}", who(), decision.failure));

  Resumed resumed;
  if (!decision.file.empty()) {
    std::string failure = failure_of([&] {
      if (!loaded) loaded = read(decision.file, decision.through_link);
    });
    agree(failure, decision.file + " was not loaded, and nothing was changed");
    failure = failure_of([&] { apply(loaded->state); });
    agree(failure, decision.file + " was loaded in part only, this process should end");
    if (group.is_root()) {
      for (const auto& warning : loaded->warnings) log::warn(group, "[ddp::Checkpointer] " + warning);
    }
    for (const auto& remark : loaded->remarks) log::info(group, "[ddp::Checkpointer] " + remark);
    resumed = {.found = true, .step = step, .epoch = epoch, .path = decision.file};
    log::info(group, fmt::format("resumed from {}: epoch {}, step {}", decision.file, epoch, step));
  }
  // A step counts as saved when the link says so: after a fallback `save` writes again and mends it.
  saved_step = decision.is_latest ? std::optional(step) : std::nullopt;
  last_saved = decision.is_latest ? std::optional(fs::path(decision.file)) : std::nullopt;
  best = decision.best;
  return resumed;
}

Checkpointer::Impl::Loaded Checkpointer::Impl::read(const fs::path& file, bool through_link) const {
  Loaded loaded;
  loaded.state = io::read_torch_file(file.string(), through_link);
  const std::string failure = failure_of([&] { check(loaded); });
  if (!failure.empty()) throw CheckpointError(fmt::format("{}: {}", file.string(), failure));
  return loaded;
}

void Checkpointer::Impl::check(Loaded& loaded) const {
  const State& state = loaded.state;
  detail::counter(state, "epoch");
  detail::counter(state, "step");
  const State* libddp = state.find(detail::kLibddpKey);
  if (libddp && libddp->at("format").as_int() > detail::kCheckpointFormat) {
    throw CheckpointError(fmt::format("format {} of libddp {}, this is libddp {}, which knows format {}",
                                      libddp->at("format").as_int(), libddp->at("version").as_string(), version(),
                                      detail::kCheckpointFormat));
  }
  if (libddp) detail::random_states(*libddp);

  std::vector<std::pair<std::string, const torch::nn::Module*>> modules;
  std::vector<std::string> not_there;
  for (const Tracked& item : tracked) {
    if (item.object.module()) modules.emplace_back(item.name, item.object.module());
    if (item.is_top_level() && !state.find(item.key())) {
      throw CheckpointError(fmt::format("the key \"{}\" is missing", item.key()));
    }
    if (!item.is_top_level() && !(libddp && libddp->at("tracked").find(item.name))) not_there.push_back(item.name);
  }
  const LoadOptions load{.optimizer_options_from_file = options.optimizer_options_from_file};
  for (const Tracked& item : tracked) {
    if (!item.is_top_level()) continue;
    const std::string failure = failure_of([&] {
      for (const auto& remark : item.object.check(*state.find(item.key()), load)) {
        loaded.remarks.push_back(fmt::format("{}: {}", item.name, remark));
      }
      const State* order = libddp && item.object.optimizer() ? libddp->at("parameter_order").find(item.name) : nullptr;
      if (order) detail::check_parameter_order(detail::parameter_order(*item.object.optimizer(), modules), *order);
    });
    if (!failure.empty()) throw CheckpointError(fmt::format("{}: {}", item.key(), failure));
  }
  if (!libddp) {
    if (not_there.empty()) not_there.push_back("anything else");
    loaded.warnings.push_back(
        fmt::format("the file has no key \"{}\" (another program saved it): random states are not "
                    "in it, nor the state of {}",
                    detail::kLibddpKey, fmt::join(not_there, ", ")));
  } else if (!not_there.empty()) {
    loaded.warnings.push_back(
        fmt::format("the file does not have {}, which stays as it is", fmt::join(not_there, ", ")));
  }
}

void Checkpointer::Impl::apply(const State& state) {
  const int64_t file_epoch = detail::counter(state, "epoch"), file_step = detail::counter(state, "step");
  const LoadOptions load{.optimizer_options_from_file = options.optimizer_options_from_file};
  const State* libddp = state.find(detail::kLibddpKey);
  for (const Tracked& item : tracked) {
    if (item.is_top_level()) {
      item.object.load(state.at(item.key()), load);
    } else if (!libddp) {
      item.object.load(moved_to(item.object.save(), file_epoch, file_step), load);
    } else if (const State* saved = libddp->at("tracked").find(item.name)) {
      item.object.load(*saved, load);
    }
  }
  if (libddp) {
    const auto random = detail::random_states(*libddp);
    const auto rank = static_cast<size_t>(group.rank());
    if (rank < random.size()) {
      detail::set_random_state(random[rank], group.device());
    } else {
      log::warn(group,
                fmt::format("[ddp::Checkpointer] the file has random states of {} ranks; this rank keeps its own",
                            random.size()));
    }
  }
  step = file_step;
  epoch = file_epoch;
  const State* its_loss = state.find("loss");
  const bool has_loss = its_loss && (its_loss->is_double() || its_loss->is_int());
  loss = has_loss ? std::optional(its_loss->as_double()) : std::nullopt;
}

void Checkpointer::Impl::agree(const std::string& failure, const std::string& what) const {
  const auto failures = all_gather_object(failure, group);
  for (size_t rank = 0; rank < failures.size(); ++rank) {
    if (!failures[rank].empty()) {
      throw CheckpointError(fmt::format("{} {}: rank {}: {}", who(), what, rank, failures[rank]));
    }
  }
}

}  // namespace ddp
