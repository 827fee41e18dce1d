// SPDX-License-Identifier: BSD-3-Clause
// A training that began in Python continues in C++, and vice versa: the scaler's state in a file
// that torch.load and torch.save read and write.
#include <torch/torch.h>
#include <torchamp/python_state.h>
#include <torchamp/torchamp.h>

#include <iostream>
#include <string>

#include "support/check.h"
#include "support/temporary_folder.h"

int main() {
  torchamp::GradScaler scaler({.init_scale = 4096., .growth_interval = 100});
  const auto parameter = torch::ones({4}, torch::requires_grad());
  torch::optim::SGD optimizer({parameter}, torch::optim::SGDOptions(0.1));
  for (int i = 0; i < 3; ++i) {
    optimizer.zero_grad();
    scaler.scale(parameter.square().sum()).backward();
    scaler.step(optimizer);
    scaler.update();
  }

  const support::TemporaryFolder folder("torchamp");
  const std::string path = (folder.path() / "scaler.pt").string();
  torchamp::save_python_state(scaler.state_dict(), path);
  std::cout << "in Python: scaler.load_state_dict(torch.load(\"scaler.pt\"))\n";

  // In Python: torch.save(scaler.state_dict(), "scaler.pt"). For a larger checkpoint, such as
  // torch.save({"model": ..., "scaler": scaler.state_dict()}, path), name the entry: {"scaler"}.
  torchamp::GradScaler other;
  other.load_state_dict(torchamp::load_python_state(path));
  support::check(other.state_dict() == scaler.state_dict(), "the state is as it was saved");
  support::check(other.get_scale() == 4096. && other.state_dict().growth_tracker == 3,
                 "with the scale and the three good steps");

  bool refused = false;
  try {
    torchamp::load_python_state(path, {"scaler"});
  } catch (const c10::Error& error) {
    refused = true;
    std::cout << error.what_without_backtrace() << '\n';
  }
  support::check(refused, "an entry that is not there is an error that lists those that are");
}
