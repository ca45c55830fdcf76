#include "plot.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <sstream>

#include "ddp/error.h"

namespace qwen {
namespace {

constexpr double kWidth = 760, kHeight = 420, kLeft = 64, kRight = 24, kTop = 48, kBottom = 52;

/// A range of values that is laid along one side of the plot.
struct Axis {
  double low, high, begin, end;

  double at(double value) const { return begin + (value - low) / (high - low) * (end - begin); }

  /// 1, 2 or 5 times a power of ten, so that there are four to ten ticks.
  double tick() const {
    const double rough = (high - low) / 8, power = std::pow(10, std::floor(std::log10(rough)));
    for (const double factor : {1, 2, 5}) {
      if (factor * power >= rough) return factor * power;
    }
    return 10 * power;
  }
};

Axis loss_axis(const std::vector<double>& losses) {
  double low = INFINITY, high = -INFINITY;
  for (const double loss : losses) {
    if (std::isfinite(loss)) low = std::min(low, loss), high = std::max(high, loss);
  }
  if (low > high) low = 0, high = 1;
  const double margin = std::max(0.05 * (high - low), 1e-3);
  return {low - margin, high + margin, kHeight - kBottom, kTop};
}

std::string escape(const std::string& text) {
  std::string out;
  for (const char c : text) {
    out += c == '<' ? "&lt;" : c == '>' ? "&gt;" : c == '&' ? "&amp;" : std::string(1, c);
  }
  return out;
}

void draw_grid(std::ostream& out, const Axis& x, const Axis& y) {
  out << "<g stroke=\"#e3e6ea\" stroke-width=\"1\">\n";
  const double dx = std::max(1.0, x.tick()), dy = y.tick();
  std::ostringstream labels;
  for (double value = std::ceil(x.low / dx) * dx; value <= x.high; value += dx) {
    out << "<path d=\"M" << x.at(value) << ' ' << y.begin << "V" << y.end << "\"/>\n";
    labels << "<text x=\"" << x.at(value) << "\" y=\"" << y.begin + 18 << "\" text-anchor=\"middle\">" << value
           << "</text>\n";
  }
  for (double tick = std::ceil(y.low / dy); tick * dy <= y.high; ++tick) {  // counted, so that zero is printed as 0
    out << "<path d=\"M" << x.begin << ' ' << y.at(tick * dy) << "H" << x.end << "\"/>\n";
    labels << "<text x=\"" << x.begin - 8 << "\" y=\"" << y.at(tick * dy) + 4 << "\" text-anchor=\"end\">" << tick * dy
           << "</text>\n";
  }
  out << "</g>\n<g fill=\"#57606a\">\n" << labels.str() << "</g>\n";
}

void draw_curve(std::ostream& out, const Axis& x, const Axis& y, const std::vector<double>& losses) {
  out << "<path fill=\"none\" stroke=\"#0969da\" stroke-width=\"2\" stroke-linejoin=\"round\" d=\"";
  bool pen_down = false;
  for (size_t i = 0; i < losses.size(); ++i) {
    if (std::isfinite(losses[i])) out << (pen_down ? 'L' : 'M') << x.at(i + 1.0) << ' ' << y.at(losses[i]);
    pen_down = std::isfinite(losses[i]);
  }
  out << "\"/>\n";
}

}  // namespace

std::string loss_plot(const std::vector<double>& losses, const std::string& title) {
  const Axis x{0, std::max<double>(losses.size(), 1), kLeft, kWidth - kRight}, y = loss_axis(losses);
  std::ostringstream out;
  out << "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " << kWidth << ' ' << kHeight
      << "\" font-family=\"system-ui, sans-serif\" font-size=\"12\">\n"
      << "<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n"
      << "<text x=\"" << kLeft << "\" y=\"28\" font-size=\"15\" font-weight=\"600\" fill=\"#1f2328\">" << escape(title)
      << "</text>\n";
  draw_grid(out, x, y);
  draw_curve(out, x, y, losses);
  out << "<text x=\"" << (x.begin + x.end) / 2 << "\" y=\"" << kHeight - 12
      << "\" text-anchor=\"middle\" fill=\"#57606a\">step</text>\n"
      << "<text transform=\"translate(18 " << (y.begin + y.end) / 2
      << ") rotate(-90)\" text-anchor=\"middle\" fill=\"#57606a\">loss</text>\n</svg>\n";
  return out.str();
}

void write_loss_plot(const std::filesystem::path& file, const std::vector<double>& losses, const std::string& title) {
  std::ofstream out(file);
  out << loss_plot(losses, title);
  if (!out.flush()) throw ddp::Error(file.string() + ": the loss plot cannot be written");
}

}  // namespace qwen
