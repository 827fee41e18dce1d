// SPDX-License-Identifier: BSD-3-Clause
// Checks the rules of language in .github/CONTRIBUTING.md that a program can check: words to avoid
// in documents and in comments of headers, and long sentences in documents. language.txt has the
// words and the allowed uses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "support/temporary_folder.h"

namespace {

namespace files = std::filesystem;

constexpr std::size_t most_words = 30;

// ---- Words --------------------------------------------------------------------------------------

/// A word in lower case, or a punctuation mark.
struct Token {
  std::string text;
  std::size_t line = 0;
  bool is_word = false;
};
using Tokens = std::vector<Token>;

bool is_part_of_word(char c) {
  const auto byte = static_cast<unsigned char>(c);
  return std::isalnum(byte) != 0 || c == '_' || byte >= 0x80;
}

/// Appends the tokens of a text without white space: "(Then," is "then" and ",".
void append_tokens(const std::string& text, std::size_t line, Tokens& tokens) {
  const auto begin = std::find_if(text.begin(), text.end(), is_part_of_word);
  const auto end = std::find_if(text.rbegin(), text.rend(), is_part_of_word).base();
  if (begin != text.end()) {
    std::string word(begin, end);
    std::transform(word.begin(), word.end(), word.begin(),
                   [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    tokens.push_back({word, line, true});
  }
  for (auto at = begin == text.end() ? text.begin() : end; at != text.end(); ++at) {
    if (std::string_view(",.;:!?").find(*at) != std::string_view::npos) {
      tokens.push_back({std::string(1, *at), line, false});
    }
  }
}

void append_words(const std::string& text, std::size_t line, Tokens& tokens) {
  std::istringstream words(text);
  for (std::string word; words >> word;) append_tokens(word, line, tokens);
}

/// Paragraphs, items of lists, cells of tables or comments.
using Blocks = std::vector<Tokens>;

// ---- Documents and comments ---------------------------------------------------------------------

/// The text with "code" for each code span, and without the addresses of links. Keeps line ends.
std::string prose_of(const std::string& text) {
  std::string prose;
  for (std::size_t at = 0; at < text.size();) {
    std::size_t end = at;
    if (text[at] == '`') {
      const std::size_t ticks = std::min(text.find_first_not_of('`', at), text.size()) - at;
      end = text.find(std::string(ticks, '`'), at + ticks);
      if (end != text.npos) end += ticks;
      prose += "code";
    } else if (text.compare(at, 2, "](") == 0) {
      end = text.find(')', at);
      if (end != text.npos) ++end;
    } else {
      prose += text[at++];
      continue;
    }
    end = std::min(end, text.size());
    prose.append(static_cast<std::size_t>(std::count(text.begin() + std::ptrdiff_t(at),
                                                     text.begin() + std::ptrdiff_t(end), '\n')),
                 '\n');
    at = end;
  }
  return prose;
}

/// The blocks of a Markdown document, without code and comments.
class Document {
 public:
  explicit Document(const std::string& text) {
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
      ++line_;
      add(line);
    }
    end_block();
  }
  const Blocks& blocks() const { return blocks_; }

 private:
  void add(const std::string& line) {
    const std::size_t indent = std::min(line.find_first_not_of(' '), line.size());
    const std::string_view rest = std::string_view(line).substr(indent);
    const bool is_fence = rest.starts_with("```");
    in_comment_ = in_comment_ || rest.starts_with("<!--");
    if (is_fence) in_code_ = !in_code_;
    if (is_fence || in_code_ || in_comment_ || rest.empty() || (indent >= 4 && text_.empty())) {
      end_block();
      if (rest.find("-->") != rest.npos) in_comment_ = false;
      return;
    }
    const bool is_numbered = std::isdigit(static_cast<unsigned char>(rest[0])) != 0 &&
                             rest.substr(0, 4).find(". ") != rest.npos;
    const bool is_row = rest[0] == '|';
    if (is_row || is_numbered || rest[0] == '#' || rest.starts_with("- ")) end_block();
    if (text_.empty()) begins_at_ = line_;
    text_ += std::string(is_numbered ? rest.substr(rest.find(' ')) : rest) + '\n';
    if (is_row || rest[0] == '#') end_block();
  }

  void end_block() {
    const std::string prose = prose_of(text_);
    std::size_t line = begins_at_, at = 0;
    Tokens block;
    while (at < prose.size()) {
      const std::size_t end = std::min(prose.find_first_of("|\n", at), prose.size());
      append_words(prose.substr(at, end - at), line, block);
      if (end < prose.size() && prose[end] == '|') {
        blocks_.push_back(std::exchange(block, {}));
      } else {
        ++line;
      }
      at = end + 1;
    }
    blocks_.push_back(block);
    text_.clear();
  }

  Blocks blocks_;
  std::string text_;
  std::size_t line_ = 0, begins_at_ = 0;
  bool in_code_ = false, in_comment_ = false;
};

/// The comments of a header, without code in them.
Blocks comments_of(const std::string& text) {
  Blocks blocks;
  std::size_t line_number = 0;
  bool goes_on = false, in_code = false;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    ++line_number;
    const std::size_t indent = std::min(line.find_first_not_of(' '), line.size());
    const bool is_whole_line = line.compare(indent, 2, "//") == 0;
    const std::size_t at = is_whole_line ? indent : line.find("  //");
    if (at == line.npos) {
      goes_on = false;
      continue;
    }
    const std::string comment =
        line.substr(std::min(line.find_first_not_of(" /", at), line.size()));
    if (comment.starts_with("@code")) in_code = true;
    if (comment.starts_with("@endcode")) in_code = false;
    if (in_code || comment.starts_with("@endcode") || comment.starts_with("----")) continue;
    if (!is_whole_line || !goes_on) blocks.emplace_back();
    append_words(prose_of(comment), line_number, blocks.back());
    goes_on = is_whole_line;
  }
  return blocks;
}

// ---- The list of words --------------------------------------------------------------------------

Tokens tokens_of(const std::string& text) {
  Tokens tokens;
  append_words(text, 0, tokens);
  return tokens;
}

struct Avoided {
  Tokens words;
  std::string instead;
};

struct Allowed {
  std::string file;  // empty: every file
  Tokens words;
};

struct WordList {
  std::vector<Avoided> avoided;
  std::vector<Allowed> allowed;
};

std::string without_spaces(std::string text) {
  text.erase(0, text.find_first_not_of(' '));
  text.erase(text.find_last_not_of(' ') + 1);
  return text;
}

/// Reads "avoid | words | instead" and "allow | words | file | reason".
WordList read_list(std::istream& in) {
  WordList list;
  for (std::string line; std::getline(in, line);) {
    if (line.empty() || line[0] == '#') continue;
    std::vector<std::string> parts;
    std::istringstream cells(line);
    for (std::string cell; std::getline(cells, cell, '|');) parts.push_back(without_spaces(cell));
    const bool allows = parts[0] == "allow";
    if (parts.size() != (allows ? 4 : 3) || parts.back().empty()) {
      ADD_FAILURE() << "language.txt: " << line;
    } else if (allows) {
      list.allowed.push_back({parts[2] == "all" ? "" : parts[2], tokens_of(parts[1])});
    } else {
      list.avoided.push_back({tokens_of(parts[1]), parts[2]});
    }
  }
  return list;
}

/// Whether `word` is one of the words of "tell/tells/told".
bool is_one_of(std::string_view words, const std::string& word) {
  for (;;) {
    const std::size_t end = std::min(words.find('/'), words.size());
    if (words.substr(0, end) == word) return true;
    if (end == words.size()) return false;
    words.remove_prefix(end + 1);
  }
}

bool is_at(const Tokens& words, const Tokens& text, std::size_t at) {
  return at + words.size() <= text.size() &&
         std::equal(words.begin(), words.end(), text.begin() + static_cast<std::ptrdiff_t>(at),
                    [](const Token& a, const Token& b) { return is_one_of(a.text, b.text); });
}

// ---- The checks ---------------------------------------------------------------------------------

std::string some_words(const Tokens& text, std::size_t at) {
  std::string words;
  const std::size_t first = at < 4 ? 0 : at - 4;
  for (std::size_t i = first; i < std::min(at + 6, text.size()); ++i) {
    words += (text[i].is_word && i > first ? " " : "") + text[i].text;
  }
  return words;
}

class Reader {
 public:
  explicit Reader(WordList list) : list_(std::move(list)), uses_(list_.allowed.size()) {}

  void check_words(const std::string& file, const Blocks& blocks) {
    for (const Tokens& text : blocks) {
      for (std::size_t at = 0; at < text.size(); ++at) {
        for (const Avoided& avoided : list_.avoided) {
          if (!is_at(avoided.words, text, at) || is_allowed(file, text, at)) continue;
          report(file, text, at, avoided.instead);
        }
      }
    }
  }

  void check_lengths(const std::string& file, const Blocks& blocks) {
    for (const Tokens& text : blocks) {
      std::size_t words = 0, first = 0;
      for (std::size_t at = 0; at < text.size(); ++at) {
        const bool ends = at + 1 == text.size() || text[at].text == "." || text[at].text == "!" ||
                          text[at].text == "?";
        words += text[at].is_word ? 1 : 0;
        if (!ends) continue;
        if (words > most_words && !is_allowed(file, text, first)) {
          report(file, text, first, "a sentence of " + std::to_string(words) + " words");
        }
        words = 0;
        first = at + 1;
      }
    }
  }

  std::size_t words_to_avoid() const { return list_.avoided.size(); }
  const std::vector<std::string>& findings() const { return findings_; }
  /// Allowed uses that no text has.
  std::vector<std::string> unused() const {
    std::vector<std::string> words;
    for (std::size_t i = 0; i < uses_.size(); ++i) {
      if (uses_[i] == 0) words.push_back(some_words(list_.allowed[i].words, 0));
    }
    return words;
  }

 private:
  void report(const std::string& file, const Tokens& text, std::size_t at,
              const std::string& what) {
    findings_.push_back(file + ':' + std::to_string(text[at].line) + ": \"" + some_words(text, at) +
                        "\": " + what);
  }

  /// Whether an allowed use covers the word.
  bool is_allowed(const std::string& file, const Tokens& text, std::size_t at) {
    for (std::size_t i = 0; i < list_.allowed.size(); ++i) {
      const Allowed& one = list_.allowed[i];
      if (!one.file.empty() && one.file != file) continue;
      for (std::size_t before = 0; before < one.words.size() && before <= at; ++before) {
        if (!is_at(one.words, text, at - before)) continue;
        ++uses_[i];
        return true;
      }
    }
    return false;
  }

  WordList list_;
  std::vector<int> uses_;
  std::vector<std::string> findings_;
};

/// Calls `use` with each file of this ending below a folder of the repository, by its path.
template <class Use>
void for_each_file(const char* folder, const char* extension, const Use& use) {
  const files::path repository = TORCHAMP_TEST_ROOT;
  for (const auto& entry : files::recursive_directory_iterator(repository / folder)) {
    if (entry.path().extension() != extension) continue;
    use(files::relative(entry.path(), repository).generic_string(), content_of(entry.path()));
  }
}

TEST(Language, NoTextHasWordsToAvoidOrLongSentences) {
  const files::path repository = TORCHAMP_TEST_ROOT;
  std::ifstream list(repository / "tests" / "headers" / "language.txt");
  Reader reader(read_list(list));
  ASSERT_GT(reader.words_to_avoid(), 20U);
  const auto check_document = [&](const std::string& file, const std::string& text) {
    if (file.starts_with("examples/benchmark/results/")) return;  // records of measurements
    const Document document(text);
    reader.check_words(file, document.blocks());
    reader.check_lengths(file, document.blocks());
  };
  check_document("README.md", content_of(repository / "README.md"));
  for (const char* folder : {"examples", "tests", ".github"}) {
    for_each_file(folder, ".md", check_document);
  }
  for_each_file("include", ".h", [&](const std::string& file, const std::string& text) {
    reader.check_words(file, comments_of(text));
  });
  for (const std::string& finding : reader.findings()) ADD_FAILURE() << finding;
  EXPECT_THAT(reader.unused(), testing::IsEmpty()) << "allowed in language.txt, and in no text";
}

TEST(Language, FindsWordsInProseButNotInCode) {
  std::istringstream list(
      "avoid | those of | repeat the noun\nallow | all those of us | all | a reason\n");
  Reader reader(read_list(list));
  reader.check_words("a.md", Document("One `those of` two.\n```\nthose of\n```\n"
                                      "Take [those\nof](those-of.md) a call, all those of us.\n"
                                      "| a | Those of b |\n")
                                 .blocks());
  reader.check_words("a.h", comments_of("  int those_of = 0;  // those of c\n"
                                        "/// @code\n/// those of\n/// @endcode\n/// and those\n"
                                        "/// of d\n"));
  EXPECT_THAT(reader.findings(),
              testing::ElementsAre(testing::StartsWith("a.md:5: \"take those of a call"),
                                   testing::StartsWith("a.md:7: "), testing::StartsWith("a.h:1: "),
                                   testing::StartsWith("a.h:5: ")));
  EXPECT_THAT(reader.unused(), testing::IsEmpty());
}

TEST(Language, FindsSentencesOfMoreThanThirtyWords) {
  std::istringstream list("");
  Reader reader(read_list(list));
  std::string words;
  for (std::size_t i = 0; i < most_words; ++i) words += "word\n";
  reader.check_lengths("a.md", Document(words + ". " + words + ".").blocks());
  EXPECT_THAT(reader.findings(), testing::IsEmpty());
  reader.check_lengths("a.md", Document("Short. " + words + "`x`.").blocks());
  EXPECT_THAT(reader.findings(), testing::SizeIs(1));
}

TEST(Language, FindsAllowedUsesThatNoTextHas) {
  std::istringstream list("avoid | told | say who warns\nallow | is told | b.md | a reason\n");
  Reader reader(read_list(list));
  reader.check_words("a.md", Document("It is told.").blocks());
  EXPECT_THAT(reader.findings(), testing::SizeIs(1));
  EXPECT_THAT(reader.unused(), testing::ElementsAre("is told"));
}

}  // namespace
