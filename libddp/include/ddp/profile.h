// Where the time of a step goes: named phases, their medians, and a trace for Perfetto.
//
//   ddp::Profiler profiler({.device = group.device()});
//   { auto range = profiler.range("forward"); loss = loss_of(batch); }
//   profiler.step();                                                   // ends a step
//   std::cout << profiler.table();                                     // median milliseconds per phase
//   profiler.write_chrome_trace("trace.json", group.rank());           // open in ui.perfetto.dev
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace ddp {

/// What is timed, and how much of it is kept.
struct ProfilerOptions {
  /// On a CUDA device a phase is timed between two events on the stream that is current, so that the device's work
  /// counts and nothing waits; on the CPU by the monotonic clock.
  c10::Device device = c10::Device(c10::kCPU);
  /// The newest ranges are kept, older ones forgotten.
  size_t max_events = 100'000;
  bool enabled = true;  ///< false: ranges cost nothing
};

/// Times named ranges. Ranges may nest, repeat within a step and come from several threads; `step` and the reading
/// functions are for one thread.
class Profiler {
 public:
  using Options = ProfilerOptions;

  explicit Profiler(Options options = {});
  ~Profiler();

  /// Times from its making to its end. Must not outlive the profiler.
  class [[nodiscard]] Range {
   public:
    ~Range();
    Range(const Range&) = delete;
    Range& operator=(const Range&) = delete;

   private:
    friend class Profiler;
    struct Open;
    explicit Range(std::unique_ptr<Open> open);
    std::unique_ptr<Open> open_;
  };
  Range range(std::string_view phase);

  /// Ends a step. Ranges that end after it belong to the next.
  void step();
  int64_t steps() const;

  /// One phase over the steps that are kept: its time in a step is the sum of its ranges there.
  struct Phase {
    std::string name;
    double median_ms;
    double min_ms;
    double max_ms;
    int64_t steps;  ///< steps in which it occurred
  };
  /// In the order of their first appearance, ended steps only; waits for the device.
  std::vector<Phase> phases() const;
  /// `phases` as text, one line each under a heading.
  std::string table() const;
  /// The median of one phase in milliseconds, 0 when it never occurred.
  double median_ms(std::string_view phase) const;

  /// Writes all kept ranges in Chrome's trace format; `rank` is the process number, so that the files of several ranks
  /// can be shown together. Times count from the Unix epoch. Throws Error with the path and the reason.
  void write_chrome_trace(const std::string& path, int rank) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ddp
