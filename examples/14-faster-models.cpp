// SPDX-License-Identifier: BSD-3-Clause
// What LibTorch's C++ modules lack next to Python's, and the few lines that make up for it. Counts
// the ops of each before and after. A test looks for this code and for what is printed in
// guide/faster-models.md.
#include <ATen/Context.h>
#include <torch/torch.h>
#include <torchamp/torchamp.h>

#include <functional>
#include <iostream>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "support/check.h"
#include "support/op_count.h"

using torch::Tensor;

struct LinearImpl : torch::nn::LinearImpl {
  using torch::nn::LinearImpl::LinearImpl;
  torch::Tensor forward(const torch::Tensor& x) { return torch::linear(x, weight, bias); }
};
TORCH_MODULE(Linear);

struct AttentionImpl : torch::nn::Module {
  AttentionImpl(int64_t width, int64_t head_count) : heads(head_count) {
    in_proj_weight = register_parameter("in_proj_weight", torch::empty({3 * width, width}));
    in_proj_bias = register_parameter("in_proj_bias", torch::zeros({3 * width}));
    out_proj = register_module("out_proj", torch::nn::Linear(width, width));
    torch::nn::init::xavier_uniform_(in_proj_weight);
  }

  // x [batch, length, width]; is_padding [batch, length], or undefined
  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& is_padding = {}) {
    const auto split = [&](const torch::Tensor& t) {
      return t.view({t.size(0), t.size(1), heads, -1}).transpose(1, 2);
    };
    const auto qkv = torch::linear(x, in_proj_weight, in_proj_bias).chunk(3, -1);
    std::optional<torch::Tensor> mask;  // true: attend to it
    if (is_padding.defined()) mask = is_padding.logical_not().unsqueeze(1).unsqueeze(1);
    const torch::Tensor y =
        torch::scaled_dot_product_attention(split(qkv[0]), split(qkv[1]), split(qkv[2]), mask);
    return torch::linear(y.transpose(1, 2).reshape(x.sizes()), out_proj->weight, out_proj->bias);
  }

  int64_t heads;
  torch::Tensor in_proj_weight, in_proj_bias;
  torch::nn::Linear out_proj{nullptr};
};
TORCH_MODULE(Attention);

void to_channels_last(torch::nn::Conv2d& model) {
  for (torch::Tensor& parameter : model->parameters()) {
    if (parameter.dim() == 4) {
      parameter.set_data(parameter.data().contiguous(at::MemoryFormat::ChannelsLast));
    }
  }
}

/// "aten::add_ 1", for each of `names`.
std::string count(const std::vector<std::string>& names, const std::function<void()>& body) {
  const support::OpCounts counts = support::count_ops(body);
  std::string text;
  for (const std::string& name : names) {
    const auto found = counts.find("aten::" + name);
    text += (text.empty() ? "" : ", ") + name + " " +
            std::to_string(found == counts.end() ? 0 : found->second);
  }
  return text;
}

void show_linear() {
  const Tensor x = torch::randn({2, 8, 16});
  torch::nn::Linear plain(16, 16);
  Linear fused(16, 16);
  const auto calls = [](auto& layer, const Tensor& input) {
    return count({"linear", "matmul", "add_"}, [&] { layer->forward(input); });
  };
  std::cout << "torch::nn::Linear: " << calls(plain, x) << "\nLinear: " << calls(fused, x) << '\n';
}

void show_attention() {
  const Tensor x = torch::randn({2, 8, 16});
  const Tensor is_padding = torch::arange(8).ge(torch::tensor({8, 5}).unsqueeze(1));
  torch::nn::MultiheadAttention plain(16, 4);
  Attention attention(16, 4);
  std::stringstream file;
  torch::save(plain, file);
  torch::load(attention, file);
  const Tensor rows = x.transpose(0, 1);  // [length, batch, width]
  const Tensor before = std::get<0>(plain->forward(rows, rows, rows, is_padding)).transpose(0, 1);
  const Tensor after = attention->forward(x, is_padding);
  support::check(torch::allclose(before, after, 1e-4, 1e-5),
                 "a file of MultiheadAttention loads, and gives the same with padding");
  const std::vector<std::string> names{"bmm", "softmax", "scaled_dot_product_attention"};
  std::cout << "MultiheadAttention: "
            << count(names, [&] { plain->forward(rows, rows, rows, is_padding); })
            << "\nAttention: " << count(names, [&] { attention->forward(x, is_padding); }) << '\n';
}

void show_optimizer() {
  const auto calls = [](auto make, const std::vector<std::string>& names) {
    std::vector<Tensor> parameters;
    for (int i = 0; i < 100; ++i) parameters.push_back(torch::ones({4}).requires_grad_());
    auto optimizer = make(parameters);
    torchamp::GradScaler scaler;
    return count(names, [&] {
      Tensor loss = torch::zeros({});
      for (const Tensor& parameter : parameters) loss = loss + parameter.sum();
      scaler.scale(loss).backward();
      scaler.step(optimizer);
      scaler.update();
    });
  };
  const auto stock = [](const auto& parameters) {
    return torch::optim::AdamW(parameters, torch::optim::AdamWOptions(1e-3));
  };
  const auto fused = [](const auto& parameters) {
    return torchamp::FusedAdamW(parameters, torch::optim::AdamWOptions(1e-3));
  };
  const std::vector<std::string> names{"addcdiv_", "_fused_adamw_"};
  std::cout << "torch::optim::AdamW: " << calls(stock, names)
            << "\ntorchamp::FusedAdamW: " << calls(fused, names) << '\n';
}

void show_channels_last() {
  torch::nn::Conv2d net(torch::nn::Conv2dOptions(4, 8, 3));
  Tensor input = torch::randn({2, 4, 8, 8});
  const Tensor before = net->forward(input);
  to_channels_last(net);
  input = input.contiguous(at::MemoryFormat::ChannelsLast);
  const Tensor after = net->forward(input);
  support::check(after.is_contiguous(at::MemoryFormat::ChannelsLast) &&
                     torch::allclose(before, after, 1e-4, 1e-5),
                 "a convolution's output stays in channels_last, with the same values");
}

void show_gradients() {
  torch::nn::Sequential model(Linear(4, 4), Linear(4, 1));
  torchamp::FusedAdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3));
  const Tensor x = torch::randn({8, 4});
  const auto calls = [&](bool to_none) {
    model->forward(x).mean().backward();
    return count({"zero_"}, [&] { optimizer.zero_grad(to_none); });
  };
  std::cout << "zero_grad(false): " << calls(false) << "\nzero_grad(): " << calls(true) << '\n';
}

void show_late_reads() {
  torch::nn::Sequential model(Linear(4, 4), Linear(4, 1));
  const Tensor x = torch::randn({8, 4});
  torchamp::FusedSGD optimizer(model->parameters(), torch::optim::SGDOptions(0.01));
  const auto train = [&] {
    torch::Tensor sum = torch::zeros({}, x.device());
    for (int step = 1; step <= 20; ++step) {
      const torch::Tensor loss = model->forward(x).square().mean();
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
      sum += loss.detach();
      if (step % 10 == 0) {
        std::cout << "  mean loss " << sum.item<double>() / 10. << '\n';  // synchronises here alone
        sum.zero_();
      }
    }
  };
  const std::string reads = count({"item"}, train);
  std::cout << "20 steps, two reads: " << reads << '\n';
}

int main() {
  torch::manual_seed(0);
  at::globalContext().setFloat32MatmulPrecision("high");  // TF32 in fp32's products
  at::globalContext().setAllowTF32CuDNN(true);            // in convolutions: the default
  at::globalContext().setBenchmarkCuDNN(true);            // for shapes that repeat
  at::globalContext().setFloat32MatmulPrecision("highest");
  show_linear();
  show_attention();
  show_optimizer();
  show_channels_last();
  show_gradients();
  show_late_reads();
}
