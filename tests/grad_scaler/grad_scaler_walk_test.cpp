// SPDX-License-Identifier: BSD-3-Clause
// Random walks over infs, NaNs, clipping, hand-set scales and three optimizers, step by step as
// Python's torch.amp.GradScaler made them: tests/parity/grad_scaler_walk.{py,txt}.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/grad_scaler.h>
#include <torchamp/optim.h>

#include <cstdlib>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "support/on_device.h"
#include "support/tolerances.h"

namespace {

using torch::optim::OptimizerParamGroup;
using torch::optim::SGDOptions;

std::vector<double> numbers(std::istringstream& line) {
  std::vector<double> all;
  for (std::string word; line >> word;) all.push_back(std::strtod(word.c_str(), nullptr));
  return all;
}

/// The optimizers that the script makes, the third one fused.
class Walk {
 public:
  Walk(const std::vector<double>& options, bool on_device)
      : scaler_({.init_scale = options.at(0),
                 .growth_factor = options.at(1),
                 .backoff_factor = options.at(2),
                 .growth_interval = static_cast<int64_t>(options.at(3))}) {
    add<torch::optim::SGD>({{{2}, {1, 2}}, {{1}}}, SGDOptions(0.5));
    add<torch::optim::SGD>({{{3}}}, SGDOptions(0.25).momentum(0.5));
    add<torchamp::FusedSGD>({{{2}, {2}}}, SGDOptions(0.125));
    scaler_.scale(torch::ones({}));
    if (on_device) move_to_device(scaler_);
  }

  void make(const std::string& call, const std::vector<double>& given) {
    const auto chosen = [&] { return static_cast<std::size_t>(given.at(0)); };
    if (call == "backward") {
      backward(given);
    } else if (call == "unscale") {
      scaler_.unscale_(*optimizers_.at(chosen()));
    } else if (call == "clip") {
      torch::nn::utils::clip_grad_norm_(owned_.at(chosen()), given.at(1));
    } else if (call == "clip_value") {
      torch::nn::utils::clip_grad_value_(owned_.at(chosen()), given.at(1));
    } else if (call == "spoil") {
      owned_.at(chosen()).front().grad().view(-1)[0].fill_(given.at(1));
    } else if (call == "step") {
      EXPECT_EQ(scaler_.step(*optimizers_.at(chosen())).stepped(), given.at(1) != 0);
    } else if (call == "update") {
      end_iteration();
      scaler_.update();
    } else if (call == "set") {
      end_iteration();
      scaler_.update(given.at(0));
    } else if (call == "interval") {
      scaler_.set_growth_interval(static_cast<int64_t>(given.at(0)));
    } else if (call == "load") {
      scaler_.load_state_dict({given.at(0), given.at(1), given.at(2),
                               static_cast<int64_t>(given.at(3)),
                               static_cast<int64_t>(given.at(4))});
    } else if (call == "state") {
      EXPECT_EQ(scaler_.get_scale(), static_cast<float>(given.at(0)));
      EXPECT_EQ(static_cast<double>(scaler_.state_dict().growth_tracker), given.at(1));
      const std::vector<double> weights(given.begin() + 2, given.end());
      std::vector<at::Tensor> ours;
      for (const at::Tensor& p : parameters_) ours.push_back(p.detach().flatten());
      expect_close(torch::cat(ours), torch::tensor(weights).to(at::kFloat));
    } else {
      FAIL() << "unknown call";
    }
  }

 private:
  template <typename Optimizer>
  void add(const std::vector<std::vector<std::vector<int64_t>>>& shapes,
           const SGDOptions& options) {
    std::vector<OptimizerParamGroup> groups;
    std::vector<at::Tensor>& owned = owned_.emplace_back();
    for (const auto& group : shapes) {
      std::vector<at::Tensor> parameters;
      for (const auto& shape : group) {
        parameters.push_back(torch::ones(shape, torch::requires_grad()));
        owned.push_back(parameters.back());
        parameters_.push_back(parameters.back());
      }
      groups.emplace_back(parameters);
    }
    optimizers_.push_back(std::make_unique<Optimizer>(groups, options));
  }

  void backward(const std::vector<double>& gradients) {
    const at::Tensor all = torch::tensor(gradients).to(at::kFloat);
    at::Tensor loss = torch::zeros({});
    int64_t begin = 0;
    for (const at::Tensor& p : parameters_) {
      const at::Tensor gradient = all.slice(0, begin, begin + p.numel()).view(p.sizes());
      loss = loss + (p * gradient).sum();
      begin += p.numel();
    }
    scaler_.scale(loss).backward();
  }

  void end_iteration() {
    for (auto& optimizer : optimizers_) optimizer->zero_grad();
  }

  torchamp::GradScaler scaler_;
  std::vector<std::unique_ptr<torch::optim::Optimizer>> optimizers_;
  std::vector<std::vector<at::Tensor>> owned_;
  std::vector<at::Tensor> parameters_;
};

}  // namespace

class GradScalerWalk : public ::testing::TestWithParam<bool> {};

TEST_P(GradScalerWalk, DoesWhatTorchAmpDoesStepByStep) {
  std::ifstream file("parity/grad_scaler_walk.txt");
  ASSERT_TRUE(file) << "run in tests/";
  std::unique_ptr<Walk> walk;
  int states = 0;
  int number = 0;
  for (std::string text; std::getline(file, text) && !HasFailure();) {
    SCOPED_TRACE(c10::str("line ", ++number, ": ", text.substr(0, 60)));
    std::istringstream line(text);
    std::string call;
    line >> call;
    if (call == "#") continue;
    const std::vector<double> given = numbers(line);
    if (call == "walk") {
      walk = std::make_unique<Walk>(given, GetParam());
    } else {
      walk->make(call, given);
      states += call == "state";
    }
  }
  EXPECT_EQ(states, 300);
}

INSTANTIATE_TEST_SUITE_P(TheUpdate, GradScalerWalk, ::testing::Bool(), [](const auto& param_info) {
  return param_info.param ? "OnTheDevice" : "OnTheHost";
});
