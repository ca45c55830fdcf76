// Saves in the background: what is written, who waits, where errors come out.
#include <sys/resource.h>
#include <torch/torch.h>

#include <fstream>
#include <future>

#include "ddp/error.h"
#include "memory_limit.h"
#include "staging.h"
#include "support/catch.h"
#include "support/spawn.h"
#include "unit/checkpoint_fixtures.h"
#include "unit/faulty_file_system.h"

namespace fs = std::filesystem;
using namespace std::chrono_literals;
using namespace ddp::test;
using ddp::Checkpointer;
using ddp::CheckpointError;
using ddp::State;

namespace {

// Writing begins only when it is opened.
struct Gate {
  explicit Gate(FaultyFileSystem& files) {
    files.on_create = [gate = opened.get_future().share()] { gate.wait(); };
  }
  void open() { opened.set_value(); }
  std::promise<void> opened;
};

const auto kLatest = "checkpoint_latest.pt";

}  // namespace

TEST_CASE("a background save has the state of its step, however training goes on: the bytes of a plain save") {
  TempDir dir;
  for (const bool async : {false, true}) {
    FaultyFileSystem files;
    ddp::io::ScopedFileSystem scope(files);
    Gate gate(files);
    if (!async) gate.open();
    torch::manual_seed(3);
    Run run(dir / (async ? "b" : "a"), {.every = 3, .async = async});
    // Views, a tied tensor, one that is not contiguous, and a conjugate one, which is written as a copy.
    struct Views {
      torch::Tensor base = torch::arange(24.0).view({4, 6});
      State state_dict() const {
        const auto complex = torch::complex(base, base + 1);
        return State::dict(
            {{"base", base}, {"row", base[1]}, {"t", base.t()}, {"tied", base}, {"conj", complex.conj()}});
      }
      void load_state_dict(const State&) {}
    } views;
    run.checkpoints.track("views", views);
    run.steps(3);
    if (!async) continue;
    CHECK_FALSE(fs::exists(dir / "b" / kLatest));
    {
      torch::NoGradGuard no_grad;
      run.model->weight.fill_(9);
      run.model->bias.fill_(9);
      views.base.fill_(9);
    }
    run.position.consumed = 99;
    run.optim.step();  // moves the moments
    gate.open();
    run.checkpoints.wait();
  }
  const bool same = content(dir / "a" / kLatest) == content(dir / "b" / kLatest);  // nobody wants to read them
  CHECK(same);
  CHECK(load(dir / "b" / kLatest).at("step") == State(3));
}

TEST_CASE("a step returns before its checkpoint is written, wait returns after") {
  TempDir dir;
  FaultyFileSystem files;
  ddp::io::ScopedFileSystem scope(files);
  Gate gate(files);
  Log log;
  Weights weights(1000);
  Checkpointer checkpoints(dir.path(), {}, {.every = 2, .async = true});
  checkpoints.track("weights", weights);
  CHECK_FALSE(checkpoints.step());
  CHECK(checkpoints.step());
  CHECK_FALSE(checkpoints.step());
  CHECK_FALSE(checkpoints.last_saved());
  CHECK(names(dir.path()).empty());
  gate.open();
  checkpoints.wait();
  CHECK(checkpoints.last_saved() == dir / "checkpoint_epoch0_step2.pt");
  CHECK(names(dir.path()) == Names{"checkpoint_epoch0_step2.pt", kLatest});
  CHECK_THAT(log.text, ContainsSubstring("training waited"));
  checkpoints.wait();
}

TEST_CASE("at most one is being written: the next save waits for it, and resume and the destructor do") {
  TempDir dir;
  Weights weights(1000);
  {
    FaultyFileSystem files;
    ddp::io::ScopedFileSystem scope(files);
    Gate gate(files);
    Checkpointer checkpoints(dir.path(), {}, {.every = 1, .async = true});
    checkpoints.track("weights", weights);
    weights.set(1);
    checkpoints.step();
    const auto opener = std::async(std::launch::async, [&] {
      std::this_thread::sleep_for(50ms);
      gate.open();
    });
    weights.set(2);
    checkpoints.step();
    CHECK(checkpoints.last_saved() == dir / "checkpoint_epoch0_step1.pt");
    CHECK(checkpoints.resume().step == 2);
    weights.set(3);
    checkpoints.step();
  }
  CHECK(fs::read_symlink(dir / kLatest) == "checkpoint_epoch0_step3.pt");
  Checkpointer again(dir.path(), {});
  again.track("weights", weights);
  weights.set(0);
  CHECK(again.resume().step == 3);
  CHECK(weights.holds(3));
}

TEST_CASE("what the thread fails at comes out at wait or the next save, once, the checkpoint before stands") {
  TempDir dir;
  Log log;
  Weights weights(1000);
  Checkpointer checkpoints(dir.path(), {}, {.every = 1, .async = true});
  checkpoints.track("weights", weights);
  checkpoints.step();
  checkpoints.wait();
  FaultyFileSystem files;
  files.error = ENOSPC;
  ddp::io::ScopedFileSystem scope(files);
  auto fail_next = [&] { files.fail_at = files.count() + 3; };

  fail_next();
  CHECK(checkpoints.step());  // 2
  const std::string at_wait = message_of<CheckpointError>([&] { checkpoints.wait(); });
  CHECK_THAT(at_wait, ContainsSubstring("rank 0/1: step 2 was not saved"));
  CHECK_THAT(at_wait, ContainsSubstring("No space left"));
  CHECK_THAT(at_wait, ContainsSubstring((dir / "checkpoint_epoch0_step2.pt").string()));
  CHECK_THAT(log.text, ContainsSubstring("was not saved"));
  checkpoints.wait();  // told once
  CHECK(names(dir.path()) == Names{"checkpoint_epoch0_step1.pt", kLatest});
  CHECK(checkpoints.last_saved() == dir / "checkpoint_epoch0_step1.pt");

  fail_next();
  CHECK(checkpoints.step());                                                             // 3
  const std::string at_step = message_of<CheckpointError>([&] { checkpoints.step(); });  // 4, which is begun
  CHECK_THAT(at_step, ContainsSubstring("step 3 was not saved"));
  CHECK_THAT(at_step, ContainsSubstring("step 4 is being written"));
  checkpoints.wait();
  CHECK(checkpoints.last_saved() == dir / "checkpoint_epoch0_step4.pt");

  fail_next();
  CHECK(checkpoints.step());  // 5
  CHECK_THAT(message_of<CheckpointError>([&] { checkpoints.save(); }), ContainsSubstring("step 5 was not saved"));
  checkpoints.save();  // tries again
  CHECK(checkpoints.last_saved() == dir / "checkpoint_epoch0_step5.pt");

  fail_next();
  CHECK(checkpoints.step());  // 6
  CHECK(checkpoints.resume().step == 5);
  CHECK_THAT(log.text, ContainsSubstring("step 6 was not saved"));
}

TEST_CASE("a state that cannot be written is an error at the step, not later") {
  struct Sparse {
    State state_dict() const { return State::dict({{"x", torch::ones({2, 2}).to_sparse()}}); }
    void load_state_dict(const State&) {}
  } sparse;
  TempDir dir;
  Checkpointer checkpoints(dir.path(), {}, {.every = 1, .async = true});
  checkpoints.track("sparse", sparse);
  CHECK_THAT(message_of<CheckpointError>([&] { checkpoints.step(); }), ContainsSubstring("sparse"));
}

TEST_CASE("save returns when the checkpoint is safe, with async too") {
  TempDir dir;
  Weights weights(1000);
  Checkpointer checkpoints(dir.path(), {}, {.every = 0, .async = true});
  checkpoints.track("weights", weights);
  checkpoints.step();
  checkpoints.save();
  CHECK(checkpoints.last_saved() == dir / "checkpoint_epoch0_step1.pt");
  CHECK(fs::read_symlink(dir / kLatest) == "checkpoint_epoch0_step1.pt");
}

TEST_CASE("without memory for a copy the save is done at once, and says so") {
  TempDir dir;
  Log log;
  Weights weights(16 << 20);  // 64 MiB
  weights.values.fill_(1);
  Checkpointer checkpoints(dir.path(), {}, {.every = 1, .async = true});
  checkpoints.track("weights", weights);
  size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  rlimit old{};
  ::getrlimit(RLIMIT_AS, &old);
  const rlimit small{.rlim_cur = pages * 4096 + (40u << 20), .rlim_max = old.rlim_max};
  ::setrlimit(RLIMIT_AS, &small);
  bool done = false;
  try {
    checkpoints.step();
    done = checkpoints.last_saved().has_value();
  } catch (const std::exception& error) {
    log.text += error.what();
  }
  ::setrlimit(RLIMIT_AS, &old);
  INFO(log.text);
  CHECK(done);
  CHECK_THAT(log.text, ContainsSubstring("saved at once"));
  CHECK_THAT(log.text, ContainsSubstring("needs 67.1 MB"));
}

TEST_CASE("the memory of a copy is kept, and given back for another size") {
  ddp::detail::Staging staging;
  auto a = torch::arange(1000.0), b = torch::arange(500);
  const auto storages = [&] { return ddp::io::pickle(State::list({a, b})).storages; };
  auto first = storages();
  CHECK(staging.missing(first) == a.nbytes() + b.nbytes());
  staging.copy(first);
  const void* memory = first[0].storage.data();
  CHECK(memory != a.const_data_ptr());
  CHECK(std::memcmp(memory, a.const_data_ptr(), a.nbytes()) == 0);
  auto second = storages();
  CHECK(staging.missing(second) == 0);
  staging.copy(second);
  CHECK(second[0].storage.data() == memory);
  b = torch::arange(600);
  CHECK(staging.missing(storages()) == 100 * 8);
}

TEST_CASE("headroom: what the machine has, what each cgroup leaves, with page cache that can go") {
  TempDir dir;
  const auto write = [&](const std::string& name, const std::string& text) {
    fs::create_directories((dir / name).parent_path());
    touch(dir / name, text);
  };
  const auto headroom = [&] { return ddp::detail::memory_headroom(dir.path().string()); };
  write("proc/meminfo", "MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable:    4000 kB\n");
  CHECK(headroom() == 4000u << 10);
  write("proc/self/cgroup", "0::/job/step\n");
  write("sys/fs/cgroup/job/step/memory.max", "max\n");
  write("sys/fs/cgroup/job/step/memory.current", "5\n");
  CHECK(headroom() == 4000u << 10);
  write("sys/fs/cgroup/job/memory.max", "1000000\n");
  write("sys/fs/cgroup/job/memory.current", "900000\n");
  CHECK(headroom() == 100000);
  write("sys/fs/cgroup/job/memory.stat", "anon 5\nactive_file 7\ninactive_file 300000\n");
  CHECK(headroom() == 400000);
  write("proc/self/cgroup", "4:cpu,memory:/x\n");
  write("sys/fs/cgroup/memory/x/memory.limit_in_bytes", "700\n");
  write("sys/fs/cgroup/memory/x/memory.usage_in_bytes", "900\n");
  CHECK(headroom() == 0);
}
