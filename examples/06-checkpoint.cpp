// SPDX-License-Identifier: BSD-3-Clause
// The scaler has a state, as model and optimizer have. Saved and loaded with theirs, it lets a
// training resume exactly.
#include <torch/torch.h>
#include <torchamp/torchamp.h>

#include <sstream>

#include "support/check.h"

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

}  // namespace

int main() {
  torch::manual_seed(0);
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
                 "the state is as it was saved");
  support::check(second.scaler.state_dict().growth_tracker == 3,
                 "with the three good steps since the scale grew");

  first.run(8, data, target);
  second.run(8, data, target);
  support::check(second.scaler.get_scale() == 8192., "the scale grew at steps 5, 10 and 15");
  support::check(torch::equal(first.model->weight, second.model->weight),
                 "the weights are those of the training that went on");
}
