#include "progress.h"

#include <unistd.h>

#include <array>
#include <cstdio>

#include "ddp/log.h"

namespace qwen {
namespace {

std::string clock_text(double seconds) {
  std::array<char, 32> text{};
  const auto whole = static_cast<int64_t>(seconds + 0.5);
  if (whole >= 3600) {
    std::snprintf(text.data(), text.size(), "%ld:%02ld:%02ld", whole / 3600, whole / 60 % 60, whole % 60);
  } else {
    std::snprintf(text.data(), text.size(), "%ld:%02ld", whole / 60, whole % 60);
  }
  return text.data();
}

std::string rate_text(double per_second) {
  std::array<char, 32> text{};
  const bool thousands = per_second >= 1000;
  std::snprintf(text.data(), text.size(), thousands ? "%.1fk" : "%.0f", thousands ? per_second / 1000 : per_second);
  return text.data();
}

}  // namespace

Progress::Progress(const ddp::Place& place, int64_t first_step, int64_t total_steps, int64_t tokens_per_step)
    : place_(place),
      first_step_(first_step),
      total_steps_(total_steps),
      tokens_per_step_(tokens_per_step),
      terminal_(place.is_root() && isatty(STDOUT_FILENO)),
      start_(std::chrono::steady_clock::now()) {
  if (!terminal_) return;
  ddp::log::set_sink([this](ddp::log::Level, std::string_view text) {
    note(std::string(text.substr(0, text.find_last_not_of('\n') + 1)));
  });
}

Progress::~Progress() { finish(); }

void Progress::finish() {
  if (!terminal_) return;
  ddp::log::set_sink({});
  if (!shown_.empty()) std::printf("\n");
  shown_.clear();
  terminal_ = false;
}

void Progress::update(int64_t step, double loss, double lr, bool milestone) {
  if (terminal_) {
    shown_ = line(step, loss, lr);
    std::printf("\r\033[K%s", shown_.c_str());
    std::fflush(stdout);
  } else if (milestone) {
    note(line(step, loss, lr));
  }
}

void Progress::note(const std::string& text) {
  if (!place_.is_root()) return;
  std::printf("%s%s\n%s", terminal_ ? "\r\033[K" : "", text.c_str(), shown_.c_str());
  std::fflush(stdout);
}

std::string Progress::line(int64_t step, double loss, double lr) const {
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  const double per_step = seconds / static_cast<double>(step - first_step_);
  std::array<char, 160> text{};
  std::snprintf(text.data(), text.size(), "step %4ld/%ld | loss %.4f | lr %.1e | %s tokens/s | %s left", step,
                total_steps_, loss, lr, rate_text(static_cast<double>(tokens_per_step_) / per_step).c_str(),
                clock_text(per_step * static_cast<double>(total_steps_ - step)).c_str());
  return text.data();
}

}  // namespace qwen
