// SPDX-License-Identifier: BSD-3-Clause
// A network learns to paint a checkerboard, in fp32 and in mixed precision. Prints and draws
// what mixed precision gains and loses. `checkerboard --help` lists the options.

#include <cmath>
#include <iostream>

#include "checkerboard/options.h"
#include "checkerboard/plan.h"
#include "checkerboard/report.h"
#include "checkerboard/target.h"
#include "checkerboard/train.h"
#include "support/arguments.h"
#include "support/drawing/png_file.h"
#include "support/format.h"
#include "support/peak_memory.h"

namespace {

int run(int argc, char** argv) {
  const std::optional<Options> options = parse_options(argc, argv);
  if (!options) return 0;
  support::count_cpu_memory();
  const Target target(options->image);
  prepare_output_folder(options->out);
  const Plan plan = make_plan(*options, target);

  const torch::Tensor targets = target.at_size(plan.size).to(plan.device);
  const auto height = targets.size(2), width = targets.size(3);
  const torch::Tensor inputs = grid(width, height).to(plan.device);
  const std::string heading = support::format(
      "%s, %lld x %lld pixels, %lld steps", target.name().c_str(), static_cast<long long>(width),
      static_cast<long long>(height), static_cast<long long>(plan.steps));
  std::cout << plan.why << heading << '\n' << std::endl;

  const Run fp32 = train(inputs, targets, plan.steps, plan.fp32, options->seed, true);
  const Run amp = train(inputs, targets, plan.steps, plan.amp, options->seed, true);

  std::cout << '\n';
  print_table(std::cout, fp32, amp);
  std::cout << '\n';
  const auto save = [&](const char* name, const drawing::Canvas& canvas) {
    const std::filesystem::path path = options->out / name;
    drawing::write_png(path, canvas.image());
    std::cout << "Wrote " << path.string() << '\n';
  };
  save("comparison.png", draw_comparison(heading, targets, fp32, amp));
  save("loss.png", draw_losses(heading, fp32, amp));
  if (!std::isfinite(fp32.losses.back()) || !std::isfinite(amp.losses.back())) {
    throw std::runtime_error("a loss is not finite: the training failed");
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return support::run_program("checkerboard", [&] { return run(argc, argv); });
}
