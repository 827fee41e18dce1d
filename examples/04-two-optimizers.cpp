// SPDX-License-Identifier: BSD-3-Clause
// Two models, two losses, two optimizers, one scaler: each optimizer skips independently, and
// both share the scale. Then one model, with Muon for its matrices and AdamW for the rest, in one
// TrainingStep: both step or none.
#include <torch/torch.h>
#include <torchamp/lr_scheduler.h>
#include <torchamp/split_for_muon.h>
#include <torchamp/torchamp.h>
#include <torchamp/training_step.h>

#include <limits>

#include "support/check.h"

namespace {

void train_two_models(torch::Device device) {
  torch::nn::Linear encoder(16, 8), decoder(8, 16);
  encoder->to(device);
  decoder->to(device);
  torch::optim::Adam encoder_optimizer(encoder->parameters(), torch::optim::AdamOptions(1e-3));
  torch::optim::SGD decoder_optimizer(decoder->parameters(), torch::optim::SGDOptions(1e-2));
  const auto data = torch::randn({32, 16}, device);

  torchamp::GradScaler scaler;
  for (int i = 0; i < 3; ++i) {
    encoder_optimizer.zero_grad();
    decoder_optimizer.zero_grad();
    torch::Tensor size, error;
    {
      torchamp::AutocastGuard autocast(device.type());
      const auto code = encoder->forward(data);
      size = code.square().mean();
      error = torch::mse_loss(decoder->forward(code), data);
    }
    scaler.scale(error).backward({}, /*keep_graph=*/true);
    scaler.scale(1e-2 * size).backward();
    // In the second iteration a gradient of the encoder overflows.
    if (i == 1) encoder->bias.mutable_grad().fill_(std::numeric_limits<float>::infinity());

    const double scale = scaler.get_scale();
    const auto encoder_step = scaler.step(encoder_optimizer);
    const auto decoder_step = scaler.step(decoder_optimizer);
    scaler.update();  // once, after all steps

    support::check(encoder_step.stepped() == (i != 1),
                   i == 1 ? "the encoder's step is skipped" : "the encoder steps");
    support::check(decoder_step.stepped(), "the decoder steps");
    support::check(scaler.get_scale() == (i == 1 ? scale / 2. : scale),
                   i == 1 ? "the scale is halved" : "the scale stays");
  }
}

void train_with_muon(torch::Device device) {
  torch::nn::Sequential model(torch::nn::Linear(16, 32), torch::nn::Tanh(),
                              torch::nn::Linear(32, 32), torch::nn::Tanh(),
                              torch::nn::Linear(32, 4));
  model->to(device);
  const auto data = torch::randn({64, 16}, device), target = torch::randn({64, 4}, device);

  const auto [matrices, others] = torchamp::split_for_muon(model);  // the last layer is the head
  torchamp::FusedMuon muon(matrices, torchamp::MuonOptions(0.02));
  torchamp::FusedAdamW adamw(others, torch::optim::AdamWOptions(3e-3));
  torchamp::WarmupCosine muon_rates(muon, {.warmup_steps = 5, .total_steps = 40});
  torchamp::WarmupCosine adamw_rates(adamw, {.warmup_steps = 5, .total_steps = 40});
  torchamp::TrainingStep train(model, {muon, adamw},
                               {.max_grad_norm = 1., .scheduler = {muon_rates, adamw_rates}});
  double first = 0., last = 0.;
  for (int i = 0; i < 40; ++i) {
    last = train([&] { return torch::mse_loss(model->forward(data), target); }).loss();
    if (i == 0) first = last;
  }
  support::check(matrices.size() == 2 && others.size() == 4, "Muon steps the hidden matrices");
  support::check(last < 0.8 * first, "the loss falls");

  const auto before = model->parameters().back().detach().clone();
  const auto bad = train([&] {
    return torch::mse_loss(model->forward(data), target) +
           matrices[0].sum() * std::numeric_limits<float>::infinity();
  });
  support::check(!bad.stepped(), "a gradient of Muon overflows");
  support::check(torch::equal(model->parameters().back(), before), "AdamW also skips its step");
}

}  // namespace

int main() {
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  torch::manual_seed(0);
  train_two_models(device);
  train_with_muon(device);
}
