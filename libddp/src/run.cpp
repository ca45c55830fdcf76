#include "ddp/run.h"

#include <fmt/format.h>

#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

#include "ddp/error.h"
#include "ddp/place.h"
#include "error_text.h"
#include "stderr_line.h"

namespace ddp {
namespace {

std::optional<int> number_of(const char* name) {
  const char* text = std::getenv(name);
  if (text == nullptr) return std::nullopt;
  int value = 0;
  const char* last = text + std::strlen(text);
  auto [end, error] = std::from_chars(text, last, value);
  if (error != std::errc() || end != last) return std::nullopt;
  return value;
}

// In the order of `read_env`, but content with whatever is there: this runs when something is wrong already.
std::string place_name() {
  constexpr std::pair<const char*, const char*> kNames[] = {{"RANK", "WORLD_SIZE"},
                                                            {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
                                                            {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS"},
                                                            {"SLURM_PROCID", "SLURM_NTASKS"}};
  for (const auto& [rank_name, size_name] : kNames) {
    const auto rank = number_of(rank_name);
    const auto size = number_of(size_name);
    if (rank && size) return Place{.rank = *rank, .size = *size}.name();
  }
  if (const auto rank = number_of("RANK")) return fmt::format("rank {}", *rank);
  return Place{}.name();
}

// "[ddp::run] rank 1/2: boom"; a message that says all this already stays as it is.
std::string report_of(const std::string& message) {
  const std::string place = place_name();
  if (message.starts_with("[ddp") && message.find(place) != std::string::npos) return message;
  return fmt::format("[ddp::run] {}: {}", place, message);
}

// In the form of Python's @record, which has no word for a consequence: torchrun passes over "secondary", ddprun reads it.
std::string report_json(const std::string& message, long timestamp_s, bool is_consequence) {
  nlohmann::json extra = {{"py_callstack", message}, {"timestamp", std::to_string(timestamp_s)}};
  if (is_consequence) extra["secondary"] = true;
  const nlohmann::json report = {{"message", {{"message", message}, {"extraInfo", extra}}}};
  return report.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);  // a message may be no UTF-8
}

void write_error_file(const std::string& report, bool is_consequence) {
  const char* path = std::getenv("TORCHELASTIC_ERROR_FILE");
  if (path == nullptr || *path == '\0') return;
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  // torchrun takes the earliest whole second for the root cause, the lowest rank among equals. Another rank's
  // end is noticed within milliseconds, at worst in the second before it is reported, so what is only its consequence is
  // dated two seconds later.
  const long seconds = std::chrono::duration_cast<std::chrono::seconds>(now).count() + (is_consequence ? 2 : 0);
  errno = 0;
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << report_json(report, seconds, is_consequence);
  file.close();
  if (!file)
    detail::write_stderr_line(
        fmt::format("[ddp::run] the error file {} cannot be written: {}", path, std::strerror(errno)));
}

int fail(const std::string& message, bool is_consequence) noexcept {
  try {
    const std::string report = report_of(message);
    detail::write_stderr_line(report);
    write_error_file(report, is_consequence);
  } catch (...) {  // out of memory while reporting: the exit code is what remains
  }
  return kExitFailure;
}

// The message and those of the exceptions nested in it.
std::string full_text(const std::exception& error) {
  std::string text = detail::error_text(error);
  try {
    std::rethrow_if_nested(error);
  } catch (const std::exception& cause) {
    text += "\n  caused by: " + full_text(cause);
  } catch (...) {
    text += "\n  caused by an exception that is no std::exception";
  }
  return text;
}

}  // namespace

int detail::run(const std::function<int()>& body) {
  try {
    return body();
  } catch (const PeerError& e) {
    return fail(full_text(e), true);
  } catch (const TimeoutError& e) {
    return fail(full_text(e), true);
  } catch (const std::exception& e) {
    return fail(full_text(e), false);
  } catch (...) {
    return fail("an exception that is no std::exception", false);
  }
}

std::string error_report_json(const std::string& message, long timestamp_s) {
  return report_json(message, timestamp_s, false);
}

}  // namespace ddp
