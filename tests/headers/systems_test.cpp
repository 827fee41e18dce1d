// SPDX-License-Identifier: BSD-3-Clause
// What the headers' text may not hold, since a system or a compiler of Windows has no such thing.
// cl.exe itself runs in the workflow only.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <regex>
#include <string>
#include <string_view>
#include <vector>

namespace {

namespace fs = std::filesystem;
using ::testing::IsEmpty;
using ::testing::Not;

/// What a header of these may hold beside the others, behind a condition of the preprocessor.
const std::map<std::string, std::string, std::less<>> layers{
    {"detail/core/base/system.h", "dlfcn|getenv|pragma warning"},
    {"detail/extras/distributed/loopback.h", "netinet/in|sys/socket|unistd"},
    {"detail/extras/fp8/lanes.h", "__attribute__|__builtin_|__GNUC__"},
    {"detail/extras/io/open_file.h", "fcntl|sys/file|sys/stat|unistd"},
    {"detail/extras/shared/cpu_units.h", "sys/auxv"},
    {"host_memory.h", "dlfcn|malloc|pthread"},
    {"version.h", "gnu::"},
};

struct Rule {
  const char* what;
  std::regex pattern;  // the first group is looked for in `layers`
};

std::regex any_of(const std::string& words) {
  return std::regex("(?:^|[^A-Za-z0-9_])(" + words + ")(?![A-Za-z0-9_])");
}

const std::vector<Rule>& rules() {
  static const std::vector<Rule> all{
      {"a header of POSIX or GNU", std::regex("#include "
                                              "<((?:sys|arpa|net|netinet|bits|ext)/"
                                              "[a-z]+|unistd|dlfcn|fcntl|pthread|poll|signal|sched|"
                                              "netdb|dirent|strings|termios|execinfo|link|elf|"
                                              "malloc|cxxabi|locale|spawn|x86intrin)(?:\\.h)?>")},
      {"an attribute of GNU", std::regex("(gnu::|__attribute__)")},
      {"an extension of GNU", std::regex("(__builtin_|__extension__|__int128|__typeof__|__PRETTY_"
                                         "FUNCTION__|__restrict__|__float128|__asm__|"
                                         "pragma GCC|#warning|#include_next|\\(\\{ )")},
      {"a variadic macro's arguments, which cl.exe forwards as one",
       std::regex("[A-Z_]{4,}\\([^()]*(__VA_ARGS__)")},
      {"the language's version, which cl.exe tells by _MSVC_LANG",
       std::regex("^#(?:el)?if (__cplusplus)")},
      {"a name that windows.h defines", any_of("interface|small|near|far|huge|hyper|pascal|cdecl|"
                                               "uuid|IN|OUT|CONST|VOID|DELETE|ERROR|TRUE|FALSE|"
                                               "OPTIONAL|STRICT|IGNORE|DIFFERENCE|RGB|GetObject|"
                                               "GetMessage|SendMessage|CreateFile|DeleteFile|Yield|"
                                               "GetCurrentTime|LoadLibrary|environ")},
      {"a function that cl.exe warns of (C4996)",
       any_of("getenv|fopen|freopen|sscanf|fscanf|sprintf|strerror|strcpy|strncpy|strcat|strtok|"
              "localtime|gmtime|"
              "ctime|asctime|tmpnam|mbstowcs|wcstombs")},
      {"a function of POSIX", any_of("setenv|unsetenv|strdup|strcasecmp|usleep|gettimeofday|isatty|"
                                     "fileno|popen|mkstemp|realpath|alloca|"
                                     "pread|fork|getpid|uselocale|newlocale")},
      {"a number that not every C++ library reads",
       std::regex("(std::from_chars)\\([^;]*(?:double|chars_format)")},
  };
  return all;
}

/// A line without comments and strings.
std::string code_of(const std::string& line) {
  static const std::regex strings("\"(?:[^\"\\\\]|\\\\.)*\""), comment("//.*$");
  const std::string without =
      line.starts_with("#include") ? line : std::regex_replace(line, strings, "\"\"");
  return std::regex_replace(without, comment, "");
}

/// "line: what" for each rule that a text breaks.
std::vector<std::string> broken_rules(std::string_view header, std::istream& text) {
  const auto layer = layers.find(header);
  const std::regex allowed(layer == layers.end() ? "$^" : layer->second);
  const bool is_system = header.ends_with("open_file.h") || header.ends_with("loopback.h");
  std::vector<std::string> broken;
  int number = 0;
  for (std::string line; std::getline(text, line);) {
    ++number;
    const std::string code = code_of(line);
    for (const Rule& rule : rules()) {
      std::smatch found;
      if (!std::regex_search(code, found, rule.pattern)) continue;
      if (std::regex_search(found.str(1), allowed)) continue;
      if (is_system && rule.what == std::string_view("a function of POSIX")) continue;
      broken.push_back(std::to_string(number) + ": " + found.str(1) + " is " + rule.what);
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
