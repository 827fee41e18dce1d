// SPDX-License-Identifier: BSD-3-Clause
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "support/arguments.h"
#include "support/format.h"
#include "support/progress_bar.h"
#include "support/table.h"

namespace support {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::ThrowsMessage;

// ---- Arguments ----------------------------------------------------------------------------------

struct Given {
  std::optional<std::int64_t> number;
  std::string word = "red", text;
};

/// Parses into `given`; false for --help, whose text goes to `help`.
bool parse(Given& given, std::vector<const char*> argv, std::ostream& help = std::cout) {
  Arguments arguments("program", "Does things.");
  arguments.add_integer("--number", "A number.", given.number, 1, 100);
  arguments.add_choice("--word", {"red", "blue"}, "A word.", given.word);
  arguments.add("--text", "TEXT", "A text.", given.text);
  argv.insert(argv.begin(), "program");
  return arguments.parse(static_cast<int>(argv.size()), argv.data(), help);
}

TEST(Arguments, TakesBothSpellingsAndTheLastOfTwo) {
  Given given;
  EXPECT_TRUE(parse(given, {"--number", "7", "--text=a=b", "--word=red", "--word", "blue"}));
  EXPECT_EQ(given.number, 7);
  EXPECT_EQ(given.text, "a=b");
  EXPECT_EQ(given.word, "blue");
}

TEST(Arguments, LeavesWhatIsNotGiven) {
  Given given;
  EXPECT_TRUE(parse(given, {}));
  EXPECT_EQ(given.number, std::nullopt);
  EXPECT_EQ(given.word, "red");
}

TEST(Arguments, NamesTheArgumentAtFault) {
  const auto parsing = [](std::vector<const char*> argv) {
    return [argv] {
      Given given;
      parse(given, argv);
    };
  };
  EXPECT_THAT(parsing({"--nombre", "7"}),
              ThrowsMessage<UsageError>(HasSubstr("unknown option '--nombre'")));
  EXPECT_THAT(parsing({"7"}), ThrowsMessage<UsageError>(HasSubstr("unexpected argument '7'")));
  EXPECT_THAT(parsing({"--number"}), ThrowsMessage<UsageError>(HasSubstr("needs a value: N")));
  for (const char* wrong : {"0", "101", "-1", "7x", "", "1e1", "99999999999999999999"}) {
    EXPECT_THAT(parsing({"--number", wrong}),
                ThrowsMessage<UsageError>("--number: '" + std::string(wrong) +
                                          "' is not a whole number from 1 to 100"));
  }
  EXPECT_THAT(parsing({"--word", "green"}),
              ThrowsMessage<UsageError>("--word: 'green' is none of red|blue"));
  EXPECT_THAT(parsing({"--text="}), ThrowsMessage<UsageError>("--text: the value is empty"));
}

TEST(Arguments, PrintsHelp) {
  Given given;
  std::ostringstream help;
  EXPECT_FALSE(parse(given, {"--number", "7", "--help", "nonsense"}, help));
  EXPECT_THAT(help.str(), HasSubstr("Usage: program [options]\n\nDoes things.\n"));
  EXPECT_THAT(help.str(), HasSubstr("  --word red|blue           A word.\n"));
}

TEST(Arguments, TurnsErrorsIntoExitCodes) {
  EXPECT_EQ(run_program("test", [] { return 5; }), 5);
  EXPECT_EQ(run_program("test", []() -> int { throw UsageError("wrong"); }), 2);
  EXPECT_EQ(run_program("test", []() -> int { throw std::runtime_error("broken"); }), 1);
}

// ---- Numbers and tables -------------------------------------------------------------------------

TEST(Format, ChoosesTheUnit) {
  EXPECT_EQ(format_bytes(1536 * 1024), "1.5 MiB");
  EXPECT_EQ(format_bytes(3LL << 30), "3.00 GiB");
  EXPECT_EQ(format_seconds(2e-4), "200 us");
  EXPECT_EQ(format_seconds(0.01234), "12.3 ms");
  EXPECT_EQ(format_seconds(1.234), "1.23 s");
}

TEST(Table, AlignsItsColumns) {
  Table table({"", "one", "two"});
  table.add({"short", "1"});
  table.add({"longer", "22", "333"});
  std::ostringstream out;
  out << table;
  EXPECT_EQ(out.str(),
            "           one   two\n"
            "  ------------------\n"
            "  short      1      \n"
            "  longer    22   333\n");
  EXPECT_EQ(table.markdown(),
            "|        | one | two |\n"
            "|--------|----:|----:|\n"
            "| short  |   1 |     |\n"
            "| longer |  22 | 333 |\n");
}

// ---- Progress -----------------------------------------------------------------------------------

/// What is written where there is no terminal if each `every`th step after `begun` asks.
std::vector<std::string> lines_of_bar(int total, int begun, int every) {
  std::FILE* file = std::tmpfile();
  {
    ProgressBar bar("run", total, file, begun);
    for (int step = begun + every; step <= total; step += every) {
      if (bar.is_due(step)) bar.show(step, "loss 1");
    }
  }
  std::rewind(file);
  std::vector<std::string> lines;
  std::array<char, 256> line;
  while (std::fgets(line.data(), line.size(), file)) lines.emplace_back(line.data());
  std::fclose(file);
  return lines;
}

TEST(ProgressBar, WritesALinePerTenthOfARunWhereThereIsNoTerminal) {
  const auto lines = lines_of_bar(25, 0, 1);
  EXPECT_EQ(lines.size(), 10U);
  EXPECT_THAT(lines.front(), HasSubstr("run 3/25  loss 1  "));
  EXPECT_THAT(lines.back(), HasSubstr("run 25/25  loss 1  0.0 s\n"));
}

TEST(ProgressBar, PassesOverNoTenthThatEndsBetweenTwoLooks) {
  const auto lines = lines_of_bar(100, 0, 7);  // none of these but 70 ends a tenth
  EXPECT_EQ(lines.size(), 9U);
  EXPECT_THAT(lines.front(), HasSubstr("run 14/100"));
}

TEST(ProgressBar, GoesOnFromAnEarlierRun) {
  const auto lines = lines_of_bar(100, 50, 1);
  EXPECT_EQ(lines.size(), 5U);
  EXPECT_THAT(lines.front(), HasSubstr("run 60/100"));
}

}  // namespace
}  // namespace support
