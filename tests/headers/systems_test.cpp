// SPDX-License-Identifier: BSD-3-Clause
// What the headers' text may not hold, since a system or a compiler of Windows has no such thing.
// cl.exe itself runs in the workflow only.
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

namespace {

namespace fs = std::filesystem;
using ::testing::IsEmpty;
using ::testing::Not;

/// What these headers may hold beside the others, behind a condition of the preprocessor.
const std::map<std::string, std::set<std::string>, std::less<>> layers{
    {"detail/core/base/system.h", {"dlfcn.h", "getenv", "dladdr", "dlopen"}},
    {"detail/extras/distributed/loopback.h", {"netinet/", "sys/", "unistd.h", "sigaction"}},
    {"detail/extras/fp8/lanes.h", {"__attribute__", "__builtin_"}},
    {"detail/extras/io/open_file.h",
     {"fcntl.h", "sys/", "unistd.h", "pread", "fsync", "flock", "fchmod", "fchown"}},
    {"detail/extras/shared/cpu_units.h", {"sys/", "getauxval"}},
    {"host_memory.h", {"dladdr", "dlfcn.h", "malloc.h", "pthread.h"}},
    {"version.h", {"gnu::"}},
};

struct Rule {
  const char* what;
  std::vector<std::string> words;  // whole ones
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
    {"a name that windows.h defines", {"interface",      "small",       "near",       "far",
                                       "huge",           "hyper",       "pascal",     "cdecl",
                                       "uuid",           "IN",          "OUT",        "CONST",
                                       "VOID",           "DELETE",      "ERROR",      "TRUE",
                                       "FALSE",          "OPTIONAL",    "STRICT",     "IGNORE",
                                       "DIFFERENCE",     "RGB",         "GetObject",  "GetMessage",
                                       "SendMessage",    "CreateFile",  "DeleteFile", "Yield",
                                       "GetCurrentTime", "LoadLibrary", "environ"}},
    {"a function that cl.exe warns of (C4996)",
     {"getenv", "fopen", "freopen", "sscanf", "fscanf", "sprintf", "strerror", "strcpy", "strncpy",
      "strcat", "strtok", "localtime", "gmtime", "ctime", "asctime", "tmpnam", "mbstowcs",
      "wcstombs"}},
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

/// A line without comments and strings.
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

/// "line: what" for each rule that a text breaks.
std::vector<std::string> broken_rules(std::string_view header, std::istream& text) {
  const auto layer = layers.find(header);
  std::vector<std::string> broken;
  int number = 0;
  for (std::string line; std::getline(text, line);) {
    const std::string code = code_of_line(line), place = std::to_string(++number) + ": ";
    const std::string other = other_fault(code);
    if (!other.empty()) broken.push_back(place + other);
    for (const Rule& rule : rules) {
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
        "const char* const interface = name;", "std::vector<int> parts, small;",
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
