// Checkpoints of real processes: killed at random times, two runs in one directory, a reader beside a writer, full
// disks. LIBDDP_LONG=1 repeats more.
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <torch/torch.h>
#include <unistd.h>

#include <atomic>
#include <random>
#include <thread>

#include "checkpoint_directory.h"
#include "ddp/collectives.h"
#include "ddp/error.h"
#include "ddp/process_group.h"
#include "support/catch.h"
#include "support/scoped.h"
#include "support/spawn.h"
#include "unit/checkpoint_fixtures.h"
#include "unit/faulty_file_system.h"

namespace fs = std::filesystem;
using namespace ddp::test;
using ddp::Checkpointer;
using ddp::CheckpointError;
using ddp::ProcessGroup;

namespace {

const std::string kLatest = "checkpoint_latest.pt";

// A number that forked ranks and the test share.
class Shared {
 public:
  Shared() {
    void* memory = ::mmap(nullptr, sizeof(Number), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::runtime_error("mmap");
    number_ = new (memory) Number(0);
  }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  ~Shared() { ::munmap(static_cast<void*>(number_), sizeof(Number)); }
  std::atomic<int64_t>& operator*() const { return *number_; }

 private:
  using Number = std::atomic<int64_t>;
  Number* number_;
};

void quiet() {
  ddp::log::set_sink([](ddp::log::Level, std::string_view) {});
}

int64_t step_of(const std::optional<fs::path>& saved) {
  return saved ? ddp::detail::CheckpointName::parse(saved->filename().string())->step : 0;
}

// One life of a run that is killed: it resumes what the last one left, which must be no less than that one knew to be
// saved, and saves at each step until its end.
void live(const fs::path& directory, ProcessGroup group, bool async, std::chrono::microseconds life,
          std::atomic<int64_t>& acknowledged) {
  std::string log_text;
  ddp::log::set_sink([&](ddp::log::Level, std::string_view line) { log_text += line; });
  Weights weights(1 << 20);  // 4 MiB
  Checkpointer checkpoints(directory, group, {.every = 1, .keep = 2, .async = async});
  checkpoints.track("weights", weights);
  const int64_t promised = acknowledged;
  const auto resumed = checkpoints.resume();
  DDP_CHECK(weights.holds(checkpoints.step_count()) || !resumed);
  DDP_CHECK(checkpoints.step_count() >= promised);
  DDP_CHECK(log_text.find("falling back") == std::string::npos);
  quiet();
  // From a thread, so that it comes at any instruction.
  std::thread([life] {
    std::this_thread::sleep_for(life);
    ::kill(::getpid(), SIGKILL);
  }).detach();
  while (true) {
    weights.set(checkpoints.step_count() + 1);
    checkpoints.step();
    if (group.is_root()) acknowledged = step_of(checkpoints.last_saved());
  }
}

void kill_rounds(int ranks, int count, int longest_ms) {
  TempDir dir;
  Shared acknowledged;
  std::mt19937 random(static_cast<unsigned>(5 + ranks));
  std::uniform_int_distribution<int> microseconds(0, 1000 * longest_ms);
  for (int round = 0; round < count; ++round) {
    const std::chrono::microseconds life(microseconds(random));
    const auto results = spawn_ranks(ranks,
                                     [&](int) {
                                       const auto group =
                                           ranks == 1 ? ProcessGroup() : ProcessGroup::from_env({.timeout = 10s});
                                       live(dir.path(), group, /*async=*/round % 2 == 1, life, *acknowledged);
                                     },
                                     {.deadline = 40s});
    for (const auto& result : results) {
      INFO("round " << round << ": " << result.describe());
      // The one that lives a moment longer may see its peer gone.
      if (result.signal != SIGKILL && result.error.find("rank") == std::string::npos) FAIL("ended otherwise");
      if (result.error.find("DDP_CHECK") != std::string::npos || result.timed_out) FAIL(result.error);
    }
  }
  CHECK(*acknowledged > 0);
  run_ranks(1, [&](int) {
    quiet();
    Weights weights(1 << 20);
    Checkpointer checkpoints(dir.path(), ProcessGroup());
    checkpoints.track("weights", weights);
    DDP_CHECK(checkpoints.resume());
    DDP_CHECK(weights.holds(checkpoints.step_count()));
    DDP_CHECK(checkpoints.step_count() >= *acknowledged);
  });
  int temporaries = 0, files = 0;
  for (const auto& name : names(dir.path())) {
    temporaries += name.find("tmp") != std::string::npos || name.starts_with(".latest");
    files += name.ends_with(".pt");
  }
  CHECK(temporaries == 0);
  CHECK(files <= 4 + 1);  // two, the newest, and what a kill kept from being deleted
  std::printf("%d kills of %d rank(s), %ld steps saved\n", count, ranks, static_cast<long>(*acknowledged));
}

}  // namespace

TEST_CASE("one rank killed at a random time in a save: the next life has all that was saved (C1)") {
  kill_rounds(1, rounds(36, 1400), 160);
}

TEST_CASE("two ranks killed at a random time in a save: the next life has all that was saved (B23a, C1)") {
  kill_rounds(2, rounds(14, 600), 250);
}

TEST_CASE("two runs in one directory: the second hears who the first is, on every rank, and writes nothing (C13)") {
  TempDir dir;
  run_ranks(3, [&](int rank) {
    quiet();
    const auto all = ProcessGroup::from_env({.timeout = 20s});
    const auto group = all.split(rank == 2 ? 1 : 0);
    const auto pids = ddp::all_gather_object(std::to_string(::getpid()), all);
    Weights weights(100);
    auto checkpoints =
        std::make_unique<Checkpointer>(dir.path(), group, ddp::CheckpointerOptions{.every = 1, .async = rank != 2});
    checkpoints->track("weights", weights);
    if (rank == 2) {
      weights.set(1);
      checkpoints->step();
    }
    ddp::barrier(all);
    const auto before = names(dir.path());
    if (rank != 2) {
      char host[256] = {};
      ::gethostname(host, sizeof host - 1);
      for (const bool resume : {true, false}) {
        const std::string message = message_of<CheckpointError>(
            [&] { resume ? static_cast<void>(checkpoints->resume()) : static_cast<void>(checkpoints->step()); });
        DDP_CHECK(message.find("process " + pids[2] + " on " + host + " since 20") != std::string::npos);
        DDP_CHECK(message.find("rank " + std::to_string(rank) + "/2") != std::string::npos);
        DDP_CHECK(message.find("in use by another run") != std::string::npos);
      }
      DDP_CHECK(names(dir.path()) == before);
      ddp::barrier(group);
      // A file by its name is read all the same, and nothing is swept away.
      if (rank == 0) touch(dir / "checkpoint_tmp.0123456789abcdef.pt");
      ddp::barrier(group);
      DDP_CHECK(checkpoints->resume(dir / kLatest).step == 1);
      DDP_CHECK(weights.holds(1));
      DDP_CHECK(fs::exists(dir / "checkpoint_tmp.0123456789abcdef.pt"));
    }
    ddp::barrier(all);
    if (rank == 2) checkpoints.reset();  // gives the lock back
    ddp::barrier(all);
    if (rank != 2) {
      DDP_CHECK(checkpoints->resume().step == 1);
      ddp::barrier(group);  // rank 0 sweeps
      DDP_CHECK(!fs::exists(dir / "checkpoint_tmp.0123456789abcdef.pt"));
      checkpoints->step();
      checkpoints->wait();
    }
  });
}

TEST_CASE("a forked child does not keep the lock of its parent that died") {
  TempDir dir;
  Shared child;
  spawn_ranks(1, [&](int) {
    quiet();
    Checkpointer checkpoints(dir.path(), ProcessGroup(), {.every = 1});
    checkpoints.step();
    if (::fork() == 0) {
      ::setpgid(0, 0);  // outlives the group
      *child = ::getpid();
      std::this_thread::sleep_for(20s);
      ::_exit(0);
    }
    while (*child == 0) std::this_thread::sleep_for(1ms);
  });
  REQUIRE(*child > 0);
  CHECK(::kill(static_cast<pid_t>(*child), 0) == 0);
  run_ranks(1, [&](int) {
    quiet();
    DDP_CHECK(Checkpointer(dir.path(), ProcessGroup()).resume().step == 1);
  });
  ::kill(static_cast<pid_t>(*child), SIGKILL);
}

TEST_CASE("a directory that cannot be written is read, a save there is an error on both ranks (C13)") {
  TempDir dir;
  run_ranks(1, [&](int) {
    quiet();
    Checkpointer checkpoints(dir / "run", ProcessGroup(), {.every = 1});
    checkpoints.step();
  });
  ::chmod(dir.path().c_str(), 0755);
  ::chmod((dir / "run").c_str(), 0555);
  for (const auto& name : names(dir / "run")) {
    if (name != kLatest) ::chmod((dir / "run" / name).c_str(), 0444);
  }
  ::chmod((dir / "run" / ddp::detail::kLockName).c_str(), 0444);
  run_ranks(2, [&](int rank) {
    std::string text;
    ddp::log::set_sink([&](ddp::log::Level, std::string_view line) { text += line; });
    const auto group = ProcessGroup::from_env({.timeout = 10s});
    if (::geteuid() == 0) DDP_CHECK(::setuid(65534) == 0);  // root may write anywhere
    Checkpointer checkpoints(dir / "run", group, {.every = 1});
    DDP_CHECK(checkpoints.resume().step == 1);
    DDP_CHECK((text.find("is not locked") != std::string::npos) == (rank == 0));
    const std::string message = message_of<CheckpointError>([&] { checkpoints.step(); });
    DDP_CHECK(message.find("Permission denied") != std::string::npos);
  });
  ::chmod((dir / "run").c_str(), 0755);
}

TEST_CASE("a reader of latest beside a writer that deletes: never a missing or half checkpoint (C10)") {
  const ScopedEnv fast("TMPDIR", memory_folder());
  TempDir dir;
  Shared last, reads;
  const int swaps = rounds(2000, 20'000);
  run_ranks(2,
            [&](int rank) {
              quiet();
              Weights weights(1000);
              if (rank == 0) {
                Checkpointer checkpoints(dir.path(), ProcessGroup(), {.every = 1, .keep = 1});
                checkpoints.track("weights", weights);
                for (int i = 1; i <= swaps; ++i) {
                  weights.set(i);
                  checkpoints.step();
                  *last = i;
                }
                return;
              }
              while (*last == 0) std::this_thread::sleep_for(1ms);
              int64_t newest = 0;
              while (*last < swaps) {
                const ddp::State state = load(dir / kLatest);
                const int64_t step = state.at("step").as_int();
                DDP_CHECK(step >= newest);
                newest = step;
                weights.load_state_dict(state.at("libddp").at("tracked").at("weights"));
                DDP_CHECK(weights.holds(step));
                ++*reads;
              }
            },
            {.deadline = 100s});
  CHECK(*reads > 20);
  std::printf("%d swaps, %ld reads\n", swaps, static_cast<long>(*reads));
}

TEST_CASE("an error of the thread on rank 0 comes out on both ranks, with the same text, and training goes on") {
  TempDir dir;
  run_ranks(2, [&](int rank) {
    quiet();
    const auto group = ProcessGroup::from_env({.timeout = 10s});
    FaultyFileSystem faulty;
    Weights weights(1000);
    Checkpointer checkpoints(dir.path(), group, {.every = 2, .async = true});
    checkpoints.track("weights", weights);
    ddp::io::ScopedFileSystem scope(faulty);
    const auto run_to = [&](int64_t step) {
      while (checkpoints.step_count() < step) {
        weights.set(checkpoints.step_count() + 1);
        checkpoints.step();
      }
    };
    run_to(2);
    checkpoints.wait();
    DDP_CHECK(step_of(checkpoints.last_saved()) == 2);
    faulty.fail_at = faulty.count() + 2;
    run_to(5);  // the save of step 4 fails meanwhile, step 5 knows nothing of it
    const std::string at_step = message_of<CheckpointError>([&] { run_to(6); });
    const auto both = ddp::all_gather_object(at_step.substr(at_step.find(": ")), group);
    DDP_CHECK(both[0] == both[1]);
    DDP_CHECK(at_step.find("step 4 was not saved") != std::string::npos);
    DDP_CHECK(at_step.find("rank " + std::to_string(rank) + "/2") != std::string::npos);
    DDP_CHECK(checkpoints.step_count() == 6);
    DDP_CHECK(step_of(checkpoints.last_saved()) == 2);
    checkpoints.wait();
    DDP_CHECK(step_of(checkpoints.last_saved()) == 6);
    Weights again(1000);
    Checkpointer other(dir.path(), group);
    other.track("weights", again);
    DDP_CHECK(other.resume().step == 6);
    DDP_CHECK(again.holds(6));
  });
}

TEST_CASE("the best metric is rank 0's, and both ranks know it after a resume") {
  TempDir dir;
  for (const bool resumed : {false, true}) {
    run_ranks(2, [&](int rank) {
      quiet();
      const auto group = ProcessGroup::from_env({.timeout = 10s});
      Checkpointer checkpoints(dir.path(), group, {.every = 0});
      DDP_CHECK(static_cast<bool>(checkpoints.resume()) == resumed);
      if (resumed) {
        DDP_CHECK(checkpoints.best() == 1.0);
        DDP_CHECK(!checkpoints.save_best(rank == 0 ? 1.5 : 0.5));
      } else {
        DDP_CHECK(checkpoints.save_best(1.0 + rank));
      }
    });
  }
}

TEST_CASE("a disk that is full for real: an error with the reason, the previous one stands, the run goes on (C5)") {
  TempDir dir;
  const auto results = spawn_ranks(1, [&](int) {
    quiet();
    // A mount of its own for this process, by root or in a user namespace.
    if (::unshare(CLONE_NEWNS) != 0 && ::unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) throw std::runtime_error("SKIP");
    ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr);
    if (::mount("tmpfs", dir.path().c_str(), "tmpfs", 0, "size=8m") != 0) throw std::runtime_error("SKIP");
    for (const bool async : {false, true}) {
      for (const bool tells_space : {true, false}) {
        FaultyFileSystem files;
        files.tells_space = tells_space;
        ddp::io::ScopedFileSystem scope(files);
        const fs::path directory = dir / ("run" + std::to_string(async) + std::to_string(tells_space));
        Weights weights(500'000);  // 2 MB
        Checkpointer checkpoints(directory, ProcessGroup(), {.every = 1, .keep = 1, .async = async});
        checkpoints.track("weights", weights);
        weights.set(1);
        checkpoints.step();
        checkpoints.wait();
        touch(dir / "filler", std::string(5'000'000, 'x'));
        weights.set(2);
        const std::string message = message_of<CheckpointError>([&] {
          checkpoints.step();
          checkpoints.wait();
        });
        DDP_CHECK(message.find(tells_space ? "needs 2.0 MB" : "No space left on device") != std::string::npos);
        DDP_CHECK(names(directory) == (Names{"checkpoint_epoch0_step1.pt", kLatest}));
        fs::remove(dir / "filler");
        weights.set(3);
        checkpoints.step();
        checkpoints.wait();
        DDP_CHECK(names(directory) == (Names{"checkpoint_epoch0_step3.pt", kLatest}));
        fs::remove_all(directory);
      }
    }
  });
  if (results[0].error == "SKIP") DDP_SKIP("this user may not mount a tmpfs");
  INFO(results[0].describe());
  CHECK(results[0].ok());
}
