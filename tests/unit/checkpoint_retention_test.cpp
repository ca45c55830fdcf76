// Which checkpoints stay, the best one, the space they need, and who may write.
#include <torch/torch.h>

#include <cerrno>
#include <cmath>
#include <limits>

#include "checkpoint_best.h"
#include "checkpoint_writer.h"
#include "ddp/error.h"
#include "support/catch.h"
#include "support/spawn.h"
#include "unit/checkpoint_fixtures.h"
#include "unit/faulty_file_system.h"

namespace fs = std::filesystem;
using namespace ddp::test;
using ddp::Checkpointer;
using ddp::CheckpointError;

namespace {

std::string step_name(int64_t step) { return ddp::detail::CheckpointName{0, step}.text(); }

Names steps(std::initializer_list<int64_t> steps, std::initializer_list<std::string> others = {}) {
  Names all(others);
  for (int64_t step : steps) all.insert(step_name(step));
  all.insert("checkpoint_latest.pt");
  return all;
}

void run_to(Checkpointer& checkpoints, int64_t step) {
  while (checkpoints.step_count() < step) checkpoints.step();
}

}  // namespace

TEST_CASE("milestones are never deleted") {
  TempDir dir;
  Checkpointer checkpoints(dir.path(), {}, {.every = 1, .keep = 2, .keep_every = 4});
  run_to(checkpoints, 11);
  CHECK(names(dir.path()) == steps({4, 8, 10, 11}));
}

TEST_CASE("what a link names is never deleted, whoever made the link, and goes when no link names it") {
  TempDir dir;
  Checkpointer checkpoints(dir.path(), {}, {.every = 1, .keep = 1});
  run_to(checkpoints, 2);
  checkpoints.pin("exam");
  CHECK(fs::read_symlink(dir / "checkpoint_exam.pt") == step_name(2));
  run_to(checkpoints, 3);
  fs::create_symlink(dir / step_name(3), dir / "mine");  // the full path, as a script may write it
  run_to(checkpoints, 5);
  CHECK(names(dir.path()) == steps({2, 3, 5}, {"checkpoint_exam.pt", "mine"}));
  checkpoints.pin("exam");
  run_to(checkpoints, 6);
  CHECK(names(dir.path()) == steps({3, 5, 6}, {"checkpoint_exam.pt", "mine"}));
  fs::remove(dir / "checkpoint_exam.pt");
  fs::remove(dir / "mine");
  run_to(checkpoints, 7);
  CHECK(names(dir.path()) == steps({7}));
}

TEST_CASE("a pin saves the step where that has not been done, in the background too") {
  TempDir dir;
  Checkpointer checkpoints(dir.path(), {}, {.every = 2, .async = true});
  run_to(checkpoints, 3);
  checkpoints.pin("three");
  CHECK(names(dir.path()) == steps({2, 3}, {"checkpoint_three.pt"}));
  run_to(checkpoints, 4);
  checkpoints.pin("four");
  CHECK(fs::read_symlink(dir / "checkpoint_four.pt") == step_name(4));
}

TEST_CASE("names that cannot be pins, a file in the way of one is not overwritten") {
  TempDir dir;
  Checkpointer checkpoints(dir.path(), {}, {.every = 0});
  for (const char* name : {"", "latest", "best", "a/b", "epoch1_step2", "tmp.0123", "a b", "ä"}) {
    CAPTURE(name);
    CHECK_THROWS_AS(checkpoints.pin(name), ddp::ConfigError);
  }
  CHECK(names(dir.path()).empty());
  touch(dir / "checkpoint_mine.pt", "precious");
  const std::string message = message_of<CheckpointError>([&] { checkpoints.pin("mine"); });
  CHECK_THAT(message, ContainsSubstring("was saved, but not pinned"));
  CHECK_THAT(message, ContainsSubstring("checkpoint_mine.pt"));
  CHECK(content(dir / "checkpoint_mine.pt") == "precious");
}

TEST_CASE("the best by a metric stays, and another life of the run knows it") {
  TempDir dir;
  {
    Checkpointer checkpoints(dir.path(), {}, {.every = 1, .keep = 1});
    CHECK_FALSE(checkpoints.best());
    run_to(checkpoints, 1);
    CHECK(checkpoints.save_best(3.0));
    run_to(checkpoints, 2);
    CHECK(checkpoints.save_best(2.5));
    run_to(checkpoints, 3);
    CHECK_FALSE(checkpoints.save_best(2.5));
    CHECK_FALSE(checkpoints.save_best(std::nan("")));
    CHECK_FALSE(checkpoints.save_best(-std::numeric_limits<double>::infinity()));
    CHECK(names(dir.path()) == steps({2, 3}, {"checkpoint_best.pt", "checkpoint_best.json"}));
  }
  {
    Checkpointer checkpoints(dir.path(), {}, {.every = 1, .keep = 1});
    CHECK(checkpoints.resume().step == 3);
    CHECK(checkpoints.best() == 2.5);
    run_to(checkpoints, 4);
    CHECK_FALSE(checkpoints.save_best(2.7));
    CHECK(fs::read_symlink(dir / "checkpoint_best.pt") == step_name(2));
    CHECK(checkpoints.save_best(0.1));
    run_to(checkpoints, 5);
    CHECK(names(dir.path()) == steps({4, 5}, {"checkpoint_best.pt", "checkpoint_best.json"}));
  }
  // Killed between the record and the link.
  ddp::swap_symlink(dir / "checkpoint_best.pt", step_name(5));
  Checkpointer checkpoints(dir.path(), {}, {.every = 1, .keep = 1});
  checkpoints.resume();
  CHECK(fs::read_symlink(dir / "checkpoint_best.pt") == step_name(4));
  CHECK(checkpoints.best() == 0.1);
}

TEST_CASE("higher may be better, a record that is damaged or whose checkpoint is gone is no obstacle") {
  TempDir dir;
  {
    Checkpointer checkpoints(dir.path(), {}, {.every = 0, .better = ddp::Better::kHigher});
    CHECK(checkpoints.save_best(1.0));
    checkpoints.step();
    CHECK_FALSE(checkpoints.save_best(0.5));
    CHECK(checkpoints.save_best(1.5));
  }
  touch(dir / "checkpoint_best.json", R"({"checkpoint": "../../etc/passwd", "metric": 7})");
  Log log;
  Checkpointer checkpoints(dir.path(), {}, {.every = 0});
  checkpoints.resume();
  CHECK_FALSE(checkpoints.best());
  CHECK_THAT(log.text, ContainsSubstring("checkpoint_best.json"));
  touch(dir / "checkpoint_best.json", R"({"checkpoint": "checkpoint_epoch0_step77.pt", "metric": 7})");
  checkpoints.resume();
  CHECK_FALSE(checkpoints.best());
  touch(dir / "checkpoint_best.json", "{");
  checkpoints.resume();
  CHECK(checkpoints.save_best(4));
  CHECK(ddp::detail::read_best(dir.path())->metric == 4);
}

TEST_CASE("too little space is an error before anything is written, with what is needed and what there is") {
  for (const bool async : {false, true}) {
    TempDir dir;
    Log log;
    Weights weights(1'000'000);
    Checkpointer checkpoints(dir.path(), {}, {.every = 1, .async = async});
    checkpoints.track("weights", weights);
    checkpoints.step();
    checkpoints.wait();
    FaultyFileSystem small;
    small.space = 2'000'000;
    ddp::io::ScopedFileSystem scope(small);
    const std::string message = message_of<CheckpointError>([&] {
      checkpoints.step();
      checkpoints.wait();
    });
    CHECK_THAT(message, ContainsSubstring("needs 4.0 MB"));
    CHECK_THAT(message, ContainsSubstring("has 2.0 MB left"));
    CHECK(small.calls.empty());
    CHECK(names(dir.path()) == steps({1}));
    small.space = 4'100'000;
    checkpoints.save();
    CHECK(checkpoints.last_saved() == dir / step_name(2));
  }
}

TEST_CASE("the size that is asked for is that of the file, a little more rather than less") {
  TempDir dir;
  for (int tensors : {0, 1, 100}) {
    ddp::State::List list;
    for (int i = 0; i < tensors; ++i) list.items.emplace_back(torch::zeros({i * 37}));
    save(dir / "x.pt", list);
    const uint64_t size = fs::file_size(dir / "x.pt"), asked = ddp::io::torch_file_size(ddp::io::pickle(list));
    CAPTURE(tensors, size, asked);
    CHECK(asked >= size);
    CHECK(asked < size + 4096 + static_cast<uint64_t>(tensors) * 512);
  }
}

TEST_CASE("sizes in the log") {
  using ddp::detail::size_text;
  CHECK(size_text(0) == "0 B");
  CHECK(size_text(999) == "999 B");
  CHECK(size_text(1000) == "1.0 kB");
  CHECK(size_text(999'949) == "999.9 kB");
  CHECK(size_text(999'950) == "1.0 MB");
  CHECK(size_text(2'000'000'000) == "2.0 GB");
  CHECK(size_text(7'300'000'000'000'000) == "7300.0 TB");
}

TEST_CASE("a link that is moved, and its old target deleted, while it is opened is opened again") {
  TempDir dir;
  touch(dir / "1", "old");
  save(dir / "2", ddp::State::dict({{"step", 2}}));
  fs::create_symlink("1", dir / "link");
  FaultyFileSystem files;
  ddp::io::ScopedFileSystem scope(files);
  int opened = 0;
  files.on_open = [&] {
    if (++opened > 1) return 0;
    ddp::swap_symlink(dir / "link", "2");
    return ENOENT;
  };
  CHECK(load(dir / "link").at("step") == ddp::State(2));
  CHECK(opened == 2);
  opened = 0;
  files.on_open = [&] { return ++opened, ENOENT; };  // and one that is not moved is missing
  CHECK_THROWS_AS(load(dir / "link"), CheckpointError);
  CHECK(opened <= 2);
}

TEST_CASE("several Checkpointers of one process share a directory") {
  TempDir dir;
  Checkpointer first(dir.path(), {}, {.every = 1});
  first.step();
  fs::create_symlink(dir.path(), dir / "again");
  Checkpointer second(dir / "again", {}, {.every = 1});
  CHECK(second.resume().step == 1);
  second.step();
  first.step();
  CHECK(fs::read_symlink(dir / "checkpoint_latest.pt") == step_name(2));
}

TEST_CASE("a lock that cannot be had although nobody has it is a warning, once") {
  TempDir dir;
  Log log;
  Checkpointer checkpoints(dir.path(), {}, {.every = 1});
  fs::create_directory(dir / ddp::detail::kLockName);  // in its place
  run_to(checkpoints, 3);
  CHECK(names(dir.path()) == steps({1, 2, 3}));
  CHECK_THAT(log.text, ContainsSubstring("is not locked"));
  CHECK(log.text.find("is not locked") == log.text.rfind("is not locked"));
}
