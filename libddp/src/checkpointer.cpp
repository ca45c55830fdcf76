#include "ddp/checkpointer.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/types.h>

#include <algorithm>
#include <chrono>

#include "checkpoint_contents.h"
#include "checkpoint_directory.h"
#include "ddp/atomic_file.h"
#include "ddp/collectives.h"
#include "ddp/error.h"
#include "ddp/log.h"
#include "ddp/version.h"
#include "io/pickle.h"
#include "io/torch_file.h"

namespace ddp {
namespace {

namespace fs = std::filesystem;

// The text of what an action throws. None of them communicates, so every rank comes to tell the others.
template <class Action>
std::string failure_of(Action action) {
  try {
    action();
  } catch (const std::exception& error) {
    return *error.what() ? error.what() : "an exception without a message";
  } catch (...) {
    return "an exception that is no std::exception";
  }
  return "";
}

State bytes(std::string data) { return State::Bytes{std::move(data)}; }

// Where an object of the user's stands, for files that do not have it: from Python, which has no word for it.
State moved_to(State state, int64_t epoch, int64_t step) {
  if (!state.is_dict()) return state;
  if (const State* value = state.find("epoch"); value && value->is_int()) state.set("epoch", epoch);
  if (const State* value = state.find("step"); value && value->is_int()) state.set("step", step);
  return state;
}

}  // namespace

struct Checkpointer::Snapshot {
  detail::CheckpointName name;
  State state;
  std::vector<std::string> ordered;  // the keys that are Python's OrderedDict
};

struct Checkpointer::Loaded {
  State state;
  Remarks remarks, warnings;
};

struct Checkpointer::Decision {
  std::string failure;  // why nothing can be loaded
  std::string file;     // empty: a fresh start
  bool through_link = false;
  bool is_latest = false;

  std::string encode() const {
    return io::pickle(State::dict({{"failure", bytes(failure)},
                                   {"file", bytes(file)},
                                   {"through_link", through_link},
                                   {"is_latest", is_latest}}))
        .data;
  }
  static Decision decode(const std::string& data) {
    const State state = io::unpickle(data, nullptr, "rank 0's decision");
    return {.failure = state.at("failure").as_bytes(),
            .file = state.at("file").as_bytes(),
            .through_link = state.at("through_link").as_bool(),
            .is_latest = state.at("is_latest").as_bool()};
  }
};

Checkpointer::Checkpointer(fs::path directory, ProcessGroup group, CheckpointerOptions options)
    : directory_(std::move(directory)), group_(std::move(group)), options_(options) {
  if (directory_.empty()) throw ConfigError("[ddp::Checkpointer] the directory is an empty path");
  if (options_.every < 0 || options_.keep < 0) {
    throw ConfigError(
        fmt::format("[ddp::Checkpointer] every is {} and keep is {}; neither may be negative (0: never by "
                    "itself, keep all)",
                    options_.every, options_.keep));
  }
}

Checkpointer& Checkpointer::add(const std::string& name, Stateful object) {
  if (name.empty()) throw ConfigError("[ddp::Checkpointer] an object is tracked under an empty name");
  for (const Tracked& other : tracked_) {
    if (other.name == name) throw ConfigError(fmt::format("[ddp::Checkpointer] \"{}\" is tracked twice", name));
  }
  tracked_.push_back({name, std::move(object)});
  return *this;
}

std::string Checkpointer::who() const { return fmt::format("[ddp::Checkpointer] {}:", group_.place().name()); }

// --- saving

bool Checkpointer::step() {
  ++step_;
  if (options_.every == 0 || step_ % options_.every != 0) return false;
  save();
  return true;
}

void Checkpointer::save() {
  if (saved_step_ == step_) return;
  const auto start = std::chrono::steady_clock::now();
  detail::RankPart part{.step = step_, .random = {}, .failure = ""};
  part.failure = failure_of([&] { part.random = detail::random_state(group_.device()); });
  const auto parts = all_gather_object(detail::encode(part), group_);

  // The answer of rank 0: "+" and the name of the file, or "-" and why there is none.
  std::string outcome;
  if (group_.is_root()) {
    const std::string failure = failure_of([&] {
      const Snapshot snapshot = capture(parts);
      commit(snapshot);
      outcome = fmt::format("+{}", snapshot.name.text());
    });
    if (!failure.empty()) outcome = fmt::format("-{}", failure);
  }
  outcome = broadcast_object(outcome, group_);
  if (outcome.empty() || outcome[0] != '+') {
    throw CheckpointError(fmt::format("{} step {} was not saved to {}: {}; the previous checkpoint stands", who(),
                                      step_, directory_.string(), outcome.substr(std::min<size_t>(1, outcome.size()))));
  }
  saved_step_ = step_;
  last_saved_ = directory_ / outcome.substr(1);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  log::info(group_, fmt::format("saved {} in {:.2f} s", last_saved_->string(), seconds.count()));
}

Checkpointer::Snapshot Checkpointer::capture(const std::vector<std::string>& parts) const {
  std::vector<detail::RandomState> random;
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    detail::RankPart part = detail::decode_part(parts[rank]);
    if (!part.failure.empty()) throw CheckpointError(fmt::format("rank {}: {}", rank, part.failure));
    if (part.step != step_) {
      throw CheckpointError(fmt::format("rank {} has taken {} steps, rank 0 {}", rank, part.step, step_));
    }
    random.push_back(std::move(part.random));
  }

  Snapshot snapshot{.name = {.epoch = epoch_, .step = step_}, .state = State::dict(), .ordered = {}};
  State::Dict top_level, tracked, orders;
  std::vector<std::pair<std::string, const torch::nn::Module*>> modules;
  for (const Tracked& item : tracked_) {
    if (item.object.module()) modules.emplace_back(item.name, item.object.module());
  }
  bool has_epoch = false;
  for (const Tracked& item : tracked_) {
    State state = item.object.save();
    if (item.object.module()) snapshot.ordered.push_back(item.key());
    if (item.object.optimizer()) {
      orders.items.emplace_back(item.name, detail::parameter_order(*item.object.optimizer(), modules));
    }
    if (item.is_top_level()) {
      top_level.items.emplace_back(item.key(), std::move(state));
      continue;
    }
    const State* epoch = state.is_dict() ? state.find("epoch") : nullptr;
    if (!has_epoch && epoch && epoch->is_int()) {
      has_epoch = true;
      snapshot.name.epoch = epoch->as_int();
    }
    tracked.items.emplace_back(item.name, std::move(state));
  }

  State libddp = State::dict({{"format", detail::kCheckpointFormat},
                              {"version", version()},
                              {"world_size", group_.size()},
                              {"tracked", std::move(tracked)},
                              {"parameter_order", std::move(orders)}});
  detail::set_random_states(libddp, random);
  snapshot.state.set("epoch", snapshot.name.epoch);
  snapshot.state.set("step", step_);
  for (auto& [key, state] : top_level.items) snapshot.state.set(key, std::move(state));
  snapshot.state.set("loss", loss_ ? State(*loss_) : State());
  snapshot.state.set(detail::kLibddpKey, std::move(libddp));
  return snapshot;
}

void Checkpointer::commit(const Snapshot& snapshot) const {
  make_directories(directory_);
  const std::string name = snapshot.name.text();
  write_file_atomically(
      directory_ / name, [&](const Append& append) { io::write_torch_file(snapshot.state, append, snapshot.ordered); },
      detail::kTemporaryStem);
  swap_symlink(directory_ / detail::kLatestName, name);

  // The new checkpoint is safe: what goes wrong from here on is no failed save.
  std::vector<std::string> problems;
  const std::string failure = failure_of([&] { problems = detail::rotate(directory_, options_.keep, snapshot.name); });
  if (!failure.empty()) problems.push_back(failure);
  for (const std::string& problem : problems) log::warn(group_, fmt::format("[ddp::Checkpointer] {}", problem));
}

// --- resuming

Resumed Checkpointer::resume() {
  Decision decision;
  std::optional<Loaded> loaded;
  if (group_.is_root()) {
    const std::string failure = failure_of([&] { decision = choose(loaded); });
    if (!failure.empty()) decision.failure = failure;
  }
  return follow(std::move(decision), std::move(loaded));
}

Resumed Checkpointer::resume(const fs::path& file) {
  return follow({.failure = "", .file = file.string(), .through_link = true, .is_latest = false}, std::nullopt);
}

Checkpointer::Decision Checkpointer::choose(std::optional<Loaded>& loaded) const {
  const detail::Latest latest = detail::resolve_latest(directory_);
  std::vector<std::string> candidates, rejected;
  if (!latest.problem.empty()) rejected.push_back(fmt::format("{} {}", detail::kLatestName, latest.problem));
  if (!latest.name.empty()) candidates.push_back(latest.name);
  for (const auto& name : detail::list_checkpoints(directory_)) {
    if (name.text() != latest.name) candidates.push_back(name.text());
  }

  for (const std::string& name : candidates) {
    const std::string failure = failure_of([&] { loaded = read(directory_ / name, /*through_link=*/false); });
    if (!failure.empty()) {
      rejected.push_back(failure);
      continue;
    }
    if (!rejected.empty()) {
      log::warn(group_, fmt::format("[ddp::Checkpointer] falling back to {}: {}", name, fmt::join(rejected, "; ")));
    }
    return {
        .failure = "", .file = (directory_ / name).string(), .through_link = false, .is_latest = name == latest.name};
  }
  if (rejected.empty()) return {};
  throw CheckpointError(fmt::format(
      "no checkpoint in {} can be used: {}. To start anew, give another directory or move what is there away",
      directory_.string(), fmt::join(rejected, "; ")));
}

Resumed Checkpointer::follow(Decision decision, std::optional<Loaded> loaded) {
  decision = Decision::decode(broadcast_object(decision.encode(), group_));
  if (!decision.failure.empty()) throw CheckpointError(fmt::format("{} {}", who(), decision.failure));

  Resumed resumed;
  if (!decision.file.empty()) {
    std::string failure = failure_of([&] {
      if (!loaded) loaded = read(decision.file, decision.through_link);
    });
    agree(failure, decision.file + " was not loaded, and nothing was changed");
    failure = failure_of([&] { apply(loaded->state); });
    agree(failure, decision.file + " was loaded in part only, this process should end");
    if (group_.is_root()) {
      for (const auto& warning : loaded->warnings) log::warn(group_, "[ddp::Checkpointer] " + warning);
    }
    for (const auto& remark : loaded->remarks) log::info(group_, "[ddp::Checkpointer] " + remark);
    resumed = {.found = true, .step = step_, .epoch = epoch_, .path = decision.file};
    log::info(group_, fmt::format("resumed from {}: epoch {}, step {}", decision.file, epoch_, step_));
  }
  // A step counts as saved when the link says so: after a fallback `save` writes again and mends it.
  saved_step_ = decision.is_latest ? std::optional(step_) : std::nullopt;
  last_saved_ = decision.is_latest ? std::optional(fs::path(decision.file)) : std::nullopt;
  if (group_.is_root()) {
    const std::string ignored = failure_of([&] { detail::sweep_temporaries(directory_); });
    if (!ignored.empty()) log::warn(group_, "[ddp::Checkpointer] " + ignored);
  }
  return resumed;
}

Checkpointer::Loaded Checkpointer::read(const fs::path& file, bool through_link) const {
  Loaded loaded;
  loaded.state = io::read_torch_file(file.string(), through_link);
  const std::string failure = failure_of([&] { check(loaded); });
  if (!failure.empty()) throw CheckpointError(fmt::format("{}: {}", file.string(), failure));
  return loaded;
}

void Checkpointer::check(Loaded& loaded) const {
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
  for (const Tracked& item : tracked_) {
    if (item.object.module()) modules.emplace_back(item.name, item.object.module());
    if (item.is_top_level() && !state.find(item.key())) {
      throw CheckpointError(fmt::format("the key \"{}\" is missing", item.key()));
    }
    if (!item.is_top_level() && !(libddp && libddp->at("tracked").find(item.name))) not_there.push_back(item.name);
  }
  const LoadOptions options{.optimizer_options_from_file = options_.optimizer_options_from_file};
  for (const Tracked& item : tracked_) {
    if (!item.is_top_level()) continue;
    const std::string failure = failure_of([&] {
      for (const auto& remark : item.object.check(*state.find(item.key()), options)) {
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

void Checkpointer::apply(const State& state) {
  const int64_t epoch = detail::counter(state, "epoch"), step = detail::counter(state, "step");
  const LoadOptions options{.optimizer_options_from_file = options_.optimizer_options_from_file};
  const State* libddp = state.find(detail::kLibddpKey);
  for (const Tracked& item : tracked_) {
    if (item.is_top_level()) {
      item.object.load(state.at(item.key()), options);
    } else if (!libddp) {
      item.object.load(moved_to(item.object.save(), epoch, step), options);
    } else if (const State* saved = libddp->at("tracked").find(item.name)) {
      item.object.load(*saved, options);
    }
  }
  if (libddp) {
    const auto random = detail::random_states(*libddp);
    const auto rank = static_cast<size_t>(group_.rank());
    if (rank < random.size()) {
      detail::set_random_state(random[rank], group_.device());
    } else {
      log::warn(group_,
                fmt::format("[ddp::Checkpointer] the file has random states of {} ranks; this rank keeps its own",
                            random.size()));
    }
  }
  step_ = step;
  epoch_ = epoch;
  const State* loss = state.find("loss");
  loss_ = loss && (loss->is_double() || loss->is_int()) ? std::optional(loss->as_double()) : std::nullopt;
}

void Checkpointer::agree(const std::string& failure, const std::string& what) const {
  const auto failures = all_gather_object(failure, group_);
  for (size_t rank = 0; rank < failures.size(); ++rank) {
    if (!failures[rank].empty()) {
      throw CheckpointError(fmt::format("{} {}: rank {}: {}", who(), what, rank, failures[rank]));
    }
  }
}

}  // namespace ddp
