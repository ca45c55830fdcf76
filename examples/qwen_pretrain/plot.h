// The loss curve as an SVG file that any browser shows.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace qwen {

/// An SVG document: `losses[i]`, the loss of step i + 1, over the steps. Values that are not finite leave a gap.
std::string loss_plot(const std::vector<double>& losses, const std::string& title);

/// Writes `loss_plot` to `file`. Throws ddp::Error when it cannot.
void write_loss_plot(const std::filesystem::path& file, const std::vector<double>& losses, const std::string& title);

}  // namespace qwen
