#include "ddp/profile.h"

#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "ddp/error.h"
#include "support/catch.h"
#include "support/spawn.h"

using namespace std::chrono_literals;

namespace {

void sleep_in(ddp::Profiler& profiler, std::string_view phase, std::chrono::milliseconds time) {
  auto range = profiler.range(phase);
  std::this_thread::sleep_for(time);
}

}  // namespace

TEST_CASE("medians are over steps, a phase's ranges within a step are summed") {
  ddp::Profiler profiler;
  for (auto forward : {2ms, 4ms, 40ms}) {
    sleep_in(profiler, "forward", forward);
    sleep_in(profiler, "backward", 3ms);
    sleep_in(profiler, "backward", 3ms);
    profiler.step();
  }
  sleep_in(profiler, "forward", 1ms);  // of a step that has not ended
  CHECK(profiler.steps() == 3);
  auto phases = profiler.phases();
  REQUIRE(phases.size() == 2);
  CHECK(phases[0].name == "forward");
  CHECK(phases[0].steps == 3);
  CHECK(phases[0].median_ms >= 4);
  CHECK(phases[0].median_ms < 30);
  CHECK(phases[0].min_ms >= 2);
  CHECK(phases[0].max_ms >= 40);
  CHECK(phases[1].median_ms >= 6);
  CHECK(profiler.median_ms("backward") == phases[1].median_ms);
  CHECK(profiler.median_ms("update") == 0);
  CHECK_THAT(profiler.table(), ddp::test::ContainsSubstring("backward"));
}

TEST_CASE("memory is bounded: the newest are kept, a step that lost a part is not counted") {
  ddp::Profiler profiler({.max_events = 5});
  for (int i = 0; i < 100; ++i) {
    sleep_in(profiler, "a", 0ms);
    sleep_in(profiler, "b", 0ms);
    profiler.step();
  }
  auto phases = profiler.phases();  // b of step 97, which is not whole, then a and b of 98 and 99
  REQUIRE(phases.size() == 2);
  CHECK(phases[0].steps == 2);
  CHECK(phases[1].steps == 2);
}

TEST_CASE("a disabled profiler records nothing") {
  ddp::Profiler profiler({.enabled = false});
  sleep_in(profiler, "forward", 0ms);
  profiler.step();
  CHECK(profiler.phases().empty());
}

TEST_CASE("the trace is JSON of complete events with rank, thread and step") {
  ddp::test::TempDir folder;
  std::string path = folder / "trace.json";
  ddp::Profiler profiler;
  {
    auto outer = profiler.range("a \"quoted\" step");
    sleep_in(profiler, "inner", 2ms);
  }
  profiler.step();
  std::thread([&] { sleep_in(profiler, "loader", 1ms); }).join();
  profiler.write_chrome_trace(path, 3);

  auto trace = nlohmann::json::parse(std::ifstream(path));
  std::map<std::string, nlohmann::json> events;
  for (const auto& event : trace["traceEvents"]) {
    CHECK(event["pid"] == 3);
    if (event["ph"] == "X") events[event["name"]] = event;
  }
  REQUIRE(events.size() == 3);
  auto outer = events["a \"quoted\" step"], inner = events["inner"];
  CHECK(inner["dur"].get<double>() >= 2000);
  CHECK(inner["dur"].get<double>() < 2e6);
  CHECK(outer["ts"].get<double>() <= inner["ts"].get<double>());
  CHECK(outer["ts"].get<double>() + outer["dur"].get<double>() + 0.002 >=
        inner["ts"].get<double>() + inner["dur"].get<double>());
  CHECK(events["loader"]["tid"] != inner["tid"]);
  CHECK(events["loader"]["args"]["step"] == 1);
  double now = std::chrono::duration<double, std::micro>(std::chrono::system_clock::now().time_since_epoch()).count();
  CHECK(std::abs(inner["ts"].get<double>() - now) < 60e6);

  CHECK_THAT(ddp::test::message_of<ddp::Error>([&] { profiler.write_chrome_trace(folder / "no/trace.json", 0); }),
             ddp::test::ContainsSubstring("no/trace.json: No such file"));
}
