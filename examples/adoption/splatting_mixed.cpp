// SPDX-License-Identifier: BSD-3-Clause
// Gaussian splatting: ellipses of light learn to look like a scene from several views. Each kind of
// parameter has its own optimizer.
#include <torch/torch.h>
#include <torchamp/training_step.h>

#include <cstdint>
#include <cstdio>
#include <utility>
#include <vector>

namespace nn = torch::nn;

namespace {

constexpr std::int64_t splats = 64, side = 20;

struct SceneImpl : nn::Module {
  /// The pixels of the scene from a view, [side * side, 3]. Splats that are nearer are in front.
  torch::Tensor forward(const torch::Tensor& view) {
    const auto order = means.select(1, 2).argsort();
    const auto grid = torch::linspace(-1., 1., side, means.options().requires_grad(false));
    const auto depth = means.narrow(1, 2, 1);
    const auto x =
        grid.repeat({side}) - means.narrow(1, 0, 1) - depth * view[0];  // [splats, pixels]
    const auto y = grid.repeat_interleave(side) - means.narrow(1, 1, 1) - depth * view[1];
    const auto along = (x * turns.cos() + y * turns.sin()) / scales.narrow(1, 0, 1).exp();
    const auto across = (y * turns.cos() - x * turns.sin()) / scales.narrow(1, 1, 1).exp();
    const auto density = (-0.5 * (along.square() + across.square())).exp();
    const auto alpha = (0.99 * opacities.sigmoid() * density).index_select(0, order);
    const auto behind = torch::cumprod(1. - alpha, 0);
    const auto light =
        torch::cat({torch::ones_like(behind.narrow(0, 0, 1)), behind.narrow(0, 0, splats - 1)});
    const auto colour = (colours + (details * view).sum(2)).sigmoid().index_select(0, order);
    return (alpha * light).t().mm(colour);
  }

  torch::Tensor part(const char* name, at::IntArrayRef sizes, double spread, double mean = 0.) {
    return register_parameter(name, spread * torch::randn(sizes) + mean);
  }
  torch::Tensor means = part("means", {splats, 3}, 0.5);
  torch::Tensor scales = part("scales", {splats, 2}, 0.2, -1.6);  // logarithms
  torch::Tensor turns = part("turns", {splats, 1}, 1.);
  torch::Tensor colours = part("colours", {splats, 3}, 1.);
  torch::Tensor details =
      part("details", {splats, 3, 2}, 0.1);  // how the colour depends on the view
  torch::Tensor opacities = part("opacities", {splats, 1}, 0.5);
};
TORCH_MODULE(Scene);

}  // namespace

int main() {
  using Adam = torchamp::FusedAdam;
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  torch::manual_seed(0);
  Scene photographed, scene;
  photographed->to(device);
  scene->to(device);
  Adam of_means({scene->means}, torch::optim::AdamOptions(5e-3));
  Adam of_scales({scene->scales}, torch::optim::AdamOptions(1e-2));
  Adam of_turns({scene->turns}, torch::optim::AdamOptions(2e-2));
  Adam of_colours({scene->colours}, torch::optim::AdamOptions(5e-2));
  Adam of_details({scene->details}, torch::optim::AdamOptions(5e-3));
  Adam of_opacities({scene->opacities}, torch::optim::AdamOptions(3e-2));
  torch::optim::StepLR rates(of_means, /*step_size=*/40, /*gamma=*/0.5);
  torchamp::TrainingStep train(
      scene, {of_means, of_scales, of_turns, of_colours, of_details, of_opacities},
      {.dtype = torch::kFloat, .scheduler = rates});

  double sum = 0.;
  for (int step = 1; step <= 120; ++step) {
    const auto view = 0.4 * torch::rand({2}, device) - 0.2;
    torch::Tensor photo;
    {
      const torch::NoGradGuard no_grad;
      photo = photographed->forward(view);
    }
    sum += train([&] { return torch::l1_loss(scene->forward(view), photo); }).loss();
    if (step % 40 != 0) continue;
    std::printf("step %d: loss %.4f\n", step, sum / 40.);
    sum = 0.;
  }
}
