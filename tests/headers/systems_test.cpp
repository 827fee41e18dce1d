// SPDX-License-Identifier: BSD-3-Clause
// What the text of the headers, and of the tests that Windows runs, may not hold, since a system or
// a compiler of Windows has no such thing. cl.exe itself runs in the workflow only.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "support/temporary_folder.h"

namespace {

namespace fs = std::filesystem;
using ::testing::IsEmpty;
using ::testing::Not;

/// Further names that these headers may have, within a condition of the preprocessor.
const std::map<std::string, std::set<std::string>, std::less<>> layers{
    {"detail/core/base/system.h", {"dlfcn.h", "getenv", "dladdr", "dlopen"}},
    {"detail/extras/distributed/loopback.h", {"netinet/", "sys/", "unistd.h", "sigaction"}},
    {"labs/detail/fp8/lanes.h", {"__attribute__", "__builtin_"}},
    {"detail/extras/io/open_file.h",
     {"fcntl.h", "sys/", "unistd.h", "pread", "fsync", "flock", "fchmod", "fchown"}},
};

struct Rule {
  const char* what;
  std::vector<std::string> words;  // whole ones
  bool of_tests = true;            // or of headers alone
};

const std::vector<Rule> rules{
    {"a header of POSIX or GNU",
     {"sys/",     "arpa/",     "net/",      "netinet/",   "bits/",    "ext/",    "unistd.h",
      "dlfcn.h",  "fcntl.h",   "pthread.h", "poll.h",     "signal.h", "sched.h", "netdb.h",
      "dirent.h", "strings.h", "termios.h", "execinfo.h", "link.h",   "elf.h",   "malloc.h",
      "cxxabi.h", "locale.h",  "spawn.h",   "x86intrin.h"}},
    {"an attribute of GNU", {"gnu::", "__attribute__"}},
    {"an extension of GNU",
     {"__builtin_", "__extension__", "__int128", "__typeof__", "__PRETTY_FUNCTION__",
      "__restrict__", "__float128", "__asm__", "pragma GCC", "#warning", "#include_next", "({ "}},
    {"the language's version, which cl.exe tells by _MSVC_LANG",
     {"#if __cplusplus", "#elif __cplusplus"}},
    {"a standard macro that LibTorch undefines on Windows", {"NAN"}},
    {"a name that windows.h defines",
     {"interface",      "small",       "near",       "far",
      "huge",           "hyper",       "pascal",     "cdecl",
      "uuid",           "IN",          "OUT",        "CONST",
      "VOID",           "DELETE",      "ERROR",      "TRUE",
      "FALSE",          "OPTIONAL",    "STRICT",     "IGNORE",
      "DIFFERENCE",     "RGB",         "GetObject",  "GetMessage",
      "SendMessage",    "CreateFile",  "DeleteFile", "Yield",
      "GetCurrentTime", "LoadLibrary", "environ"},
     /*of_tests=*/false},
    {"a function that cl.exe warns of (C4996)",
     {"getenv", "fopen", "freopen", "sscanf", "fscanf", "sprintf", "strerror", "strcpy", "strncpy",
      "strcat", "strtok", "localtime", "gmtime", "ctime", "asctime", "tmpnam", "mbstowcs",
      "wcstombs"},
     /*of_tests=*/false},
    {"a function of POSIX",
     {"setenv", "unsetenv",  "strdup",    "strcasecmp", "usleep", "gettimeofday", "isatty",
      "fileno", "popen",     "mkstemp",   "realpath",   "alloca", "pread",        "fork",
      "getpid", "uselocale", "newlocale", "getauxval",  "dladdr", "dlopen",       "fsync",
      "flock",  "fchmod",    "fchown",    "sigaction"}},
};

bool is_letter(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_';
}

/// Whether `code` has the word, which is not a part of a longer one.
bool has(const std::string& code, const std::string& word) {
  for (std::size_t at = code.find(word); at != code.npos; at = code.find(word, at + 1)) {
    const std::size_t end = at + word.size();
    const bool begins = at == 0 || !is_letter(word.front()) || !is_letter(code[at - 1]);
    const bool ends = end == code.size() || word.ends_with('_') || !is_letter(word.back()) ||
                      !is_letter(code[end]);
    if (begins && ends) return true;
  }
  return false;
}

/// A line without comments and what strings hold.
std::string code_of_line(const std::string& line) {
  if (line.starts_with("#include")) return line;
  std::string code;
  bool quoted = false;
  for (std::size_t i = 0; i < line.size(); ++i) {
    if (!quoted && line.compare(i, 2, "//") == 0) break;
    if (quoted && line[i] == '\\') {
      ++i;
    } else if (line[i] == '"') {
      quoted = !quoted;
      code += '"';
    } else if (!quoted) {
      code += line[i];
    }
  }
  return code;
}

/// Of the preprocessor's forwarding and of the standard library.
std::string other_fault(const std::string& code) {
  static const std::regex forwarded("[A-Z_]{4,}\\([^()]*__VA_ARGS__");
  if (code.find("__VA_ARGS__") != code.npos && std::regex_search(code, forwarded)) {
    return "__VA_ARGS__ is forwarded to a macro, for which cl.exe takes it as one argument";
  }
  if (code.find("std::from_chars(") != code.npos && code.find("chars_format") != code.npos) {
    return "std::from_chars of a floating-point number is not in every C++ library";
  }
  return "";
}

/// The text as Windows sees it: lines of `#ifdef __linux__` and of the other part of `#ifdef
/// _WIN32` are empty.
std::string as_on_windows(std::istream& text) {
  enum class Part { any, left_out, kept };
  std::vector<Part> open;
  std::string seen;
  for (std::string line; std::getline(text, line); seen += '\n') {
    if (line.starts_with("#if")) {
      const bool is_linux = line == "#ifdef __linux__", is_windows = line == "#ifdef _WIN32";
      open.push_back(is_linux ? Part::left_out : is_windows ? Part::kept : Part::any);
    } else if (line.starts_with("#endif")) {
      open.pop_back();
    } else if (line.starts_with("#else")) {
      if (open.back() != Part::any) {
        open.back() = open.back() == Part::kept ? Part::left_out : Part::kept;
      }
    } else if (std::find(open.begin(), open.end(), Part::left_out) == open.end()) {
      seen += line;
    }
  }
  return seen;
}

/// "line: what" for each rule that a text breaks.
std::vector<std::string> broken_rules(std::string_view header, std::istream& text,
                                      bool of_test = false) {
  const auto layer = layers.find(header);
  std::vector<std::string> broken;
  int number = 0;
  for (std::string line; std::getline(text, line);) {
    const std::string code = code_of_line(line), place = std::to_string(++number) + ": ";
    const std::string other = of_test ? "" : other_fault(code);  // they have /Zc:preprocessor
    if (!other.empty()) broken.push_back(place + other);
    for (const Rule& rule : rules) {
      if (of_test && !rule.of_tests) continue;
      for (const std::string& word : rule.words) {
        if (!has(code, word)) continue;
        if (layer != layers.end() && layer->second.contains(word)) continue;
        broken.push_back(place + word + " is " + rule.what);
      }
    }
  }
  return broken;
}

std::vector<std::string> broken_rules(std::string_view header, const std::string& text) {
  std::istringstream in(text);
  return broken_rules(header, in);
}

TEST(Systems, HeadersHoldNothingThatOneSystemOrCompilerLacks) {
  const fs::path root = fs::path(TORCHAMP_TEST_ROOT) / "include/torchamp";
  std::size_t count = 0;
  for (const auto& entry : fs::recursive_directory_iterator(root)) {
    if (entry.path().extension() != ".h") continue;
    const std::string name = fs::relative(entry.path(), root).generic_string();
    std::ifstream file(entry.path());
    EXPECT_THAT(broken_rules(name, file), IsEmpty()) << name;
    ++count;
  }
  EXPECT_GT(count, 100U);
}

/// What `pattern`'s first group is, wherever it matches.
std::vector<std::string> found_in(const std::string& text, const std::string& pattern) {
  const std::regex regex(pattern);
  std::vector<std::string> found;
  for (std::sregex_iterator match(text.begin(), text.end(), regex), end; match != end; ++match) {
    found.push_back((*match)[1]);
  }
  return found;
}

/// The files of a test program, below tests/, as tests/CMakeLists.txt names them.
std::vector<std::string> files_of_test(const fs::path& tests, const std::string& name) {
  std::vector<std::string> files;
  for (const std::string& call : found_in(content_of(tests / "CMakeLists.txt"),
                                          "torchamp_add_tests\\(\\s*(" + name + "\\s[^)]*)\\)")) {
    std::istringstream words(call);
    std::string list;
    for (std::string word; words >> word;) {
      if (word == "FILES" || word == "INTERNALS" || word == "DEFINITIONS") {
        list = word;
      } else if (list == "FILES" || list == "INTERNALS") {
        files.push_back((list == "FILES" ? name : "internals") + '/' + word + "_test.cpp");
      }
    }
  }
  return files;
}

TEST(Systems, TestsThatWindowsRunsAskNothingOfLinuxWithoutAGuard) {
  const fs::path root(TORCHAMP_TEST_ROOT), tests = root / "tests";
  const std::string workflow = content_of(root / ".github/workflows/ci.yml");
  const auto names = found_in(workflow.substr(workflow.find("windows-x86-64:")), "(\\w+)_test\\b");
  EXPECT_GE(names.size(), 5U);
  std::vector<std::string> files;
  for (const auto& entry : fs::directory_iterator(tests / "simulated_device")) {
    files.push_back(fs::relative(entry.path(), tests).generic_string());
  }
  for (const std::string& name : names) {
    const auto more = files_of_test(tests, name);
    EXPECT_THAT(more, Not(IsEmpty())) << name;
    files.insert(files.end(), more.begin(), more.end());
  }
  for (std::size_t i = 0; i < files.size(); ++i) {  // grows by what they include
    std::ifstream file(tests / files[i]);
    EXPECT_TRUE(file) << files[i];
    const std::string text = as_on_windows(file);
    std::istringstream lines(text);
    EXPECT_THAT(broken_rules(files[i], lines, /*of_test=*/true), IsEmpty()) << files[i];
    for (const std::string& included : found_in(text, "#include \"(support/[^\"]+)\"")) {
      if (std::find(files.begin(), files.end(), included) == files.end()) files.push_back(included);
    }
  }
}

TEST(Systems, OnlyWhatWindowsSeesIsLookedAt) {
  std::istringstream text(
      "a\n#ifdef __linux__\nb\n#if X\nb\n#endif\n#else\nc\n#endif\n"
      "#ifdef _WIN32\nd\n#else\nb\n#endif\n#if Y\ne\n#else\nf\n#endif\n");
  EXPECT_EQ(std::regex_replace(as_on_windows(text), std::regex("\n"), ""), "acdef");
}

TEST(Systems, EachLayerIsAHeaderThatNeedsTo) {
  const fs::path root = fs::path(TORCHAMP_TEST_ROOT) / "include/torchamp";
  for (const auto& [name, allowed] : layers) {
    std::ifstream file(root / name);
    EXPECT_THAT(broken_rules("another.h", file), Not(IsEmpty())) << name;
  }
}

TEST(Systems, EveryRuleIsSeenToBreak) {
  for (const char* const line :
       {"#include <unistd.h>", "#include <sys/socket.h>", "[[gnu::cold]] void f();",
        "int x __attribute__((unused));", "if (__builtin_expect(x, 1)) return;",
        "#define LIST(...) EACH_OF(__VA_ARGS__)", "#if __cplusplus < 202002L",
        "const char* const interface = name;", "std::vector<int> parts, small;", "f(NAN);",
        "std::getenv(\"HOME\");", "std::strerror(errno);", "setenv(\"A\", \"1\", 1);",
        "std::from_chars(begin, end, number, std::chars_format::hex);"}) {
    EXPECT_THAT(broken_rules("a.h", line), testing::SizeIs(1)) << line;
  }
}

TEST(Systems, CommentsAndStringsAndLongerNamesBreakNone) {
  for (const char* const line :
       {"// a small one, by getenv", "fail(\"a small value\");", "const int small_size = 1;",
        "int interface_of(int);", "std::from_chars(begin, end, number);", "#include <cstdlib>",
        "#define LIST(...) f(__VA_ARGS__)"}) {
    EXPECT_THAT(broken_rules("a.h", line), IsEmpty()) << line;
  }
}

}  // namespace
