#include "ddp/log.h"

#include <atomic>
#include <sstream>
#include <thread>
#include <vector>

#include "support/catch.h"
#include "support/scoped.h"

namespace {

using ddp::Place;
using ddp::log::Level;

// The lines that reach a sink during its life.
class Recorder {
 public:
  Recorder() {
    ddp::log::set_sink([this](Level level, std::string_view line) {
      levels_.push_back(level);
      lines_.emplace_back(line);
    });
  }
  ~Recorder() { ddp::log::set_sink({}); }
  const std::vector<std::string>& lines() const { return lines_; }
  const std::vector<Level>& levels() const { return levels_; }

 private:
  std::vector<std::string> lines_;
  std::vector<Level> levels_;
};

}  // namespace

TEST_CASE("log: information comes from rank 0 only, warnings and errors from every rank with its name", "[log]") {
  Recorder recorder;
  for (int rank = 0; rank < 2; ++rank) {
    const Place place{.rank = rank, .size = 2};
    ddp::log::info(place, "epoch 3 begins");
    ddp::log::warn(place, "no space for a copy");
    ddp::log::error(place, "lost");
  }
  CHECK(recorder.lines() ==
        std::vector<std::string>{"[ddp] epoch 3 begins", "[ddp] rank 0/2: warning: no space for a copy",
                                 "[ddp] rank 0/2: error: lost", "[ddp] rank 1/2: warning: no space for a copy",
                                 "[ddp] rank 1/2: error: lost"});
  const bool levels_fit = recorder.levels() == std::vector<Level>{Level::kInfo, Level::kWarning, Level::kError,
                                                                  Level::kWarning, Level::kError};
  CHECK(levels_fit);
}

TEST_CASE("log: lines go to stderr, each ended by one newline, and an empty sink restores that", "[log]") {
  ddp::log::set_sink([](Level, std::string_view) { FAIL("this sink was replaced"); });
  ddp::log::set_sink({});
  ddp::test::CapturedStderr errors;
  ddp::log::info({}, "one");
  ddp::log::info({}, "two\n");
  ddp::log::warn({.rank = 2, .size = 4}, "three");
  CHECK(errors.text() == "[ddp] one\n[ddp] two\n[ddp] rank 2/4: warning: three\n");
}

TEST_CASE("log: lines of several threads are whole at stderr, and one at a time at a sink", "[log]") {
  constexpr int kThreads = 4;
  constexpr int kLines = 200;
  auto write = [] {
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([t] {
        const std::string message(300, static_cast<char>('a' + t));
        for (int i = 0; i < kLines; ++i) ddp::log::info({}, message);
      });
    }
    for (auto& thread : threads) thread.join();
  };
  auto whole = [](std::string_view line) {
    return line.size() == 306 && line.starts_with("[ddp] ") &&
           line.find_first_not_of(line[6], 6) == std::string_view::npos;
  };

  {
    std::atomic<bool> inside = false;
    std::atomic<int> overlaps = 0;
    int lines = 0;
    ddp::log::set_sink([&](Level, std::string_view line) {
      if (inside.exchange(true)) ++overlaps;
      std::this_thread::yield();
      if (whole(line)) ++lines;
      inside = false;
    });
    write();
    ddp::log::set_sink({});
    CHECK(overlaps == 0);
    CHECK(lines == kThreads * kLines);
  }
  std::string text;
  {
    ddp::test::CapturedStderr errors;
    write();
    text = errors.text();
  }
  std::istringstream stream(text);
  int count = 0;
  for (std::string line; std::getline(stream, line); ++count) REQUIRE(whole(line));
  CHECK(count == kThreads * kLines);
}
