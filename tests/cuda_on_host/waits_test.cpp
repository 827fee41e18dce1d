// SPDX-License-Identifier: BSD-3-Clause
// What public headers promise about the host: that their calls do not synchronise, that is, do not
// wait for the device. A row for each header that promises it, in LibTorch's real CUDA code.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <ostream>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "cuda_on_host/stand_in.h"
#include "support/dropping_accumulation.h"
#include "support/temporary_folder.h"
#include "torchamp/accumulate.h"
#include "torchamp/autocast_state.h"
#include "torchamp/clip_grad.h"
#include "torchamp/cpu_products.h"
#include "torchamp/cuda_graph.h"
#include "torchamp/custom_function.h"
#include "torchamp/labs/cast_recorder.h"
#include "torchamp/labs/fp8.h"
#include "torchamp/labs/module_policy.h"
#include "torchamp/labs/underflow_meter.h"
#include "torchamp/lr_scheduler.h"
#include "torchamp/master_weights.h"
#include "torchamp/missing_gradients.h"
#include "torchamp/python_state.h"
#include "torchamp/recompute.h"
#include "torchamp/torchamp.h"
#include "torchamp/training_log.h"
#include "torchamp/training_step.h"

namespace {

using torch::Tensor;
using torchamp::AutocastGuard;
using Calls = std::function<void()>;

struct QuietHeader {
  std::string name;
  std::function<Calls()> make;  ///< prepares, and returns what may not wait
};
std::ostream& operator<<(std::ostream& out, const QuietHeader& header) {
  return out << header.name;
}

/// A layer of 16 x 16 on the device, with all that a loop needs.
struct LoopParts {
  explicit LoopParts(const torchamp::GradScalerOptions& options = {}) : scaler(options) {}
  Tensor loss() {
    const AutocastGuard guard(at::kCUDA, at::kHalf);
    return torch::mse_loss(model->forward(x), x);
  }
  void backward() {
    optimizer.zero_grad();
    scaler.scale(loss()).backward();
  }

  torch::nn::Sequential model{torch::nn::Linear(16, 16)};
  torchamp::FusedAdam optimizer{(model->to(at::kCUDA), model->parameters()),
                                torch::optim::AdamOptions(1e-3)};
  torchamp::GradScaler scaler;
  Tensor x = at::ones({16, 16}, at::kCUDA);
};

/// `calls(parts)` with parts that live as long.
Calls in_a_loop(const std::function<void(LoopParts&)>& calls,
                const torchamp::GradScalerOptions& options = {}) {
  const auto parts = std::make_shared<LoopParts>(options);
  return [=] { calls(*parts); };
}

struct QuietDouble : torchamp::AutocastFunction<QuietDouble, at::kFloat> {
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) { return x * 2; }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    return {gradients[0] * 2};
  }
};

// ---- A row each --------------------------------------------------------------------------------

void accumulate(LoopParts& in) {
  in.optimizer.zero_grad();
  {
    torchamp::Accumulation accumulation(in.scaler, in.optimizer, 2);
    for (int i = 0; i < 2; ++i) (void)accumulation.backward(in.loss());
  }
  in.optimizer.zero_grad();
  DroppingAccumulation safe(in.scaler, in.optimizer);
  for (int i = 0; i < 2; ++i) safe.backward(in.loss());
  EXPECT_EQ(safe.step().micro_batches(), 2);
}

void select_cpu_products(LoopParts& in) {
  torchamp::set_cpu_products(torchamp::CpuProducts::fastest);
  in.loss();
}

void change_rates(LoopParts& in) {
  torchamp::WarmupCosine rates(in.optimizer, {.warmup_steps = 2, .total_steps = 10});
  in.backward();
  in.scaler.step(in.optimizer);
  in.scaler.update();
  rates.step();
}

void carry_autocast_state(LoopParts& in) {
  const AutocastGuard guard(at::kCUDA, at::kHalf);
  const auto state = torchamp::AutocastState::of_this_thread();
  const torchamp::AutocastStateGuard same(state);
  EXPECT_EQ(in.model->forward(in.x).scalar_type(), at::kHalf);
}

void drop_casts(LoopParts& in) {
  const AutocastGuard guard(at::kCUDA, at::kHalf);
  in.model->forward(in.x);
  torchamp::weights_changed();
  torchamp::weights_changed(in.model->parameters());
  torchamp::clear_weight_cache();
  in.model->forward(in.x);
}

void record_casts(LoopParts& in) {
  torchamp::CastRecorder recorder;
  in.loss();
  EXPECT_GT(recorder.report().total().casts, 0);
}

void apply_custom_function(LoopParts& in) {
  const AutocastGuard guard(at::kCUDA, at::kHalf);
  const Tensor x = in.x.detach().requires_grad_();
  QuietDouble::apply(x).sum().backward();
}

void take_a_step(LoopParts& in) {
  in.backward();
  in.scaler.unscale_(in.optimizer);
  const auto result = in.scaler.step(in.optimizer);
  EXPECT_TRUE(result.found_inf().defined());
  EXPECT_TRUE(result.had_gradients());
  EXPECT_TRUE(result.missing_gradients().empty());
  in.scaler.update();
}

void clip(LoopParts& in) {
  in.backward();
  torchamp::clip_grad_value_(in.scaler, in.optimizer, 0.5);
  torchamp::clip_grad_norm_(in.scaler, in.optimizer, 1.);
  in.scaler.step(in.optimizer);
  in.scaler.update();
}

void find_missing_gradients(LoopParts& in) {
  in.optimizer.zero_grad();
  EXPECT_EQ(torchamp::missing_gradients(in.optimizer, at::Device(at::kCUDA)).size(), 2U);
}

void set_module_policies(LoopParts& in) {
  const torchamp::ModulePolicies policies{{"0", torchamp::Policy::torch()}};
  policies.apply_to(*in.model);
  in.loss();
}

void divide_and_drop(LoopParts& in) {
  in.optimizer.drop_gradients_after_step();
  in.backward();
  in.optimizer.divide_next_step(at::ones({}, at::kCUDA));
  EXPECT_TRUE(in.optimizer.next_step_divisor().defined());
  in.scaler.step(in.optimizer);
  in.scaler.update();
}

void run_in_fp8(LoopParts& in) {
  const auto policy =
      torchamp::fp8(torchamp::Policy::standard(), torchamp::ops::dense, {.strict = true});
  in.optimizer.zero_grad();
  Tensor loss;
  {
    const AutocastGuard guard(at::kCUDA, {.dtype = at::kHalf, .policy = policy});
    loss = torch::mse_loss(in.model->forward(in.x), in.x);
  }
  loss.backward();
}

void recompute(LoopParts& in) {
  in.optimizer.zero_grad();
  Tensor loss;
  {
    const AutocastGuard guard(at::kCUDA, at::kHalf);
    loss = torchamp::checkpoint(in.model, in.x).sum();
  }
  loss.backward();
}

void step_scaled(LoopParts& in) {
  in.optimizer.zero_grad();
  in.loss().backward();
  in.optimizer.step_scaled(at::ones({}, at::kCUDA), at::zeros({}, at::kCUDA));
}

Calls replay_a_graph() {
  struct Captured : LoopParts {
    torchamp::CudaGraph graph{optimizer, [this](const std::vector<Tensor>&) {
                                backward();
                                scaler.step(optimizer);
                                scaler.update();
                                return at::zeros({}, at::kCUDA);
                              }};
  };
  const auto in = std::make_shared<Captured>();
  return [=] { in->graph({in->x}); };
}

Calls step_masters(bool main_gradients) {
  struct Masters {
    explicit Masters(bool main_gradients)
        : masters((model->to(at::kCUDA), model),
                  {.dtype = at::kBFloat16, .main_gradients = main_gradients}),
          optimizer(masters.parameters(), torch::optim::AdamWOptions(1e-3)) {}
    torch::nn::Sequential model{torch::nn::Linear(16, 16)};
    torchamp::MasterWeights masters;
    torchamp::FusedAdamW optimizer;
    torchamp::GradScaler scaler{};
    Tensor x = at::ones({16, 16}, at::TensorOptions(at::kCUDA).dtype(at::kBFloat16));
  };
  const auto in = std::make_shared<Masters>(main_gradients);
  return [=] {
    in->masters.zero_grad();
    in->scaler.scale(in->model->forward(in->x).to(at::kFloat).sum()).backward();
    if (!main_gradients) in->masters.take_gradients();
    in->scaler.step(in->optimizer);
    in->scaler.update();
    in->masters.copy_to_model();
  };
}

Calls load_what_python_saved() {
  std::ostringstream file;
  torchamp::save_python_state(torchamp::GradScaler().state_dict(), file);
  return [bytes = file.str()] {
    std::istringstream in(bytes);
    EXPECT_EQ(torchamp::load_python_state(in).scale, 65536.);
  };
}

Calls look_at_results(torchamp::TrainingStepOptions options) {
  struct Stepped : LoopParts {
    explicit Stepped(torchamp::TrainingStepOptions given)
        : train(model, optimizer, std::move(given)) {}
    torchamp::TrainingStep train;
  };
  options.dtype = at::kHalf;
  options.max_grad_norm = 1.;
  const auto in = std::make_shared<Stepped>(std::move(options));
  return [=] {
    const auto result = in->train({in->x}, [parts = in.get()](const std::vector<Tensor>& batch) {
      return torch::mse_loss(parts->model->forward(batch[0]), batch[0]);
    });
    EXPECT_TRUE(result.loss_tensor().defined());
    EXPECT_TRUE(result.norm_tensor().defined());
    EXPECT_TRUE(result.found_inf().defined());
  };
}

Calls meter_underflow() {
  struct Metered : LoopParts {
    torchamp::UnderflowMeter meter{*model};
  };
  const auto in = std::make_shared<Metered>();
  return [=] {
    {
      const auto step = in->meter.step(in->scaler);
      in->backward();
    }
    in->scaler.step(in->optimizer);
    in->scaler.update();
  };
}

Calls write_a_log() {
  const auto folder = std::make_shared<TemporaryFolder>();
  const Calls train = look_at_results({.log = (*folder / "run.csv").string()});
  return [=] { train(); };
}

const std::vector<QuietHeader>& quiet_headers() {
  static const std::vector<QuietHeader> all{
      {"accumulate.h", [] { return in_a_loop(accumulate); }},
      {"autocast.h", [] { return in_a_loop([](LoopParts& in) { in.loss(); }); }},
      {"autocast_state.h", [] { return in_a_loop(carry_autocast_state); }},
      {"cast_cache.h", [] { return in_a_loop(drop_casts); }},
      {"labs/cast_recorder.h", [] { return in_a_loop(record_casts); }},
      {"clip_grad.h", [] { return in_a_loop(clip); }},
      {"cuda_graph.h", replay_a_graph},
      {"cpu_products.h", [] { return in_a_loop(select_cpu_products); }},
      {"custom_function.h", [] { return in_a_loop(apply_custom_function); }},
      {"grad_scaler.h", [] { return in_a_loop(take_a_step); }},
      {"grad_scaler_options.h",
       [] { return in_a_loop(take_a_step, torchamp::GradScalerOptions::deepspeed()); }},
      {"lr_scheduler.h", [] { return in_a_loop(change_rates); }},
      {"master_weights.h", [] { return step_masters(false); }},
      {"master_weights.h", [] { return step_masters(true); }},
      {"missing_gradients.h", [] { return in_a_loop(find_missing_gradients); }},
      {"labs/fp8.h", [] { return in_a_loop(run_in_fp8); }},
      {"labs/module_policy.h", [] { return in_a_loop(set_module_policies); }},
      {"optim.h", [] { return in_a_loop(divide_and_drop); }},
      {"python_state.h", load_what_python_saved},
      {"recompute.h", [] { return in_a_loop(recompute); }},
      {"scaled_step.h", [] { return in_a_loop(step_scaled); }},
      {"training_log.h", write_a_log},
      {"training_result.h", [] { return look_at_results({}); }},
      {"training_result.h",
       [] { return look_at_results({.capture = torchamp::CudaGraphOptions{}}); }},
      {"training_step.h", [] { return look_at_results({}); }},
      {"labs/underflow_meter.h", meter_underflow},
  };
  return all;
}

class Waits : public testing::TestWithParam<QuietHeader> {};
INSTANTIATE_TEST_SUITE_P(OfHeaders, Waits, testing::ValuesIn(quiet_headers()),
                         [](const auto& instance) {
                           std::string name = instance.param.name + std::to_string(instance.index);
                           std::erase_if(name,
                                         [](char c) { return c == '.' || c == '_' || c == '/'; });
                           return name;
                         });

TEST_P(Waits, CallsThatPromiseItNeitherWaitNorCopyPageableMemoryNorAllocate) {
  const Calls calls = GetParam().make();
  for (int i = 0; i < 4; ++i) calls();
  for (int64_t device = 0; device < 2; ++device) torch::cuda::synchronize(device);
  StandInCounts before, after;
  stand_in_counts(&before);
  calls();
  stand_in_counts(&after);
  EXPECT_EQ(after.waits, before.waits);
  EXPECT_EQ(after.pageable, before.pageable);
  EXPECT_EQ(after.allocations, before.allocations) << "of CUDA, not of LibTorch's caches";
  EXPECT_EQ(after.host_allocations, before.host_allocations);
}

/// The comments of a header as one line.
std::string comments_of(const std::filesystem::path& header) {
  std::ifstream in(header);
  std::string text;
  for (std::string line; std::getline(in, line);) {
    const auto begin = line.find("///");
    if (begin != std::string::npos) text += line.substr(begin + 3);
  }
  return text;
}

TEST(Waits, EachHeaderThatPromisesNotToWaitHasARow) {
  const std::regex promise(
      "[Nn]ever +synchronise|not +synchronise|without +synchronising|[Rr]eads +(no|a) +device(?! "
      "+for)"
      "|nothing +waits");
  const std::regex demand("must +not +synchronise");  // of what a program passes
  std::set<std::string> rows, promising;
  for (const QuietHeader& header : quiet_headers()) rows.insert(header.name);
  const std::filesystem::path headers = "../include/torchamp";
  for (const std::string folder : {"", "labs/"}) {
    for (const auto& entry : std::filesystem::directory_iterator(headers / folder)) {
      if (entry.path().extension() != ".h") continue;
      const std::string text = std::regex_replace(comments_of(entry.path()), demand, "");
      if (std::regex_search(text, promise)) {
        promising.insert(folder + entry.path().filename().string());
      }
    }
  }
  EXPECT_GT(promising.size(), 15U);
  for (const std::string& header : promising) EXPECT_EQ(rows.count(header), 1U) << header;
}

}  // namespace
