#include <fmt/format.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iostream>
#include <unordered_map>

#include "checkpoint/commands.h"
#include "checkpoint/contents.h"
#include "checkpoint/table.h"

namespace tool {
namespace {

using ddp::State;
using nlohmann::ordered_json;

// Elements that are looked at together.
constexpr int64_t kPiece = 1 << 20;

struct Difference {
  int64_t count = 0;     // elements whose bytes differ, beyond the tolerance
  double largest = 0;    // of |a - b|
  bool has_nan = false;  // one side is NaN and the other is not, or another NaN
};

// The same bytes are equal, NaN too. Of complex numbers the distance.
void compare_piece(const torch::Tensor& a, const torch::Tensor& b, double tolerance, Difference& result) {
  const auto item = static_cast<size_t>(a.element_size());
  const auto *x = static_cast<const char*>(a.const_data_ptr()), *y = static_cast<const char*>(b.const_data_ptr());
  if (std::memcmp(x, y, a.nbytes()) == 0) return;
  const auto wide = a.is_complex() ? torch::kComplexDouble : torch::kDouble;
  const auto distance = (a.to(wide) - b.to(wide)).abs().contiguous();
  const auto* distances = distance.const_data_ptr<double>();
  for (int64_t i = 0; i < a.numel(); ++i) {
    const auto at = static_cast<size_t>(i) * item;
    if (std::memcmp(x + at, y + at, item) == 0) continue;
    if (std::isnan(distances[i])) {
      result.has_nan = true;
    } else if (distances[i] <= tolerance && tolerance > 0) {
      continue;
    } else {
      result.largest = std::max(result.largest, distances[i]);
    }
    ++result.count;
  }
}

// Requires: dtype and shape are equal.
Difference compare(const torch::Tensor& a, const torch::Tensor& b, double tolerance) {
  Difference result;
  if (a.numel() == 0) return result;
  // Views such as expand() may have far more elements than memory: piece by piece along the first dimension.
  if (a.dim() == 0 || a.numel() <= kPiece) {
    compare_piece(a.resolve_conj().resolve_neg().contiguous(), b.resolve_conj().resolve_neg().contiguous(), tolerance,
                  result);
    return result;
  }
  const int64_t rows = std::max<int64_t>(1, kPiece / (a.numel() / a.size(0)));
  for (int64_t row = 0; row < a.size(0); row += rows) {
    const int64_t end = std::min(a.size(0), row + rows);
    const Difference part =
        rows == 1 ? compare(a[row], b[row], tolerance) : compare(a.slice(0, row, end), b.slice(0, row, end), tolerance);
    result.count += part.count;
    result.largest = std::max(result.largest, part.largest);
    result.has_nan |= part.has_nan;
  }
  return result;
}

// What differs between two values, nothing where they are equal.
std::optional<ordered_json> difference(const State& a, const State& b, double tolerance) {
  if (!a.is_tensor() || !b.is_tensor()) {
    const bool close =
        tolerance > 0 && a.is_double() && b.is_double() && std::abs(a.as_double() - b.as_double()) <= tolerance;
    const bool nans = a.is_double() && b.is_double() && std::isnan(a.as_double()) && std::isnan(b.as_double());
    if (close || nans || (!a.is_tensor() && !b.is_tensor() && a == b)) return std::nullopt;
    return ordered_json{{"a", describe(a)}, {"b", describe(b)}};
  }
  const auto &x = a.as_tensor(), &y = b.as_tensor();
  if (x.scalar_type() != y.scalar_type() || x.sizes() != y.sizes()) {
    return ordered_json{{"a", describe(a)}, {"b", describe(b)}};
  }
  const Difference found = compare(x, y, tolerance);
  if (found.count == 0) return std::nullopt;
  return ordered_json{{"elements", found.count},
                      {"of", x.numel()},
                      {"max_abs", found.has_nan ? ordered_json("nan") : ordered_json(found.largest)}};
}

std::string text(const ordered_json& row) {
  if (row.contains("only_in")) return fmt::format("only in {}", row["only_in"].get<std::string>());
  if (row.contains("a")) return fmt::format("{} -> {}", row["a"].get<std::string>(), row["b"].get<std::string>());
  const ordered_json& most = row["max_abs"];
  return fmt::format("{} of {} elements, by {} at most", row["elements"].get<int64_t>(), row["of"].get<int64_t>(),
                     most.is_string() ? "nan" : fmt::format("{:.6g}", most.get<double>()));
}

}  // namespace

int diff(const std::string& a, const std::string& b, const DiffOptions& options) {
  torch::NoGradGuard no_grad;
  const Contents left = read(a, Data::kRead), right = read(b, Data::kRead);
  std::unordered_map<std::string, const State*> theirs;
  auto is_asked_for = [&](const std::string& path) { return path.starts_with(options.only); };
  const auto right_leaves = leaves(right.state), left_leaves = leaves(left.state);
  for (const auto& [path, value] : right_leaves) theirs.emplace(path, value);

  ordered_json rows = ordered_json::array();
  int64_t compared = 0;
  for (const auto& [path, value] : left_leaves) {
    if (!is_asked_for(path)) continue;
    ++compared;
    const auto found = theirs.find(path);
    if (found == theirs.end()) {
      rows.push_back({{"key", path}, {"only_in", a}});
      continue;
    }
    if (auto row = difference(*value, *found->second, options.tolerance)) {
      rows.push_back({{"key", path}});
      rows.back().update(*row);
    }
    theirs.erase(found);
  }
  for (const auto& [path, value] : right_leaves) {
    if (!is_asked_for(path) || !theirs.contains(path)) continue;
    ++compared;
    rows.push_back({{"key", path}, {"only_in", b}});
  }
  if (compared == 0) throw Failure(fmt::format("{}, {}: no key begins with \"{}\"", a, b, options.only));

  const int code = rows.empty() ? kYes : kNo;
  if (options.json) {
    print({{"a", a}, {"b", b}, {"equal", rows.empty()}, {"compared", compared}, {"differences", rows}});
    return code;
  }
  Table table({"key", "difference"});
  for (const auto& row : rows) table.add({printable(row["key"].get<std::string>()), printable(text(row))});
  if (!table.is_empty()) table.print();
  std::cout << (rows.empty() ? fmt::format("equal, {} {}", compared, compared == 1 ? "value" : "values")
                             : fmt::format("{} of {} values differ", rows.size(), compared))
            << '\n';
  return code;
}

}  // namespace tool
