// SPDX-License-Identifier: BSD-3-Clause
// A TorchScript module is fine-tuned, and then answers requests in two threads. Only the new head
// is trained: the rest is a frozen backbone. Inference needs a guard in each thread, and no scaler.
// A guard affects only its own thread; an AutocastState copies the guard's state to another thread.
#include <torch/script.h>
#include <torch/torch.h>
#include <torchamp/autocast_state.h>
#include <torchamp/torchamp.h>
#include <torchamp/training_step.h>
#include <torchamp/weight_cache.h>

#include <iostream>
#include <thread>
#include <vector>

#include "support/check.h"

namespace {

/// What torch::jit::load() would read from a file: a backbone and a head.
torch::jit::Module make_script() {
  torch::jit::Module backbone("Backbone"), net("Net");
  backbone.register_parameter("weight", torch::randn({128, 32}) * 0.2, /*is_buffer=*/false);
  backbone.define("def forward(self, x):\n  return torch.relu(torch.matmul(x, self.weight.t()))\n");
  net.register_module("backbone", backbone);
  net.register_parameter("weight", torch::zeros({10, 128}), /*is_buffer=*/false);
  net.define(
      "def forward(self, x):\n"
      "  return torch.matmul(self.backbone.forward(x), self.weight.t())\n");
  return net;
}

void fine_tune_and_serve(torch::Device device) {
  torch::jit::Module model = make_script();
  model.to(device);
  const auto data = torch::randn({256, 32}, device);
  const auto classes = data.matmul(torch::randn({32, 10}, device)).argmax(1);

  // Fine-tuning.
  for (torch::Tensor parameter : model.parameters()) parameter.set_requires_grad(false);
  torch::Tensor head = model.attr("weight").toTensor();
  head.set_requires_grad(true);
  const auto frozen = model.attr("backbone").toModule().attr("weight").toTensor().clone();
  torchamp::FusedAdam optimizer(std::vector<torch::Tensor>{head}, torch::optim::AdamOptions(0.01));
  torchamp::TrainingStep train(model, optimizer);
  double first = 0., last = 0.;
  for (int i = 0; i < 50; ++i) {
    const auto result =
        train([&] { return torch::cross_entropy_loss(model.forward({data}).toTensor(), classes); });
    (i == 0 ? first : last) = result.loss();
  }
  std::cout << "loss " << first << ", after fine-tuning " << last << '\n';
  support::check(last < 0.5 * first, "the head has learned");
  support::check(torch::equal(model.attr("backbone").toModule().attr("weight").toTensor(), frozen),
                 "the backbone is unchanged");

  // Serving. NoGradGuard is safe for every script; InferenceMode is not, see the guide's
  // troubleshooting.
  model.eval();
  const auto answer = [&](const torch::Tensor& request) {
    const torch::NoGradGuard no_grad;
    torchamp::AutocastGuard autocast(device.type(), {.cache = torchamp::WeightCache::kept});
    return model.forward({request}).toTensor();
  };
  torch::Tensor full;
  {
    const torch::NoGradGuard no_grad;
    full = model.forward({data}).toTensor();
  }
  torch::Tensor mixed = answer(data);  // before the threads start: casts the weights
  std::vector<torch::Tensor> answers(2);
  std::vector<std::thread> workers;
  for (auto& one : answers) workers.emplace_back([&] { one = answer(data); });
  for (auto& worker : workers) worker.join();
  support::check(torch::equal(answers[0], mixed) && torch::equal(answers[1], mixed),
                 "both threads give the same answers");
  const double error = (mixed - full).abs().max().item<double>();
  const double largest = full.abs().max().item<double>();
  const auto same_class = mixed.argmax(1).eq(full.argmax(1)).to(torch::kDouble).mean();
  std::cout << "largest output " << largest << ", largest error " << error << '\n';
  support::check(mixed.scalar_type() != torch::kFloat, "the output is in 16 bits");
  support::check(head.scalar_type() == torch::kFloat, "the weights are still in fp32");
  support::check(error < 0.03 * largest, "the outputs are those of fp32, to about two digits");
  support::check(same_class.item<double>() > 0.95, "nearly all choose the same class");
}

/// The same state in another thread, without a second guard.
void copy_state_to_a_thread(torch::Device device) {
  torch::nn::Linear model(16, 4);
  model->to(device);
  const auto data = torch::randn({8, 16}, device);

  torchamp::AutocastGuard autocast(device, torch::kBFloat16);
  const auto state = torchamp::AutocastState::of_this_thread();
  support::check(state.is_enabled(device) && state.dtype(device) == torch::kBFloat16,
                 "the state holds what the guard has set");

  torch::Tensor alone, carried;
  std::thread worker([&, state] {
    const torch::NoGradGuard no_grad;
    alone = model->forward(data);
    torchamp::AutocastStateGuard same(state);
    carried = model->forward(data);
  });
  worker.join();
  std::cout << "the thread computes in " << alone.scalar_type() << ", under the state in "
            << carried.scalar_type() << '\n';
  support::check(alone.scalar_type() == torch::kFloat, "a new thread computes in fp32");
  support::check(carried.scalar_type() == torch::kBFloat16,
                 "under the state it computes in the guard's dtype");
}

}  // namespace

int main() {
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  torch::manual_seed(0);
  fine_tune_and_serve(device);
  copy_state_to_a_thread(device);
}
