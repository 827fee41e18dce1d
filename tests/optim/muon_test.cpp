// SPDX-License-Identifier: BSD-3-Clause
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/clip_grad.h>
#include <torchamp/grad_scaler.h>
#include <torchamp/master_weights.h>
#include <torchamp/optim.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <limits>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "simulated_device/device.h"
#include "simulated_device/facts.h"
#include "support/devices.h"
#include "support/expect_error.h"
#include "support/numbers.h"
#include "support/optimizer_kinds.h"
#include "support/seed.h"

namespace {

using torchamp::FusedMuon;
using torchamp::MuonOptions;
using torchamp::MuonParamState;
using AdjustLr = MuonOptions::AdjustLr;

/// The cases of parity/optim.py.
const std::vector<std::pair<std::string, MuonOptions>>& cases() {
  static const std::vector<std::pair<std::string, MuonOptions>> all{
      {"muon", MuonOptions(0.1)},
      {"muon_no_nesterov", MuonOptions(0.1).nesterov(false).momentum(0.7)},
      {"muon_match_rms_adamw",
       MuonOptions(0.1).weight_decay(0.5).adjust_lr(AdjustLr::match_rms_adamw)},
      {"muon_spectral_unclamped",
       MuonOptions(0.1).weight_decay(0.).adjust_lr(AdjustLr::spectral_unclamped)},
      {"muon_coefficients",
       MuonOptions(0.1).ns_coefficients({2., -1.5, 0.5}).ns_steps(8).eps(10.).momentum(0.)}};
  return all;
}

// Orthogonal matrices have elements of at most 1. In bf16 an iteration rounds each by up to 2^-9 of
// that, and the next iterations multiply the difference.
constexpr double ns_error = 0x1p-4;

/// Expects parameters that steps of `lr` in sum have taken there.
void expect_stepped_alike(const Tensor& actual, const Tensor& expected, double lr) {
  ASSERT_EQ(actual.sizes(), expected.sizes());
  const Tensor a = actual.detach().to(at::kCPU, at::kDouble);
  const Tensor e = expected.detach().to(at::kCPU, at::kDouble);
  EXPECT_LE((a - e).abs().max().item<double>(), lr * ns_error);
}

/// A step of torch.optim.Muon for one parameter, in fp64 but for the iterations.
struct PlainMuon {
  MuonOptions options;
  Tensor param, momentum = torch::zeros_like(param);

  void step(const Tensor& gradient) {
    momentum.lerp_(gradient, 1. - options.momentum());
    const Tensor update =
        options.nesterov() ? gradient.lerp(momentum, options.momentum()) : momentum;
    const Tensor matrix = update.flatten(1).to(at::kBFloat16);
    const bool is_tall = matrix.size(0) > matrix.size(1);
    Tensor x = is_tall ? matrix.t() : matrix;
    x = x / x.norm().clamp_min(options.eps());
    const auto [a, b, c] = options.ns_coefficients();
    for (int64_t i = 0; i < options.ns_steps(); ++i) {
      const Tensor gram = x.mm(x.t());
      x = torch::addmm(x, torch::addmm(gram, gram, gram, b, c), x, a);
    }
    if (is_tall) x = x.t();
    const double ratio = static_cast<double>(matrix.size(0)) / static_cast<double>(matrix.size(1));
    param.mul_(1. - options.lr() * options.weight_decay());
    param.sub_(x.to(param.scalar_type()).reshape(param.sizes()),
               options.lr() * std::sqrt(std::max(1., ratio)));
  }
};

/// Matrices whose singular values are near 1, which rounding does not turn.
Tensor well_conditioned(at::IntArrayRef sizes, at::TensorOptions options = {}) {
  const Tensor flat = torch::randn(sizes).flatten(1);
  const auto [u, s, v] = torch::linalg_svd(flat, /*full_matrices=*/false);
  return u.matmul(torch::diag(s.div(s.max()).add(0.5))).matmul(v).reshape(sizes).to(options);
}

class Muon : public testing::TestWithParam<at::DeviceType> {
 protected:
  void SetUp() override {
    SKIP_WITHOUT(GetParam());
    seed_all(1);
  }
  static at::TensorOptions options(at::ScalarType dtype = at::kFloat) {
    return at::TensorOptions(GetParam()).dtype(dtype);
  }
};
INSTANTIATE_TEST_SUITE_P(Optim, Muon, all_devices(), device_name);

// ---- The same steps as Python's -----------------------------------------------------------------

using Walks = std::map<int64_t, std::vector<Tensor>>;

Walks walks_of(const std::string& name) {
  std::ifstream file("parity/optim.txt");
  EXPECT_TRUE(file) << "run the test in the folder tests/";
  Walks walks;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string case_name;
    int64_t walk = 0, step = 0;
    words >> case_name >> walk >> step;
    if (case_name != name) continue;
    std::vector<float> values;
    for (float value = 0.F; words >> value;) values.push_back(value);
    walks[walk].push_back(torch::tensor(values));
  }
  EXPECT_FALSE(walks.empty()) << name;
  return walks;
}

TEST_P(Muon, StepsLikePythons) {
  const std::vector<std::vector<int64_t>> shapes{{3, 4}, {4, 3}, {3, 3}, {3, 4}, {2, 2, 2, 2}};
  for (const auto& [name, muon] : cases()) {
    SCOPED_TRACE(name);
    for (const auto& [walk, rows] : walks_of(name)) {
      Numbers numbers(walk);
      Params params;
      for (const auto& sizes : shapes) {
        params.push_back(numbers.tensor(sizes).to(GetParam()).requires_grad_());
      }
      FusedMuon optimizer(params, muon);
      double lr = 0.;
      for (const Tensor& row : rows) {
        const double power = std::ldexp(1., static_cast<int>(numbers.below(8)));
        const double scale = power * (1. + static_cast<double>(numbers.below(3)) / 4.);
        const bool skipped = numbers.below(3) == 0;
        for (const Tensor& p : params) {
          const bool absent = numbers.below(4) == 0;
          const Tensor gradient = numbers.tensor(p.sizes()).to(GetParam()) * scale;
          p.mutable_grad() = absent ? Tensor() : gradient;
        }
        optimizer.step_scaled(number(scale, GetParam()), number(skipped ? 1. : 0., GetParam()));
        std::vector<Tensor> flat;
        for (const Tensor& p : params) flat.push_back(p.detach().reshape({-1}).cpu());
        expect_stepped_alike(torch::cat(flat), row, lr += muon.lr());
      }
    }
  }
}

TEST_P(Muon, StepsMatricesOfAShapeTogetherAsOneByOne) {
  for (const auto& [name, muon] : cases()) {
    SCOPED_TRACE(name);
    Params together;
    for (int i = 0; i < 3; ++i) {
      together.push_back(well_conditioned({24, 40}, options()).requires_grad_());
      together.push_back(well_conditioned({40, 24}, options()).requires_grad_());
    }
    const Params apart = copies(together);
    FusedMuon of_all(together, muon);
    std::vector<std::unique_ptr<FusedMuon>> of_each;
    for (const Tensor& p : apart) of_each.push_back(std::make_unique<FusedMuon>(Params{p}, muon));
    for (int step = 1; step <= 3; ++step) {
      for (std::size_t i = 0; i < apart.size(); ++i) {
        together[i].mutable_grad() = well_conditioned(apart[i].sizes(), options());
        apart[i].mutable_grad() = together[i].grad();
        of_each[i]->step();
      }
      of_all.step();
      for (std::size_t i = 0; i < apart.size(); ++i) {
        expect_stepped_alike(together[i], apart[i], step * muon.lr());
      }
    }
  }
}

TEST_P(Muon, StepsParametersOfAnyLayoutAndDtypeAsMatricesOfTheirFirstDimension) {
  for (const auto dtype : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16}) {
    SCOPED_TRACE(dtype);
    Params params{
        well_conditioned({6, 3, 2, 2}, options(dtype)),
        well_conditioned({6, 3, 2, 2}, options(dtype)).contiguous(at::MemoryFormat::ChannelsLast),
        well_conditioned({6, 3, 2, 2}, options(dtype)),
        well_conditioned({7, 5}, options(dtype)).t().contiguous().t(),
        well_conditioned({5, 4, 3}, options(dtype)).transpose(0, 1).contiguous().transpose(0, 1),
        torch::zeros({0, 3}, options(dtype)),
        torch::zeros({2, 0}, options(dtype))};
    std::vector<PlainMuon> plain;
    for (Tensor& p : params) {
      p = p.detach().requires_grad_();
      plain.push_back({MuonOptions(0.1), p.detach().cpu().to(at::kDouble).contiguous()});
    }
    FusedMuon optimizer(params, MuonOptions(0.1));
    for (int step = 1; step <= 3; ++step) {
      for (std::size_t i = 0; i < params.size(); ++i) {
        const Tensor gradient = params[i].numel() == 0
                                    ? torch::zeros_like(params[i])
                                    : well_conditioned(params[i].sizes(), options(dtype));
        params[i].mutable_grad() = gradient * 64.;
        if (gradient.numel() > 0) plain[i].step(gradient.cpu().to(at::kDouble));
      }
      optimizer.step_scaled(number(64., GetParam()), number(0., GetParam()));
      for (std::size_t i = 0; i < params.size(); ++i) {
        if (params[i].numel() == 0) continue;
        SCOPED_TRACE(i);
        const double rounding =
            at::isFloatingType(dtype) && dtype != at::kDouble && dtype != at::kFloat ? 0.4 : 0.;
        expect_stepped_alike(params[i], plain[i].param, 0.1 * step + rounding);
      }
    }
  }
}

// ---- The scale, the flag and a clip
// --------------------------------------------------------------

/// Bit by bit.
void expect_same_bits(const Params& actual, const Params& expected) {
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(torch::equal(actual[i].detach().cpu(), expected[i].detach().cpu())) << i;
  }
}

Tensor momentum_of(FusedMuon& optimizer, const Tensor& p) {
  return state_of<MuonParamState>(optimizer, p).momentum_buffer();
}

TEST_P(Muon, ChangesNothingForAnyFlagButZeroWhateverTheGradientsHold) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const Params params{param({4, 6}, options(dtype)), param({6, 4}, options(dtype))};
    FusedMuon optimizer(params, MuonOptions(0.1));
    for (const Tensor& p : params) p.mutable_grad() = torch::randn_like(p);
    optimizer.step();
    Params before = copies(params);
    for (const Tensor& p : params) before.push_back(momentum_of(optimizer, p).clone());
    for (const double value : {std::numeric_limits<double>::infinity(), std::nan(""), 1e30, 0.}) {
      for (const double flag : {1., 2., 0.5}) {
        for (const Tensor& p : params) p.mutable_grad() = torch::full_like(p, value);
        optimizer.step_scaled(number(0.5, GetParam()), number(flag, GetParam()));
      }
    }
    Params after = params;
    for (const Tensor& p : params) after.push_back(momentum_of(optimizer, p));
    expect_same_bits(after, before);
  }
}

TEST_P(Muon, DividesByTheScaleAndTheClipThatIsLeftToIt) {
  const Params params{param({4, 6}, options()), param({3, 2, 2}, options())};
  FusedMuon optimizer(params, MuonOptions(0.1).momentum(0.5));
  torchamp::GradScaler scaler({.init_scale = 1024.});
  (void)scaler.scale(torch::ones({}, options()));
  Params gradients;
  Tensor squares = torch::zeros({}, options());
  for (const Tensor& p : params) {
    gradients.push_back(torch::randn_like(p));
    squares += gradients.back().square().sum();
    p.mutable_grad() = gradients.back() * 1024.;
  }
  torchamp::clip_grad_norm_(scaler, optimizer, 0.25);
  EXPECT_TRUE(scaler.step(optimizer).stepped());
  scaler.update();
  for (std::size_t i = 0; i < params.size(); ++i) {
    ::expect_close(momentum_of(optimizer, params[i]),
                   gradients[i] * (0.5 * 0.25 / squares.sqrt().item<double>()));
  }
}

TEST_P(Muon, LeavesNoMomentumOfSkippedFirstSteps) {
  const Tensor p = param({4, 6}, options());
  FusedMuon optimizer({p}, MuonOptions(0.1));
  p.mutable_grad() = torch::full_like(p, std::nan(""));
  optimizer.step_scaled({}, number(1., GetParam()));
  EXPECT_TRUE(momentum_of(optimizer, p).eq(0).all().item<bool>());
}

TEST_P(Muon, DoesNotWriteToGradients) {
  const Tensor p = param({4, 6}, options());
  FusedMuon optimizer({p});
  p.mutable_grad() = torch::randn_like(p);
  const Tensor before = p.grad().clone();
  optimizer.step_scaled(number(4., GetParam()), number(0., GetParam()));
  EXPECT_TRUE(torch::equal(p.grad(), before));
}

// ---- Cost ---------------------------------------------------------------------------------------

TEST(MuonCosts, ReadsNothingAndLaunchesTheSameForAnyNumberOfMatricesOfAShape) {
  SKIP_WITHOUT(at::kPrivateUse1);
  std::vector<int64_t> kernels;
  for (const int count : {10, 100}) {
    Params all;
    for (int i = 0; i < count; ++i) {
      all.push_back(param({8, 4}, at::kPrivateUse1));
      all.push_back(param({4, 8}, at::kPrivateUse1));
      for (const Tensor& p : {all.end()[-1], all.end()[-2]}) p.mutable_grad() = torch::ones_like(p);
    }
    FusedMuon optimizer(all, MuonOptions(0.1));
    torchamp::GradScaler scaler({.init_scale = 4.});
    for (int i = 0; i < 3; ++i) {
      (void)scaler.scale(torch::ones({}, at::kPrivateUse1));
      const simulated::Counts counts;
      scaler.step(optimizer);
      scaler.update();
      EXPECT_EQ(counts.now().waits, 0);
      EXPECT_EQ(counts.now().host_to_device, 0);
      if (i == 2) kernels.push_back(counts.now().kernels);
    }
  }
  EXPECT_EQ(kernels[0], kernels[1]);
  RecordProperty("kernels", static_cast<int>(kernels[0]));
  EXPECT_LE(kernels[0], 130) << "for two shapes";
}

// ---- Options, groups and archives ---------------------------------------------------------------

TEST(MuonOptionsOfGroups, HaveTheDefaultsOfPythons) {
  const MuonOptions options;
  EXPECT_EQ(options.lr(), 1e-3);
  EXPECT_EQ(options.weight_decay(), 0.1);
  EXPECT_EQ(options.momentum(), 0.95);
  EXPECT_TRUE(options.nesterov());
  EXPECT_EQ(options.ns_coefficients(), MuonOptions::NsCoefficients(3.4445, -4.7750, 2.0315));
  EXPECT_EQ(options.eps(), 1e-7);
  EXPECT_EQ(options.ns_steps(), 5);
  EXPECT_EQ(options.adjust_lr(), AdjustLr::original);
}

TEST(MuonOptionsOfGroups, AreKeptAndStepEachGroup) {
  const Tensor first = param({3, 4}), second = param({3, 4}), third = param({3, 4});
  Groups groups{OptimizerParamGroup(Params{first})};
  groups.emplace_back(Params{second}, std::make_unique<MuonOptions>(MuonOptions(1e-3).ns_steps(3)));
  FusedMuon optimizer(groups, MuonOptions(0.5).ns_steps(4));
  optimizer.add_param_group({Params{third}, std::make_unique<MuonOptions>(0.25)});
  std::vector<MuonOptions> kept;
  for (const auto& group : optimizer.param_groups()) {
    kept.push_back(static_cast<const MuonOptions&>(group.options()));
  }
  EXPECT_EQ(kept[0], MuonOptions(0.5).ns_steps(4));
  EXPECT_EQ(kept[1], MuonOptions(1e-3).ns_steps(3));
  EXPECT_EQ(kept[2], MuonOptions(0.25));
  const Params before = copies({first, second, third});
  for (const Tensor& p : {first, second, third})
    p.mutable_grad() = torch::ones({3, 4}).add_(torch::eye(3, 4));
  optimizer.step();
  EXPECT_GT((first - before[0]).norm().item<double>(), 0.1);
  EXPECT_LT((second - before[1]).norm().item<double>(), 0.01);
  EXPECT_GT((third - before[2]).norm().item<double>(), 0.05);
}

TEST_P(Muon, GoesOnBitForBitFromAnArchive) {
  for (const auto& [name, muon] : cases()) {
    SCOPED_TRACE(name);
    const Params params{param({4, 6}, options()), param({3, 2, 2}, options())};
    const auto take_step = [](Optimizer& optimizer, const Params& all, int step) {
      for (const Tensor& p : all) p.mutable_grad() = torch::cos(p.detach() * 100. + step);
      optimizer.step();
    };
    const auto groups = [](const Params& all, std::size_t with_options, const MuonOptions& own) {
      Groups two{OptimizerParamGroup({all[0]}), OptimizerParamGroup({all[1]})};
      two[with_options].set_options(std::make_unique<MuonOptions>(own));
      return two;
    };
    const MuonOptions of_second = MuonOptions(0.05).momentum(0.6).ns_steps(4);
    FusedMuon optimizer(groups(params, 1, of_second), muon);
    take_step(optimizer, params, 0);
    const Params others = copies(params);
    FusedMuon loaded(groups(others, 0, MuonOptions(3.)), MuonOptions(7.));
    through_archive(optimizer, loaded);
    EXPECT_EQ(static_cast<const MuonOptions&>(loaded.param_groups()[0].options()), muon);
    EXPECT_EQ(static_cast<const MuonOptions&>(loaded.param_groups()[1].options()), of_second);
    for (int step = 1; step < 4; ++step) {
      take_step(optimizer, params, step);
      take_step(loaded, others, step);
      expect_same_bits(others, params);
    }
  }
}

TEST(MuonMistakes, RefusesArchivesOfOtherOptimizersAndShapes) {
  const Tensor p = param({4, 6}), other = param({6, 4});
  FusedMuon optimizer({p}), of_other({other});
  p.mutable_grad() = torch::ones_like(p);
  optimizer.step();
  for (const Kind& kind : kinds()) {
    SCOPED_TRACE(kind.name);
    const auto of_another = kind.fused_of_parameters({p});
    of_another->step();
    const std::string error = "::load: the archive does not hold what";
    EXPECT_ERROR(through_archive(*of_another, optimizer), "FusedMuon" + error);
    EXPECT_ERROR(through_archive(optimizer, *of_another), kind.optimizer + error);
  }
  EXPECT_ERROR(through_archive(optimizer, of_other), "FusedMuon::load: the archive's state of");
}

TEST(MuonMistakes, SaysToGiveVectorsToAdamW) {
  const Tensor matrix = param({4, 6}), vector = param({4}), scalar = param({});
  constexpr const char* remedy = "give parameters of fewer than two dimensions to FusedAdamW";
  EXPECT_ERROR(FusedMuon({matrix, vector}), "FusedMuon: parameter 1 of group 0 is of shape [4]");
  EXPECT_ERROR(FusedMuon({scalar}), remedy);
  FusedMuon optimizer({matrix});
  EXPECT_ERROR(optimizer.add_param_group(OptimizerParamGroup({vector})), remedy);
  EXPECT_EQ(optimizer.param_groups().size(), 1U);
  optimizer.param_groups()[0].params().push_back(vector);
  matrix.mutable_grad() = torch::ones_like(matrix);
  vector.mutable_grad() = torch::ones_like(vector);
  const Params before = copies({matrix, vector});
  EXPECT_ERROR(optimizer.step(), remedy);
  expect_same_bits({matrix, vector}, before);
}

TEST(MuonMistakes, RefusesOptionsOutOfRange) {
  const Params params{param({4, 6})};
  EXPECT_ERROR(FusedMuon(params, MuonOptions(-1.)), "FusedMuon: lr is -1. It must be at least 0.");
  EXPECT_ERROR(FusedMuon(params, MuonOptions(std::nan(""))), "lr is nan");
  EXPECT_ERROR(FusedMuon(params, MuonOptions().weight_decay(-1.)), "weight_decay is -1");
  EXPECT_ERROR(FusedMuon(params, MuonOptions().momentum(-1.)), "momentum is -1");
  EXPECT_ERROR(FusedMuon(params, MuonOptions().eps(-1.)), "eps is -1");
  EXPECT_ERROR(FusedMuon(params, MuonOptions().ns_steps(100)), "ns_steps is 100");
  Groups groups;
  groups.emplace_back(params, std::make_unique<MuonOptions>(MuonOptions().ns_steps(-1)));
  EXPECT_ERROR(FusedMuon{groups}, "ns_steps is -1");
  Groups of_another;
  of_another.emplace_back(params, std::make_unique<SGDOptions>(0.1));
  EXPECT_ERROR(FusedMuon{of_another}, "the options of group 0 belong to another optimizer");
}

// ---- Masters ------------------------------------------------------------------------------------

TEST(MuonMasters, StepsMastersAsFp32Weights) {
  for (const auto storage : {torchamp::MasterStorage::full, torchamp::MasterStorage::split}) {
    seed_all(1);
    torch::nn::Sequential model;
    for (int i = 0; i < 3; ++i) {
      model->push_back(torch::nn::Linear(torch::nn::LinearOptions(40, 24).bias(false)));
    }
    const Params wide = copies(model->parameters());
    FusedMuon of_wide(wide, MuonOptions(0.1));
    torchamp::MasterWeights masters(model, {.dtype = at::kBFloat16, .storage = storage});
    FusedMuon optimizer(masters.parameters(), MuonOptions(0.1));
    for (int step = 0; step < 4; ++step) {
      const auto parameters = model->parameters();
      for (std::size_t i = 0; i < wide.size(); ++i) {
        parameters[i].mutable_grad() = torch::randn({24, 40}).to(at::kBFloat16);
        wide[i].mutable_grad() = parameters[i].grad().to(at::kFloat);
      }
      masters.take_gradients();
      optimizer.step();
      optimizer.zero_grad();
      masters.copy_to_model();
      of_wide.step();
      for (std::size_t i = 0; i < wide.size(); ++i) {
        const Tensor difference = parameters[i].detach().to(at::kFloat) - wide[i].detach();
        EXPECT_LE(difference.abs().max().item<double>(), 0x1p-9);
      }
    }
  }
}

}  // namespace
