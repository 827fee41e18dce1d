// SPDX-License-Identifier: BSD-3-Clause
// Gradients that share memory are unscaled, clipped, added to and stepped as if each had its own.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/accumulate.h>
#include <torchamp/clip_grad.h>
#include <torchamp/grad_scaler.h>
#include <torchamp/master_weights.h>
#include <torchamp/optim.h>
#include <torchamp/training_step.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "simulated_device/device.h"
#include "simulated_device/facts.h"
#include "simulated_device/memory.h"
#include "support/devices.h"
#include "support/host_allocation_limit.h"
#include "support/optimizer_kinds.h"
#include "support/optimizers.h"
#include "support/out_of_memory.h"
#include "support/tolerances.h"

// On Windows, a torch::autograd::Function must be of a type with external linkage.
namespace gradients_in_one_memory {

using torch::autograd::AutogradContext;

/// Two parameters of four elements each. Backward returns two views of one tensor, `distance`
/// elements apart.
struct TwoViews : torch::autograd::Function<TwoViews> {
  static Tensor forward(AutogradContext* context, const Tensor& a, const Tensor& b,
                        const Tensor& factors, int64_t distance) {
    context->save_for_backward({factors});
    context->saved_data["distance"] = distance;
    return (a.sum() + b.sum()) * factors.sum();
  }
  static std::vector<Tensor> backward(AutogradContext* context, const std::vector<Tensor>& of) {
    const Tensor all = context->get_saved_variables()[0] * of[0];
    const int64_t distance = context->saved_data["distance"].toInt();
    return {all.narrow(0, 0, 4), all.narrow(0, distance, 4), {}, {}};
  }
};

}  // namespace gradients_in_one_memory

namespace {

using gradients_in_one_memory::TwoViews;
using torchamp::GradScaler;

constexpr double scale_at_first = 8.;

// ---- Losses whose gradients share memory --------------------------------------------------------

struct LossCase {
  std::string name;
  at::IntArrayRef a, b;  ///< sizes
  std::function<Tensor(const Params&, const Tensor&)> loss;
  bool shares;  ///< whether the two gradients overlap
};
std::ostream& operator<<(std::ostream& out, const LossCase& one) {
  return out << one.name;
}

Tensor two_views(const Params& p, const Tensor& factors, int64_t distance) {
  return TwoViews::apply(p[0], p[1], factors, distance);
}

const std::vector<LossCase>& loss_cases() {
  static constexpr int64_t four[]{4}, square[]{2, 2}, column[]{4, 1};
  static const std::vector<LossCase> all{
      {"positions", four, four,
       [](const Params& p, const Tensor& factors) {
         return ((p[0].unsqueeze(0) + p[1].unsqueeze(0)) * factors.narrow(0, 0, 4)).sum();
       },
       true},
      {"views_of_other_shapes", square, column,
       [](const Params& p, const Tensor& factors) {
         return ((p[0].view(4) + p[1].view(4)) * factors.narrow(0, 0, 4)).sum();
       },
       true},
      {"one_view_twice", four, four,
       [](const Params& p, const Tensor& factors) { return two_views(p, factors, 0); }, true},
      {"views_that_overlap", four, four,
       [](const Params& p, const Tensor& factors) { return two_views(p, factors, 2); }, true},
      {"disjoint_views", four, four,
       [](const Params& p, const Tensor& factors) { return two_views(p, factors, 4); }, false},
      {"stack", four, four,
       [](const Params& p, const Tensor& factors) {
         return (torch::stack({p[0], p[1]}) * factors.view({2, 4})).sum();
       },
       false},
      {"cat", square, square,
       [](const Params& p, const Tensor& factors) {
         return (torch::cat({p[0], p[1]}) * factors.view({4, 2})).sum();
       },
       false},
  };
  return all;
}

Tensor factors_of(int64_t iteration, at::TensorOptions options = {}) {
  return torch::arange(1., 9., options) * (1. + 0.5 * static_cast<double>(iteration));
}

bool overlap(const Params& params) {
  const Tensor &a = params[0].grad(), &b = params[1].grad();
  return a.storage().is_alias_of(b.storage()) &&
         std::abs(a.storage_offset() - b.storage_offset()) < 4;
}

/// The parameters of a case with a third one, whose gradient shares nothing.
Params params_of(const LossCase& one, at::TensorOptions options = {}) {
  torch::manual_seed(1);
  Params params;
  for (const at::IntArrayRef sizes : {one.a, one.b, at::IntArrayRef(one.a)}) {
    params.push_back(torch::randn(sizes, options).requires_grad_());
  }
  return params;
}

Tensor loss_of(const LossCase& one, const Params& params, int64_t iteration) {
  const auto options = params[0].options().requires_grad(false);
  return one.loss(params, factors_of(iteration, options)) + params[2].pow(2).sum();
}

/// Clones of the gradients of a loss.
Params gradients_of(const LossCase& one, const Params& params, int64_t iteration) {
  Params gradients;
  for (const Tensor& g : torch::autograd::grad({loss_of(one, params, iteration)}, params)) {
    gradients.push_back(g.clone());
  }
  return gradients;
}

// ---- What is done to them -----------------------------------------------------------------------

enum class Clip { none, norm, norm_of_unscaled, norm_of_parameters, value, value_of_parameters };

constexpr double max_norm = 0.5, max_value = 1.5;

/// The same by plain ops; returns the norm of all gradients.
double clip_plainly(Params& gradients, Clip clip) {
  double square = 0.;
  for (const Tensor& g : gradients) square += g.pow(2).sum().item<double>();
  const double norm = std::sqrt(square);
  for (Tensor& g : gradients) {
    switch (clip) {
      case Clip::none:
        break;
      case Clip::value:
      case Clip::value_of_parameters:
        g = g.clamp(-max_value, max_value);
        break;
      default:
        g = g * std::min(1., max_norm / (norm + 1e-6));
    }
  }
  return norm;
}

/// By torchamp; returns the norm if there is one.
Tensor clip_scaled(GradScaler& scaler, Optimizer& optimizer, const Params& params, Clip clip) {
  switch (clip) {
    case Clip::none:
      return {};
    case Clip::norm:
      return torchamp::clip_grad_norm_(scaler, optimizer, max_norm);
    case Clip::norm_of_unscaled:
      scaler.unscale_(optimizer);
      return torchamp::clip_grad_norm_(optimizer, max_norm);
    case Clip::norm_of_parameters:
      scaler.unscale_(optimizer);
      return torchamp::clip_grad_norm_(params, max_norm);
    case Clip::value:
      torchamp::clip_grad_value_(scaler, optimizer, max_value);
      return {};
    case Clip::value_of_parameters:
      scaler.unscale_(optimizer);
      torchamp::clip_grad_value_(params, max_value);
      return {};
  }
  return {};
}

class GradientsInOneMemory
    : public testing::TestWithParam<std::tuple<LossCase, std::string, at::DeviceType>> {
 protected:
  void SetUp() override {
    SKIP_WITHOUT(device());
    params = params_of(one(), options());
    expected = copies(params);
    plain = kind().plain({OptimizerParamGroup(expected)});
  }
  static const LossCase& one() { return std::get<0>(GetParam()); }
  static const Kind& kind() { return kind_named(std::get<1>(GetParam())); }
  static at::DeviceType device() { return std::get<2>(GetParam()); }
  static at::TensorOptions options() { return at::TensorOptions(device()).dtype(at::kFloat); }

  Params params, expected;
  std::unique_ptr<Optimizer> plain;  // of `expected`

  std::vector<std::unique_ptr<Optimizer>> optimizers_of(const Params& stepped) const {
    std::vector<std::unique_ptr<Optimizer>> both;
    both.push_back(kind().plain({OptimizerParamGroup(stepped)}));
    both.push_back(kind().fused({OptimizerParamGroup(stepped)}));
    return both;
  }
  /// A plain step with these gradients.
  void step_plainly(const Params& gradients) const {
    for (std::size_t i = 0; i < expected.size(); ++i) expected[i].mutable_grad() = gradients[i];
    plain->step();
  }
};

INSTANTIATE_TEST_SUITE_P(Losses, GradientsInOneMemory,
                         testing::Combine(testing::ValuesIn(loss_cases()),
                                          testing::Values("sgd", "sgd_momentum", "adam"),
                                          testing::Values(at::kCPU, at::kPrivateUse1, at::kCUDA)),
                         [](const auto& test) {
                           return std::get<0>(test.param).name + '_' + std::get<1>(test.param) +
                                  '_' + name_of_device(std::get<2>(test.param));
                         });

TEST_P(GradientsInOneMemory, AreUnscaledClippedAndSteppedOnce) {
  for (const Clip clip : {Clip::none, Clip::norm, Clip::norm_of_unscaled, Clip::norm_of_parameters,
                          Clip::value, Clip::value_of_parameters}) {
    for (const bool fused : {false, true}) {
      SCOPED_TRACE(c10::str("clip ", static_cast<int>(clip), fused ? ", fused" : ""));
      const Params own = copies(params), others = copies(params);
      const auto optimizer = std::move(optimizers_of(own)[fused ? 1 : 0]);
      const auto by_hand = kind().plain({OptimizerParamGroup(others)});
      GradScaler scaler({.init_scale = scale_at_first});
      for (int64_t iteration = 0; iteration < 3; ++iteration) {
        Params gradients = gradients_of(one(), others, iteration);
        const double norm = clip_plainly(gradients, clip);
        for (std::size_t i = 0; i < others.size(); ++i) others[i].mutable_grad() = gradients[i];
        by_hand->step();

        optimizer->zero_grad();
        scaler.scale(loss_of(one(), own, iteration)).backward();
        EXPECT_EQ(overlap(own), one().shares) << "or this tests nothing";
        const void* const memory[]{own[0].grad().data_ptr(), own[1].grad().data_ptr()};
        const Tensor total = clip_scaled(scaler, *optimizer, own, clip);
        if (total.defined()) {
          EXPECT_NEAR(total.item<double>(), norm, norm * 1e-5);
        }
        EXPECT_TRUE(scaler.step(*optimizer));
        scaler.update();
        EXPECT_FALSE(overlap(own));
        EXPECT_EQ(own[0].grad().data_ptr(), memory[0]) << "the first keeps its memory";
        EXPECT_EQ(own[1].grad().data_ptr() == memory[1], !one().shares);
        expect_close(own, others);
      }
    }
  }
}

TEST_P(GradientsInOneMemory, AreAddedToMicroBatchByMicroBatch) {
  constexpr int64_t parts = 3;
  for (const bool fused : {false, true}) {
    for (const bool drops : {false, true}) {
      SCOPED_TRACE(c10::str(fused ? "fused" : "plain", drops ? ", drop_bad" : ""));
      const Params own = copies(params), others = copies(params);
      const auto optimizer = std::move(optimizers_of(own)[fused ? 1 : 0]);
      const auto by_hand = kind().plain({OptimizerParamGroup(others)});
      GradScaler scaler({.init_scale = scale_at_first});
      torchamp::Accumulation accumulation(scaler, *optimizer, parts, {.drop_bad = drops});
      for (int64_t window = 0; window < 2; ++window) {
        Params sums;
        for (int64_t part = 0; part < parts; ++part) {
          const Params gradients = gradients_of(one(), others, part);
          for (std::size_t i = 0; i < gradients.size(); ++i) {
            if (part == 0) sums.push_back(torch::zeros_like(gradients[i]));
            sums[i].add_(gradients[i], 1. / parts);
          }
        }
        for (std::size_t i = 0; i < others.size(); ++i) others[i].mutable_grad() = sums[i];
        by_hand->step();
        for (int64_t part = 0; part < parts; ++part) {
          accumulation.backward(loss_of(one(), own, part));
        }
        expect_close(own, others);
      }
    }
  }
}

TEST_P(GradientsInOneMemory, AreDividedOnceByAStepThatTheProgramMakes) {
  const auto optimizer = std::move(optimizers_of(params)[1]);
  auto& fused = as_fused(*optimizer);
  const auto number = [&](double value) { return torch::full({}, value, options()); };
  const auto backward = [&](int64_t iteration) {
    fused.zero_grad();
    loss_of(one(), params, iteration).backward();
    EXPECT_EQ(overlap(params), one().shares) << "or this tests nothing";
  };
  const auto expect_divided = [&](int64_t iteration, double divisor) {
    Params gradients = gradients_of(one(), expected, iteration);
    for (Tensor& g : gradients) g = g / divisor;
    step_plainly(gradients);
    expect_close(params, expected);
  };
  backward(0);
  fused.step_scaled(number(4.), number(0.));
  expect_divided(0, 4.);
  backward(1);
  fused.divide_next_step(number(2.));
  fused.step();
  expect_divided(1, 2.);
}

// ---- Other holders of gradients -----------------------------------------------------------------

TEST(GradientsInOneMemoryOf, AParameterWithGapsThatReachesIntoAnotherIsSeparated) {
  for (const bool fused : {false, true}) {
    const Tensor memory = torch::full({6}, 8.F);
    const Params params{parameter_with(memory.as_strided({3}, {2})),  // elements 0, 2 and 4
                        parameter_with(memory.narrow(0, 4, 2))};
    const auto optimizer = plain_or_fused_sgd(params, fused);
    GradScaler scaler({.init_scale = 8.});
    scaler.scale(torch::ones({}));
    EXPECT_TRUE(scaler.step(*optimizer));
    expect_close(params[0], torch::full({3}, -1.F));
    expect_close(params[1], torch::full({2}, -1.F));
  }
}

TEST(GradientsInOneMemoryOf, ParametersThatHoldOneTensorAreReplacedOnce) {
  for (const bool fused : {false, true}) {
    const Tensor gradient = torch::tensor({4.F, 8.F});
    const Params params{parameter_with(gradient), parameter_with(gradient)};
    // The first parameter is in the list twice, as the weight of a module registered twice is.
    const Params list = fused ? params : Params{params[0], params[1], params[0]};
    const auto optimizer = plain_or_fused_sgd(list, fused, /*lr=*/0.);
    GradScaler scaler({.init_scale = 4.});
    scaler.scale(torch::ones({}));
    scaler.unscale_(*optimizer);
    EXPECT_TRUE(params[0].grad().is_same(gradient));
    EXPECT_FALSE(params[1].grad().is_same(gradient));
    for (const Tensor& p : params) expect_close(p.grad(), torch::tensor({1.F, 2.F}));
    scaler.step(*optimizer);
  }
}

TEST(GradientsInOneMemoryOf, ParametersInAListForAClipAreReplacedOnce) {
  const Tensor gradient = torch::tensor({3.F, 4.F});
  const Params params{parameter_with(gradient), parameter_with(gradient)};
  const Tensor norm = torchamp::clip_grad_norm_({params[1], params[0], params[1]}, 1.);
  expect_close(norm, torch::tensor(5.F * std::sqrt(2.F)));
  for (const Tensor& p : params) expect_close(p.grad(), torch::tensor({3.F, 4.F}) / norm);
}

TEST(GradientsInOneMemoryOf, SparseEmbeddingsAreUnscaledOnce) {
  using torch::nn::EmbeddingOptions;
  for (const bool clips : {false, true}) {
    torch::nn::Embedding words(EmbeddingOptions(5, 3).sparse(true)),
        places(EmbeddingOptions(5, 3).sparse(true));
    torch::optim::SGD optimizer(Params{words->weight, places->weight}, SGDOptions(1.));
    const Tensor index = torch::tensor({1, 2});
    const Params before = copies({words->weight, places->weight});
    GradScaler scaler({.init_scale = 8.});
    scaler.scale(((words(index) + places(index)) * 2.).sum()).backward();
    ASSERT_TRUE(words->weight.grad()._values().storage().is_alias_of(
        places->weight.grad()._values().storage()));
    if (clips) torchamp::clip_grad_norm_(scaler, optimizer, 1.);
    scaler.step(optimizer);
    const double step = clips ? 1. / std::sqrt(12.) : 2.;
    expect_close(words->weight, before[0].index_add(0, index, torch::full({2, 3}, -step)));
    expect_close(places->weight, before[1].index_add(0, index, torch::full({2, 3}, -step)));
  }
}

TEST(GradientsInOneMemoryOf, ThreeParametersKeepMemoryThatNoOtherOneHas) {
  // The second one overlaps the first and the third, which do not overlap each other.
  const Tensor all = torch::arange(1., 11., torch::kFloat);
  const Params params{parameter_with(all.narrow(0, 6, 4).detach()),
                      parameter_with(all.narrow(0, 3, 4).detach()),
                      parameter_with(all.narrow(0, 0, 4).detach())};
  Params expected;
  for (const Tensor& p : params) expected.push_back(p.grad() / 2.);
  auto optimizer = sgd(params, /*lr=*/0.);
  GradScaler scaler({.init_scale = 2.});
  scaler.scale(torch::ones({}));
  scaler.unscale_(optimizer);
  for (std::size_t i = 0; i < params.size(); ++i) expect_close(params[i].grad(), expected[i]);
  EXPECT_TRUE(params[0].grad().is_alias_of(all));
  EXPECT_FALSE(params[1].grad().is_alias_of(all));
  EXPECT_TRUE(params[2].grad().is_alias_of(all));
}

/// Two tables of positions, as in a transformer, that a model adds.
struct PositionsImpl : torch::nn::Module {
  Tensor places = register_parameter("places", torch::zeros({3, 4}));
  Tensor segments = register_parameter("segments", torch::zeros({3, 4}));
  torch::nn::Linear head = register_module("head", torch::nn::Linear(4, 1));

  PositionsImpl() {
    const torch::NoGradGuard no_grad;
    head->weight.copy_(torch::tensor({{1.F, 2.F, -1.F, 0.5F}}));
    head->bias.zero_();
  }
  Tensor forward(const Tensor& x) {
    return head(x + (places.unsqueeze(0) + segments.unsqueeze(0))).mean();
  }
};
TORCH_MODULE(Positions);

Tensor input_of(int64_t part) {
  return torch::full({2, 3, 4}, 0.25 * static_cast<double>(part));
}

/// What plain SGD makes of both tables: their gradients do not depend on weights.
Tensor moved_by(double factor, int64_t steps, double lr) {
  const Tensor gradient = torch::tensor({1.F, 2.F, -1.F, 0.5F}).expand({3, 4}) / 3.;
  return gradient * (-lr * factor * static_cast<double>(steps));
}

TEST(GradientsInOneMemoryOf, TwoTablesMoveAlikeInATrainingStep) {
  constexpr double lr = 0.5;
  for (const bool fused : {false, true}) {
    for (const int64_t parts : {1, 3}) {
      for (const bool clips : {false, true}) {
        SCOPED_TRACE(c10::str(fused ? "fused, " : "plain, ", parts, clips ? ", clipped" : ""));
        Positions model;
        model->head->weight.set_requires_grad(false);
        model->head->bias.set_requires_grad(false);
        const Params tables{model->places, model->segments};
        torchamp::TrainingStepOptions options{
            .dtype = torch::kFloat,
            .scaler = torchamp::GradScalerOptions{.init_scale = 8.},
            .micro_batches = parts};
        if (clips) options.max_grad_norm = 0.1;
        const auto optimizer = plain_or_fused_sgd(tables, fused, lr);
        torchamp::TrainingStep train(model, *optimizer, std::move(options));
        for (int64_t part = 0; part < 2 * parts; ++part) {
          train([&] { return model->forward(input_of(part)); });
        }
        const double norm = std::sqrt(2. * moved_by(1., 1, 1.).pow(2).sum().item<double>());
        const double factor = clips ? 0.1 / (norm + 1e-6) : 1.;
        for (const Tensor& table : tables) expect_close(table, moved_by(factor, 2, lr));
      }
    }
  }
}

TEST(GradientsInOneMemoryOf, TwoTablesMoveAlikeUnderMasterWeights) {
  using torchamp::MasterStorage;
  constexpr double lr = 0.5;
  constexpr int64_t parts = 2;
  struct Way {
    MasterStorage storage;
    bool main_gradients, keeps_tables;
  };
  for (const Way& way : {Way{MasterStorage::full, false, false},
                         {MasterStorage::full, true, false},
                         {MasterStorage::full, false, true},
                         {MasterStorage::split, false, false},
                         {MasterStorage::split, true, false}}) {
    SCOPED_TRACE(c10::str(way.storage == MasterStorage::split ? "split" : "full",
                          way.main_gradients ? ", main" : "", way.keeps_tables ? ", fp32" : ""));
    Positions model;
    model->head->weight.set_requires_grad(false);
    model->head->bias.set_requires_grad(false);
    torchamp::MasterWeights masters(
        model.ptr(), {.dtype = at::kBFloat16,
                      .keep_fp32 = way.keeps_tables ? std::vector<std::string>{"places", "segments"}
                                                    : std::vector<std::string>(),
                      .storage = way.storage,
                      .main_gradients = way.main_gradients});
    const Params tables = masters.parameters();
    torchamp::FusedSGD optimizer(tables, SGDOptions(lr));
    GradScaler scaler({.init_scale = 8.});
    torchamp::Accumulation accumulation(scaler, optimizer, parts);
    accumulation.before_unscale([&] { masters.take_gradients(); });
    for (int64_t part = 0; part < 2 * parts; ++part) {
      const Tensor x = input_of(part).to(at::kBFloat16);
      const Tensor sum = x + (model->places.unsqueeze(0) + model->segments.unsqueeze(0));
      const bool steps =
          accumulation
              .backward((sum.to(at::kFloat) * torch::tensor({1.F, 2.F, -1.F, 0.5F})).sum() / 6.)
              .has_value();
      if (steps) masters.copy_to_model();
    }
    for (const Tensor& table : tables) {
      expect_close(table.to(at::kFloat), moved_by(1., 2, lr), at::kBFloat16);
    }
  }
}

// ---- Where memory runs out ----------------------------------------------------------------------

/// Gradients of all dtypes; the first two share memory.
Params of_all_dtypes(at::Device device) {
  const Tensor numbers = torch::arange(1., 9., torch::kFloat);
  Params params{parameter_with(numbers.to(device, at::kFloat, /*non_blocking=*/false, true))};
  params.push_back(parameter_with(params[0].grad().detach()));
  for (const at::ScalarType dtype : {at::kDouble, at::kBFloat16, at::kComplexFloat}) {
    params.push_back(parameter_with(numbers.to(dtype).to(device)));
  }
  return params;
}

/// Calls that write to gradients: all of them are changed, or none.
template <class Limit>
void expect_all_changed_or_none(at::Device device) {
  using Call = std::function<void(GradScaler&, Optimizer&, const Params&)>;
  const std::vector<Call> calls{
      [](GradScaler& scaler, Optimizer& optimizer, const Params&) { scaler.unscale_(optimizer); },
      [](GradScaler&, Optimizer&, const Params& params) { torchamp::clip_grad_norm_(params, 1.); },
      [](GradScaler&, Optimizer& optimizer, const Params&) {
        torchamp::clip_grad_norm_(optimizer, 1.);
      }};
  for (std::size_t i = 0; i < calls.size(); ++i) {
    SCOPED_TRACE(c10::str("call ", i));
    const Params params = of_all_dtypes(device);
    auto optimizer = sgd(params);
    GradScaler scaler({.init_scale = 2.});
    scaler.scale(torch::ones({}, device));
    Params before;
    for (const Tensor& p : params) before.push_back(p.grad().clone());
    const int failures =
        until_memory_suffices<Limit>([&] { calls[i](scaler, optimizer, params); },
                                     [&] {
                                       for (std::size_t p = 0; p < params.size(); ++p) {
                                         EXPECT_TRUE(at::equal(params[p].grad(), before[p])) << p;
                                       }
                                     });
    EXPECT_GE(failures, 2);
    for (std::size_t p = 0; p < params.size(); ++p) {
      EXPECT_FALSE(at::equal(params[p].grad(), before[p])) << p;
    }
  }
}

TEST(GradientsOfSeveralDtypes, AreAllChangedOrNoneIfTheHostRunsOutOfMemory) {
  expect_all_changed_or_none<HostAllocationLimit>(at::kCPU);
}

TEST(GradientsOfSeveralDtypes, AreAllChangedOrNoneIfADeviceRunsOutOfMemory) {
  SKIP_WITHOUT(at::kPrivateUse1);
  const simulated::Facts facts(simulated::facts_like(at::kCUDA));  // bf16 goes through fp32
  expect_all_changed_or_none<simulated::AllocationLimit>(simulated::sim0);
}

}  // namespace
