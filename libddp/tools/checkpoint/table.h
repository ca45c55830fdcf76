// Rows of text in columns as wide as they must be.
#pragma once

#include <algorithm>
#include <iostream>
#include <string>
#include <vector>

namespace tool {

class Table {
 public:
  using Row = std::vector<std::string>;

  /// `right` are the columns that are set to the right: numbers.
  explicit Table(Row head, std::vector<size_t> right = {}) : right_(std::move(right)) { add(std::move(head)); }

  void add(Row row) { rows_.push_back(std::move(row)); }
  bool is_empty() const { return rows_.size() < 2; }

  void print(std::ostream& out = std::cout) const {
    std::vector<size_t> widths;
    for (const Row& row : rows_) {
      widths.resize(std::max(widths.size(), row.size()));
      for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], width(row[i]));
    }
    for (const Row& row : rows_) {
      std::string line;
      for (size_t i = 0; i < row.size(); ++i) {
        const std::string space(widths[i] - width(row[i]), ' ');
        const bool is_right = std::find(right_.begin(), right_.end(), i) != right_.end();
        line += (i ? "  " : "") + (is_right ? space + row[i] : row[i] + space);
      }
      line.erase(line.find_last_not_of(' ') + 1);
      out << line << '\n';
    }
  }

 private:
  // Characters of UTF-8, each taken to be one column wide.
  static size_t width(const std::string& text) {
    return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) { return (c & '\xc0') != '\x80'; }));
  }

  std::vector<size_t> right_;
  std::vector<Row> rows_;
};

}  // namespace tool
