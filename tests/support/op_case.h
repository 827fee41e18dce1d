// SPDX-License-Identifier: BSD-3-Clause
// Reads op cases: the syntax is explained in tests/parity/cases.txt.
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

/// A tensor as a case describes it.
struct TensorLiteral {
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::string fill = "spread";
  std::optional<std::vector<double>> values;
  bool grad = false;
  int place = 0;  // among the case's tensors, from 1
};

/// A dtype as an argument: `dtype=float64`.
struct DtypeLiteral {
  std::string name;
};

/// An argument of a case; without a value: None.
struct Literal {
  std::variant<std::monostate, bool, std::int64_t, double, std::string, DtypeLiteral, TensorLiteral,
               std::vector<Literal>>
      value;

  template <class T>
  bool is() const {
    return std::holds_alternative<T>(value);
  }
  template <class T>
  const T& get() const {
    return std::get<T>(value);
  }
  double number() const {
    return is<double>() ? get<double>() : static_cast<double>(get<std::int64_t>());
  }
};

/// One call of an op.
struct OpCase {
  std::string text;
  std::string op;  // "softmax.int"
  std::vector<Literal> positional;
  std::vector<std::pair<std::string, Literal>> keyword;
  bool varies = false;  // has an x: runs with fp32 and with the region's dtype
  /// In a record: what stands below the case, by "bfloat16 float32" (region and x).
  std::map<std::string, std::string> results;
};

/// Cases under one heading: `[title] key=value flag`.
struct CaseSection {
  std::string title;
  std::map<std::string, std::string> attributes;
  std::vector<OpCase> cases;

  std::string attribute(const std::string& name) const {
    const auto found = attributes.find(name);
    return found == attributes.end() ? std::string() : found->second;
  }
};

class OpCaseParser {
 public:
  explicit OpCaseParser(std::string_view text) : text_(text) {}

  OpCase parse() {
    OpCase result;
    result.text = std::string(text_);
    result.op = name();
    arguments([&](const std::string& keyword, Literal value) {
      if (keyword.empty()) {
        result.positional.push_back(std::move(value));
      } else {
        result.keyword.emplace_back(keyword, std::move(value));
      }
    });
    skip_spaces();
    if (at_ != text_.size()) fail("the end of the line");
    result.varies = varies_;
    return result;
  }

 private:
  [[noreturn]] void fail(const char* expected) const {
    TORCH_CHECK(false, "expected ", expected, " at column ", at_ + 1, " of the case: ", text_);
  }

  void skip_spaces() {
    while (at_ < text_.size() && text_[at_] == ' ') ++at_;
  }
  char peek() {
    skip_spaces();
    return at_ < text_.size() ? text_[at_] : '\0';
  }
  bool take(char c) {
    if (peek() != c) return false;
    ++at_;
    return true;
  }

  std::string name() {
    skip_spaces();
    const std::size_t start = at_;
    while (at_ < text_.size() && (std::isalnum(static_cast<unsigned char>(text_[at_])) ||
                                  text_[at_] == '_' || text_[at_] == '.')) {
      ++at_;
    }
    if (at_ == start) fail("a name");
    return std::string(text_.substr(start, at_ - start));
  }

  /// `(a, b, key=c)`
  template <class Add>
  void arguments(Add add) {
    if (!take('(')) fail("'('");
    while (!take(')')) {
      std::string keyword;
      const std::size_t start = at_;
      if (std::isalpha(static_cast<unsigned char>(peek()))) {
        keyword = name();
        if (!take('=')) {
          keyword.clear();
          at_ = start;
        }
      }
      add(keyword, value());
      if (peek() != ')' && !take(',')) fail("',' or ')'");
    }
  }

  Literal value() {
    const char c = peek();
    if (c == '[') return list();
    if (c == '"') return string();
    if (c == '-' || std::isdigit(static_cast<unsigned char>(c))) return number();
    const std::string word = name();
    if (word == "None") return {};
    if (word == "True" || word == "False") return {word == "True"};
    if (peek() != '(') return {DtypeLiteral{word}};
    return tensor(word);
  }

  Literal list() {
    take('[');
    std::vector<Literal> elements;
    while (!take(']')) {
      elements.push_back(value());
      if (peek() != ']' && !take(',')) fail("',' or ']'");
    }
    return {std::move(elements)};
  }

  Literal string() {
    take('"');
    const std::size_t end = text_.find('"', at_);
    if (end == std::string_view::npos) fail("a closing quote");
    std::string content(text_.substr(at_, end - at_));
    at_ = end + 1;
    return {std::move(content)};
  }

  Literal number() {
    std::size_t end = at_;
    while (end < text_.size() && (std::isalnum(static_cast<unsigned char>(text_[end])) ||
                                  std::string_view("+-.").find(text_[end]) != std::string::npos)) {
      ++end;
    }
    const std::string digits(text_.substr(at_, end - at_));
    at_ = end;
    if (digits.find_first_of(".e") != std::string::npos) return {std::strtod(digits.c_str(), {})};
    return {static_cast<std::int64_t>(std::strtoll(digits.c_str(), nullptr, 10))};
  }

  Literal tensor(const std::string& dtype) {
    TensorLiteral tensor;
    tensor.dtype = dtype;
    tensor.place = ++tensors_;
    varies_ = varies_ || dtype == "x";
    arguments([&](const std::string& keyword, const Literal& value) {
      if (keyword.empty()) {
        tensor.shape.push_back(value.get<std::int64_t>());
      } else if (keyword == "fill") {
        tensor.fill = value.get<std::string>();
      } else if (keyword == "grad") {
        tensor.grad = value.get<bool>();
      } else if (keyword == "values") {
        tensor.values.emplace();
        for (const Literal& v : value.get<std::vector<Literal>>()) {
          tensor.values->push_back(v.number());
        }
      } else {
        fail("fill, values or grad");
      }
    });
    return {std::move(tensor)};
  }

  std::string_view text_;
  std::size_t at_ = 0;
  int tensors_ = 0;
  bool varies_ = false;
};

inline CaseSection parse_heading(const std::string& line) {
  const std::size_t end = line.find(']');
  TORCH_CHECK(end != std::string::npos, "expected ']' in the heading: ", line);
  CaseSection section;
  section.title = line.substr(1, end - 1);
  std::size_t at = end + 1;
  while ((at = line.find_first_not_of(' ', at)) != std::string::npos) {
    const std::size_t stop = std::min(line.find(' ', at), line.size());
    const std::string item = line.substr(at, stop - at);
    const std::size_t equals = item.find('=');
    TORCH_CHECK(equals != std::string::npos, "expected key=value in the heading: ", line);
    section.attributes[item.substr(0, equals)] = item.substr(equals + 1);
    at = stop;
  }
  return section;
}

/// The sections of a file of cases, or of a record of them.
inline std::vector<CaseSection> read_cases(const std::string& path) {
  std::ifstream file(path);
  TORCH_CHECK(file, "cannot read ", path);
  std::vector<CaseSection> sections;
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line[0] == '#') continue;
    if (line[0] == '[') {
      sections.push_back(parse_heading(line));
    } else if (line.starts_with("  ")) {
      const std::size_t colon = line.find(": ");
      sections.back().cases.back().results[line.substr(2, colon - 2)] = line.substr(colon + 2);
    } else {
      sections.back().cases.push_back(OpCaseParser(line).parse());
    }
  }
  return sections;
}
