// SPDX-License-Identifier: BSD-3-Clause
// A report on training programs: audits and trains three programs (a checkerboard,
// Fashion-MNIST, a small transformer), and writes a self-contained HTML page with their ops that
// may run in 16 bits, their casts, underflow, the loss scale over time, and what overflowed. Or
// draws the log of a run (TrainingStepOptions::log). `diagnose --help` lists the options.
#include <torch/torch.h>

#include <cstdint>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "diagnose/diagnose.h"
#include "diagnose/log.h"
#include "diagnose/page.h"
#include "diagnose/programs.h"
#include "support/arguments.h"
#include "support/device.h"

namespace {

int run(int argc, char** argv) {
  std::string out = "diagnose.html", data = "/usr/share/datasets/fashion-mnist",
              text = DIAGNOSE_TEXT, log;
  support::DeviceOptions device{.dtype = "fp16"};
  Setting setting;
  Sizes sizes;
  support::Arguments arguments(
      "diagnose",
      "Audits and trains three small programs in 16 bits, and writes one HTML page of what it\n"
      "found: which ops may run in 16 bits, casts, underflow, the scale, overflows.");
  arguments.add("--out", "FILE", "The page. Default: " + out + ".", out);
  arguments.add("--data", "DIR", "The folder of Fashion-MNIST.\nDefault: " + data + ".", data);
  arguments.add("--text", "PATH",
                "What the transformer learns: a file, or a folder of headers.\n"
                "Default: LibTorch's.",
                text);
  arguments.add("--log", "FILE",
                "Instead draws a run: what its TrainingStep wrote, whose .log names the file.",
                log);
  device.add_to(arguments);
  arguments.add_integer("--steps", "Training steps of each program. Default: 100.", setting.steps,
                        1, 1'000'000);
  arguments.add_integer("--size", "Pixels along a side of the board. Default: 32.", sizes.board, 4,
                        1024);
  arguments.add_integer("--batch", "Images, and parts of the text. Default: 16.", sizes.batch, 2,
                        4096);
  if (!arguments.parse(argc, argv)) return 0;
  const auto write = [&](const std::string& html) {
    std::ofstream file(out, std::ios::binary);
    file << html;
    file.close();
    if (!file) throw support::UsageError("--out: cannot write '" + out + "'");
    std::cout << "see " << out << '\n';
    return 0;
  };
  if (!log.empty()) return write(page(read_log(log), log));

  setting.device = device.chosen_device();
  setting.dtype = device.chosen_dtype();

  std::vector<Diagnosis> all;
  const auto look_at = [&](const auto& make) {
    torch::manual_seed(0);
    all.push_back(diagnose(make(), setting));
    std::cout << all.back().program.name << ": " << all.back().rows.size() << " ops audited, "
              << all.back().skips.size() << " of " << setting.steps << " steps skipped\n"
              << std::flush;
  };
  look_at([&] { return checkerboard_program(sizes, setting.device); });
  look_at([&] { return fashion_mnist_program(sizes, setting.device, data); });
  look_at([&] { return transformer_program(sizes, setting.device, text); });

  return write(page(all, setting));
}

}  // namespace

int main(int argc, char** argv) {
  return support::run_program("diagnose", [&] { return run(argc, argv); });
}
