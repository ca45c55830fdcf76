#include "report.h"

#include <sys/stat.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <ctime>
#include <fstream>
#include <iomanip>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string_view>

namespace ddprun {
namespace {

constexpr size_t kMostLines = 40;  // of a message; the rest is in the rank's own output

double seconds(SystemClock::duration time) { return std::chrono::duration<double>(time).count(); }

std::string clock_time(SystemClock::time_point at) {
  const std::time_t whole = SystemClock::to_time_t(at);
  std::tm local{};
  ::localtime_r(&whole, &local);
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(at.time_since_epoch()).count() % 1000;
  std::ostringstream text;
  text << std::put_time(&local, "%H:%M:%S") << '.' << std::setw(3) << std::setfill('0') << ms;
  return text.str();
}

std::string after(double time, const char* what) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(2) << std::max(time, 0.0) << " s " << what;
  return text.str();
}

std::string indented(std::string_view text, size_t most_lines) {
  std::string result;
  std::istringstream lines{std::string(text)};
  size_t count = 0;
  for (std::string line; std::getline(lines, line) && count < most_lines; ++count) result += "\n    " + line;
  return result;
}

std::string last_lines(const std::string& text, size_t count) {
  size_t at = text.size();
  for (size_t i = 0; i <= count && at != std::string::npos && at > 0; ++i) at = text.rfind('\n', at - 1);
  return at == std::string::npos || at == 0 ? text : text.substr(at + 1);
}

// What is known of the cause, below the line that says who failed.
std::string cause(const Ending& ending) {
  if (ending.report) return indented(ending.report->message, kMostLines);
  if (!ending.tail.empty())
    return "\n  no error file; its last lines on stderr:" + indented(last_lines(ending.tail, 5), 5);
  return "";
}

}  // namespace

std::optional<ErrorReport> read_error_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  const auto json = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("message")) return std::nullopt;
  const auto& outer = json["message"];
  if (outer.is_string()) return ErrorReport{.message = outer.get<std::string>()};
  if (!outer.is_object() || !outer.contains("message") || !outer["message"].is_string()) return std::nullopt;
  ErrorReport report{.message = outer["message"].get<std::string>()};
  if (outer.contains("extraInfo") && outer["extraInfo"].is_object()) {
    const auto& extra = outer["extraInfo"];
    report.secondary = extra.contains("secondary") && extra["secondary"] == true;
  }
  return report;
}

bool Ending::secondary() const {
  if (report) return report->secondary;
  if (!told_to_stop) return false;
  if (signal == SIGKILL) return killed;  // not ddprun's own: it was killed before it could heed the first signal
  return signal == 0 || signal == SIGTERM || signal == SIGPIPE;
}

std::string Ending::how() const {
  if (signal == 0) return "exit code " + std::to_string(code);
  return "signal " + std::to_string(signal) + " (" + signal_name(signal) + ")";
}

const Ending* first_failure(const std::vector<Ending>& endings) {
  const Ending* first = nullptr;
  for (const Ending& ending : endings) {
    if (!ending.failed()) continue;
    if (first == nullptr || std::pair(ending.secondary(), ending.at) < std::pair(first->secondary(), first->at)) {
      first = &ending;
    }
  }
  return first;
}

std::string summary(const std::vector<Ending>& endings, int world, SystemClock::time_point start) {
  const Ending* first = first_failure(endings);
  if (first == nullptr) return "";
  const auto name = [world](const Ending& e) { return "rank " + std::to_string(e.rank) + "/" + std::to_string(world); };
  std::string text = name(*first) + " failed first: " + first->how() + " at " + clock_time(first->at) + ", " +
                     after(seconds(first->at - start), "after the start") + cause(*first);
  std::vector<const Ending*> others;
  for (const Ending& ending : endings) {
    if (ending.failed() && &ending != first) others.push_back(&ending);
  }
  std::ranges::stable_sort(others, {}, [](const Ending* e) { return std::pair(e->secondary(), e->at); });
  for (const Ending* other : others) {
    text += "\n[ddprun] " + name(*other);
    if (!other->secondary()) {
      text += " failed too: " + other->how() + ", " + after(seconds(other->at - first->at), "later") + cause(*other);
    } else if (other->report) {
      text += " failed because another had (secondary): " + other->how() + ", " +
              after(seconds(other->at - first->at), "later") + indented(other->report->message, 3);
    } else if (other->killed) {
      text += " did not end in the time of grace and was killed (secondary)";
    } else {
      text += " was told to stop (secondary): " + other->how();
    }
  }
  return text;
}

std::string signal_name(int signal) {
  const char* name = ::sigabbrev_np(signal);
  return name != nullptr ? std::string("SIG") + name : "signal " + std::to_string(signal);
}

}  // namespace ddprun
