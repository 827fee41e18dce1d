// SPDX-License-Identifier: BSD-3-Clause
// A convolutional classifier of drawn shapes, with LibTorch's data loader.
#include <torch/torch.h>

#include <cstdint>
#include <cstdio>
#include <optional>

namespace {

/// Pictures of rings, crosses and squares, with noise.
class Shapes : public torch::data::Dataset<Shapes> {
 public:
  torch::data::Example<> get(std::size_t index) override {
    const auto along = torch::linspace(-1., 1., side);
    const auto x = along.view({1, side}).abs(), y = along.view({side, 1}).abs();
    const auto kind = static_cast<std::int64_t>(index) % 3;
    const auto shape = kind == 0   ? (x * x + y * y - 0.4).abs().lt(0.15)
                       : kind == 1 ? torch::minimum(x, y).lt(0.15)
                                   : (torch::maximum(x, y) - 0.6).abs().lt(0.15);
    return {(shape.to(torch::kFloat) + 0.8 * torch::randn({side, side})).unsqueeze(0),
            torch::tensor(kind)};
  }
  std::optional<std::size_t> size() const override { return 768; }

 private:
  static constexpr std::int64_t side = 16;
};

}  // namespace

int main() {
  using namespace torch::nn;
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  torch::manual_seed(0);
  Sequential model(Conv2d(Conv2dOptions(1, 16, 3).padding(1)), BatchNorm2d(16), ReLU(),
                   MaxPool2d(2), Conv2d(Conv2dOptions(16, 32, 3).padding(1)), BatchNorm2d(32),
                   ReLU(), MaxPool2d(2), Flatten(), Linear(32 * 4 * 4, 3));
  model->to(device);
  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(1e-3));
  auto loader = torch::data::make_data_loader<torch::data::samplers::RandomSampler>(
      Shapes().map(torch::data::transforms::Stack<>()), /*batch_size=*/64);

  for (int epoch = 1; epoch <= 3; ++epoch) {
    double sum = 0.;
    std::int64_t batches = 0;
    for (auto& batch : *loader) {
      const auto data = batch.data.to(device), target = batch.target.to(device);
      optimizer.zero_grad();
      const auto loss = functional::cross_entropy(model->forward(data), target);
      loss.backward();
      optimizer.step();
      sum += loss.item<double>();
      ++batches;
    }
    std::printf("epoch %d: loss %.4f\n", epoch, sum / static_cast<double>(batches));
  }
}
