// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <clocale>
#include <cstdlib>
#include <fstream>
#include <locale>
#include <string>

#include "support/temporary_folder.h"

/// While it lives, streams made in the process write 1234567.5 as 1.234.567,5.
class GroupingStreams {
 public:
  GroupingStreams()
      : before_(std::locale::global(std::locale(std::locale::classic(), new Numbers))) {}
  GroupingStreams(const GroupingStreams&) = delete;
  GroupingStreams& operator=(const GroupingStreams&) = delete;
  ~GroupingStreams() { std::locale::global(before_); }

 private:
  struct Numbers : std::numpunct<char> {
    char do_decimal_point() const override { return ','; }
    char do_thousands_sep() const override { return '.'; }
    std::string do_grouping() const override { return "\3"; }
  };
  std::locale before_;
};

/// While it lives, C's functions write 0.5 as 0,5 and read it so, if the system can make a locale
/// for it: see is_there().
class CommaOfC {
 public:
  CommaOfC() {
    const std::string source = (folder_ / "source").string(), made = (folder_ / "comma").string();
    std::ofstream(source) << "LC_NUMERIC\ndecimal_point \",\"\nthousands_sep \".\"\ngrouping "
                             "3;3\nEND LC_NUMERIC\n";
    const std::string command = "localedef -c -f ANSI_X3.4-1968 -i " + source + ' ' + made;
    (void)!std::system((command + " > /dev/null 2>&1").c_str());  // warns of what is not defined
    setenv("LOCPATH", folder_.environment()["TORCHAMP_TEST_FOLDER"].c_str(), 1);
    (void)std::setlocale(LC_NUMERIC, "comma");
  }
  CommaOfC(const CommaOfC&) = delete;
  CommaOfC& operator=(const CommaOfC&) = delete;
  ~CommaOfC() {
    (void)std::setlocale(LC_NUMERIC, "C");
    unsetenv("LOCPATH");
  }

  bool is_there() const { return std::string(std::localeconv()->decimal_point) == ","; }

 private:
  TemporaryFolder folder_;
};
