// SPDX-License-Identifier: BSD-3-Clause
// A DCGAN: a generator learns to draw rings that a discriminator accepts as real.
#include <torch/torch.h>

#include <cstdint>
#include <cstdio>

namespace nn = torch::nn;

namespace {

constexpr std::int64_t batch = 32, noise = 16, side = 16;

/// Rings of random sizes, as values from -1 to 1.
torch::Tensor rings(torch::Device device) {
  const auto along = torch::linspace(-1., 1., side, device);
  const auto radius = (along.view({1, side}).square() + along.view({side, 1}).square()).sqrt();
  const auto size = 0.3 + 0.5 * torch::rand({batch, 1, 1, 1}, device);
  return 2. * (-30. * (radius - size).square()).exp() - 1.;
}

nn::ConvTranspose2d up(std::int64_t in, std::int64_t out) {
  return nn::ConvTranspose2d(
      nn::ConvTranspose2dOptions(in, out, 4).stride(2).padding(1).bias(false));
}

nn::Conv2d down(std::int64_t in, std::int64_t out) {
  return nn::Conv2d(nn::Conv2dOptions(in, out, 4).stride(2).padding(1).bias(false));
}

nn::LeakyReLU leaky() {
  return nn::LeakyReLU(nn::LeakyReLUOptions().negative_slope(0.2));
}

}  // namespace

int main() {
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  torch::manual_seed(0);
  nn::Sequential generator(
      nn::ConvTranspose2d(nn::ConvTranspose2dOptions(noise, 32, 4).bias(false)),
      nn::BatchNorm2d(32), nn::ReLU(), up(32, 16), nn::BatchNorm2d(16), nn::ReLU(), up(16, 1),
      nn::Tanh());
  nn::Sequential discriminator(down(1, 16), leaky(), down(16, 32), nn::BatchNorm2d(32), leaky(),
                               nn::Conv2d(nn::Conv2dOptions(32, 1, 4).bias(false)), nn::Flatten());
  generator->to(device);
  discriminator->to(device);
  const auto options = torch::optim::AdamOptions(2e-4).betas({0.5, 0.999});
  torch::optim::Adam generator_optimizer(generator->parameters(), options);
  torch::optim::Adam discriminator_optimizer(discriminator->parameters(), options);
  const auto real = torch::ones({batch, 1}, device), fake = torch::zeros({batch, 1}, device);
  const auto loss_of = [](const torch::Tensor& judged, const torch::Tensor& label) {
    return torch::binary_cross_entropy_with_logits(judged, label);
  };

  const auto descend = [&](torch::optim::Optimizer& optimizer, const torch::Tensor& loss) {
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
  };

  double generator_sum = 0., discriminator_sum = 0.;
  for (int step = 1; step <= 60; ++step) {
    const auto drawn = generator->forward(torch::randn({batch, noise, 1, 1}, device));
    const auto discriminator_loss = loss_of(discriminator->forward(rings(device)), real) +
                                    loss_of(discriminator->forward(drawn.detach()), fake);
    descend(discriminator_optimizer, discriminator_loss);
    const auto generator_loss = loss_of(discriminator->forward(drawn), real);
    descend(generator_optimizer, generator_loss);

    discriminator_sum += discriminator_loss.item<double>();
    generator_sum += generator_loss.item<double>();
    if (step % 20 != 0) continue;
    std::printf("step %d: discriminator's loss %.4f, generator's loss %.4f\n", step,
                discriminator_sum / 20., generator_sum / 20.);
    discriminator_sum = generator_sum = 0.;
  }
}
