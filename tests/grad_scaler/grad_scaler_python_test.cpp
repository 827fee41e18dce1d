// SPDX-License-Identifier: BSD-3-Clause
// Files that go to a Python of this machine and come back. (Files that a Python wrote some time ago
// are in checkpoint/python_state_test.cpp.)
#include <torchamp/python_state.h>

#include <gtest/gtest.h>
#include <stdio.h>
#include <torch/torch.h>
#include <torchamp/grad_scaler.h>

#include <cmath>
#include <cstdlib>
#include <map>
#include <string>

#include "support/optimizers.h"
#include "support/temporary_folder.h"

using torchamp::GradScaler;
using torchamp::GradScalerState;
using torchamp::load_python_state;
using torchamp::save_python_state;

namespace {

struct Answer {
  int status;
  std::string output;
};

/// Runs Python: $TORCHAMP_TEST_PYTHON, or the one that CMake found.
Answer python(const std::string& arguments) {
  const char* const chosen = std::getenv("TORCHAMP_TEST_PYTHON");
#ifdef TORCHAMP_TEST_PYTHON
  const std::string found = TORCHAMP_TEST_PYTHON;
#else
  const std::string found = "python3";
#endif
  const std::string command = "'" + (chosen ? chosen : found) + "' " + arguments + " 2>&1";
  FILE* const pipe = popen(command.c_str(), "r");
  if (!pipe) return {-1, "cannot run " + command};
  std::string output;
  char part[4096];
  while (const std::size_t size = fread(part, 1, sizeof part, pipe)) output.append(part, size);
  return {pclose(pipe), output};
}

void go_on(GradScaler& scaler, const std::string& iterations) {
  for (const char what : iterations) {
    auto optimizer = sgd({parameter_with(torch::full({1}, what == 'x' ? HUGE_VAL : 1.))}, 0.);
    scaler.scale(torch::ones({}));
    scaler.step(optimizer);
    scaler.update();
  }
}

}  // namespace

TEST(GradScalerPython, GoesOnWhereWeStoppedAndTheOtherWayRound) {
  const Answer found = python("-c 'import torch; torch.amp.GradScaler'");
  if (found.status != 0) {
    GTEST_SKIP() << "no Python with torch (set TORCHAMP_TEST_PYTHON to one): " << found.output;
  }
  const TemporaryFolder folder;
  const auto path = [&](const std::string& name) { return (folder / name).string(); };
  std::map<std::string, GradScalerState> states{
      {"extremes", {0x1p-100, 1.5, 0.9, (int64_t{1} << 31) - 1, 0}},
      {"short_interval", {3., 1.7, 0.3, 1, 0}},
      {"large", {0x1.fffffep120, 2., 0.5, 300, 299}},
      {"unused", GradScaler().state_dict()}};
  GradScaler used({.init_scale = 1000., .growth_factor = 1.1, .growth_interval = 3});
  go_on(used, "....x.");
  states["used"] = used.state_dict();
  for (const auto& [name, state] : states) save_python_state(state, path(name + ".ours"));
  save_python_state({}, path("disabled.ours"));

  const std::string iterations = "..x....xx.....x.";
  const Answer run = python("parity/exchange.py '" + path("") + "' " + iterations);
  ASSERT_EQ(run.status, 0) << run.output;
  EXPECT_NE(run.output.find("exchanged 6"), std::string::npos) << run.output;

  for (const auto& [name, state] : states) {
    SCOPED_TRACE(name);
    GradScaler scaler;
    scaler.load_state_dict(state);
    go_on(scaler, iterations);
    EXPECT_EQ(load_python_state(path(name + ".python")), scaler.state_dict());
    EXPECT_EQ(load_python_state(path(name + ".checkpoint"), {"amp", "scaler"}),
              scaler.state_dict());
  }
}
