// SPDX-License-Identifier: BSD-3-Clause
// Does not include the headers that the functions named _without_its_header need.
#include <torch/optim/schedulers/step_lr.h>
#include <torchamp/distributed/data_parallel.h>
#include <torchamp/training_step.h>

using Options = torchamp::TrainingStepOptions;
using torchamp::TrainingStep;

// ---- The arguments of an iteration --------------------------------------------------------------

void of_a_loss(TrainingStep& train, const at::Tensor& loss) {
  // error: pass a function that computes the loss
  train(loss);
}

void of_one_input(TrainingStep& train, const at::Tensor& x) {
  const auto function = [](const auto& inputs) -> at::Tensor { return inputs[0]; };
  // error: pass a function that computes the loss
  train(x, function);
}

void of_a_function_without_inputs(TrainingStep& train, const at::Tensor& x) {
  // error: a list of inputs and a function of them
  train({x}, [&] { return x; });
}

void of_a_number(TrainingStep& train, const at::Tensor& loss) {
  // error: the function must return the loss, an at::Tensor
  train([&] { return loss.item<double>(); });
}

void of_nothing(TrainingStep& train, at::Tensor& loss) {
  // error: the function must return the loss, an at::Tensor
  train({loss}, [&](const auto& inputs) { loss = inputs[0]; });
}

// ---- The arguments of the constructor -----------------------------------------------------------

void with_swapped_arguments(torch::nn::Module& model, torch::optim::Optimizer& optimizer) {
  // error: the first argument is the model .*the second the optimizer
  const TrainingStep train(optimizer, model, {.max_grad_norm = 1.});
}

void with_a_pointer_to_an_optimizer(torch::nn::Module& model,
                                    const std::shared_ptr<torch::optim::Optimizer>& optimizer) {
  // error: the second argument is the optimizer
  const TrainingStep train(model, optimizer);
}

void with_a_factory_of_values(torch::nn::Module& model) {
  const auto factory = [](auto parameters) { return torchamp::FusedAdamW(parameters); };
  // error: a function that creates one and returns a pointer
  const TrainingStep train(model, factory);
}

// ---- Options ------------------------------------------------------------------------------------

Options scaler_pointer(torchamp::GradScaler& scaler) {
  // error: [.]scaler takes GradScalerOptions, or a GradScaler by its name
  return {.scaler = &scaler};
}

Options scheduler_pointer(torch::optim::StepLR& scheduler) {
  // error: [.]scheduler takes a scheduler with step.. by its name
  return {.scheduler = &scheduler};
}

Options scheduler_temporary(torch::optim::Optimizer& optimizer) {
  // error: [.]scheduler takes a scheduler with step.. by its name
  return {.scheduler = torch::optim::StepLR(optimizer, 2)};
}

Options masters_of_a_bool() {
  // error: [.]masters takes
  return {.masters = true};
}

Options group_of_a_number() {
  // error: [.]group takes
  return {.group = 4};
}

Options capture_of_a_bool() {
  // error: [.]capture takes
  return {.capture = true};
}

// ---- A header is missing ------------------------------------------------------------------------

Options group_without_its_header(torchamp::ProcessGroupPtr group) {
  // error: include torchamp/distributed/training_group.h
  return {.group = group};
}

void saved_without_its_header(TrainingStep& train) {
  // error: include torchamp/training_checkpoint.h
  train.save("run.pt");
}
