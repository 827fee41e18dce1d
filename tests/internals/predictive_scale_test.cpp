// SPDX-License-Identifier: BSD-3-Clause
// The scale that follows the gradients' magnitude, against a model of it in Python,
// tests/parity/predictive_scale.{py,txt}, and in the cases that it is made for.
#include <torchamp/predictive_scale.h>

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/detail/core/scaler/loss_scale.h>
#include <torchamp/optim.h>
#include <torchamp/torchamp.h>

#include <cmath>
#include <fstream>
#include <random>
#include <sstream>
#include <string>

#include "support/call_counter.h"
#include "support/devices.h"
#include "support/expect_error.h"
#include "support/non_finite.h"
#include "support/on_device.h"
#include "support/optimizers.h"

using torchamp::GradScaler;
using torchamp::GradScalerOptions;
using torchamp::detail::after_update;
using torchamp::detail::LossScale;
using torchamp::detail::ScaleMemory;

namespace {

constexpr double kHalfMax = 65504.;

/// The largest gradient, unscaled, of each iteration: noise, and 1000-fold for 50 of 500.
class Bursts {
 public:
  explicit Bursts(double size, double noise) : size_(size), noise_(0., noise) {}
  double at(int iteration) {
    const double burst = iteration % 500 >= 450 ? 1000. : 1.;
    return size_ * burst * std::exp2(noise_(random_));
  }

 private:
  double size_;
  std::mt19937 random_{1};
  std::normal_distribution<double> noise_;
};

/// The iterations that are skipped where gradients overflow as fp16 does.
int skips(const GradScalerOptions& options, double size, double noise, int iterations) {
  Bursts bursts(size, noise);
  ScaleMemory<double> memory = torchamp::detail::initial_memory(options);
  int count = 0;
  for (int i = 0; i < iterations; ++i) {
    const double largest = bursts.at(i) * memory.scale;
    const bool bad = largest > kHalfMax;
    count += bad;
    memory = after_update(options, memory, bad, bad ? HUGE_VAL : largest);
  }
  return count;
}

class GradientForecast : public ::testing::TestWithParam<at::DeviceType> {
 protected:
  void SetUp() override { SKIP_WITHOUT(GetParam()); }
  static at::TensorOptions options(at::ScalarType dtype = at::kFloat) {
    return at::TensorOptions(GetParam()).dtype(dtype);
  }
  static at::Tensor number(double value) { return torch::full({}, value, options()); }
};

using torchamp::detail::GradientBatch;

GradientBatch batch_of(const std::vector<at::Tensor>& gradients) {
  return {torchamp::detail::TensorKind::of(gradients.at(0)), gradients};
}

at::Tensor measure(const std::vector<GradientBatch>& batches, const at::Tensor& scale,
                   at::Tensor& flag) {
  return torchamp::detail::PredictiveScale<bool>::rule()->check_and_measure(batches, scale, flag);
}

/// One iteration with gradients that are `magnitude` at most, unscaled, and overflow as fp16's.
template <class Optimizer>
torchamp::StepResult iterate(GradScaler& scaler, Optimizer& optimizer, double magnitude,
                             double loss = 1.) {
  scaler.scale(torch::full({}, loss, optimizer.param_groups()[0].params()[0].options()));
  double value = magnitude;
  for (const at::Tensor& p : optimizer.param_groups()[0].params()) {
    const at::Tensor scaled = torch::full({3}, value, p.options()) * scaler.scale_tensor();
    p.mutable_grad() = scaled.masked_fill(scaled.abs() > kHalfMax, HUGE_VAL).detach();
    value *= -0.5;
  }
  const torchamp::StepResult result = scaler.step(optimizer);
  scaler.update();
  return result;
}

std::vector<at::Tensor> parameters_on(at::DeviceType device) {
  return {parameter_with(torch::ones({3}, device)), parameter_with(torch::ones({3}, device))};
}

}  // namespace

TEST(GradientForecastUpdate, WalksAsItsModelInPythonDoes) {
  std::ifstream file("parity/predictive_scale.txt");
  ASSERT_TRUE(file) << "run in tests/";
  const torch::NoGradGuard no_grad;
  GradScalerOptions options;
  ScaleMemory<double> host{};
  std::optional<LossScale> device;
  int iterations = 0;
  for (std::string text; std::getline(file, text) && !HasFailure();) {
    SCOPED_TRACE(text);
    std::istringstream line(text);
    if (text[0] == '#') continue;
    if (text[0] == 'w') {
      std::string word;
      bool forgives = false;
      options = GradScalerOptions::predictive();
      line >> word >> options.init_scale >> options.min_scale >> options.max_scale >>
          options.hysteresis >> options.growth_interval >> forgives;
      options.forgives_bad_losses = forgives;
      host = torchamp::detail::initial_memory(options);
      device.emplace(options);
      device->create(at::kCPU);
      continue;
    }
    std::string words[6];
    for (std::string& word : words) line >> word;
    double numbers[6];
    for (int i = 0; i < 6; ++i) numbers[i] = std::strtod(words[i].c_str(), nullptr);
    const auto [bad, largest, scale, mean, slow_mean, slow_square] = numbers;
    host = after_update(options, host, bad != 0., largest);
    device->advance(torch::full({}, bad), torch::full({}, largest, at::kDouble));
    for (const ScaleMemory<double>& memory : {host, device->read()}) {
      ASSERT_EQ(memory.scale, scale);
      const double tolerance = 1e-9 * std::max(1., slow_square);
      const auto forecast = torchamp::detail::forecast_of(memory.of_rule);
      ASSERT_NEAR(forecast.mean, mean, tolerance);
      ASSERT_NEAR(forecast.slow_mean, slow_mean, tolerance);
      ASSERT_NEAR(forecast.slow_square, slow_square, tolerance);
    }
    ++iterations;
  }
  EXPECT_EQ(iterations, 700);
}

TEST(GradientForecastUpdate, KeepsItsNumbersWithinBounds) {
  using torchamp::detail::after_iteration;
  using torchamp::detail::predicted_scale;
  using Forecast = torchamp::detail::GradientForecast<double>;
  const GradScalerOptions options = GradScalerOptions::predictive();
  const Forecast before{
      .samples = 10., .mean = 10., .slow_mean = 10., .slow_square = 100., .aim = -18.};
  const Forecast after =
      after_iteration<double, bool>(options, before, /*scale=*/0x1p10, /*bad=*/true,
                                    /*is_first=*/true, /*lowers=*/true, /*grows=*/false, 0.);
  EXPECT_EQ(after.mean, 10.) << "2^6, which overflows, tells nothing";
  EXPECT_EQ(after.aim, -18.) << "as low as it gets";
  const auto scale_for = [&](const Forecast& now, bool bad, double largest) {
    return predicted_scale<double, bool>(options, now, 0x1p10, bad, largest);
  };
  const Forecast rounded{
      .samples = 10., .mean = 1e-9, .slow_mean = 1., .slow_square = 1. - 1e-12, .aim = 13.};
  EXPECT_EQ(scale_for(rounded, false, 0x1p10), 0x1p13) << "a variance of no less than 0";
  const Forecast large{
      .samples = 10., .mean = 20., .slow_mean = 20., .slow_square = 400., .aim = 13.};
  EXPECT_EQ(scale_for(large, true, 0.), 0x1p-7) << "below what it would retreat to";
}

TEST(GradientForecastUpdate, SkipsAQuarterOfTorchAmpsStepsAtMostWhereGradientsBurst) {
  for (const double size : {1e-4, 0.1, 1., 30.}) {
    for (const double noise : {0., 0.5, 1.}) {
      SCOPED_TRACE(c10::str("size ", size, ", noise ", noise));
      const int torchs = skips(GradScalerOptions::torch(), size, noise, 20000);
      EXPECT_LE(4 * skips(GradScalerOptions::predictive(), size, noise, 20000), torchs);
    }
  }
}

TEST(GradientForecastUpdate, SkipsOneStepAtMostFromAScaleThatIsFarTooLarge) {
  GradScalerOptions options = GradScalerOptions::predictive();
  options.init_scale = 0x1p30;
  for (const double size : {1e-6, 1e-3, 1., 100.}) {
    EXPECT_LE(skips(options, size, 0.5, 400), 1) << size;
  }
}

TEST(GradientForecastUpdate, IsBackTwoIterationsAfterARunOfNaNs) {
  const GradScalerOptions options = GradScalerOptions::predictive();
  for (const int bad : {1, 2, 6, 10, 20}) {
    SCOPED_TRACE(bad);
    std::mt19937 random(1);
    std::normal_distribution<double> noise(0., 0.5);
    ScaleMemory<double> memory = torchamp::detail::initial_memory(options);
    const auto iterate = [&] {
      memory = after_update(options, memory, false, std::exp2(noise(random)) * memory.scale);
    };
    for (int i = 0; i < 20; ++i) iterate();
    const double before = memory.scale;
    for (int i = 0; i < bad; ++i) memory = after_update(options, memory, true, std::nan(""));
    const double torchs = std::exp2(16 - bad);
    EXPECT_GE(memory.scale, std::min(torchs, before) * 0x1p-17) << "the retreat, and a bit each";
    for (int i = 0; i < 2; ++i) iterate();
    EXPECT_GE(memory.scale, before / 16.);
    for (int i = 0; i < 100; ++i) iterate();
    EXPECT_GE(memory.scale, before / 4.);
  }
}

TEST_P(GradientForecast, FindsTheScaleWithTheFirstBackward) {
  GradScaler scaler(GradScalerOptions::predictive());
  torchamp::FusedSGD optimizer(parameters_on(GetParam()), torch::optim::SGDOptions(0.));
  EXPECT_TRUE(iterate(scaler, optimizer, 0x1p-10));
  EXPECT_EQ(scaler.get_scale(), 0x1p23) << "for a largest gradient of 2^13";
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(iterate(scaler, optimizer, 0x1p-8));
  EXPECT_LT(scaler.get_scale(), 0x1p21) << "the spread of what was seen counts, too";
}

TEST_P(GradientForecast, IsBackAfterABurst) {
  GradScaler scaler(GradScalerOptions::predictive());
  torch::optim::SGD optimizer(parameters_on(GetParam()), 0.);
  for (int i = 0; i < 20; ++i) iterate(scaler, optimizer, 1.);
  EXPECT_EQ(scaler.get_scale(), 0x1p13);
  EXPECT_FALSE(iterate(scaler, optimizer, 0x1p12));
  EXPECT_EQ(scaler.get_scale(), 2.);
  EXPECT_TRUE(iterate(scaler, optimizer, 1.));
  EXPECT_GE(scaler.get_scale(), 0x1p8) << "one iteration later";
  EXPECT_EQ(scaler.skips_in_a_row(), 0);
}

TEST_P(GradientForecast, GivesTheSameScaleWhoeverDividesAndWhereverItIsKnown) {
  GradScaler fused(GradScalerOptions::predictive()), plain(fused.options()),
      unscaled(fused.options());
  torchamp::FusedSGD fused_sgd(parameters_on(GetParam()), torch::optim::SGDOptions(0.));
  torchamp::FusedSGD unscaled_sgd(parameters_on(GetParam()), torch::optim::SGDOptions(0.));
  torch::optim::SGD plain_sgd(parameters_on(GetParam()), 0.);
  unscaled.scale(torch::ones({}, GetParam()));
  move_to_device(unscaled);
  Bursts bursts(1., 1.);
  for (int i = 430; i < 500; ++i) {
    const double magnitude = i % 20 == 7 ? 0. : i % 20 == 9 ? std::nan("") : bursts.at(i);
    const bool stepped = iterate(fused, fused_sgd, magnitude).stepped();
    EXPECT_EQ(stepped, iterate(plain, plain_sgd, magnitude).stepped());
    EXPECT_EQ(stepped, iterate(unscaled, unscaled_sgd, magnitude).stepped());
    ASSERT_EQ(fused.get_scale(), plain.get_scale()) << i;
    ASSERT_EQ(fused.get_scale(), unscaled.get_scale()) << i;
  }
}

TEST_P(GradientForecast, NeitherReadsTheDeviceNorLooksAtTheGradientsAPassMore) {
  GradScaler scaler(GradScalerOptions::predictive());
  torchamp::FusedSGD optimizer(parameters_on(GetParam()), torch::optim::SGDOptions(0.));
  iterate(scaler, optimizer, 1.);
  if (GetParam() == at::kCPU) move_to_device(scaler);
  const CallCounter counter;
  scaler.step(optimizer);
  scaler.update();
  EXPECT_EQ(counter.reads(), 0);
  EXPECT_EQ(counter.called("aten::_foreach_norm"), 1) << "the check";
  EXPECT_EQ(counter.called("aten::_amp_foreach_non_finite_check_and_unscale_"), 0);
}

TEST_P(GradientForecast, GoesOnFromAFileAsIfItHadNotStopped) {
  GradScaler scaler(GradScalerOptions::predictive());
  torch::optim::SGD optimizer(parameters_on(GetParam()), 0.);
  Bursts bursts(1., 1.);
  for (int i = 440; i < 460; ++i) iterate(scaler, optimizer, bursts.at(i));
  std::stringstream file;
  torch::save(scaler, file);
  GradScaler loaded(GradScalerOptions::predictive()), ordinary;
  torch::load(loaded, file);
  file.seekg(0);
  torch::load(ordinary, file);
  EXPECT_EQ(ordinary.get_scale(), scaler.get_scale());
  for (int i = 460; i < 480; ++i) {
    const double magnitude = bursts.at(i);
    iterate(scaler, optimizer, magnitude);
    iterate(loaded, optimizer, magnitude);
    ASSERT_EQ(loaded.get_scale(), scaler.get_scale());
  }
}

TEST_P(GradientForecast, ForgivesBatchesOfNaNsAndNoOverflowsOfTheScale) {
  GradScalerOptions options = GradScalerOptions::predictive();
  options.forgives_bad_losses = true;
  GradScaler forgiving(options), other(GradScalerOptions::predictive());
  torch::optim::SGD plain(parameters_on(GetParam()), 0.);
  torchamp::FusedSGD fused(parameters_on(GetParam()), torch::optim::SGDOptions(0.));
  for (int i = 0; i < 2; ++i) {  // the first overflows
    iterate(forgiving, plain, 1.);
    iterate(other, fused, 1.);
  }
  const double scale = forgiving.get_scale();
  for (int i = 1; i <= 60; ++i) {
    const bool is_bad = i % 6 == 0;
    const double loss = !is_bad ? 1. : i % 12 == 0 ? HUGE_VAL : std::nan("");
    const auto step = [&](GradScaler& scaler, auto& optimizer) {
      EXPECT_EQ(iterate(scaler, optimizer, is_bad ? std::nan("") : 1., loss).stepped(), !is_bad);
    };
    i % 4 < 2 ? step(forgiving, plain) : step(forgiving, fused);
    step(other, fused);
    ASSERT_EQ(forgiving.get_scale(), scale) << i;
    EXPECT_EQ(forgiving.skips_in_a_row(), is_bad ? 1 : 0);
  }
  EXPECT_LT(other.get_scale(), scale / 100.);
  iterate(forgiving, plain, 1., HUGE_VAL);  // whose gradients are finite all the same
  EXPECT_EQ(forgiving.get_scale(), scale);
  EXPECT_FALSE(iterate(forgiving, plain, 0x1p12));
  EXPECT_LT(forgiving.get_scale(), scale / 1000.) << "an overflow";
}

TEST_P(GradientForecast, ForgivesWithoutReadingTheDevice) {
  GradScalerOptions options = GradScalerOptions::predictive();
  options.forgives_bad_losses = true;
  GradScaler scaler(options);
  torchamp::FusedSGD optimizer(parameters_on(GetParam()), torch::optim::SGDOptions(0.));
  for (int k = 0; k < 2; ++k) iterate(scaler, optimizer, 1.);
  if (GetParam() == at::kCPU) move_to_device(scaler);
  const double scale = scaler.get_scale();
  const auto loss = torch::full({2}, HUGE_VAL, torch::TensorOptions(GetParam()));
  const auto bad = torch::full({}, std::nan(""), torch::TensorOptions(GetParam()));
  for (const at::Tensor& p : optimizer.param_groups()[0].params()) p.mutable_grad().fill_(HUGE_VAL);
  const CallCounter counter;
  (void)scaler.scale(std::vector<at::Tensor>{loss, bad});
  scaler.step(optimizer);
  scaler.update();
  EXPECT_EQ(counter.reads(), 0);
  EXPECT_EQ(scaler.get_scale(), scale);
}

TEST_P(GradientForecast, KeepsTheLimits) {
  GradScalerOptions options = GradScalerOptions::predictive();
  options.init_scale = 64.;
  options.min_scale = 32.;
  options.max_scale = 256.;
  options.hysteresis = 2;
  options.max_skips_in_a_row = 3;
  GradScaler scaler(options);
  torch::optim::SGD optimizer(parameters_on(GetParam()), 0.);
  EXPECT_TRUE(iterate(scaler, optimizer, 1e-6));
  EXPECT_EQ(scaler.get_scale(), 256.);
  EXPECT_FALSE(iterate(scaler, optimizer, HUGE_VAL));
  EXPECT_EQ(scaler.get_scale(), 256.) << "the first of two is forgiven";
  EXPECT_FALSE(iterate(scaler, optimizer, HUGE_VAL));
  EXPECT_EQ(scaler.get_scale(), 32.);
  EXPECT_EQ(scaler.skips_in_a_row(), 2);
  if (GetParam() == at::kCPU) {
    EXPECT_ERROR(iterate(scaler, optimizer, HUGE_VAL), "in 3 consecutive iterations");
    EXPECT_EQ(scaler.skips_in_a_row(), 2);
  }
}

TEST(GradientForecastUpdate, AgreesAcrossProcesses) {
  GradScalerOptions options = GradScalerOptions::predictive();
  options.agree_found_inf = [](at::Tensor&) {};
  EXPECT_ERROR(GradScaler{options}, "with only one of agree_found_inf and agree_largest");
  options.agree_largest = [](at::Tensor& largest) { largest.clamp_min_(0x1p20); };
  GradScaler scaler(options);
  torch::optim::SGD optimizer(parameters_on(at::kCPU), 0.);
  iterate(scaler, optimizer, 0x1p-10);
  EXPECT_EQ(scaler.get_scale(), 0x1p9) << "another process has gradients of 16";
}

TEST(GradientForecastUpdate, ForgivesAnotherProcessesLoss) {
  GradScalerOptions options = GradScalerOptions::predictive();
  options.forgives_bad_losses = true;
  bool other_has_nans = false;
  double own = 0.;  // what this process tells the others
  options.agree_found_inf = [&](at::Tensor& found_inf) {
    if (other_has_nans) found_inf.fill_(1.);
  };
  options.agree_largest = [&](at::Tensor& largest) {
    own = largest.item<double>();
    if (other_has_nans) largest.fill_(HUGE_VAL);
  };
  GradScaler scaler(options);
  torch::optim::SGD optimizer(parameters_on(at::kCPU), 0.);
  for (int k = 0; k < 2; ++k) iterate(scaler, optimizer, 1.);
  const double scale = scaler.get_scale();
  other_has_nans = true;
  for (const double magnitude : {1., std::nan("")}) {  // also where it gets NaNs by averaging
    EXPECT_FALSE(iterate(scaler, optimizer, magnitude).stepped());
    EXPECT_EQ(scaler.get_scale(), scale);
    EXPECT_TRUE(std::isfinite(own)) << "its own loss is";
  }
  other_has_nans = false;
  EXPECT_FALSE(iterate(scaler, optimizer, 1e6).stepped());
  EXPECT_LT(scaler.get_scale(), scale);
  EXPECT_TRUE(std::isfinite(own));
  iterate(scaler, optimizer, std::nan(""), std::nan(""));
  EXPECT_EQ(own, HUGE_VAL);
}

TEST(GradientForecastUpdate, RefusesOptionsThatContradictIt) {
  GradScalerOptions options = GradScalerOptions::predictive();
  options.dynamic = false;
  EXPECT_ERROR(GradScaler{options}, "follows_gradients is set without dynamic");
  options = GradScalerOptions::torch();
  options.forgives_bad_losses = true;
  EXPECT_ERROR(GradScaler{options}, "forgives_bad_losses needs follows_gradients. Start from");
}

TEST(GradientForecastUpdate, ForgetsABadLossThatItsProgramDiscards) {
  GradScalerOptions options = GradScalerOptions::predictive();
  options.forgives_bad_losses = true;
  GradScaler scaler(options);
  torch::optim::SGD optimizer(parameters_on(at::kCPU), 0.);
  for (int k = 0; k < 2; ++k) iterate(scaler, optimizer, 1.);
  const double scale = scaler.get_scale();
  (void)scaler.scale(torch::full({}, std::nan("")));
  scaler.discard(optimizer);
  EXPECT_FALSE(iterate(scaler, optimizer, 1e6).stepped());
  EXPECT_LT(scaler.get_scale(), scale);
}

TEST_P(GradientForecast, MeasuresTheLargestMagnitudeOfAllBatches) {
  const std::vector<GradientBatch> batches{
      batch_of({torch::ones({3}, options()), torch::full({2}, -8., options())}),
      batch_of({torch::empty({0}, options(at::kHalf))}),
      batch_of({torch::full({2}, 2., options(at::kBFloat16)),
                torch::zeros({}, options(at::kBFloat16))})};
  at::Tensor flag = number(0.);
  const at::Tensor largest = measure(batches, number(4.), flag);
  EXPECT_EQ(largest.item<float>(), 8.F);
  EXPECT_EQ(largest.dim(), 0);
  EXPECT_EQ(flag.item<float>(), 0.F);
}

TEST_P(GradientForecast, MeasuresNothingWhereThereAreNoElements) {
  for (const float before : {0.F, 1.F}) {
    at::Tensor flag = number(before);
    EXPECT_FALSE(measure({batch_of({torch::empty({0}, options())})}, number(1.), flag).defined());
    EXPECT_EQ(flag.item<float>(), before);
  }
}

TEST_P(GradientForecast, FindsWhileItMeasuresWhatIsNotFiniteOrBecomesSoByTheDivision) {
  const auto flag_of = [&](double value, double scale, double before) {
    at::Tensor flag = number(before);
    (void)measure({batch_of({torch::full({2}, value, options())})}, number(scale), flag);
    return flag.item<float>();
  };
  EXPECT_EQ(flag_of(8., 0x1p-100, 0.), 0.F);
  EXPECT_EQ(flag_of(8., 0x1p-126, 0.), 1.F) << "8 * 2^126";
  for (const float value : {kInf, -kInf, kNaN}) EXPECT_EQ(flag_of(value, 4., 0.), 1.F) << value;
  EXPECT_EQ(flag_of(8., 4., 1.), 1.F) << "found before";
  EXPECT_EQ(flag_of(kInf, 4., 1.), 1.F) << "found twice";
}

INSTANTIATE_TEST_SUITE_P(Devices, GradientForecast, all_devices(), device_name);
