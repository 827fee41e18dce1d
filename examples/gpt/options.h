// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/cuda.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "gpt/model.h"
#include "support/arguments.h"
#include "support/device.h"

/// Newton's Opticks, from Debian's package golang-src, if it is installed; else torchamp's guide.
inline std::string default_text() {
  const std::string book = "/usr/share/go/src/testdata/Isaac.Newton-Opticks.txt";
  return std::filesystem::exists(book) ? book : GPT_GUIDE;
}

/// What the command line says.
struct Options {
  std::string text = default_text();
  GptSizes sizes;
  std::int64_t batch = 16, accumulate = 2, steps = 500, save_every = 100, sample = 400;
  std::int64_t seed = 0;
  support::DeviceOptions device;
  std::string precision = "mixed", recompute = "no";
  std::string audit, policy;  ///< files; empty: none
  std::filesystem::path out = "torchamp-gpt";

  bool mixed() const { return precision == "mixed"; }
  bool all_dtypes() const { return precision == "all"; }
};

/// The options, or nothing if --help was among them. Throws support::UsageError.
inline std::optional<Options> parse_options(int argc, const char* const* argv) {
  Options options;
  std::string out = options.out.string();
  support::Arguments arguments("gpt",
                               "Teaches a small GPT to write like a text, letter by letter, and "
                               "lets it write. Goes on where\n"
                               "a run before it stopped. Several processes share each batch:\n"
                               "  torchrun --nproc-per-node 2 --no-python gpt");
  arguments.add("--text", "FILE",
                "What to learn from: a file, or the headers and Markdown pages in a folder. "
                "Default:\nNewton's Opticks, if Debian's package golang-src is installed, else "
                "torchamp's guide.",
                options.text);
  arguments.add_integer("--layers", "Default: 4.", options.sizes.layers, 1, 1000);
  arguments.add_integer("--width", "Of each layer. Default: 256.", options.sizes.width, 1, 1 << 16);
  arguments.add_integer("--heads", "Of the attention; they divide the width. Default: 4.",
                        options.sizes.heads, 1, 1000);
  arguments.add_integer("--length", "How many letters the model looks back. Default: 128.",
                        options.sizes.length, 1, 1 << 16);
  arguments.add_integer("--batch", "Parts of the text at once, in each process. Default: 16.",
                        options.batch, 1, 1 << 16);
  arguments.add_integer("--accumulate", "Batches of a step. Default: 2.", options.accumulate, 1,
                        1 << 16);
  arguments.add_integer("--steps", "Default: 500.", options.steps, 1, 100'000'000);
  arguments.add_integer("--save-every", "Steps between two files. Default: 100.",
                        options.save_every, 1, 100'000'000);
  arguments.add_integer("--sample", "How many letters it writes in the end. Default: 400.",
                        options.sample, 0, 1 << 20);
  options.device.add_to(arguments);
  arguments.add_choice("--precision", {"mixed", "fp32", "all"},
                       "all: trains in fp32, bf16 and fp16 one after the other and compares the "
                       "losses.\nExit code 1 if the held-out losses differ by more than 5 %. "
                       "Default: mixed.",
                       options.precision);
  arguments.add("--audit", "FILE",
                "Instead of training, measures which ops this model may run in 16 bits on this "
                "machine, and writes it to FILE.",
                options.audit);
  arguments.add("--policy", "FILE", "Which ops run in 16 bits, as --audit has written it.",
                options.policy);
  arguments.add_choice("--recompute", {"no", "yes"},
                       "Activations again in backward: slower, in less memory.", options.recompute);
  arguments.add_integer("--seed", "Of start weights and batches. Default: 0.", options.seed, 0,
                        INT64_C(0x7fffffff));
  arguments.add("--out", "DIR", "Where model, chart and checkpoint go. Default: " + out + ".", out);
  if (!arguments.parse(argc, argv)) return std::nullopt;
  options.out = out;
  if (options.sizes.width % options.sizes.heads != 0) {
    throw support::UsageError("--heads: they do not divide the width, " +
                              std::to_string(options.sizes.width));
  }
  if (!options.mixed() && !(options.audit.empty() && options.policy.empty())) {
    throw support::UsageError("--precision " + options.precision +
                              ": has nothing to do with --audit and --policy");
  }
  return options;
}
