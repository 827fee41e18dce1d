// SPDX-License-Identifier: BSD-3-Clause
// Every piece of a scaler's state, after each way in which it may be set: by updates, a load, a
// file, a value set by hand, a setter, on the host and on a device.
#include <torchamp/torchamp.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/clip_grad.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "support/expect_error.h"
#include "support/grad_scaler_on.h"
#include "support/non_finite.h"
#include "support/on_device.h"
#include "support/optimizers.h"
#include "support/tolerances.h"
#include "support/warnings.h"

namespace {

using grad_scaler_on::GradScalerOn;
using torchamp::AtLimit;
using torchamp::GradScaler;
using torchamp::GradScalerOptions;
using torchamp::GradScalerState;
using torchamp::ScaleLimit;
using torchamp::StepResult;

std::string file_of(const GradScaler& scaler) {
  std::ostringstream file;
  torch::save(scaler, file);
  return file.str();
}
void load_file(GradScaler& scaler, const std::string& file) {
  std::istringstream in(file);
  torch::load(scaler, in);
}

/// What the guide says of an update, in plain arithmetic.
struct PlainState {
  explicit PlainState(const GradScalerOptions& given) : options(given) {}

  void iterate(bool bad) {
    skips = bad ? skips + 1 : 0;
    if (!options.dynamic) return;
    if (bad) {
      tracker = options.growth_tracker_start;
      credit = std::max<int64_t>(credit - 1, 0);
      if (credit > 0) return;
      scale = std::max(scale * options.backoff_factor, options.min_scale);
      return;
    }
    if (++tracker < options.growth_interval) return;
    scale = std::min(scale * options.growth_factor, options.max_scale);
    tracker = 0;
    refill();
  }
  void load(const GradScalerState& state) {
    scale = state.scale;
    options.growth_factor = state.growth_factor;
    options.backoff_factor = state.backoff_factor;
    options.growth_interval = state.growth_interval;
    tracker = std::min(state.growth_tracker, state.growth_interval - 1);
    skips = 0;
    refill();
  }
  void set_interval(int64_t interval) {
    options.growth_interval = interval;
    tracker = std::min(tracker, interval - 1);
  }
  void refill() { credit = options.hysteresis; }

  GradScalerOptions options;
  double scale = options.init_scale;
  int64_t tracker = options.growth_tracker_start;
  int64_t credit = options.hysteresis;
  int64_t skips = 0;
};

struct KeptResult {
  StepResult result;
  bool bad;
  double scale;
  int64_t skips;

  void expect_right() const {
    EXPECT_EQ(result.stepped(), !bad);
    EXPECT_EQ(result.scale(), scale);
    EXPECT_EQ(result.skips_in_a_row(), skips);
  }
};

/// A scaler and its plain model, side by side.
class ScalerPair {
 public:
  ScalerPair(GradScalerOptions options, at::TensorOptions where, bool rule_on_device)
      : plain(options), where_(where), rule_on_device_(rule_on_device) {
    renew();
    weight_ = at::zeros({2}, where).requires_grad_();
    ordinary_ = plain_or_fused_sgd({weight_}, false, 0.);
    fused_ = plain_or_fused_sgd({weight_}, true, 0.);
  }

  void iterate(bool bad, bool with_fused) {
    scaler->scale(at::ones({}, where_));
    weight_.mutable_grad() = at::full({2}, bad ? kInf : 1.F, where_);
    StepResult result = scaler->step(with_fused ? *fused_ : *ordinary_);
    const double scale = plain.scale;
    plain.iterate(bad);
    kept.push_back({std::move(result), bad, scale, bad ? plain.skips : 0});
    scaler->update();
  }
  /// Steps, and ends the iteration by a scale set by hand.
  void set_scale(double scale, bool by_tensor, bool steps, bool bad) {
    if (steps) {
      scaler->scale(at::ones({}, where_));
      weight_.mutable_grad() = at::full({2}, bad ? kInf : 1.F, where_);
      kept.push_back({scaler->step(*fused_), bad, plain.scale, bad ? plain.skips + 1 : 0});
    }
    by_tensor ? scaler->update(at::full({}, scale, where_)) : scaler->update(scale);
    plain.scale = scale;
  }
  /// Goes on in another scaler.
  void go_through_a_file() {
    const std::string file = file_of(*scaler);
    renew();
    load_file(*scaler, file);
  }

  void expect_same() const {
    EXPECT_EQ(scaler->get_scale(), plain.scale);
    EXPECT_EQ(scaler->scale_tensor().item<double>(), plain.scale);
    EXPECT_EQ(scaler->skips_in_a_row(), plain.skips);
    const GradScalerState state = scaler->state_dict();
    EXPECT_EQ(state,
              (GradScalerState{plain.scale, plain.options.growth_factor,
                               plain.options.backoff_factor, plain.options.growth_interval,
                               plain.options.dynamic ? plain.tracker : state.growth_tracker}));
  }

  PlainState plain;
  std::unique_ptr<GradScaler> scaler;
  std::vector<KeptResult> kept;

 private:
  void renew() {
    scaler = std::make_unique<GradScaler>(plain.options);
    scaler->scale(at::ones({}, where_));
    if (rule_on_device_ && host_knows(*scaler)) move_to_device(*scaler);
  }

  at::TensorOptions where_;
  bool rule_on_device_;
  at::Tensor weight_;
  std::unique_ptr<torch::optim::Optimizer> ordinary_, fused_;
};

std::vector<GradScalerOptions> all_options() {
  const GradScalerOptions limits{
      .init_scale = 1024., .growth_interval = 4, .min_scale = 4., .max_scale = 65536.};
  return {{.init_scale = 1024., .growth_interval = 3},
          limits,
          {.init_scale = 64., .growth_interval = 5, .hysteresis = 2},
          {.init_scale = 64., .growth_interval = 4, .hysteresis = 3, .growth_tracker_start = -1},
          {.init_scale = 64., .growth_interval = 6, .hysteresis = 3},
          {.init_scale = 64., .dynamic = false}};
}

}  // namespace

TEST_P(GradScalerOn, WalksAsItsPlainModelWhateverSetsItsState) {
  std::mt19937 random(7);
  const auto chance = [&](unsigned of) { return random() % of == 0; };
  for (GradScalerOptions options : all_options()) {
    options.at_min_scale = AtLimit::keep_going;
    ScalerPair pair(options, this->options(), GetParam().rule_on_device);
    for (int i = 0; i < 80 && !HasFailure(); ++i) {
      SCOPED_TRACE(c10::str("options of hysteresis ", options.hysteresis, ", call ", i));
      const double scale = std::exp2(2 + static_cast<double>(random() % 10));
      const auto interval = static_cast<int64_t>(1 + random() % 6);
      switch (random() % 12) {
        case 0:
          pair.set_scale(scale, chance(2), chance(2), chance(2));
          break;
        case 1:
          pair.plain.set_interval(interval);
          pair.scaler->set_growth_interval(interval);
          break;
        case 2: {
          const GradScalerState state{scale, chance(2) ? 2. : 4., chance(2) ? 0.5 : 0.25, interval,
                                      static_cast<int64_t>(random() % 9)};
          pair.plain.load(state);
          pair.scaler->load_state_dict(state);
          break;
        }
        case 3:
          pair.go_through_a_file();
          break;
        default:
          pair.iterate(chance(3), chance(2));
      }
      if (chance(3)) pair.expect_same();
      if (chance(3) && !pair.kept.empty()) pair.kept[random() % pair.kept.size()].expect_right();
    }
    pair.expect_same();
    for (const KeptResult& one : pair.kept) one.expect_right();
  }
}

TEST_P(GradScalerOn, GrowsAfterTheNextGoodIterationIfALoadedTrackerIsPastTheInterval) {
  for (const int64_t tracker : {2, 3, 4, 100}) {
    GradScaler scaler({.init_scale = 16.});
    start(scaler);
    auto optimizer = sgd({tensor({1}).requires_grad_()}, 0.);
    scaler.load_state_dict({4., 2., 0.5, 3, tracker});
    EXPECT_EQ(scaler.state_dict().growth_tracker, 2);
    iterate(scaler, optimizer, 1);
    EXPECT_EQ(scaler.get_scale(), 8.) << tracker;
  }
}

/// Also if the device counts them in another way because of an option.
TEST_P(GradScalerOn, CountsSkipsAnewAfterALoadAndOnFromAFile) {
  for (const int64_t most : {0, 1000}) {
    for (const bool fused : {false, true}) {
      GradScaler scaler({.max_skips_in_a_row = most});
      start(scaler);
      const at::Tensor w = tensor({1}).requires_grad_();
      const auto optimizer = plain_or_fused_sgd({w}, fused, 0.);
      for (int i = 0; i < 3; ++i) iterate(scaler, *optimizer, kInf);
      const std::string file = file_of(scaler);
      scaler.load_state_dict(scaler.state_dict());
      EXPECT_EQ(scaler.skips_in_a_row(), 0);
      iterate(scaler, *optimizer, kInf);
      EXPECT_EQ(scaler.skips_in_a_row(), 1);
      load_file(scaler, file);
      EXPECT_EQ(scaler.skips_in_a_row(), 3);
      iterate(scaler, *optimizer, kInf);
      EXPECT_EQ(scaler.skips_in_a_row(), 4);
      iterate(scaler, *optimizer, 1);
      EXPECT_EQ(scaler.skips_in_a_row(), 0);
    }
  }
}

TEST_P(GradScalerOn, KeepsTheSkipsIfTheScaleIsSetByHand) {
  GradScaler scaler;
  start(scaler);
  const at::Tensor w = tensor({1}).requires_grad_();
  torchamp::FusedSGD optimizer({w}, torch::optim::SGDOptions(0.));
  iterate(scaler, optimizer, kInf);
  scaler.update(8.);
  EXPECT_EQ(scaler.skips_in_a_row(), 1);
  iterate(scaler, optimizer, kInf);
  scaler.update(number(16));
  EXPECT_EQ(scaler.skips_in_a_row(), 2);
  iterate(scaler, optimizer, kInf);
  EXPECT_EQ(scaler.skips_in_a_row(), 3);
  EXPECT_EQ(scaler.get_scale(), 8.);
}

TEST_P(GradScalerOn, HasItsHysteresisBackAfterAGrowthThatAShorterIntervalBrings) {
  GradScaler scaler({.init_scale = 64., .growth_interval = 10, .hysteresis = 2});
  start(scaler);
  auto optimizer = sgd({tensor({1}).requires_grad_()}, 0.);
  iterate(scaler, optimizer, kInf);
  EXPECT_EQ(scaler.get_scale(), 64.) << "the first one is forgiven";
  for (int i = 0; i < 5; ++i) iterate(scaler, optimizer, 1);
  scaler.set_growth_interval(3);
  iterate(scaler, optimizer, 1);
  EXPECT_EQ(scaler.get_scale(), 128.);
  iterate(scaler, optimizer, kInf);
  EXPECT_EQ(scaler.get_scale(), 128.) << "forgiven again";
  iterate(scaler, optimizer, kInf);
  EXPECT_EQ(scaler.get_scale(), 64.);
}

TEST_P(GradScalerOn, HasItsHysteresisBackAfterALoad) {
  GradScaler scaler({.init_scale = 64., .growth_interval = 4, .hysteresis = 2});
  start(scaler);
  auto optimizer = sgd({tensor({1}).requires_grad_()}, 0.);
  for (int i = 0; i < 2; ++i) {
    iterate(scaler, optimizer, kInf);
    EXPECT_EQ(scaler.get_scale(), 64.);
    iterate(scaler, optimizer, 1);
    scaler.load_state_dict({64., 2., 0.5, 4, 2});
  }
  iterate(scaler, optimizer, kInf);
  iterate(scaler, optimizer, kInf);
  EXPECT_EQ(scaler.get_scale(), 32.);
  for (int i = 0; i < 4; ++i) iterate(scaler, optimizer, 1);
  EXPECT_EQ(scaler.get_scale(), 64.);
  iterate(scaler, optimizer, kInf);
  EXPECT_EQ(scaler.get_scale(), 64.);
}

TEST_P(GradScalerOn, LetsResultsKeepTheirScaleAndSkipsWhateverSetsTheScale) {
  using Set = std::function<void(GradScaler&)>;
  const std::string file = [] {
    GradScaler other({.init_scale = 2.});
    return file_of(other);
  }();
  const std::pair<const char*, Set> ways[] = {
      {"update()", [](GradScaler& s) { s.update(); }},
      {"a number", [](GradScaler& s) { s.update(2.); }},
      {"a tensor", [this](GradScaler& s) { s.update(number(2)); }},
      {"a state",
       [](GradScaler& s) {
         s.load_state_dict({2., 2., 0.5, 2000, 0});
       }},
      {"a file", [&](GradScaler& s) { load_file(s, file); }}};
  for (const auto& [name, set] : ways) {
    for (const bool bad : {false, true}) {
      SCOPED_TRACE(c10::str(name, bad ? " bad" : " good"));
      GradScaler scaler({.init_scale = 16., .growth_interval = 1});
      start(scaler);
      const at::Tensor w = tensor({1}).requires_grad_();
      torchamp::FusedSGD optimizer({w}, torch::optim::SGDOptions(0.));
      iterate(scaler, optimizer, kInf);
      w.mutable_grad() = tensor({bad ? kInf : 1.F});
      const StepResult result = scaler.step(optimizer);
      set(scaler);
      EXPECT_EQ(result.scale(), 8.);
      EXPECT_EQ(result.stepped(), !bad);
      EXPECT_EQ(result.skips_in_a_row(), bad ? 2 : 0);
    }
  }
}

namespace {

/// Brings a scaler that has used a larger scale to `scale`.
struct WayToAScale {
  const char* name;
  std::function<void(GradScaler&, double scale)> go;
};

std::vector<WayToAScale> ways_to_a_scale(const at::TensorOptions& options) {
  return {
      {"a number", [](GradScaler& s, double scale) { s.update(scale); }},
      {"a tensor", [=](GradScaler& s, double scale) { s.update(at::full({}, scale, options)); }},
      {"a state",
       [](GradScaler& s, double scale) {
         s.load_state_dict({scale, 2., 0.5, 2000, 0});
       }},
      {"a file", [](GradScaler& s, double scale) {
         load_file(s, file_of(GradScaler({.init_scale = scale})));
       }}};
}

}  // namespace

TEST_P(GradScalerOn, SeesAGradientThatUnscalingMakesInfiniteHoweverTheScaleCameBelowOne) {
  for (const WayToAScale& way : ways_to_a_scale(options())) {
    for (const bool fused : {false, true}) {
      SCOPED_TRACE(c10::str(way.name, fused ? ", fused" : ""));
      GradScaler scaler({.init_scale = 4096.});
      start(scaler);
      const at::Tensor w = tensor({0}).requires_grad_();
      const auto optimizer = plain_or_fused_sgd({w}, fused, 1e-30);
      iterate(scaler, *optimizer, 1);
      way.go(scaler, 0.25);
      scaler.scale(number(1));
      w.mutable_grad() = tensor({1e38F});
      EXPECT_FALSE(scaler.step(*optimizer));
      EXPECT_TRUE(w.isfinite().all().item<bool>());
      scaler.update();
      EXPECT_EQ(scaler.get_scale(), 0.125);
    }
  }
}

TEST_P(GradScalerOn, BacksOffFromAScaleAtWhichFp32CannotHoldAClipHoweverItCameThere) {
  for (const WayToAScale& way : ways_to_a_scale(options())) {
    SCOPED_TRACE(way.name);
    GradScaler scaler({.init_scale = 16.});
    start(scaler);
    const at::Tensor w = tensor({0}).requires_grad_();
    torchamp::FusedSGD optimizer({w}, torch::optim::SGDOptions(1.));
    way.go(scaler, 0x1p100);
    scaler.scale(number(1));
    w.mutable_grad() = tensor({0x1p120F});  // 2^20, once it is unscaled
    torchamp::clip_grad_norm_(scaler, optimizer, 0x1p-10);
    EXPECT_FALSE(scaler.step(optimizer));
    expect_close(w, tensor({0}));
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 0x1p99);
  }
}

TEST_P(GradScalerOn, CopiesAScaleThatStaysAtOneOnlyWhileItDoes) {
  for (const WayToAScale& way : ways_to_a_scale(options())) {
    SCOPED_TRACE(way.name);
    GradScaler scaler(GradScalerOptions::skip_non_finite());
    start(scaler);
    const at::Tensor w = tensor({0}).requires_grad_();
    torchamp::FusedSGD optimizer({w}, torch::optim::SGDOptions(1.));
    way.go(scaler, 8.);
    const at::Tensor scaled = scaler.scale(number(3));
    EXPECT_EQ(scaled.item<float>(), 24.F);
    w.mutable_grad() = tensor({8});
    EXPECT_TRUE(scaler.step(optimizer));
    expect_close(w, tensor({-1}));
    scaler.update();
    way.go(scaler, 1.);
    EXPECT_EQ(scaler.scale(number(3)).item<float>(), 3.F);
    w.mutable_grad() = tensor({2});
    EXPECT_TRUE(scaler.step(optimizer));
    expect_close(w, tensor({-3}));
  }
}

TEST_P(GradScalerOn, TakesTheNearestLimitForATensorThatIsNoScale) {
  if (GetParam().device == at::kCPU) GTEST_SKIP() << "an error there, as the host can read it";
  GradScaler scaler({.init_scale = 64., .min_scale = 4., .max_scale = 1024.});
  start(scaler);
  for (const auto& [given, expected] :
       {std::pair(1e9, 1024.), std::pair(1., 4.), std::pair(-HUGE_VAL, 4.),
        std::pair(std::nan(""), 4.), std::pair(HUGE_VAL, 1024.), std::pair(32., 32.)}) {
    scaler.update(number(given));
    EXPECT_EQ(scaler.get_scale(), expected) << given;
    EXPECT_EQ(scaler.scale(number(1)).item<double>(), expected) << given;
  }
}

TEST_P(GradScalerOn, HasItsOwnHysteresisIfAFileHoldsMore) {
  GradScaler first({.init_scale = 64., .hysteresis = 5}), second({.hysteresis = 2});
  start(first);
  start(second);
  load_file(second, file_of(first));
  auto optimizer = sgd({tensor({1}).requires_grad_()}, 0.);
  iterate(second, optimizer, kInf);
  EXPECT_EQ(second.get_scale(), 64.);
  iterate(second, optimizer, kInf);
  EXPECT_EQ(second.get_scale(), 32.);
}

// ---- Limits and warnings ------------------------------------------------------------------------

TEST_P(GradScalerOn, ReportsNoLimitThatWasMetBeforeALoad) {
  std::vector<ScaleLimit> calls;
  GradScaler scaler({.max_skips_in_a_row = 1,
                     .at_max_skips = AtLimit::call,
                     .on_limit = [&](const ScaleLimit& limit) { calls.push_back(limit); }});
  start(scaler);
  const at::Tensor w = tensor({1}).requires_grad_();
  torchamp::FusedSGD optimizer({w}, torch::optim::SGDOptions(0.));
  const bool late = !host_knows(scaler) || GetParam().device != at::kCPU;
  for (int load = 0; load < 3; ++load) {
    iterate(scaler, optimizer, kInf);
    EXPECT_EQ(scaler.skips_in_a_row(), 1);  // waits, so that the news has arrived
    const std::size_t before = calls.size();
    EXPECT_EQ(before, late ? 0U : static_cast<std::size_t>(load) + 1);
    scaler.load_state_dict({64., 2., 0.5, 2000, 0});
    iterate(scaler, optimizer, 1);
    iterate(scaler, optimizer, 1);
    EXPECT_EQ(calls.size(), before);
  }
  iterate(scaler, optimizer, kInf);
  EXPECT_EQ(scaler.skips_in_a_row(), 1);
  iterate(scaler, optimizer, 1);
  EXPECT_EQ(calls.size(), late ? 1U : 4U) << "the first skip after a load is news";
}

TEST_P(GradScalerOn, CountsToAHundredSkipsAnewAfterALoad) {
  GradScaler scaler(GradScalerOptions::fixed(2.));
  start(scaler);
  const at::Tensor w = tensor({1}).requires_grad_();
  torchamp::FusedSGD optimizer({w}, torch::optim::SGDOptions(0.));
  const CollectedWarnings warnings;
  for (int load = 0; load < 2; ++load) {
    for (int i = 0; i < 99; ++i) iterate(scaler, optimizer, kInf);
    scaler.load_state_dict(scaler.state_dict());
  }
  for (int i = 0; i < 99; ++i) iterate(scaler, optimizer, kInf);
  EXPECT_EQ(warnings.text(), "");
  for (int i = 0; i < 64; ++i) iterate(scaler, optimizer, kInf);
  EXPECT_THAT(warnings.text(), ::testing::HasSubstr("gradients held infs or NaNs in the last 1"));
}

// ---- A scaler's records in an iteration ---------------------------------------------------------

namespace {

/// One iteration that does not ask for the scale; `scaled`: as it should be.
void step_without_asking(GradScaler& scaler, torch::optim::Optimizer& optimizer,
                         const at::Tensor& loss, bool scaled = true) {
  optimizer.zero_grad();
  (scaled ? scaler.scale(loss) : loss).backward();
  scaler.step(optimizer);
}

}  // namespace

TEST_P(GradScalerOn, RefusesToScaleAnyOutputOfAListAgain) {
  GradScaler scaler({.init_scale = 4.});
  const at::Tensor w = tensor({1}).requires_grad_();
  for (const at::Tensor& loss : scaler.scale(at::TensorList{w.sum(), (w * 2).sum()})) {
    EXPECT_ERROR(scaler.scale(loss), "has been scaled already");
  }
}

TEST_P(GradScalerOn, ClearsItsRecordsAtEachEndOfAnIteration) {
  using End = std::function<void(GradScaler&)>;
  const End ends[] = {[](GradScaler& s) { s.update(); }, [](GradScaler& s) { s.update(4.); },
                      [this](GradScaler& s) { s.update(number(4)); }};
  for (const End& end : ends) {
    GradScaler scaler({.init_scale = 4.});
    start(scaler);
    const at::Tensor w = tensor({1}).requires_grad_();
    torchamp::FusedSGD optimizer({w}, torch::optim::SGDOptions(0.));
    scaler.scale((w * 2).sum()).backward();
    scaler.unscale_(optimizer);
    EXPECT_TRUE(scaler.is_unscaled(optimizer));
    end(scaler);
    EXPECT_FALSE(scaler.is_unscaled(optimizer));
    EXPECT_FALSE(scaler.is_stepped(optimizer));
    EXPECT_FALSE(scaler.found_inf(optimizer).defined());
    EXPECT_ERROR(scaler.update(), "no optimizer has been stepped or unscaled");
    optimizer.zero_grad();
    scaler.scale((w * 2).sum()).backward();
    scaler.unscale_(optimizer);
    expect_close(w.grad(), tensor({2}));
    EXPECT_TRUE(scaler.step(optimizer));
    end(scaler);
    // Nor is anything left of the scale() that the iteration had.
    const CollectedWarnings warnings;
    step_without_asking(scaler, optimizer, (w * 2).sum(), /*scaled=*/false);
    EXPECT_THAT(warnings.text(),
                ::testing::HasSubstr("nothing was scaled since the last update()"));
  }
}

TEST_P(GradScalerOn, WarnsOfALossThatIsScaledInVainAfterAnIterationThatWasRight) {
  GradScaler scaler({.init_scale = 4.});
  start(scaler);
  const at::Tensor w = tensor({1}).requires_grad_();
  torchamp::FusedSGD optimizer({w}, torch::optim::SGDOptions(0.));
  step_without_asking(scaler, optimizer, w.sum());
  scaler.update();
  const CollectedWarnings warnings;
  const at::Tensor scaled = scaler.scale(w.sum());
  step_without_asking(scaler, optimizer, w.sum(), /*scaled=*/false);
  EXPECT_THAT(warnings.text(), ::testing::HasSubstr("no backward() of what scale() returned"));
}

TEST_P(GradScalerOn, ForgetsAClipInVainWithItsIteration) {
  GradScaler scaler({.init_scale = 4.});
  start(scaler);
  const at::Tensor w = tensor({1}).requires_grad_(), late = tensor({1}).requires_grad_();
  torchamp::FusedSGD optimizer({w}, torch::optim::SGDOptions(0.)),
      second({late}, torch::optim::SGDOptions(0.));
  const CollectedWarnings warnings;
  step_without_asking(scaler, optimizer, w.sum());
  torchamp::clip_grad_norm_({late}, 1.);  // it has no gradient in this iteration
  scaler.update();
  step_without_asking(scaler, optimizer, (w + late).sum());
  scaler.step(second);
  EXPECT_EQ(warnings.text(), "");
}

TEST_P(GradScalerOn, AgreesAnewAfterDiscard) {
  int calls = 0;
  GradScaler scaler({.init_scale = 4., .agree_found_inf = [&](at::Tensor&) { ++calls; }});
  start(scaler);
  for (const bool fused : {false, true}) {
    const auto optimizer = plain_or_fused_sgd({parameter_with(tensor({kInf}))}, fused, 0.);
    calls = 0;
    EXPECT_FALSE(scaler.step(*optimizer));
    scaler.discard(*optimizer);
    optimizer->param_groups()[0].params()[0].mutable_grad() = tensor({1});
    EXPECT_TRUE(scaler.step(*optimizer));
    EXPECT_EQ(calls, 2);
    scaler.update();
  }
}

TEST_P(GradScalerOn, LooksAnewAtTheGradientsOfAFusedStepThatFailed) {
  bool fails = true;
  GradScaler scaler({.init_scale = 4., .agree_found_inf = [&](at::Tensor&) {
                       TORCH_CHECK(!std::exchange(fails, false), "out of luck");
                     }});
  start(scaler);
  const at::Tensor w = parameter_with(tensor({kInf}));
  PlainScaledSGD optimizer({w}, torch::optim::SGDOptions(1.));
  EXPECT_ERROR(scaler.step(optimizer), "out of luck");
  w.mutable_grad() = tensor({4});
  EXPECT_TRUE(scaler.step(optimizer));
  expect_close(w, tensor({-1}));
}

TEST_P(GradScalerOn, WarnsOfAMissingScaleInAnIterationAfterOneThatAskedForTheScale) {
  GradScaler scaler({.init_scale = 4.});
  start(scaler);
  const at::Tensor w = tensor({1}).requires_grad_();
  torchamp::FusedSGD optimizer({w}, torch::optim::SGDOptions(0.));
  step_without_asking(scaler, optimizer, w.sum());
  scaler.update();
  const CollectedWarnings warnings;
  for (const bool asks : {true, false}) {
    if (asks) {
      EXPECT_EQ(scaler.get_scale(), 4.);
    }
    step_without_asking(scaler, optimizer, w.sum(), /*scaled=*/false);
    scaler.update();
    EXPECT_EQ(warnings.text().empty(), asks);
  }
}
