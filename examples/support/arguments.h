// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <charconv>
#include <cstdint>
#include <functional>
#include <iostream>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace support {

/// The user asked for what cannot be done; the program ends with exit code 2 and this text.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A program's options: `--name VALUE` or `--name=VALUE`; of an option given twice the last counts.
class Arguments {
 public:
  Arguments(std::string program, std::string about)
      : program_(std::move(program)), about_(std::move(about)) {}

  /// An option whose value `store` takes; it throws UsageError("…") for a bad one.
  void add(std::string name, std::string placeholder, std::string help,
           std::function<void(const std::string&)> store) {
    options_.push_back(
        {std::move(name), std::move(placeholder), std::move(help), std::move(store)});
  }

  void add(std::string name, std::string placeholder, std::string help, std::string& value) {
    add(std::move(name), std::move(placeholder), std::move(help),
        [&value](const std::string& text) {
          if (text.empty()) throw UsageError("the value is empty");
          value = text;
        });
  }

  /// A whole number from `low` to `high`.
  template <class Integer>
  void add_integer(std::string name, std::string help, Integer& value, std::int64_t low,
                   std::int64_t high) {
    add(std::move(name), "N", std::move(help), [&value, low, high](const std::string& text) {
      std::int64_t number = 0;
      const char* const end = text.data() + text.size();
      const auto [stop, error] = std::from_chars(text.data(), end, number);
      if (error != std::errc{} || stop != end || number < low || number > high) {
        throw UsageError("'" + text + "' is not a whole number from " + std::to_string(low) +
                         " to " + std::to_string(high));
      }
      value = number;
    });
  }

  /// One of a few words.
  void add_choice(std::string name, std::vector<std::string> words, std::string help,
                  std::string& value) {
    std::string list;
    for (const std::string& word : words) list += (list.empty() ? "" : "|") + word;
    add(std::move(name), list, std::move(help),
        [&value, words = std::move(words), list](const std::string& text) {
          for (const std::string& word : words) {
            if (word == text) return void(value = text);
          }
          throw UsageError("'" + text + "' is none of " + list);
        });
  }

  /// Stores all options. False if --help was among them: the help is on `out` and nothing is left
  /// to do. Throws UsageError naming the argument at fault.
  bool parse(int argc, const char* const* argv, std::ostream& out = std::cout) const {
    for (int i = 1; i < argc; ++i) {
      const std::string_view argument = argv[i];
      if (argument == "--help" || argument == "-h") return print_help(out), false;
      const std::size_t equals = argument.find('=');
      const std::string_view name = argument.substr(0, equals);
      const Option* option = find(name);
      if (!option) {
        throw UsageError((name.starts_with('-') ? "unknown option '" : "unexpected argument '") +
                         std::string(argument) + "'");
      }
      if (equals == std::string_view::npos && ++i == argc) {
        throw UsageError(std::string(name) + " needs a value: " + option->placeholder);
      }
      try {
        option->store(equals == std::string_view::npos ? argv[i]
                                                       : std::string(argument.substr(equals + 1)));
      } catch (const UsageError& error) {
        throw UsageError(std::string(name) + ": " + error.what());
      }
    }
    return true;
  }

  void print_help(std::ostream& out) const {
    out << "Usage: " << program_ << " [options]\n\n" << about_ << "\n\nOptions:\n";
    for (const Option& option : options_) {
      print_option(out, option.name + " " + option.placeholder, option.help);
    }
    print_option(out, "--help", "Print this and exit.");
  }

 private:
  struct Option {
    std::string name, placeholder, help;
    std::function<void(const std::string&)> store;
  };

  const Option* find(std::string_view name) const {
    for (const Option& option : options_) {
      if (option.name == name) return &option;
    }
    return nullptr;
  }

  static void print_option(std::ostream& out, const std::string& usage, const std::string& help) {
    constexpr std::size_t column = 28;
    out << "  " << usage;
    if (usage.size() + 4 > column)
      out << '\n' << std::string(column, ' ');
    else
      out << std::string(column - 2 - usage.size(), ' ');
    for (const char letter : help) {
      out << letter;
      if (letter == '\n') out << std::string(column, ' ');
    }
    out << '\n';
  }

  std::string program_, about_;
  std::vector<Option> options_;
};

/// Runs the body of a main(): 2 for a UsageError, 1 for any other exception, each with its text on
/// the error stream.
template <class Body>
int run_program(const std::string& program, Body body) {
  try {
    return body();
  } catch (const UsageError& error) {
    std::cerr << program << ": " << error.what() << "\nTry '" << program << " --help'.\n";
    return 2;
  } catch (const std::exception& error) {
    std::cerr << program << ": " << error.what() << '\n';
    return 1;
  }
}

}  // namespace support
