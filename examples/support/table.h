// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

namespace support {

/// Rows of text in columns: the first flush left, the others flush right. The first row is the
/// head.
class Table {
 public:
  explicit Table(std::vector<std::string> head) { rows_.push_back(std::move(head)); }

  void add(std::vector<std::string> row) {
    row.resize(rows_.front().size());
    rows_.push_back(std::move(row));
  }

  /// As a table of Markdown, with columns as wide as needed.
  std::string markdown() const {
    const auto widths = this->widths();
    std::string text;
    for (std::size_t r = 0; r < rows_.size(); ++r) {
      std::string rule = "|";
      for (std::size_t i = 0; i < widths.size(); ++i) {
        const std::string& cell = rows_[r][i];
        const std::string pad(widths[i] - cell.size(), ' ');
        text += "| " + (i == 0 ? cell + pad : pad + cell) + " ";
        rule += std::string(widths[i] + 1, '-') + (i == 0 ? "-|" : ":|");
      }
      text += "|\n";
      if (r == 0) text += rule + "\n";
    }
    return text;
  }

  friend std::ostream& operator<<(std::ostream& out, const Table& table) {
    const auto widths = table.widths();
    for (std::size_t r = 0; r < table.rows_.size(); ++r) {
      std::string line;
      for (std::size_t i = 0; i < widths.size(); ++i) {
        const std::string& cell = table.rows_[r][i];
        const std::string pad(widths[i] - cell.size(), ' ');
        line += i == 0 ? "  " + cell + pad : "   " + pad + cell;
      }
      out << line << '\n';
      if (r == 0) out << "  " << std::string(line.size() - 2, '-') << '\n';
    }
    return out;
  }

 private:
  std::vector<std::size_t> widths() const {
    std::vector<std::size_t> widths(rows_.front().size());
    for (const auto& row : rows_) {
      for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
    }
    return widths;
  }

  std::vector<std::vector<std::string>> rows_;
};

}  // namespace support
