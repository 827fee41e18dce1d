// SPDX-License-Identifier: BSD-3-Clause
// What torchamp's part of a training step launches on a device, counted on the simulated one. A
// launch is small if it takes no list of gradients or parameters.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/clip_grad.h>
#include <torchamp/grad_scaler.h>
#include <torchamp/master_weights.h>
#include <torchamp/optim.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "simulated_device/device.h"
#include "simulated_device/facts.h"
#include "support/devices.h"
#include "support/graphs.h"
#include "support/optimizer_kinds.h"
#include "support/warnings.h"

namespace {

using simulated::Launch;
using simulated::sim0;
using testing::ElementsAreArray;
using torchamp::GradScaler;
using Names = std::vector<std::string>;

constexpr int64_t size = 64;  // of each parameter

/// Steps nothing: all that is counted is torchamp's.
struct Idle : Optimizer {
  explicit Idle(const Groups& groups)
      : Optimizer(groups, std::make_unique<torch::optim::SGDOptions>(0.1)) {}
  Tensor step(LossClosure) override { return {}; }
};

struct Cost {
  Names small, large;  // launches, in order
  simulated::Totals totals;
};

/// Lists of little tensors are slower with several threads.
struct OneThread {
  OneThread() { at::set_num_threads(1); }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;
  ~OneThread() { at::set_num_threads(before); }
  int before = at::get_num_threads();
};

/// Parameters with gradients, an optimizer and a scaler that have made a few steps.
struct Step {
  template <class Make>
  Step(const Make& make, int count, bool clips,
       torchamp::GradScalerOptions options = {.init_scale = 1024.})
      : clip(clips), scaler(std::move(options)) {
    for (int i = 0; i < count; ++i) {
      params.push_back(torch::ones({size}, at::device(sim0)).requires_grad_());
      params.back().mutable_grad() = torch::ones({size}, at::device(sim0));
    }
    optimizer = make(Groups{OptimizerParamGroup(params)});
    scaler.scale(torch::ones({}, at::device(sim0)));
    for (int i = 0; i < 3; ++i) once();
  }

  ~Step() { simulated::wait_for_device(0); }  // what a graph's stream has made is its memory
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;

  /// From now on, each time is a replay.
  void capture() {
    scaler.update(65536.);
    graph = make_graph(at::kPrivateUse1, {*optimizer},
                       [this](const torchamp::CudaGraph::Tensors&) {
                         step();
                         return Tensor();
                       },
                       log, {.warmup = 1});
    for (int i = 0; i < 3; ++i) once();
    ASSERT_TRUE(graph->is_captured());
  }

  void once() { graph ? void((*graph)({})) : step(); }

  void step() {
    if (clip) torchamp::clip_grad_norm_(scaler, *optimizer, 0.1);
    scaler.step(*optimizer);
    scaler.update();
  }

  Cost cost() {
    simulated::LaunchLog launches;
    const simulated::Counts counts;
    once();
    Cost cost;
    cost.totals = counts.now();
    for (const Launch& launch : launches.take()) {
      const bool is_large = 2 * launch.elements >= size * static_cast<int64_t>(params.size());
      const std::size_t begin = launch.op.rfind(':') + 1;
      const std::string name = launch.op.substr(begin, launch.op.find('.') - begin);
      for (int64_t i = 0; i < launch.kernels; ++i) {
        (is_large ? cost.large : cost.small).push_back(name);
      }
    }
    return cost;
  }

  /// Of all parameters, or all gradients.
  int64_t bytes() const { return static_cast<int64_t>(params.size()) * size * 4; }

  OneThread one_thread;
  bool clip;
  std::vector<Tensor> params;
  std::unique_ptr<Optimizer> optimizer;
  GradScaler scaler;
  Repeater::Log log;  // of nothing
  std::unique_ptr<torchamp::CudaGraph> graph;
};

Names operator+(Names a, const Names& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

const Names none;

// ---- The launches, one by one -------------------------------------------------------------------

/// The flag, and the check of the largest values, or of what a clip makes the step divide by, which
/// finds infs and NaNs in the gradients.
const Names look{"_amp_foreach_non_finite_check_and_unscale_"};
const Names check = Names{"zero_"} + look;
/// The check of an unclipped fused step, at a scale that may be below 1: of the largest values
/// divided by the scale.
const Names check_quotients = Names{"zero_", "_foreach_div_"} + look;
/// The step is counted, or not.
const Names count{"_fused_sgd_"};
/// Whether there was a step before, or none; each, or the flag.
const Names flags{"ne", "eq", "maximum", "maximum"};
/// The scale and its tracker, and the limits; the count of skips in a row.
const Names update{"_amp_update_scale_", "clamp"}, skips{"addcmul"};
/// The norm of norms, what the gradients are divided by for the clip, and that times the scale.
const Names clip_small{"cat", "linalg_vector_norm", "sub", "clamp_min", "mul"};

class StepCosts : public testing::TestWithParam<Kind> {
 protected:
  void SetUp() override { SKIP_WITHOUT(at::kPrivateUse1); }
};

/// The kinds that ATen has a kernel for.
std::vector<Kind> kinds_with_kernel() {
  std::vector<Kind> all = kinds();
  std::erase_if(all, [](const Kind& kind) { return kind.op.empty(); });
  return all;
}

INSTANTIATE_TEST_SUITE_P(Kinds, StepCosts, testing::ValuesIn(kinds_with_kernel()),
                         [](const auto& kind) { return kind.param.name; });

TEST_P(StepCosts, AFusedStepMakesTheseSmallLaunchesHoweverManyParameters) {
  const std::string kind = GetParam().name;
  const std::string kernel = GetParam().op;
  // While SGD's first step may be still to come, its steps are counted; with dampening, SGD is
  // called twice, with two flags.
  const bool twice = kind == "sgd_dampening";
  const bool counts = GetParam().counts_steps || GetParam().counts_to_first;
  const Names counting = twice ? flags + count : counts ? count : none;
  for (const bool clips : {false, true}) {
    const Names small = (clips ? clip_small + check : check_quotients) + counting + update + skips;
    EXPECT_LE(small.size(), (clips ? 14U : 8U) + (twice ? 3U : 0U));
    // With a clip, the norm tells whether all is finite. Its copies divided by the scale are for
    // devices that may lack fp64; see Note [Norms of scaled gradients].
    const Names large = (clips ? Names{"_foreach_div"} : none) + Names{"_foreach_norm", kernel} +
                        (twice ? Names{kernel} : none);
    for (const int params :
         kind == "adam" ? std::vector<int>{10, 100, 1000} : std::vector<int>{10}) {
      const Cost cost = Step(GetParam().fused, params, clips).cost();
      EXPECT_THAT(cost.small, ElementsAreArray(small)) << params;
      EXPECT_THAT(cost.large, ElementsAreArray(large)) << params;
      EXPECT_EQ(cost.totals.waits, 0);
      EXPECT_EQ(cost.totals.host_to_device, 0);
      // Whether SGD has stepped may be due, which nobody waits for.
      EXPECT_LE(cost.totals.device_to_host, twice ? 1 : 0);
    }
  }
}

TEST_P(StepCosts, AReplayMakesTheSameSmallLaunches) {
  const std::string kind = GetParam().name;
  if (TORCH_VERSION_MINOR < 8 && kind.starts_with("adagrad")) {
    GTEST_SKIP() << "Adagrad's kernel takes no learning rate on the device there";
  }
  const std::string kernel = GetParam().op;
  const Names counting = GetParam().counts_steps ? count : none;
  for (const bool clips : {false, true}) {
    const Names small = (clips ? clip_small + check : check_quotients) + counting + update + skips;
    EXPECT_LE(small.size(), clips ? 14U : 8U);
    const Names large = (clips ? Names{"_foreach_div"} : none) + Names{"_foreach_norm", kernel};
    for (const int params : kind == "adam" ? std::vector<int>{10, 100} : std::vector<int>{10}) {
      Step step(GetParam().fused, params, clips);
      step.capture();
      const Cost cost = step.cost();
      EXPECT_THAT(cost.small, ElementsAreArray(small)) << params;
      EXPECT_THAT(cost.large, ElementsAreArray(large)) << params;
      EXPECT_EQ(cost.totals.graph_launches, 1);
      EXPECT_EQ(cost.totals.waits, 0);
      EXPECT_EQ(cost.totals.host_to_device, 0);
      EXPECT_EQ(cost.totals.device_to_host, 0);
    }
  }
}

TEST(StepCostsOf, PresetsOfTheScalerTakeTheseLaunchesForTheirUpdates) {
  SKIP_WITHOUT(at::kPrivateUse1);
  using torchamp::GradScalerOptions;
  struct Row {
    std::string name;
    GradScalerOptions options;
    std::size_t most;  // launches of the update
    int copies;        // to the host, which must learn what the limits want
  };
  const Row rows[] = {
      {"skip_non_finite", GradScalerOptions::skip_non_finite(), 1, 0},
      {"fixed", GradScalerOptions::fixed(8.), 1, 0},
      {"limits", {.min_scale = 1., .max_skips_in_a_row = 50}, 3, 1},
      {"fairseq", GradScalerOptions::fairseq(), 3, 1},
      {"megatron", GradScalerOptions::megatron(), 60, 0},
      {"deepspeed", GradScalerOptions::deepspeed(), 60, 1},
  };
  for (const Row& row : rows) {
    for (const bool clips : {false, true}) {
      const Cost cost = Step(kind_named("adam").fused, 4, clips, row.options).cost();
      // The host knows a fixed scale, and min_scale.
      const bool may_be_below_one = row.options.dynamic && row.options.min_scale < 1.;
      const Names checked = may_be_below_one ? check_quotients : check;
      const Names step = (clips ? clip_small + check : checked) + count;
      ASSERT_GT(cost.small.size(), step.size()) << row.name;
      const auto end_of_step = cost.small.begin() + static_cast<std::ptrdiff_t>(step.size());
      EXPECT_THAT(Names(cost.small.begin(), end_of_step), ElementsAreArray(step)) << row.name;
      EXPECT_LE(cost.small.size() - step.size(), row.most) << row.name;
      EXPECT_EQ(cost.totals.device_to_host, row.copies) << row.name;
      EXPECT_EQ(cost.totals.host_to_device, 0) << row.name;
      EXPECT_EQ(cost.totals.waits, 0) << row.name;
    }
  }
}

TEST(StepCostsOf, AFirstStepOfSGDCostsNothingMoreOnceTheHostHasLearnedOfIt) {
  SKIP_WITHOUT(at::kPrivateUse1);
  Step step(kind_named("sgd_dampening").fused, 10, /*clips=*/false);
  step.scaler.update(65536.);
  simulated::wait_for_device(0);
  const Cost cost = step.cost();
  EXPECT_THAT(cost.small, ElementsAreArray(check_quotients + update + skips));
  EXPECT_THAT(cost.large, ElementsAreArray(Names{"_foreach_norm", "_fused_sgd_"}));
  EXPECT_EQ(cost.totals.device_to_host, 0);

  Step skipped(kind_named("sgd_dampening").fused, 10, /*clips=*/false);
  skipped.optimizer = kind_named("sgd_dampening").fused({OptimizerParamGroup(skipped.params)});
  for (const Tensor& p : skipped.params) p.mutable_grad().fill_(std::nan(""));
  skipped.capture();
  EXPECT_THAT(skipped.cost().small,
              ElementsAreArray(check_quotients + flags + count + update + skips));
  for (const Tensor& p : skipped.params) p.mutable_grad().fill_(1e-3);
  for (int i = 0; i < 4; ++i) {
    skipped.once();
    simulated::wait_for_device(0);
  }
  EXPECT_THAT(skipped.cost().small, ElementsAreArray(check_quotients + update + skips))
      << "captured anew";
}

TEST(StepCostsOf, AClipMakesOneMoreIfNormsAreSummedUpInFp64) {
  SKIP_WITHOUT(at::kPrivateUse1);
  const simulated::Facts like_cuda(simulated::facts_like(at::kCUDA));
  const Names divides{"cat", "linalg_vector_norm", "div", "sub", "clamp_min", "mul"};
  const Names all = divides + check + count + update + skips;
  EXPECT_LE(all.size(), 14U);
  Step step(kind_named("adam").fused, 10, /*clips=*/true);
  const Cost eager = step.cost();
  EXPECT_THAT(eager.small, ElementsAreArray(all));
  EXPECT_THAT(eager.large, ElementsAreArray(Names{"_foreach_norm", "_fused_adam_"}));
  step.capture();
  EXPECT_THAT(step.cost().small, ElementsAreArray(all));
}

TEST(StepCostsOf, AClipIsLeftToTheStepHoweverOftenTheScaleMayHaveGrown) {
  SKIP_WITHOUT(at::kPrivateUse1);
  Step step(kind_named("sgd").fused, 2, /*clips=*/true);
  step.scaler.set_growth_interval(1);
  for (int i = 0; i < 80; ++i) {
    for (const Tensor& p : step.params) p.mutable_grad().fill_(i % 2 == 0 ? std::nan("") : 1e-3);
    step.once();
    simulated::wait_for_device(0);
  }
  EXPECT_LE(step.scaler.get_scale(), 0x1p14);
  EXPECT_THAT(step.cost().small, ElementsAreArray(clip_small + check + update + skips));
}

TEST(StepCostsOf, SkipsAreCountedByOneLaunchInEachIteration) {
  SKIP_WITHOUT(at::kPrivateUse1);
  Step step(kind_named("sgd").fused, 2, false);
  for (int i = 0; i < 40; ++i) {
    const Names small = step.cost().small;
    EXPECT_EQ(std::count(small.begin(), small.end(), "addcmul"), 1) << i;
    EXPECT_LE(small.size(), 6U) << i;
  }
  EXPECT_EQ(step.scaler.skips_in_a_row(), 0);
  for (const Tensor& p : step.params) p.mutable_grad().fill_(std::nan(""));
  for (int i = 1; i <= 70; ++i) {
    step.once();
    if (i % 10 == 0) {
      EXPECT_EQ(step.scaler.skips_in_a_row(), i);
    }
  }
  EXPECT_EQ(step.scaler.state_dict().scale, 1024. / std::ldexp(1., 70));
  for (const Tensor& p : step.params) p.mutable_grad().fill_(1e-30);
  step.once();
  EXPECT_EQ(step.scaler.skips_in_a_row(), 0);
}

TEST(StepCostsOf, ALongRunOfSkipsIsReportedWithoutAWaitEagerOrReplayed) {
  SKIP_WITHOUT(at::kPrivateUse1);
  for (const auto& options :
       {torchamp::GradScalerOptions::skip_non_finite(), torchamp::GradScalerOptions::megatron()}) {
    for (const bool replays : {false, true}) {
      Step step(kind_named("adam").fused, 2, /*clips=*/false, options);
      if (replays) step.capture();
      const CollectedWarnings warnings;
      int64_t copies = 0, waits = 0;
      const auto iterate = [&](double gradient, int times) {
        for (const Tensor& p : step.params) p.mutable_grad().fill_(gradient);
        for (int i = 0; i < times; ++i) {
          const Cost cost = step.cost();
          copies += cost.totals.device_to_host;
          waits += cost.totals.waits;
          simulated::wait_for_device(0);
        }
      };
      iterate(1e-3, 60);
      iterate(std::nan(""), 99);
      iterate(1e-3, 1);
      EXPECT_THAT(warnings.text(), testing::Not(testing::HasSubstr("infs or NaNs")));
      iterate(std::nan(""), 140);
      EXPECT_THAT(warnings.text(), testing::HasSubstr("infs or NaNs in the last 1")) << replays;
      if (!options.dynamic) {
        EXPECT_LE(copies, 300 / 32 + 1);
      }
      EXPECT_EQ(waits, 0);
    }
  }
}

TEST(StepCostsOf, AFusedStepReadsTheGradientsTwiceAndWritesThemOnce) {
  SKIP_WITHOUT(at::kPrivateUse1);
  Step step(kind_named("sgd").fused, 100, /*clips=*/false);
  const simulated::Totals totals = step.cost().totals;
  const int64_t numbers = 3 * 4 * 100 + 128;  // the largest values, and what is not one of many
  EXPECT_GE(totals.bytes_read, 3 * step.bytes());  // by the check; with the parameters by the step
  EXPECT_LE(totals.bytes_read, 3 * step.bytes() + numbers);
  EXPECT_GE(totals.bytes_written, 2 * step.bytes());
  EXPECT_LE(totals.bytes_written, 2 * step.bytes() + numbers);
}

/// Bytes for each parameter, as CUDA's kernels move them: read, and written.
struct Moved {
  double read, written;
  bool operator==(const Moved&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Moved& moved) {
  return out << moved.read << " + " << moved.written;
}

TEST(StepCostsOf, AFusedStepReadsTheGradientsOnceMoreForCheckAndNormTogether) {
  SKIP_WITHOUT(at::kPrivateUse1);
  const simulated::Facts like_cuda(simulated::facts_like(at::kCUDA));
  const OneThread one_thread;
  const int64_t n = 1 << 16;
  enum class How { without_scaler, scaled, clipped, unscaled_and_clipped };
  using torchamp::MasterStorage;
  const auto moved = [&](How how, std::optional<MasterStorage> masters, bool is_plain = false) {
    torch::nn::Linear model(torch::nn::LinearOptions(512, n / 512).bias(false));
    to_device(model, sim0);
    std::optional<torchamp::MasterWeights> weights;
    if (masters) {
      weights.emplace(model,
                      torchamp::MasterWeightsOptions{.dtype = at::kBFloat16, .storage = *masters});
    }
    const Groups groups{OptimizerParamGroup(masters ? weights->parameters() : model->parameters())};
    std::unique_ptr<Optimizer> optimizer = kind_named("adamw").fused(groups);
    if (is_plain) optimizer = std::make_unique<Idle>(groups);
    GradScaler scaler({.init_scale = 1024.});
    scaler.scale(torch::ones({}, at::device(sim0)));
    const auto step = [&] {
      model->weight.mutable_grad() = torch::ones_like(model->weight);
      const simulated::Counts counts;
      if (masters) weights->take_gradients();
      if (how == How::unscaled_and_clipped) scaler.unscale_(*optimizer);
      if (how >= How::clipped) torchamp::clip_grad_norm_(scaler, *optimizer, 0.1);
      if (how == How::without_scaler) {
        optimizer->step();
      } else {
        scaler.step(*optimizer);
        scaler.update();
      }
      if (masters) weights->copy_to_model();
      const simulated::Totals totals = counts.now();
      optimizer->zero_grad();
      const auto each = [&](int64_t bytes) {
        return std::round(static_cast<double>(bytes) / static_cast<double>(n) * 100.) / 100.;
      };
      return Moved{each(totals.bytes_read), each(totals.bytes_written)};
    };
    (void)step();
    return step();
  };
  const auto full = MasterStorage::full, split = MasterStorage::split;
  const Moved bare{16, 12};  // parameters, gradients and two moments; all but the gradients
  EXPECT_EQ(moved(How::without_scaler, {}), bare);
  // The check or the norm reads the gradients; ATen's kernel stores those that it divides.
  EXPECT_EQ(moved(How::scaled, {}), (Moved{bare.read + 4, bare.written + 4}));
  EXPECT_EQ(moved(How::clipped, {}), (Moved{bare.read + 4, bare.written + 4}));
  // The quotients are checked, since the scale may be below 1.
  EXPECT_EQ(moved(How::unscaled_and_clipped, {}), (Moved{bare.read + 12, bare.written + 8}));
  // An optimizer of LibTorch's, without its own step: the gradients are divided, and clipped.
  EXPECT_EQ(moved(How::scaled, {}, true), (Moved{4, 4}));
  EXPECT_EQ(moved(How::clipped, {}, true), (Moved{12, 8}));
  // Gradients in bf16 become fp32, and masters bf16.
  const Moved masters{bare.read + 2 + 4, bare.written + 4 + 2};
  EXPECT_EQ(moved(How::without_scaler, full), masters);
  EXPECT_EQ(moved(How::scaled, full), (Moved{masters.read + 4, masters.written + 4}));
  EXPECT_EQ(moved(How::clipped, full), (Moved{masters.read + 4, masters.written + 4}));
  // A device joins and splits them by ops of ATen's, a pass or two each; one more looks at the
  // flag.
  EXPECT_EQ(moved(How::without_scaler, split), (Moved{55, 45}));
  EXPECT_EQ(moved(How::scaled, split), (Moved{59, 49}));
  EXPECT_EQ(moved(How::clipped, split), (Moved{59, 49}));
}

TEST(StepCostsOf, APlainStepWaitsOnceAndLaunchesTheSameForAnyNumberOfParameters) {
  SKIP_WITHOUT(at::kPrivateUse1);
  const auto make = [](const Groups& groups) { return std::make_unique<Idle>(groups); };
  for (const int params : {10, 100, 1000}) {
    Step step(make, params, /*clips=*/false);
    const Cost cost = step.cost();
    // The flag, the inverse of the scale, and the flag as a number of the host.
    EXPECT_THAT(cost.small, ElementsAreArray(Names{"zero_", "fill_"})) << params;
    EXPECT_THAT(cost.large, ElementsAreArray(look)) << params;
    EXPECT_EQ(cost.totals.waits, 1);
    EXPECT_EQ(cost.totals.device_to_host, 1);

    const Cost clipped = Step(make, params, /*clips=*/true).cost();
    EXPECT_LE(clipped.small.size(), 10U) << testing::PrintToString(clipped.small);
    EXPECT_THAT(clipped.large, ElementsAreArray(look + Names{"_foreach_norm"} + look)) << params;
    EXPECT_EQ(clipped.totals.waits, 1);
  }
}

}  // namespace
