// SPDX-License-Identifier: BSD-3-Clause
// Two models, two losses, two optimizers, one scaler: each optimizer skips independently, and
// both share the scale.
#include <torch/torch.h>
#include <torchamp/torchamp.h>

#include <limits>

#include "support/check.h"

int main() {
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  torch::manual_seed(0);
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
