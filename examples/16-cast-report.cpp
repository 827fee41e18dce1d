// SPDX-License-Identifier: BSD-3-Clause
// What autocast did in one training step: which ops ran in which dtype, what was cast for them,
// the memory traffic of these casts, and which could be saved.
#include <torch/torch.h>
#include <torchamp/labs/cast_recorder.h>
#include <torchamp/torchamp.h>

#include <iostream>
#include <sstream>
#include <string>

namespace nn = torch::nn;

// A block with a softmax in the middle: fp32 between two products in bf16.
struct AttentionImpl : nn::Module {
  nn::Linear query{nullptr}, key{nullptr}, value{nullptr};

  AttentionImpl() {
    query = register_module("query", nn::Linear(16, 16));
    key = register_module("key", nn::Linear(16, 16));
    value = register_module("value", nn::Linear(16, 16));
  }

  torch::Tensor forward(const torch::Tensor& x) {
    RECORD_USER_SCOPE("attention");  // names the ops that take no parameter
    const torch::Tensor weights = query(x).mm(key(x).t()).softmax(-1);
    return weights.mm(value(x)) + x;
  }
};
TORCH_MODULE(Attention);

torchamp::CastReport record_step(Attention& model, const torch::Tensor& x,
                                 const torchamp::Policy& policy) {
  model->zero_grad();
  torchamp::CastRecorder recorder(*model);
  torch::Tensor loss;
  {
    torchamp::AutocastGuard autocast(torch::kCPU, {.dtype = torch::kBFloat16, .policy = policy});
    loss = torch::mse_loss(model(x), x);
  }
  loss.backward();
  return recorder.report();
}

int main() {
  torch::manual_seed(0);
  Attention model;
  const torch::Tensor x = torch::randn({64, 16});

  const torchamp::CastReport report = record_step(model, x, torchamp::Policy::standard());
  std::cout << report;

  // "undone" counts softmax's result, which came from bf16 and goes back to it. A softmax with
  // unchanged arguments has neither cast. (Whether the model tolerates that is another question.)
  const auto lean = torchamp::Policy::standard().unchanged({"softmax"});
  const torchamp::CastReport leaner = record_step(model, x, lean);
  const auto before = report.total();
  const auto after = leaner.total();
  std::cout << "softmax in bf16: " << before.casts << " casts become " << after.casts << ", "
            << before.cast_bytes << " bytes " << after.cast_bytes << ", " << before.undone
            << " undone " << after.undone << '\n';
  std::istringstream json(leaner.to_json());
  std::string line;
  std::getline(std::getline(json, line), line);
  std::cout << "its costliest row as JSON: " << line << '\n';

  const bool as_expected = before.undone > after.undone && before.casts > after.casts &&
                           !at::hasCallbacks();  // without a recorder there is no cost
  std::cout << (as_expected ? "as expected\n" : "NOT as expected\n");
  return as_expected ? 0 : 1;
}
