// SPDX-License-Identifier: BSD-3-Clause
// The scaler has a state, like the model and the optimizer. If all three are saved and loaded, a
// training resumes exactly. The scaler's state can also be exchanged with Python.
#include <torch/torch.h>
#include <torchamp/python_state.h>
#include <torchamp/torchamp.h>

#include <iostream>
#include <sstream>
#include <string>

#include "support/check.h"
#include "support/temporary_folder.h"

namespace {

struct Training {
  torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  torch::nn::Linear model{torch::nn::LinearOptions(16, 4)};
  torch::optim::Adam optimizer{(model->to(device), model->parameters()),
                               torch::optim::AdamOptions(1e-2)};
  torchamp::GradScaler scaler{{.init_scale = 1024., .growth_interval = 5}};

  void run(int steps, const torch::Tensor& data, const torch::Tensor& target) {
    for (int i = 0; i < steps; ++i) {
      optimizer.zero_grad();
      torch::Tensor loss;
      {
        torchamp::AutocastGuard autocast(device.type());
        loss = torch::mse_loss(model->forward(data), target);
      }
      scaler.scale(loss).backward();
      scaler.step(optimizer);
      scaler.update();
    }
  }
};

void resume() {
  Training first;
  const auto data = torch::randn({64, 16}, first.device);
  const auto target = torch::randn({64, 4}, first.device);
  first.run(8, data, target);

  std::stringstream model_file, optimizer_file, scaler_file;  // or names of files
  torch::save(first.model, model_file);
  torch::save(first.optimizer, optimizer_file);
  torch::save(first.scaler, scaler_file);

  Training second;
  torch::load(second.model, model_file);
  torch::load(second.optimizer, optimizer_file);
  torch::load(second.scaler, scaler_file);
  support::check(second.scaler.state_dict() == first.scaler.state_dict(),
                 "the loaded state is the saved state");
  support::check(second.scaler.state_dict().growth_tracker == 3,
                 "it counts the three good steps since the scale grew");

  first.run(8, data, target);
  second.run(8, data, target);
  support::check(second.scaler.get_scale() == 8192., "the scale grew at steps 5, 10 and 15");
  support::check(torch::equal(first.model->weight, second.model->weight),
                 "both trainings reach the same weights");
}

void exchange_with_python() {
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
  support::check(other.state_dict() == scaler.state_dict(), "the loaded state is the saved state");
  support::check(other.get_scale() == 4096. && other.state_dict().growth_tracker == 3,
                 "it has the scale and the three good steps");

  bool refused = false;
  try {
    torchamp::load_python_state(path, {"scaler"});
  } catch (const c10::Error& error) {
    refused = true;
    std::cout << error.what_without_backtrace() << '\n';
  }
  support::check(refused, "an entry that the file lacks is an error that lists the file's entries");
}

}  // namespace

int main() {
  torch::manual_seed(0);
  resume();
  exchange_with_python();
}
