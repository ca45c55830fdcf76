// The frame around a rank's work: an exception becomes a report that names the rank, in torchrun's error file too.
//
//   void train();
//   int main() { return ddp::run(train); }
#pragma once

#include <concepts>
#include <functional>
#include <string>
#include <type_traits>

namespace ddp {

/// Exit codes of `run`.
inline constexpr int kExitSuccess = 0;  ///< the work is done, or was stopped by a signal after saving
inline constexpr int kExitFailure = 1;  ///< an exception; the report is on stderr and in the error file

namespace detail {
int run(const std::function<int()>& body);
}

/// Calls `body` and returns the process's exit code: what `body` returns, or kExitSuccess where it returns nothing. An
/// exception is written to stderr first, whole and with the rank ("[ddp::run] rank 1/2: boom"), then to
/// $TORCHELASTIC_ERROR_FILE as JSON in the form of Python's `@record`, so that torchrun's summary shows it, and the code
/// is kExitFailure. Nothing is waited for and nothing is communicated after an exception, so that a failed rank ends:
/// return the code from main at once. The rank is read from the launcher's variables without complaint about faults.
template <std::invocable Body>
int run(Body&& body) {
  using Result = std::invoke_result_t<Body&>;
  static_assert(std::is_void_v<Result> || std::is_same_v<Result, int>,
                "ddp::run: the body returns void or an exit code");
  if constexpr (std::is_void_v<Result>) {
    return detail::run([&body] {
      body();
      return kExitSuccess;
    });
  } else {
    return detail::run([&body] { return body(); });
  }
}

/// The JSON that `run` writes, and `@record` in Python:
/// {"message": {"message": ..., "extraInfo": {"py_callstack": ..., "timestamp": "<seconds>"}}}.
std::string error_report_json(const std::string& message, long timestamp_s);

}  // namespace ddp
