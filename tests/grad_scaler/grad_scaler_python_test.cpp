// SPDX-License-Identifier: BSD-3-Clause
// Files that go to a Python of this machine and come back. (Files that a Python wrote some time ago
// are in checkpoint/python_state_test.cpp.)
#include <torchamp/python_state.h>

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/grad_scaler.h>

#include <cmath>
#include <map>
#include <string>

#include "support/optimizers.h"
#include "support/python.h"
#include "support/temporary_folder.h"

using torchamp::GradScaler;
using torchamp::GradScalerState;
using torchamp::load_python_state;
using torchamp::save_python_state;

namespace {

void go_on(GradScaler& scaler, const std::string& iterations) {
  for (const char what : iterations) {
    auto optimizer = sgd({parameter_with(torch::full({1}, what == 'x' ? HUGE_VAL : 1.))}, 0.);
    scaler.scale(torch::ones({}));
    scaler.step(optimizer);
    scaler.update();
  }
}

}  // namespace

TEST(GradScalerPython, ContinuesPythonsStateAndPythonContinuesOurs) {
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
