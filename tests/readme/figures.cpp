// SPDX-License-Identifier: BSD-3-Clause
// figures [--write] PAGE.md…: compares every measured figure of these pages with its source.
//
// A figure is a number with a unit (%, ms, MiB, times, …) or with decimals, outside of code. The
// paragraph, list or table that has it is followed by a comment with a line for each source:
//
//     <!-- figures
//     11.9 ms = results/training.csv | bert,cpp,captured | seconds_per_step
//     10 to 66 % = results/report.md | * | torchamp, bf16 | saved against fp32
//     column time = results/report.md | $1 | torchamp, bf16 | time per step
//     row bf16 = results/report.md | $column | torchamp, bf16 | time per step
//     from ../labs/fp8.md
//     -->
//
// CSV: the median of a column over the rows that have all these values; the lowest and the highest
// for "1 to 2 ms". Markdown: heading, row and column of a table; * is any. `column` and `row` name
// what a table's header and first cells say;
// the row of a report may be named by its first two cells, with a comma; a second such line is for
// the second figure of each cell. $1 is the row's first cell, @1 the target of its link, $column
// the header. "time [2]" is the second column of that name. A minus after = changes the sign.
// `from` names a file that has the numbers of the block's other figures, with the same digits. It
// may follow a colon: <!-- figures: from report.md -->. --write puts the sources' numbers in place
// of others.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <optional>
#include <regex>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

namespace fs = std::filesystem;
using Strings = std::vector<std::string>;

/// 12,345 becomes 12345.
std::string without_commas(std::string number) {
  number.erase(std::remove(number.begin(), number.end(), ','), number.end());
  return number;
}

std::string trim(const std::string& text) {
  const auto begin = text.find_first_not_of(" \t");
  if (begin == std::string::npos) return "";
  return text.substr(begin, text.find_last_not_of(" \t") - begin + 1);
}

Strings split(const std::string& text, char at) {
  Strings parts(1);
  for (const char c : text) {
    if (c == at) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  for (auto& part : parts) part = trim(part);
  return parts;
}

// Reads each file once.
const Strings& read_lines(const fs::path& path) {
  static std::map<fs::path, Strings> files;
  auto& lines = files[path];
  if (!lines.empty()) return lines;
  std::ifstream file(path);
  if (!file) throw std::runtime_error("cannot read " + path.string());
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  return lines;
}

// ---- Figures of a line ----------------------------------------------------------------------

struct Number {
  std::size_t begin, end;
  double value;
  int decimals;
};

struct Figure {
  std::size_t line, begin, end;
  std::string text;
  std::vector<Number> numbers;  // two: a range
  double unit;
};

double unit_of(const std::string& name) {
  static const std::map<std::string, double> units = {
      {"%", 1e-2},     {"s", 1.},       {"ms", 1e-3}, {"us", 1e-6}, {"µs", 1e-6},
      {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"kB", 1e3},  {"MB", 1e6},  {"GB", 1e9}};
  const auto found = units.find(name);
  return found == units.end() ? 1. : found->second;
}

Number number_of(const std::string& text, std::size_t begin) {
  const std::string digits = without_commas(text);
  const auto point = digits.find('.');
  const auto decimals = point == std::string::npos ? 0 : digits.size() - point - 1;
  return {begin, begin + text.size(), std::stod(digits), static_cast<int>(decimals)};
}

// The line with code, comments and targets of links blanked: positions stay.
std::string prose_of(std::string line) {
  static const std::regex hidden("``[^`]*``.*?``|`[^`]*`|\\]\\([^)]*\\)|<!--.*-->");
  for (std::smatch match; std::regex_search(line, match, hidden);) {
    std::fill_n(line.begin() + match.position(), match.length(), ' ');
  }
  return line;
}

bool is_version(const std::string& number) {
  static const std::regex version("2\\.([6-9]|1[0-5])|3\\.25|.*\\..*\\..*");
  return std::regex_match(number, version);
}

std::vector<Figure> figures_of(const std::string& line, std::size_t number) {
  static const std::regex shape(
      "([0-9][0-9,]*(?:\\.[0-9]+)*)(?: to ([0-9][0-9,]*(?:\\.[0-9]+)*))?"
      "(?: (%|ms|µs|us|s|MiB|GiB|GB|MB|kB|times)(?![A-Za-z]))?");
  std::vector<Figure> found;
  const auto prose = prose_of(line);
  for (std::sregex_iterator at(prose.begin(), prose.end(), shape), end; at != end; ++at) {
    const auto& match = *at;
    const auto begin = static_cast<std::size_t>(match.position());
    auto first = match[1].str(), second = match[2].str();
    while (first.back() == ',') first.pop_back();
    while (!second.empty() && second.back() == ',') second.pop_back();
    if (begin > 0 && (std::isalnum(static_cast<unsigned char>(prose[begin - 1])) ||
                      std::string("_-.^").find(prose[begin - 1]) != std::string::npos)) {
      if (prose[begin - 1] != '-' || begin < 2 || prose[begin - 2] != ' ') continue;
    }
    const bool has_unit = match[3].matched;
    if (!has_unit && (first.find('.') == std::string::npos || is_version(first))) continue;
    Figure figure{number, begin, begin + match.str().size(), trim(match.str()), {}, 1.};
    while (figure.text.back() == ',') figure.text.pop_back();
    figure.numbers.push_back(number_of(first, begin));
    if (begin > 0 && prose[begin - 1] == '-') figure.numbers[0].value *= -1;
    if (!second.empty()) {
      figure.numbers.push_back(number_of(second, static_cast<std::size_t>(match.position(2))));
    }
    if (has_unit) figure.unit = unit_of(match[3].str());
    found.push_back(std::move(figure));
  }
  return found;
}

// ---- Sources ------------------------------------------------------------------------------------

Strings cells_of(const std::string& line) {
  auto cells = split(line, '|');
  if (!cells.empty()) cells.erase(cells.begin());
  if (!cells.empty() && cells.back().empty()) cells.pop_back();
  return cells;
}

// The values in ascending order.
std::vector<double> of_csv(const fs::path& path, const Strings& wanted, const std::string& column) {
  const auto& lines = read_lines(path);
  const auto header = split(lines.at(0), ',');
  const auto at = std::find(header.begin(), header.end(), column) - header.begin();
  if (static_cast<std::size_t>(at) == header.size()) {
    throw std::runtime_error(path.string() + " has no column " + column);
  }
  std::vector<double> values;
  for (std::size_t i = 1; i < lines.size(); ++i) {
    const auto contains = [&](const std::string& value) {
      return lines[i].find(value) != std::string::npos;
    };
    if (!std::all_of(wanted.begin(), wanted.end(), contains)) continue;  // cheaper than split
    const auto fields = split(lines[i], ',');
    if (std::all_of(wanted.begin(), wanted.end(), [&](const std::string& value) {
          return std::find(fields.begin(), fields.end(), value) != fields.end();
        })) {
      values.push_back(std::stod(fields.at(static_cast<std::size_t>(at))));
    }
  }
  std::sort(values.begin(), values.end());
  return values;
}

double median(const std::vector<double>& ascending) {
  const auto half = ascending.size() / 2;
  return ascending.size() % 2 ? ascending[half] : (ascending[half - 1] + ascending[half]) / 2;
}

// The numbers of a text file, as they are written, without commas between thousands.
const std::set<std::string>& numbers_in(const fs::path& path) {
  static std::map<fs::path, std::set<std::string>> files;
  auto& numbers = files[path];
  if (!numbers.empty()) return numbers;
  static const std::regex shape("[0-9]{1,3}(,[0-9]{3})+(\\.[0-9]+)?|[0-9]+(\\.[0-9]+)?");
  for (const auto& line : read_lines(path)) {
    for (std::sregex_iterator at(line.begin(), line.end(), shape), end; at != end; ++at) {
      numbers.insert(without_commas(at->str()));
    }
  }
  return numbers;
}

// The second of two equal headers gets " [2]".
Strings numbered(Strings header) {
  std::map<std::string, int> seen;
  for (auto& cell : header) {
    if (const int count = ++seen[cell]; count > 1) cell += " [" + std::to_string(count) + "]";
  }
  return header;
}

// The first two cells, if the first one is not enough.
std::string row_name(const Strings& cells) {
  return cells.size() > 1 ? cells[0] + ", " + cells[1] : cells.at(0);
}

std::vector<double> of_report(const fs::path& path, const Strings& place) {
  const auto matches = [](const std::string& wanted, const std::string& text) {
    return wanted == "*" || wanted == text;
  };
  std::vector<double> values;
  std::string heading;
  Strings header;
  for (const auto& line : read_lines(path)) {
    if (line.starts_with("#")) heading = trim(line.substr(line.find_first_not_of('#')));
    if (!line.starts_with("|")) {
      header.clear();
      continue;
    }
    const auto cells = cells_of(line);
    if (header.empty()) header = numbered(cells);
    if (!matches(place.at(0), heading) ||
        !(matches(place.at(1), cells.at(0)) || place[1] == row_name(cells)))
      continue;
    const auto at = std::find(header.begin(), header.end(), place.at(2)) - header.begin();
    if (static_cast<std::size_t>(at) >= std::min(header.size(), cells.size())) continue;
    const auto& cell = cells[static_cast<std::size_t>(at)];
    static const std::regex shape("(-?[0-9][0-9,.e+]*)(?: (%|ms|us|s|MiB|GiB))?.*");
    std::smatch match;
    if (!std::regex_match(cell, match, shape)) continue;
    values.push_back(std::stod(without_commas(match[1].str())) * unit_of(match[2].str()));
  }
  return values;
}

// The values that a source, `PATH | …`, has for a figure of so many numbers.
std::vector<double> values_of(std::string source, const fs::path& folder, std::size_t count) {
  const bool negated = source.starts_with("-");
  auto parts = split(negated ? source.substr(1) : source, '|');
  const auto path = (folder / parts[0]).lexically_normal();
  parts.erase(parts.begin());
  const bool csv = path.extension() == ".csv";
  if (parts.size() != (csv ? 2u : 3u)) throw std::runtime_error("not a source: " + source);
  auto values = csv ? of_csv(path, split(parts[0], ','), parts[1]) : of_report(path, parts);
  if (csv && count == 1 && !values.empty()) values = {median(values)};
  if (negated) {
    for (auto& value : values) value = -value;
  }
  return values;
}

// ---- A page -------------------------------------------------------------------------------------

// Three digits of a measured quantity, two decimals of a ratio, whole per cent.
int digits_after_point(double value, double unit) {
  if (unit == 1e-2) return 0;
  if (unit == 1.) return 2;
  return std::clamp(2 - static_cast<int>(std::floor(std::log10(std::abs(value)))), 0, 3);
}

struct Entry {
  std::string key, source;
};

struct Block {
  std::size_t begin, end;  // lines
  std::vector<Entry> entries;
  std::vector<fs::path> files;  // of `from`
};

class Page {
 public:
  Page(fs::path path, bool writes)
      : path_(std::move(path)), writes_(writes), lines_(read_lines(path_)) {}

  // Prints what is wrong; returns how much.
  int check() {
    for (auto& block : blocks()) {
      is_table(block) ? check_table(block) : check_prose(block);
    }
    if (changed_) {
      std::ofstream file(path_);
      for (const auto& line : lines_) file << line << '\n';
    }
    return wrong_;
  }

  int compared() const { return compared_; }

 private:
  void tell(std::size_t line, const std::string& text) {
    std::cout << path_.string() << ':' << line + 1 << ": " << text << '\n';
    ++wrong_;
  }

  void read_entry(Block& block, const std::string& line, std::size_t number) {
    if (line.starts_with("from ")) {
      const auto source = path_.parent_path() / trim(line.substr(5));
      if (!fs::exists(source)) return tell(number, "there is no " + source.string());
      block.files.push_back(source);
    } else if (const auto at = line.find(" = "); at != std::string::npos) {
      block.entries.push_back({trim(line.substr(0, at)), trim(line.substr(at + 3))});
    } else if (!line.empty()) {
      tell(number, "not a source: " + line);
    }
  }

  std::vector<Block> blocks() {
    std::vector<Block> found;
    bool code = false, comment = false, open = false;
    for (std::size_t i = 0; i < lines_.size(); ++i) {
      const auto line = trim(lines_[i]);
      if (line.starts_with("```")) {
        code = !code;
        open = false;
      } else if (code) {
        continue;
      } else if (line.starts_with("<!-- figures")) {
        if (found.empty()) throw std::runtime_error(path_.string() + ": figures of nothing");
        comment = line.find("-->") == std::string::npos;
        open = false;
        auto rest = trim(line.substr(12, line.find("-->") - 12));
        if (rest.starts_with(":")) rest = trim(rest.substr(1));
        if (!rest.empty()) read_entry(found.back(), rest, i);
      } else if (comment) {
        comment = line != "-->";
        if (comment) read_entry(found.back(), line, i);
      } else if (line.empty() || line.starts_with("#")) {
        open = false;
      } else {
        if (!open) found.push_back({i, i, {}, {}});
        open = true;
        found.back().end = i + 1;
      }
    }
    return found;
  }

  bool is_table(const Block& block) const {
    static const std::regex rule("[|][-:| ]+");
    return block.end - block.begin > 2 && std::regex_match(lines_[block.begin + 1], rule);
  }

  void compare(const Figure& figure, const std::string& source) {
    const auto wanted = figure.numbers.size();
    auto values = values_of(source, path_.parent_path(), wanted);
    ++compared_;
    if (values.empty()) return tell(figure.line, figure.text + ": nothing is at " + source);
    std::sort(values.begin(), values.end());
    if (wanted == 1 && values.front() != values.back()) {
      return tell(figure.line, figure.text + ": several values are at " + source);
    }
    const double bounds[] = {values.front(), values.back()};
    for (std::size_t i = wanted; i-- > 0;) {
      const auto& number = figure.numbers[i];
      const double value = bounds[wanted == 1 ? 0 : i] / figure.unit;
      const bool vanished = number.value == 0. && value != 0. && figure.unit != 1e-2;
      if (!vanished && std::abs(value - number.value) <= 0.5001 * std::pow(10., -number.decimals)) {
        continue;
      }
      char text[32];
      const int decimals = digits_after_point(value, figure.unit);
      std::snprintf(text, sizeof text, "%.*f", decimals, value);
      if (writes_) {
        lines_[figure.line].replace(number.begin, number.end - number.begin, text);
        changed_ = true;
      } else {
        tell(figure.line, figure.text + ": the source has " + text + " (" + source + ")");
      }
    }
  }

  // A figure without an entry.
  void look_for(const Figure& figure, const Block& block) {
    if (block.files.empty()) return tell(figure.line, figure.text + ": has no source");
    ++compared_;
    for (const auto& number : figure.numbers) {
      const auto digits =
          without_commas(lines_[figure.line].substr(number.begin, number.end - number.begin));
      if (std::none_of(block.files.begin(), block.files.end(),
                       [&](const fs::path& file) { return numbers_in(file).count(digits) > 0; })) {
        tell(figure.line, figure.text + ": " + digits + " is not in " + block.files[0].string());
      }
    }
  }

  void check_prose(const Block& block) {
    std::vector<bool> used(block.entries.size());
    for (auto line = block.begin; line < block.end; ++line) {
      auto figures = figures_of(lines_[line], line);
      std::reverse(figures.begin(), figures.end());  // writing moves what follows
      for (const auto& figure : figures) {
        const auto entry = std::find_if(block.entries.begin(), block.entries.end(),
                                        [&](const Entry& e) { return e.key == figure.text; });
        if (entry != block.entries.end()) {
          used[static_cast<std::size_t>(entry - block.entries.begin())] = true;
          compare(figure, entry->source);
        } else {
          look_for(figure, block);
        }
      }
    }
    for (std::size_t i = 0; i < used.size(); ++i) {
      if (!used[i])
        tell(block.begin, "a source of \"" + block.entries[i].key + "\", which is not here");
    }
  }

  // Cells of a line by their positions: [begin, end).
  static std::vector<std::pair<std::size_t, std::size_t>> places(const std::string& line) {
    std::vector<std::pair<std::size_t, std::size_t>> found;
    const auto prose = prose_of(line);
    for (auto at = prose.find('|'); at != std::string::npos;) {
      const auto next = prose.find('|', at + 1);
      if (next == std::string::npos) break;
      found.emplace_back(at + 1, next);
      at = next;
    }
    return found;
  }

  static std::string shown(std::string text) {
    static const std::regex link("\\[([^\\]]*)\\]\\(([^)]*)\\)");
    return trim(std::regex_replace(text, link, "$1"));
  }

  static std::string target(const std::string& text) {
    static const std::regex link(".*\\]\\(([^)]*)\\).*");
    return std::regex_replace(text, link, "$1");
  }

  static void replace(std::string& text, const std::string& what, const std::string& by) {
    for (auto at = text.find(what); at != std::string::npos; at = text.find(what, at + by.size())) {
      text.replace(at, what.size(), by);
    }
  }

  // The source of an entry for a cell. In the name of a CSV's model, feed-forward is feed_forward.
  static std::string filled(std::string source, const Strings& row, const std::string& column) {
    replace(source, "$column", column);
    for (std::size_t i = 0; i < row.size(); ++i) {
      replace(source, "@" + std::to_string(i + 1), target(row[i]));
    }
    const bool csv = source.find(".csv") != std::string::npos;
    for (std::size_t i = 0; i < row.size(); ++i) {
      auto cell = shown(row[i]);
      if (csv) {
        std::erase(cell, '`');
        std::transform(cell.begin(), cell.end(), cell.begin(), [](unsigned char c) {
          return static_cast<char>(c == '-' ? '_' : std::tolower(c));
        });
      }
      replace(source, "$" + std::to_string(i + 1), cell);
    }
    return source;
  }

  void check_table(const Block& block) {
    const auto header = texts(block.begin);
    for (auto line = block.begin + 2; line < block.end; ++line) {
      const auto row = texts(line);
      for (std::size_t cell = row.size(); cell-- > 0;) {
        const auto column = cell < header.size() ? shown(header[cell]) : "";
        check_cell(block, line, cell, row, column);
      }
    }
    for (const auto& figure : figures_of(lines_[block.begin], block.begin)) {
      look_for(figure, block);
    }
  }

  void check_cell(const Block& block, std::size_t line, std::size_t cell, const Strings& row,
                  const std::string& column) {
    Strings sources;
    for (const auto& entry : block.entries) {
      if (entry.key == "column " + column || (cell > 0 && entry.key == "row " + shown(row[0]))) {
        sources.push_back(filled(entry.source, row, column));
      }
    }
    const auto place = places(lines_[line]).at(cell);
    auto figures = figures_of(lines_[line], line);
    std::erase_if(
        figures, [&](const Figure& f) { return f.begin < place.first || f.begin >= place.second; });
    if (figures.empty() && !sources.empty() &&
        !values_of(sources[0], path_.parent_path(), 1).empty()) {
      tell(line, "an empty cell of " + column + ", for which there is " + sources[0]);
    }
    for (std::size_t i = figures.size(); i-- > 0;) {
      if (i < sources.size()) {
        compare(figures[i], sources[i]);
      } else {
        look_for(figures[i], block);
      }
    }
  }

  Strings texts(std::size_t line) const {
    Strings found;
    for (const auto& [begin, end] : places(lines_[line])) {
      found.push_back(trim(lines_[line].substr(begin, end - begin)));
    }
    return found;
  }

  fs::path path_;
  bool writes_;
  Strings lines_;
  bool changed_ = false;
  int wrong_ = 0, compared_ = 0;
};

}  // namespace

int main(int count, char** arguments) {
  Strings pages(arguments + 1, arguments + count);
  const bool writes = !pages.empty() && pages[0] == "--write";
  if (writes) pages.erase(pages.begin());
  try {
    int wrong = 0, compared = 0;
    for (const auto& name : pages) {
      Page page(name, writes);
      wrong += page.check();
      compared += page.compared();
    }
    std::cout << compared << " figures compared with their sources, " << wrong << " wrong\n";
    return wrong == 0 ? 0 : 2;
  } catch (const std::exception& error) {
    std::cout << error.what() << '\n';
    return 1;
  }
}
