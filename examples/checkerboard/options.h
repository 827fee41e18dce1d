// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <system_error>

#include "support/arguments.h"
#include "support/device.h"
#include "support/system.h"

/// What the command line says.
struct Options {
  std::string image;  ///< a PNG file to fit; empty: the checkerboard
  std::optional<std::int64_t> size;
  std::optional<std::int64_t> steps;
  support::DeviceOptions device;
  std::string policy = "standard";
  std::filesystem::path out = "torchamp-checkerboard";
  std::int64_t seed = 0;
};

/// The options, or nothing if --help was among them. Throws support::UsageError.
inline std::optional<Options> parse_options(int argc, const char* const* argv) {
  Options options;
  std::string out = options.out.string();
  support::Arguments arguments(
      "checkerboard",
      "Teaches a small network to paint a checkerboard (or a picture of yours) from coordinates,\n"
      "once in fp32 and once with torchamp's mixed precision, from the same start weights.\n"
      "Prints a table of both runs and writes pictures of the outputs and of the loss curves.");
  arguments.add("--image", "FILE.png", "Fit this picture, grey or colour, in place of the board.",
                options.image);
  arguments.add_integer("--size",
                        "Pixels along the longer side. Default: 512 on CUDA; on a CPU a size\n"
                        "that both runs finish in about a minute.",
                        options.size, 4, 8192);
  arguments.add_integer("--steps", "Training steps. Default: 500 (a slow CPU: fewer).",
                        options.steps, 1, 1'000'000);
  options.device.add_to(arguments);
  arguments.add_choice("--policy", {"standard", "torch"},
                       "Which ops run in it: torchamp's table or LibTorch's own lists.",
                       options.policy);
  arguments.add("--out", "DIR", "Where the pictures go. Default: " + out + ".", out);
  arguments.add_integer("--seed", "Of the start weights. Default: 0.", options.seed, 0,
                        INT64_C(0x7fffffff));
  if (!arguments.parse(argc, argv)) return std::nullopt;
  options.out = out;
  return options;
}

/// Makes the folder for the pictures, before minutes of work are spent on them.
inline void prepare_output_folder(const std::filesystem::path& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) {
    throw support::UsageError("--out: cannot make the folder '" + folder.string() +
                              "': " + error.message());
  }
  if (!support::is_writable(folder)) {
    throw support::UsageError("--out: cannot write to the folder '" + folder.string() + "'");
  }
}
