#include "ddp/checkpointer.h"

#include <sys/resource.h>
#include <torch/torch.h>

#include <csignal>
#include <fstream>
#include <set>

#include "checkpoint_directory.h"
#include "ddp/atomic_file.h"
#include "ddp/error.h"
#include "ddp/log.h"
#include "io/torch_file.h"
#include "support/catch.h"
#include "support/spawn.h"
#include "unit/checkpoint_fixtures.h"
#include "unit/faulty_file_system.h"

namespace fs = std::filesystem;
using ddp::Checkpointer;
using ddp::CheckpointError;
using ddp::State;
using ddp::detail::CheckpointName;
using ddp::test::ContainsSubstring;
using ddp::test::cut;
using ddp::test::load;
using ddp::test::Log;
using ddp::test::message_of;
using ddp::test::Names;
using ddp::test::names;
using ddp::test::Position;
using ddp::test::Run;
using ddp::test::save;
using ddp::test::TempDir;
using ddp::test::touch;

TEST_CASE("names of checkpoints: numbers, nothing else") {
  CHECK(CheckpointName{.epoch = 2, .step = 1500}.text() == "checkpoint_epoch2_step1500.pt");
  CHECK(CheckpointName::parse("checkpoint_epoch2_step1500.pt") == CheckpointName{2, 1500});
  for (const char* foreign :
       {"checkpoint_epoch2_step01500.pt", "checkpoint_epoch-1_step2.pt", "checkpoint_epoch+1_step2.pt",
        "checkpoint_epoch1_step2.pt2", "xcheckpoint_epoch1_step2.pt", "checkpoint_epoch1_step2_tmp.pt",
        "checkpoint_epoch_step2.pt", "checkpoint_epoch1_step99999999999999999999.pt", "checkpoint_latest.pt",
        "step_notes"}) {
    CAPTURE(foreign);
    CHECK_FALSE(CheckpointName::parse(foreign).has_value());
  }
}

TEST_CASE("rotation goes by number, after the link has moved, and leaves others' files alone (B25)") {
  TempDir dir;
  Run run(dir.path(), {.every = 100, .keep = 3});
  touch(dir / "step_notes");
  touch(dir / "step_12.tmp");
  touch(dir / "checkpoint_best.pt");
  run.steps(1200);
  CHECK(names(dir.path()) == Names{"checkpoint_epoch0_step1000.pt", "checkpoint_epoch0_step1100.pt",
                                   "checkpoint_epoch0_step1200.pt", "checkpoint_latest.pt", "step_notes", "step_12.tmp",
                                   "checkpoint_best.pt"});
  CHECK(fs::read_symlink(dir / "checkpoint_latest.pt") == "checkpoint_epoch0_step1200.pt");
}

TEST_CASE("keep 1, and a later step left by another run (B25)") {
  TempDir dir;
  touch(dir / "checkpoint_epoch9_step9999.pt");
  Run run(dir.path(), {.every = 5, .keep = 1});
  run.steps(10);
  CHECK(names(dir.path()) ==
        Names{"checkpoint_epoch0_step10.pt", "checkpoint_epoch9_step9999.pt", "checkpoint_latest.pt"});
  CHECK(fs::read_symlink(dir / "checkpoint_latest.pt") == "checkpoint_epoch0_step10.pt");
}

TEST_CASE("rotation never takes the link's target") {
  TempDir dir;
  for (int step : {1, 2, 3}) touch(dir / CheckpointName{0, step}.text());
  ddp::swap_symlink(dir / "checkpoint_latest.pt", "checkpoint_epoch0_step1.pt");
  CHECK(ddp::detail::rotate(dir.path(), {.keep = 1}, {0, 3}).empty());
  CHECK(names(dir.path()) == Names{"checkpoint_epoch0_step1.pt", "checkpoint_epoch0_step3.pt", "checkpoint_latest.pt"});
}

TEST_CASE("old files are deleted only when the new one is safe") {
  TempDir dir;
  Run run(dir.path(), {.every = 0, .keep = 1});
  run.step();
  run.checkpoints.save();
  run.step();
  ddp::test::FaultyFileSystem watched;
  ddp::io::ScopedFileSystem scope(watched);
  run.checkpoints.save();
  const auto& calls = watched.calls;
  REQUIRE(calls.back() == "remove");
  CHECK(calls[calls.size() - 2] == "fsync directory");
  CHECK(calls[calls.size() - 3] == "rename");
  CHECK(calls[calls.size() - 4] == "symlink");
}

TEST_CASE("the keys are those of the Python script, and libddp") {
  TempDir dir;
  Run run(dir.path(), {.every = 2});
  run.position.epoch = 3;
  run.checkpoints.set_loss(0.25);
  run.steps(2);
  CHECK(run.checkpoints.last_saved() == dir / "checkpoint_epoch3_step2.pt");
  const State state = load(dir / "checkpoint_latest.pt");
  std::vector<std::string> keys;
  for (const auto& item : state.as_dict()) keys.push_back(item.first.as_string());
  CHECK(keys ==
        std::vector<std::string>{"epoch", "step", "model_state_dict", "optimizer_state_dict", "loss", "libddp"});
  CHECK(state.at("epoch") == State(3));
  CHECK(state.at("step") == State(2));
  CHECK(state.at("loss") == State(0.25));
  CHECK(state.at("model_state_dict") == ddp::state_dict(*run.model));
  CHECK(state.at("libddp").at("world_size") == State(1));
  CHECK(state.at("libddp").at("tracked").at("sampler") == run.position.state_dict());
  CHECK(state.at("libddp").at("cpu_rng_states").as_list().at(0).as_tensor().scalar_type() == torch::kByte);
}

TEST_CASE("a resumed run draws, computes and counts as the unbroken one, bit for bit") {
  TempDir dir;
  torch::manual_seed(7);
  std::vector<double> unbroken, resumed;
  {
    Run run(dir / "a", {.every = 0});
    for (int i = 0; i < 6; ++i) unbroken.push_back(run.step());
  }
  torch::manual_seed(7);
  {
    Run run(dir / "b", {.every = 3});
    for (int i = 0; i < 3; ++i) resumed.push_back(run.step());
    run.steps(2);  // lost
  }
  torch::manual_seed(123);
  Run run(dir / "b", {.every = 0}, /*lr=*/0.5);
  Log log;
  const auto result = run.checkpoints.resume();
  REQUIRE(result);
  CHECK(result.step == 3);
  CHECK(result.path == dir / "b" / "checkpoint_epoch0_step3.pt");
  CHECK(run.position.consumed == 3);
  CHECK_THAT(log.text, ContainsSubstring("optimizer: lr 0.1 of the file replaces 0.5"));
  for (int i = 0; i < 3; ++i) resumed.push_back(run.step());
  CHECK(resumed == unbroken);
  CHECK(run.checkpoints.step_count() == 6);
}

TEST_CASE("a fresh start, and saving twice") {
  TempDir dir;
  Run run(dir / "missing/yet", {.every = 0});
  CHECK_FALSE(run.checkpoints.resume());
  CHECK_FALSE(run.checkpoints.last_saved());
  run.checkpoints.save();  // nothing trained yet is a state, too
  CHECK(names(dir / "missing/yet") == Names{"checkpoint_epoch0_step0.pt", "checkpoint_latest.pt"});
  ddp::test::FaultyFileSystem watched;
  ddp::io::ScopedFileSystem scope(watched);
  run.checkpoints.save();
  CHECK(watched.calls.empty());
  Run again(dir / "missing/yet", {.every = 0});
  CHECK(again.checkpoints.resume());
  again.checkpoints.save();
  CHECK(watched.calls.empty());
}

TEST_CASE("a damaged latest: falls back to the newest whole one and says what it passed over (B23c)") {
  TempDir dir;
  {
    Run run(dir.path(), {.every = 10});
    run.steps(20);
    fs::remove(dir / "checkpoint_latest.pt");
    cut(dir / "checkpoint_epoch0_step20.pt", 100);
    touch(dir / "checkpoint_tmp.0123456789abcdef.pt");
    touch(dir / ".latest.0123456789abcdef");
    touch(dir / "step_30.tmp");
  }
  Log log;
  Run run(dir.path(), {.every = 0});
  CHECK(run.checkpoints.resume().step == 10);
  CHECK_THAT(log.text, ContainsSubstring("warning"));
  CHECK_THAT(log.text, ContainsSubstring("checkpoint_epoch0_step20.pt"));
  CHECK(names(dir.path()) == Names{"checkpoint_epoch0_step10.pt", "checkpoint_epoch0_step20.pt", "step_30.tmp"});
  run.checkpoints.save();  // mends the link
  CHECK(fs::read_symlink(dir / "checkpoint_latest.pt") == "checkpoint_epoch0_step10.pt");
}

TEST_CASE("one flipped bit of the weights is found") {
  TempDir dir;
  Run(dir.path(), {.every = 1}).steps(2);
  const fs::path newest = dir / "checkpoint_epoch0_step2.pt";
  {
    std::fstream file(newest, std::ios::in | std::ios::out | std::ios::binary);
    std::string bytes{std::istreambuf_iterator<char>(file), {}};
    const State state = load(newest);
    const auto weight = state.at("model_state_dict").at("weight").as_tensor();
    const std::string raw(static_cast<const char*>(weight.const_data_ptr()), weight.nbytes());
    const size_t at = bytes.find(raw);
    REQUIRE(at != std::string::npos);
    file.seekp(static_cast<std::streamoff>(at));
    file.put(static_cast<char>(bytes[at] ^ 1));
  }
  Log log;
  Run run(dir.path());
  CHECK(run.checkpoints.resume().step == 1);
  CHECK_THAT(log.text, ContainsSubstring("checksum"));
}

TEST_CASE("latest: dangling, a file, a directory, a loop, absolute, leading out") {
  TempDir dir;
  Run(dir / "run", {.every = 1}).steps(2);
  Run(dir / "other", {.every = 1}).steps(5);
  const fs::path run = dir / "run", latest = run / "checkpoint_latest.pt";
  auto resumed = [&] {
    Log log;
    Run again(run);
    return std::pair(again.checkpoints.resume().step, log.text);
  };
  auto relink = [&](const fs::path& target) {
    fs::remove_all(latest);
    fs::create_symlink(target, latest);
  };

  relink("checkpoint_epoch0_step7.pt");
  CHECK(resumed().first == 2);
  CHECK_THAT(resumed().second, ContainsSubstring("-> checkpoint_epoch0_step7.pt does not exist"));
  relink("../other/checkpoint_epoch0_step5.pt");
  CHECK(resumed().first == 2);
  CHECK_THAT(resumed().second, ContainsSubstring("leads out of the directory"));
  relink(dir / "other/checkpoint_epoch0_step5.pt");
  CHECK(resumed().first == 2);
  relink("checkpoint_latest.pt");
  CHECK(resumed().first == 2);
  relink(run / "checkpoint_epoch0_step1.pt");  // as the Python script does: the full path
  CHECK(resumed().first == 1);
  relink("checkpoint_epoch0_step1.pt");
  CHECK(resumed().first == 1);

  fs::remove(latest);
  fs::copy_file(run / "checkpoint_epoch0_step1.pt", latest);
  CHECK(resumed().first == 1);
  fs::remove(latest);
  fs::create_directory(latest);
  CHECK(resumed().first == 2);
  Run again(run, {.every = 0});
  again.checkpoints.resume();
  again.step();
  CHECK_THROWS_AS(again.checkpoints.save(), CheckpointError);  // cannot replace a directory
  CHECK(names(dir / "other").size() == 6);                     // nothing was written elsewhere
  fs::remove(latest);
  again.checkpoints.save();
  CHECK(resumed().first == 3);
}

TEST_CASE("checkpoints that are there but cannot be used are an error, not a fresh start") {
  TempDir dir;
  touch(dir / "checkpoint_epoch0_step3.pt", "garbage");
  Run run(dir.path());
  const std::string message = message_of<CheckpointError>([&] { run.checkpoints.resume(); });
  CHECK_THAT(message, ContainsSubstring("checkpoint_epoch0_step3.pt"));
  CHECK_THAT(message, ContainsSubstring("To start anew"));
}

TEST_CASE("another model, missing keys, a newer format: refused with the reason, nothing changed") {
  TempDir dir;
  Run first(dir.path(), {.every = 1});
  first.step();
  const fs::path file = dir / "checkpoint_epoch0_step1.pt";
  const State good = load(file);
  auto refusal = [&](const State& state) {
    save(dir / "odd.pt", state);
    Run run(dir / "none");
    const auto before = run.model->weight.clone();
    const std::string message = message_of<CheckpointError>([&] { run.checkpoints.resume(dir / "odd.pt"); });
    CHECK(run.model->weight.equal(before));
    CHECK(run.checkpoints.step_count() == 0);
    return message;
  };
  auto without = [&](const std::string& key) {
    State::Dict rest;
    for (const auto& item : good.as_dict()) {
      if (item.first != State(key)) rest.items.push_back(item);
    }
    return State(rest);
  };
  auto with = [&](const char* key, State value) {
    State changed = good;
    changed.set(key, std::move(value));
    return changed;
  };
  for (const char* key : {"epoch", "step", "model_state_dict", "optimizer_state_dict"}) {
    CHECK_THAT(refusal(without(key)), ContainsSubstring(std::string("\"") + key + "\" is missing"));
  }
  CHECK_THAT(refusal(with("step", -1)), ContainsSubstring("step"));
  CHECK_THAT(refusal(with("model_state_dict", ddp::state_dict(*torch::nn::Linear(4, 5)))), ContainsSubstring("[5, 4]"));
  CHECK_THAT(refusal(State::list({})), ContainsSubstring("odd.pt"));
  State libddp = good.at("libddp");
  libddp.set("format", 2);
  CHECK_THAT(refusal(with("libddp", libddp)), ContainsSubstring("format 2"));
  libddp = good.at("libddp");
  libddp.set("cpu_rng_states", State::list({torch::zeros({3}, torch::kByte)}));
  CHECK_THAT(refusal(with("libddp", libddp)), ContainsSubstring("odd.pt"));
  CHECK_THAT(message_of<CheckpointError>([&] { Run(dir.path()).checkpoints.resume(dir / "absent.pt"); }),
             ContainsSubstring("absent.pt"));
}

TEST_CASE("parameters given to the optimizer in another order are detected (B27)") {
  TempDir dir;
  struct TwoImpl : torch::nn::Module {
    TwoImpl() {
      a = register_parameter("a", torch::zeros({3}));
      b = register_parameter("b", torch::ones({3}));
    }
    torch::Tensor a, b;
  };
  auto model = std::make_shared<TwoImpl>();
  torch::optim::SGD optim({model->a, model->b}, torch::optim::SGDOptions(0.1).momentum(0.9));
  Checkpointer checkpoints(dir.path(), {}, {.every = 1});
  checkpoints.track("model", model).track("optimizer", optim);
  (model->a * model->b).sum().backward();
  optim.step();
  checkpoints.step();

  torch::optim::SGD swapped({model->b, model->a}, torch::optim::SGDOptions(0.1).momentum(0.9));
  Checkpointer again(dir.path(), {});
  again.track("model", model).track("optimizer", swapped);
  CHECK_THAT(message_of<CheckpointError>([&] { again.resume(); }),
             ContainsSubstring("is model.a [3] in the file and model.b [3] here"));
}

TEST_CASE("a file without libddp, as Python saves it, resumes, what it lacks is a warning") {
  TempDir dir;
  Run first(dir / "a", {.every = 1});
  first.step();
  State python = State::dict();
  for (const auto& item : load(dir / "a/checkpoint_latest.pt").as_dict()) {
    if (item.first != State("libddp")) python.set(item.first, item.second);
  }
  python.set("epoch", 4);
  python.set("step", 17);
  save(dir / "python.pt", python);
  Log log;
  Run run(dir / "b", {.every = 0});
  CHECK(run.checkpoints.resume(dir / "python.pt").epoch == 4);
  CHECK(run.checkpoints.step_count() == 17);
  CHECK(run.position.epoch == 4);
  CHECK(run.position.consumed == 0);
  CHECK(run.model->weight.equal(first.model->weight));
  CHECK_THAT(log.text, ContainsSubstring("warning"));
  CHECK_THAT(log.text, ContainsSubstring("sampler"));
  run.checkpoints.save();
  CHECK(names(dir / "b") == Names{"checkpoint_epoch4_step17.pt", "checkpoint_latest.pt"});
}

TEST_CASE("every call of a save that fails: an error, the previous checkpoint stands, training goes on (B23)") {
  int failures = 0;
  for (int k = 1; k < 200; ++k) {
    TempDir dir;
    Run run(dir.path(), {.every = 0});
    run.step();
    run.checkpoints.save();
    run.step();
    ddp::test::FaultyFileSystem faulty;
    faulty.fail_at = k;
    faulty.error = ENOSPC;
    bool failed = false;
    {
      ddp::io::ScopedFileSystem scope(faulty);
      try {
        run.checkpoints.save();
      } catch (const CheckpointError& error) {
        failed = true;
        CHECK_THAT(error.what(), ContainsSubstring(dir.path().string()));
        CHECK_THAT(error.what(), ContainsSubstring("No space left"));
      }
    }
    const std::string target = fs::read_symlink(dir / "checkpoint_latest.pt");
    CHECK(load(dir / target).at("step").as_int() >= 1);
    for (const auto& name : names(dir.path())) CHECK_FALSE(name.find("tmp") != std::string::npos);
    CHECK_FALSE(fs::exists(dir / ".latest"));
    if (!failed) break;
    ++failures;
    run.step();
    run.checkpoints.save();
    CHECK(fs::read_symlink(dir / "checkpoint_latest.pt") == "checkpoint_epoch0_step3.pt");
  }
  CHECK(failures > 20);
}

TEST_CASE("a file size limit stops a save with an error, and the run goes on (B23b)") {
  TempDir dir;
  Run run(dir.path(), {.every = 0});
  run.step();
  run.checkpoints.save();
  run.step();
  rlimit old{};
  ::getrlimit(RLIMIT_FSIZE, &old);
  auto* handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{.rlim_cur = 4096, .rlim_max = old.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &small);
  std::string message;
  try {
    run.checkpoints.save();
  } catch (const CheckpointError& error) {
    message = error.what();
  }
  ::setrlimit(RLIMIT_FSIZE, &old);
  std::signal(SIGXFSZ, handler);
  CHECK_THAT(message, ContainsSubstring("File too large"));
  CHECK(names(dir.path()) == Names{"checkpoint_epoch0_step1.pt", "checkpoint_latest.pt"});
  run.checkpoints.save();
  CHECK(fs::read_symlink(dir / "checkpoint_latest.pt") == "checkpoint_epoch0_step2.pt");
}

TEST_CASE("a directory that cannot be one is an error with the path (B23d)") {
  TempDir dir;
  touch(dir / "file");
  Run run(dir / "file/sub", {.every = 0});
  CHECK_THAT(message_of<CheckpointError>([&] { run.checkpoints.save(); }), ContainsSubstring((dir / "file").string()));
}

TEST_CASE("the directory can be moved elsewhere") {
  TempDir dir;
  Run(dir / "a", {.every = 1}).steps(1);
  fs::rename(dir / "a", dir / "b");
  CHECK(Run(dir / "b").checkpoints.resume().step == 1);
}

TEST_CASE("options and names that make no sense are refused") {
  CHECK_THROWS_AS(Checkpointer("x", {}, {.every = -1}), ddp::ConfigError);
  CHECK_THROWS_AS(Checkpointer("x", {}, {.keep = -1}), ddp::ConfigError);
  CHECK_THROWS_AS(Checkpointer("x", {}, {.keep_every = -1}), ddp::ConfigError);
  CHECK_THROWS_AS(Checkpointer("", {}), ddp::ConfigError);
  Checkpointer checkpoints("x", {});
  Position position;
  checkpoints.track("sampler", position);
  CHECK_THROWS_AS(checkpoints.track("sampler", position), ddp::ConfigError);
  CHECK_THROWS_AS(checkpoints.track("", position), ddp::ConfigError);
}
