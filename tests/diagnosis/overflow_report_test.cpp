// SPDX-License-Identifier: BSD-3-Clause
#include <torchamp/overflow_report.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/grad_scaler.h>

#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "support/call_counter.h"
#include "support/devices.h"
#include "support/expect_error.h"
#include "support/non_finite.h"
#include "support/optimizers.h"
#include "support/skips.h"

using torchamp::OverflowReport;

namespace {

class OverflowReportOn : public ::testing::TestWithParam<at::DeviceType> {
 protected:
  void SetUp() override { SKIP_WITHOUT(GetParam()); }
};

}  // namespace

TEST_P(OverflowReportOn, NamesTheParametersAndDistinguishesInfFromNaN) {
  torch::nn::Sequential model(torch::nn::Linear(3, 2), torch::nn::ReLU(), torch::nn::Linear(2, 1));
  to_device(model, GetParam());
  for (at::Tensor& p : model->parameters()) p.mutable_grad() = torch::ones_like(p);
  model->named_parameters()["0.weight"].mutable_grad()[0][1] = kInf;
  model->named_parameters()["0.weight"].mutable_grad()[1][2] = -kInf;
  model->named_parameters()["0.weight"].mutable_grad()[1][1] = -7.F;
  model->named_parameters()["2.bias"].mutable_grad()[0] = kNaN;
  const OverflowReport report = torchamp::overflow_report(*model);
  EXPECT_EQ(report.gradients, 4U);
  ASSERT_EQ(report.overflows.size(), 2U);
  const torchamp::Overflow& weight = report.overflows[0];
  EXPECT_EQ(weight.name, "0.weight");
  EXPECT_EQ(weight.infs, 2);
  EXPECT_EQ(weight.nans, 0);
  EXPECT_EQ(weight.elements, 6);
  EXPECT_EQ(weight.largest_finite, 7.);
  EXPECT_EQ(report.overflows[1].name, "2.bias");
  EXPECT_EQ(report.overflows[1].nans, 1);
  EXPECT_EQ(report.overflows[1].largest_finite, 0.) << "none is finite";
  std::ostringstream text;
  text << report;
  const std::string device = c10::str(weight.device);
  EXPECT_EQ(text.str(),
            "2 of 4 gradients hold infs or NaNs\n"
            "  0.weight (Float [2, 3] on " +
                device +
                "): 2 inf, 0 NaN of 6, largest "
                "finite 7\n"
                "  2.bias (Float [1] on " +
                device + "): 0 inf, 1 NaN of 1, largest finite 0\n");
}

/// What an overflow in a forward pass does to running statistics.
TEST_P(OverflowReportOn, NamesTheBuffersOfAModuleThatHoldInfsOrNaNs) {
  torch::nn::Sequential model(torch::nn::Linear(3, 2), torch::nn::BatchNorm1d(2),
                              torch::nn::BatchNorm1d(2));
  to_device(model, GetParam());
  EXPECT_TRUE(torchamp::overflow_report(model).empty());
  model->named_buffers()["1.running_mean"][1] = kInf;
  model->named_buffers()["2.running_var"].fill_(kNaN);
  const CallCounter counter;
  const OverflowReport report = torchamp::overflow_report(model);
  EXPECT_EQ(counter.reads(), 0) << "one copy to the host";
  EXPECT_FALSE(report.empty());
  EXPECT_TRUE(report.overflows.empty());
  ASSERT_EQ(report.buffers.size(), 2U);
  EXPECT_EQ(report.buffers[0].name, "1.running_mean");
  EXPECT_EQ(report.buffers[0].infs, 1);
  EXPECT_EQ(report.buffers[1].name, "2.running_var");
  EXPECT_EQ(report.buffers[1].nans, 2);
  for (at::Tensor& p : model->parameters()) p.mutable_grad() = torch::ones_like(p);
  std::ostringstream text;
  text << torchamp::overflow_report(*model);
  const std::string device = c10::str(report.buffers[0].device);
  EXPECT_EQ(text.str(),
            "0 of 6 gradients hold infs or NaNs\n"
            "buffers that hold infs or NaNs, which a skipped step does not undo:\n"
            "  1.running_mean (Float [2] on " +
                device +
                "): 1 inf, 0 NaN of 2, largest finite 0\n"
                "  2.running_var (Float [2] on " +
                device + "): 0 inf, 2 NaN of 2, largest finite 0\n");
}

/// A batch norm whose statistics a skipped step has ruined, and the remedy of the guide.
TEST(OverflowReport, NamesWhatASkippedStepLeavesInABatchNorm) {
  torch::nn::Sequential model(torch::nn::Linear(2, 4), torch::nn::BatchNorm1d(4));
  torchamp::GradScaler scaler;
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  std::vector<at::Tensor> copies;
  for (const at::Tensor& buffer : model->buffers()) copies.push_back(buffer.clone());
  at::Tensor input = torch::randn({8, 2});
  input[0][0] = kInf;
  scaler.scale(model->forward(input).sum()).backward();
  ASSERT_FALSE(scaler.step(optimizer));
  ASSERT_FALSE(torchamp::overflow_report(model).buffers.empty());
  const torch::NoGradGuard no_grad;
  for (std::size_t i = 0; i < copies.size(); ++i) model->buffers()[i].copy_(copies[i]);
  EXPECT_TRUE(torchamp::overflow_report(model).buffers.empty());
}

TEST_P(OverflowReportOn, LooksAtEveryKindOfGradient) {
  SKIP_WITHOUT_SPARSE(GetParam());
  const auto on = [](const at::Tensor& t) { return t.to(GetParam()); };
  std::vector<at::Tensor> parameters;
  for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16, at::kDouble, at::kComplexFloat}) {
    parameters.push_back(parameter_with(on(torch::tensor({1.F, kInf, 3.F}).to(dtype))));
  }
  parameters.push_back(parameter_with(
      on(torch::sparse_coo_tensor(torch::tensor({{1, 4}}), torch::tensor({2.F, kNaN}), {9}))));
  parameters.push_back(parameter_with(on(torch::ones({0}))));
  parameters.push_back(torch::ones({1}, torch::requires_grad()));
  const OverflowReport report = torchamp::overflow_report(sgd(parameters));
  EXPECT_EQ(report.gradients, 5U);
  ASSERT_EQ(report.overflows.size(), 5U);
  EXPECT_EQ(report.overflows[2].name, "group 0, parameter 2");
  for (const torchamp::Overflow& one : report.overflows) EXPECT_EQ(one.infs + one.nans, 1);
  EXPECT_EQ(report.overflows[0].largest_finite, 3.);
  EXPECT_EQ(report.overflows[4].elements, 2);
}

TEST_P(OverflowReportOn, ReadsOnceAndLeavesTheGradientsAlone) {
  std::vector<at::Tensor> parameters;
  for (int i = 0; i < 20; ++i) {
    parameters.push_back(
        parameter_with(torch::full({3}, i % 2 ? kInf : 1.F, at::TensorOptions(GetParam()))));
  }
  const auto optimizer = sgd(parameters);
  const CallCounter counter;
  const OverflowReport report = torchamp::overflow_report(optimizer);
  EXPECT_EQ(counter.reads(), 0) << "one copy to the host, however many gradients";
  EXPECT_EQ(report.overflows.size(), 10U);
  EXPECT_EQ(parameters[0].grad()[0].item<float>(), 1.F);
}

TEST(OverflowReport, IsEmptyWithoutGradients) {
  const torch::nn::Linear model(2, 2);
  const OverflowReport report = torchamp::overflow_report(*model);
  EXPECT_TRUE(report.empty());
  EXPECT_EQ(report.gradients, 0U);
  std::ostringstream text;
  text << report;
  EXPECT_EQ(text.str(),
            "no parameter has a gradient: report after backward(), before zero_grad()\n(or a step "
            "that drops them, see drop_gradients_after_step())\n");
}

TEST(OverflowReport, TakesAModuleOrAnOptimizerInAnyForm) {
  torch::nn::Linear model(2, 1);
  for (at::Tensor& p : model->parameters()) p.mutable_grad() = torch::full_like(p, kInf);
  const auto names = [](const OverflowReport& report) {
    std::vector<std::string> all;
    for (const torchamp::Overflow& one : report.overflows) all.push_back(one.name);
    return all;
  };
  using ::testing::ElementsAre;
  using torchamp::overflow_report;
  const std::shared_ptr<torch::nn::Module> shared = model.ptr();
  const auto by_name = ElementsAre("weight", "bias");
  EXPECT_THAT(names(overflow_report(*model)), by_name);
  EXPECT_THAT(names(overflow_report(model)), by_name);
  EXPECT_THAT(names(overflow_report(model.ptr())), by_name);
  EXPECT_THAT(names(overflow_report(model.get())), by_name);
  EXPECT_THAT(names(overflow_report(shared)), by_name);
  EXPECT_THAT(names(overflow_report(*shared)), by_name);
  const auto by_place = ElementsAre("group 0, parameter 0", "group 0, parameter 1");
  const auto optimizer = std::make_unique<torch::optim::SGD>(model->parameters(), 0.1);
  const torch::optim::Optimizer& base = *optimizer;
  EXPECT_THAT(names(overflow_report(*optimizer)), by_place);
  EXPECT_THAT(names(overflow_report(optimizer)), by_place);
  EXPECT_THAT(names(overflow_report(&base)), by_place);
  const std::vector<at::Tensor> more{parameter_with(torch::full({1}, kInf))};
  optimizer->add_param_group(torch::optim::OptimizerParamGroup(more));
  EXPECT_EQ(names(overflow_report(optimizer)).back(), "group 1, parameter 0");
  const std::vector<std::pair<std::string, at::Tensor>> pairs{{"w", model->weight},
                                                              {"undefined", at::Tensor()}};
  EXPECT_THAT(names(overflow_report(pairs)), ElementsAre("w"));
  EXPECT_ERROR(overflow_report(std::shared_ptr<torch::nn::Module>()),
               "overflow_report: was given a null pointer or an empty module holder");
  EXPECT_ERROR(overflow_report(torch::nn::Linear{nullptr}), "an empty module holder");
}

TEST(OverflowReport, ExplainsASkippedStep) {
  torch::nn::Linear model(2, 1);
  torchamp::GradScaler scaler;
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  const at::Tensor input = torch::tensor({{1.F, 1e38F}});
  scaler.scale(model(input).sum()).backward();
  ASSERT_FALSE(scaler.step(optimizer));
  const OverflowReport report = torchamp::overflow_report(*model);
  ASSERT_EQ(report.overflows.size(), 1U);
  EXPECT_EQ(report.overflows[0].name, "weight");
  EXPECT_EQ(report.overflows[0].largest_finite, 1.) << "unscaled";
}

TEST(OverflowReport, CountsAComplexElementOnce) {
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  using Number = c10::complex<float>;
  const at::Tensor w = torch::zeros({4}, at::kComplexFloat).requires_grad_();
  w.mutable_grad() =
      torch::tensor({Number(inf, inf), Number(inf, nan), Number(nan, 1), Number(3, 4)});
  const OverflowReport report =
      torchamp::overflow_report(std::vector<std::pair<std::string, at::Tensor>>{{"w", w}});
  ASSERT_EQ(report.overflows.size(), 1U);
  EXPECT_EQ(report.overflows[0].infs, 2);
  EXPECT_EQ(report.overflows[0].nans, 1);
  EXPECT_EQ(report.overflows[0].elements, 4);
  EXPECT_NEAR(report.overflows[0].largest_finite, 5., 1e-6);
}

TEST(OverflowReport, ReportsAFiniteNumberIfAComplexElementIsLongerThanFp64Holds) {
  using Number = c10::complex<double>;
  constexpr double inf = std::numeric_limits<double>::infinity();
  const at::Tensor w = torch::zeros({2}, at::kComplexDouble).requires_grad_();
  w.mutable_grad() = torch::tensor({Number(1.5e308, -1.5e308), Number(inf, 1.)});
  const OverflowReport report =
      torchamp::overflow_report(std::vector<std::pair<std::string, at::Tensor>>{{"w", w}});
  ASSERT_EQ(report.overflows.size(), 1U);
  EXPECT_EQ(report.overflows[0].infs, 1);
  EXPECT_EQ(report.overflows[0].largest_finite, std::numeric_limits<double>::max());
}

TEST(OverflowReport, ReadsWhatACompressedSparseGradientStores) {
  const at::Tensor w = torch::zeros({2, 2}).requires_grad_();
  w.mutable_grad() =
      torch::tensor({{std::numeric_limits<float>::infinity(), 0.F}, {2.F, 0.F}}).to_sparse_csr();
  const OverflowReport report =
      torchamp::overflow_report(std::vector<std::pair<std::string, at::Tensor>>{{"w", w}});
  ASSERT_EQ(report.overflows.size(), 1U);
  EXPECT_EQ(report.overflows[0].infs, 1);
  EXPECT_EQ(report.overflows[0].elements, 2);
}

INSTANTIATE_TEST_SUITE_P(Devices, OverflowReportOn, all_devices(), device_name);

TEST(OverflowReport, DistinguishesGradientsWithoutElementsFromNone) {
  const at::Tensor parameter = torch::empty({0, 3}).requires_grad_();
  (parameter * 2.).sum().backward();
  const std::vector<std::pair<std::string, at::Tensor>> named{{"empty", parameter}};
  const OverflowReport report = torchamp::overflow_report_of(named);
  EXPECT_EQ(report.gradients, 0U);
  EXPECT_EQ(report.without_elements, 1U);
  EXPECT_TRUE(report.empty());
  std::ostringstream text;
  text << report;
  EXPECT_EQ(text.str(), "0 of 0 gradients hold infs or NaNs (and 1 have no elements)\n");
}
