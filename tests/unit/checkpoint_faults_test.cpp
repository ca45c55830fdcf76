// Every fault that a disk or a kernel can have, at every place in a save. LIBDDP_LONG=1 repeats more.
#include <sys/resource.h>
#include <torch/torch.h>

#include <csignal>
#include <cstring>
#include <numeric>
#include <random>

#include "ddp/error.h"
#include "support/catch.h"
#include "support/scoped.h"
#include "support/spawn.h"
#include "unit/checkpoint_fixtures.h"
#include "unit/faulty_file_system.h"
#include "unit/losing_file_system.h"

namespace fs = std::filesystem;
using namespace ddp::test;
using ddp::Checkpointer;
using ddp::CheckpointError;
using ddp::State;

namespace {

const std::string kLatest = "checkpoint_latest.pt";

// What the next life of the run finds: the step, with weights that are those of that step.
int64_t next_life(const fs::path& directory, std::string* log_text = nullptr) {
  Log log;
  Weights weights(100);
  Checkpointer checkpoints(directory, {}, {.every = 0});
  checkpoints.track("weights", weights);
  const bool found = static_cast<bool>(checkpoints.resume());
  if (log_text) *log_text = log.text;
  if (!found) return -1;
  if (!weights.holds(checkpoints.step_count())) throw std::runtime_error("weights of another step");
  return checkpoints.step_count();
}

void save_step(Checkpointer& checkpoints, Weights& weights) {
  weights.set(checkpoints.step_count() + 1);
  checkpoints.step();
  checkpoints.wait();
}

int temporaries(const fs::path& directory) {
  int count = 0;
  for (const auto& name : names(directory)) count += name.find("_tmp.") != std::string::npos || name[0] == '.';
  return count;
}

}  // namespace

TEST_CASE("power lost after every change of a save: the old or the new checkpoint, never less than was promised (C3)") {
  const ScopedEnv fast("TMPDIR", memory_folder());
  std::mt19937 random(11);
  const int repeats = rounds(10, 1000);
  int powered = 0, images = 0;
  for (int k = 0;; ++k) {
    LosingFileSystem disk;
    int64_t promised = 1;
    {
      Log log;
      ddp::io::ScopedFileSystem scope(disk);
      Weights weights(100);
      Checkpointer checkpoints("/losing", {}, {.every = 1, .keep = 1, .async = k % 2 == 1});
      checkpoints.track("weights", weights);
      save_step(checkpoints, weights);
      const int before = disk.changes();
      disk.power_fails_after = before + k;
      try {
        while (promised < 3) {
          save_step(checkpoints, weights);
          promised = checkpoints.step_count();
        }
      } catch (const CheckpointError&) {
      }
      powered = disk.changes() - before;
    }
    using Loss = LosingFileSystem::Loss;
    std::vector<Loss> losses = {Loss::kAll, Loss::kNothing, Loss::kInOrder};
    losses.resize(static_cast<size_t>(3 + repeats), Loss::kAnything);
    for (int i = 0; i < repeats / 4; ++i) losses.push_back(Loss::kInOrder);
    for (const Loss loss : losses) {
      TempDir dir;
      disk.write_image(loss, random, dir.path());
      CAPTURE(k, static_cast<int>(loss), promised, names(dir.path()));
      std::string log;
      const int64_t found = next_life(dir.path(), &log);
      INFO(log);
      if (found < promised || found > promised + 1) FAIL("found step " << found);
      // The link itself is never behind its promise: nobody has to look for an older file.
      if (log.find("falling back") != std::string::npos) FAIL("a fallback");
      if (temporaries(dir.path()) != 0) FAIL("a temporary was left");
      ++images;
    }
    if (promised == 3) break;
  }
  CHECK(powered > 60);
  std::printf("%d changes, %d power losses\n", powered, images);
}

TEST_CASE(
    "every call that fails, as every error, once and for ever: an error or a checkpoint, never half of one (C4)") {
  const ScopedEnv fast("TMPDIR", memory_folder());
  const std::vector<int> errors = {EIO, ENOSPC, EDQUOT, EINTR, EACCES};
  int faults = 0;
  for (const bool async : {false, true}) {
    for (const int error : errors) {
      for (const bool forever : {false, true}) {
        if (async && rounds(0, 1) == 0 && (forever || error == EDQUOT || error == EACCES)) continue;
        for (int k = 1;; ++k) {
          TempDir dir;
          Log log;
          FaultyFileSystem faulty;
          faulty.all_calls = true;
          faulty.error = error;
          faulty.forever = forever;
          Weights weights(100);
          Checkpointer checkpoints(dir.path(), {}, {.every = 1, .keep = 1, .async = async});
          checkpoints.track("weights", weights);
          save_step(checkpoints, weights);
          std::string failure;
          int calls = 0;
          {
            ddp::io::ScopedFileSystem scope(faulty);
            faulty.fail_at = k;
            try {
              save_step(checkpoints, weights);
            } catch (const CheckpointError& thrown) {
              failure = thrown.what();
            }
            calls = faulty.count();
            faulty.fail_at = 0;
          }
          CAPTURE(async, error, forever, k, failure, log.text);
          if (k > calls) break;  // nothing failed any more
          ++faults;
          // The previous one, or, where the link had moved already, the new one.
          const std::string target = fs::read_symlink(dir / kLatest);
          const int64_t step = load(dir / target).at("step").as_int();
          if (step != 2 && !(step == 1 && !failure.empty())) FAIL("latest is step " << step);
          if (!failure.empty()) {
            if (failure.find(dir.path().string()) == std::string::npos) FAIL("no path in: " << failure);
            if (failure.find(std::strerror(error)) == std::string::npos) FAIL("no reason in: " << failure);
            if (failure.find("rank 0/1: step 2 was not saved") == std::string::npos) FAIL(failure);
          }
          if (!forever && temporaries(dir.path()) != 0) FAIL("a temporary was left");
          // The run goes on, and the next life begins where it ended.
          save_step(checkpoints, weights);
          if (next_life(dir.path()) != 3) FAIL("step 3 is not there");
          if (temporaries(dir.path()) != 0) FAIL("a temporary is still there");
        }
      }
    }
  }
  CHECK(faults > 500);
  std::printf("%d faults\n", faults);
}

TEST_CASE("a fault while a fault is cleaned up, and while the next life resumes (C7)") {
  const ScopedEnv fast("TMPDIR", memory_folder());
  std::mt19937 random(7);
  for (int round = 0; round < rounds(20, 500); ++round) {
    TempDir dir;
    Log log;
    FaultyFileSystem faulty;
    faulty.all_calls = true;
    Weights weights(100);
    {
      Checkpointer checkpoints(dir.path(), {}, {.every = 1, .keep = 1});
      checkpoints.track("weights", weights);
      save_step(checkpoints, weights);
      ddp::io::ScopedFileSystem scope(faulty);
      const int first = 1 + static_cast<int>(random() % 60);
      faulty.fail_also = {first, first + 1 + static_cast<int>(random() % 3)};
      try {
        save_step(checkpoints, weights);
      } catch (const CheckpointError&) {
      }
    }
    touch(dir / "checkpoint_tmp.0123456789abcdef.pt");
    FaultyFileSystem again;
    again.all_calls = true;
    again.fail_also = {1 + static_cast<int>(random() % 20), 1 + static_cast<int>(random() % 40)};
    {
      // It resumes, or says why not; it never starts anew.
      ddp::io::ScopedFileSystem scope(again);
      Checkpointer checkpoints(dir.path(), {}, {.every = 0});
      checkpoints.track("weights", weights);
      try {
        if (!checkpoints.resume() || !weights.holds(checkpoints.step_count())) FAIL("not resumed: " << log.text);
      } catch (const CheckpointError&) {
      }
    }
    if (next_life(dir.path()) < 1) FAIL("lost");
    if (temporaries(dir.path()) != 0) FAIL("a temporary is still there");
  }
  SUCCEED();
}

TEST_CASE("short and interrupted writes and reads: the same file (C6)") {
  const ScopedEnv fast("TMPDIR", memory_folder());
  TempDir dir;
  Weights weights(100);
  std::string expected;
  for (int i = 0; i < rounds(100, 100); ++i) {
    FaultyFileSystem slow;
    slow.longest_write = i == 0 ? SIZE_MAX : static_cast<size_t>(1 + i * i % 97);
    slow.interruptions = i == 0 ? 0 : 50;
    ddp::io::ScopedFileSystem scope(slow);
    save(dir / "x.pt", State::dict({{"weights", weights.values}, {"i", 7}}));
    if (i == 0) expected = content(dir / "x.pt");
    if (content(dir / "x.pt") != expected) FAIL("round " << i);
    if (!(load(dir / "x.pt").at("weights") == State(weights.values))) FAIL("round " << i);
  }
  SUCCEED();
}

TEST_CASE("a file size limit fails a save in the background, and the run goes on (C5)") {
  TempDir dir;
  Log log;
  Weights weights(10'000);
  Checkpointer checkpoints(dir.path(), {}, {.every = 1, .async = true});
  checkpoints.track("weights", weights);
  save_step(checkpoints, weights);
  rlimit old{};
  ::getrlimit(RLIMIT_FSIZE, &old);
  const rlimit small{.rlim_cur = 4096, .rlim_max = old.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &small);  // SIGXFSZ is not ignored: the thread does not take it
  std::string message;
  try {
    save_step(checkpoints, weights);
  } catch (const CheckpointError& error) {
    message = error.what();
  }
  ::setrlimit(RLIMIT_FSIZE, &old);
  CHECK_THAT(message, ContainsSubstring("File too large"));
  CHECK(names(dir.path()) == Names{"checkpoint_epoch0_step1.pt", kLatest});
  save_step(checkpoints, weights);
  CHECK(checkpoints.last_saved() == dir / "checkpoint_epoch0_step3.pt");
}

namespace {

// A whole checkpoint, and one step before it to fall back to.
struct Damaged {
  Damaged() {
    Weights weights(100);
    Checkpointer checkpoints(dir.path(), {}, {.every = 1});
    checkpoints.track("weights", weights);
    save_step(checkpoints, weights);
    save_step(checkpoints, weights);
    file = dir / "checkpoint_epoch0_step2.pt";
    good = content(file);
    whole = load(file);
  }
  void write(const std::string& bytes) { std::ofstream(file, std::ios::binary | std::ios::trunc) << bytes; }

  TempDir dir;
  fs::path file;
  std::string good;
  State whole;
};

}  // namespace

TEST_CASE("one flipped bit anywhere: found, or without any effect, found in a record always (C8)") {
  const ScopedEnv fast("TMPDIR", memory_folder());
  Damaged damaged;
  std::mt19937 random(3);
  const std::string payload(
      static_cast<const char*>(
          damaged.whole.at("libddp").at("tracked").at("weights").at("values").as_tensor().const_data_ptr()),
      400);
  const size_t payload_at = damaged.good.find(payload);
  REQUIRE(payload_at != std::string::npos);

  std::vector<size_t> positions(damaged.good.size());
  std::iota(positions.begin(), positions.end(), 0);
  for (int i = 0; i < rounds(500, 20'000); ++i) positions.push_back(random() % damaged.good.size());

  int found = 0, harmless = 0;
  for (const size_t at : positions) {
    std::string bytes = damaged.good;
    bytes[at] = static_cast<char>(bytes[at] ^ (1 << random() % 8));
    damaged.write(bytes);
    try {
      const State state = load(damaged.file);
      if (!(state == damaged.whole)) FAIL("byte " << at << " of " << bytes.size() << " changed what was loaded");
      if (at >= payload_at && at < payload_at + payload.size()) FAIL("byte " << at << " of a record was not found");
      ++harmless;
    } catch (const CheckpointError& error) {
      if (std::string(error.what()).find(damaged.file.string()) == std::string::npos) FAIL(error.what());
      ++found;
    }
  }
  std::printf("%d flips found, %d in padding and fields that nobody reads\n", found, harmless);
  CHECK(found > harmless);
  damaged.write(damaged.good.substr(0, payload_at) + "!" + damaged.good.substr(payload_at + 1));
  CHECK(next_life(damaged.dir.path()) == 1);
}

TEST_CASE("cut anywhere, zeroed at its end, or with bytes behind it: found, and the one before is loaded (C9)") {
  const ScopedEnv fast("TMPDIR", memory_folder());
  Damaged damaged;
  std::mt19937 random(4);
  const size_t size = damaged.good.size(), directory_at = damaged.good.find("PK\x01\x02");
  std::vector<size_t> lengths;
  for (size_t length = directory_at; length < size; ++length) lengths.push_back(length);
  for (size_t length = 0; length < 200; ++length) lengths.push_back(length);
  for (int i = 0; i < rounds(200, 5'000); ++i) lengths.push_back(random() % size);
  const auto refused = [&](const std::string& bytes) {
    damaged.write(bytes);
    try {
      load(damaged.file);
    } catch (const CheckpointError&) {
      return true;
    }
    return false;
  };
  for (const size_t length : lengths) {
    if (!refused(damaged.good.substr(0, length))) FAIL("cut to " << length << " of " << size);
    const std::string zeroed = damaged.good.substr(0, length) + std::string(size - length, '\0');
    if (zeroed != damaged.good && !refused(zeroed)) FAIL("zeroed from " << length);
  }
  for (const size_t more : {1, 2, 21, 22, 23, 64, 4096}) {
    CHECK(refused(damaged.good + std::string(more, '\0')));
    CHECK(refused(damaged.good + damaged.good.substr(0, more)));
  }
  CHECK_FALSE(refused(damaged.good));
  damaged.write(damaged.good.substr(0, size / 2));
  CHECK(next_life(damaged.dir.path()) == 1);
}
