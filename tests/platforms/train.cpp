// SPDX-License-Identifier: BSD-3-Clause
// A program that trains in every way that a CPU has, for platforms on which the tests themselves do
// not run: .ci/platforms compiles, links and runs it. It takes seconds under an emulator.
// Arguments, if any: the file of a checkpoint; the dtype that TrainingStep chooses on this CPU.
#include <torch/torch.h>
#include <torchamp/master_weights.h>
#include <torchamp/torchamp.h>
#include <torchamp/training_checkpoint.h>
#include <torchamp/training_step.h>

#include <cstdint>
#include <filesystem>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

namespace {

constexpr int steps = 20;
bool failed = false;

void check(bool holds, const std::string& claim) {
  std::cout << (holds ? "passed: " : "FAILED: ") << claim << std::endl;
  failed = failed || !holds;
}

struct Data {
  torch::Tensor inputs, targets;
};

Data make_data() {
  torch::manual_seed(1);
  const auto inputs = torch::rand({128, 32}) * 4 - 2;
  return {inputs, inputs.sin().sum(1, true) / 8};
}

torch::nn::Sequential make_model() {
  torch::manual_seed(7);
  return torch::nn::Sequential(torch::nn::Linear(32, 64), torch::nn::ReLU(),
                               torch::nn::Linear(64, 64), torch::nn::ReLU(),
                               torch::nn::Linear(64, 1));
}

/// The losses of a loop with a guard and a scaler; fp32: the guard is disabled.
std::vector<double> train(torch::ScalarType dtype, const Data& data) {
  auto model = make_model();
  torchamp::FusedAdam optimizer(model->parameters(), torch::optim::AdamOptions(3e-3));
  torchamp::GradScaler scaler(dtype == torch::kHalf
                                  ? torchamp::GradScalerOptions()
                                  : torchamp::GradScalerOptions::skip_non_finite());
  std::vector<double> losses;
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    torch::Tensor loss;
    {
      torchamp::AutocastOptions options{.enabled = dtype != torch::kFloat};
      if (options.enabled) options.dtype = dtype;
      const torchamp::AutocastGuard guard(torch::kCPU, options);
      const auto outputs = model->forward(data.inputs);
      if (step == 0) check(outputs.scalar_type() == dtype, "a model's outputs have the dtype");
      loss = torch::mse_loss(outputs, data.targets);
    }
    scaler.scale(loss).backward();
    scaler.step(optimizer);
    scaler.update();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

/// The last loss of `train`. Sets `dtype` to the dtype of the model's outputs.
double train_by_one_call(torchamp::TrainingStep& train, torch::nn::Sequential& model,
                         const Data& data, torch::ScalarType& dtype) {
  double loss = 0.;
  for (int step = 0; step < steps; ++step) {
    const auto result = train([&] {
      const auto outputs = model->forward(data.inputs);
      dtype = outputs.scalar_type();
      return torch::mse_loss(outputs, data.targets);
    });
    loss = result.loss();
  }
  return loss;
}

/// In the dtype that it chooses, which is `expected` if that is not empty.
double train_as_it_chooses(const Data& data, const std::string& expected) {
  auto model = make_model();
  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(3e-3));
  torchamp::TrainingStep train(model, optimizer);
  torch::ScalarType dtype = torch::kFloat;
  const double loss = train_by_one_call(train, model, data, dtype);
  const std::string chosen = c10::toString(dtype);
  check(expected.empty() || chosen == expected, "TrainingStep chooses " + chosen);
  return loss;
}

/// A model in bf16 with masters, in one call; saved, trained on, and restored to where it was
/// saved.
double train_masters_by_one_call(const Data& data, const std::string& path) {
  auto model = make_model();
  torchamp::TrainingStep train(
      model,
      [](std::vector<torch::Tensor> parameters) {
        return std::make_unique<torchamp::FusedAdamW>(parameters, torch::optim::AdamWOptions(3e-3));
      },
      {.masters = torchamp::MasterWeightsOptions{.dtype = torch::kBFloat16}});
  torch::ScalarType dtype = torch::kFloat;
  const double loss = train_by_one_call(train, model, data, dtype);
  check(dtype == torch::kBFloat16, "TrainingStep with masters trains in bf16");
  train.save(path);
  const auto saved = train.masters().parameters().front().clone();
  train_by_one_call(train, model, data, dtype);
  check(!train.masters().parameters().front().equal(saved), "more steps change its masters");
  check(train.load(path) && train.masters().parameters().front().equal(saved),
        "its checkpoint restores its masters");
  std::filesystem::remove(path);
  return loss;
}

/// A bf16 model with fp32 masters.
double train_masters(const Data& data) {
  auto model = make_model();
  torchamp::MasterWeights masters(model, {.dtype = torch::kBFloat16});
  torchamp::FusedAdamW optimizer(masters.parameters(), torch::optim::AdamWOptions(3e-3));
  double loss = 0.;
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    const auto outputs = model->forward(data.inputs.to(torch::kBFloat16));
    const auto mean = torch::mse_loss(outputs.to(torch::kFloat), data.targets);
    mean.backward();
    masters.take_gradients();
    optimizer.step();
    masters.copy_to_model();
    loss = mean.item<double>();
  }
  return loss;
}

/// Writes a run's state twice, so that a file is replaced, and reads it into another run.
bool checkpoint_is_restored(const std::filesystem::path& path) {
  auto model = make_model();
  torchamp::GradScaler scaler({.init_scale = 512.});
  std::int64_t step = 5;
  torchamp::TrainingCheckpoint checkpoint(path.string());
  checkpoint.add("model", model).add("scaler", scaler).add("step", step);
  checkpoint.save();
  checkpoint.save();
  const auto saved = model->parameters().front().clone();
  {
    const torch::NoGradGuard no_grad;
    model->parameters().front().zero_();
  }
  scaler.load_state_dict(torchamp::GradScaler({.init_scale = 2.}).state_dict());
  step = 0;
  const bool loaded = checkpoint.load();
  std::filesystem::remove(path);
  return loaded && step == 5 && scaler.get_scale() == 512. &&
         model->parameters().front().equal(saved);
}

}  // namespace

int main(int count, char** arguments) {
  torch::set_num_threads(1);
  const Data data = make_data();
  const auto fp32 = train(torch::kFloat, data);
  std::cout << "the losses in fp32 begin at " << fp32.front() << " and end at " << fp32.back()
            << std::endl;
  check(fp32.back() < 0.8 * fp32.front(), "fp32 learns");
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
    const auto losses = train(dtype, data);
    check(losses.back() < 1.05 * fp32.back(),
          std::string(c10::toString(dtype)) + " learns as fp32 does");
  }
  check(train_as_it_chooses(data, count > 2 ? arguments[2] : "") < 1.05 * fp32.back(),
        "TrainingStep learns as fp32 does");
  const std::string path = count > 1 ? arguments[1] : "torchamp_train.pt";
  check(train_masters_by_one_call(data, path) < 0.8 * fp32.front(),
        "TrainingStep with masters learns");
  check(train_masters(data) < 0.8 * fp32.front(), "a model in bf16 with master weights learns");
  check(checkpoint_is_restored(path), "a checkpoint is restored");
  return failed ? 1 : 0;
}
