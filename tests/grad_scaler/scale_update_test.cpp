// SPDX-License-Identifier: BSD-3-Clause
// The rules by which other systems change the scale, each stated here once more, in its own terms
// and as plainly as possible, against the one update of torchamp on the host and on a device.
#include <torchamp/detail/scaler/loss_scale.h>

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/detail/graph/captured_scale.h>
#include <torchamp/predictive_scale.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "support/call_counter.h"
#include "support/devices.h"

using torchamp::AtLimit;
using torchamp::GradScalerOptions;
using torchamp::HysteresisRefill;
using torchamp::detail::after_update;
using torchamp::detail::BoundCopies;
using torchamp::detail::LossScale;
using torchamp::detail::ScaleBound;
using torchamp::detail::ScaleLimits;
using torchamp::detail::ScaleMemory;

namespace {

/// A published update: the scale, and whether the latest iteration was refused with an error that
/// left everything as it was.
struct Published {
  explicit Published(double init_scale) : scale(init_scale) {}
  virtual ~Published() = default;
  virtual void iterate(bool bad) = 0;

  double scale;
  bool refused = false;
};

/// torch/amp/grad_scaler.py and ATen's _amp_update_scale_.
struct Torch : Published {
  void iterate(bool bad) override {
    good_in_a_row = bad ? 0 : good_in_a_row + 1;
    if (bad) scale *= 0.5;
    if (good_in_a_row == interval) {
      scale *= 2;
      good_in_a_row = 0;
    }
  }
  explicit Torch(int growth_interval) : Published(65536.), interval(growth_interval) {}
  int interval;
  int good_in_a_row = 0;
};

/// megatron/core/optimizer/grad_scaler.py, DynamicGradScaler.
struct Megatron : Published {
  void iterate(bool bad) override {
    if (bad) {
      good = 0;
      --hysteresis_left;
      if (hysteresis_left <= 0) scale = std::max(scale * 0.5, 1.);
    } else if (++good == interval) {
      good = 0;
      hysteresis_left = 2;
      scale *= 2;
    }
  }
  explicit Megatron(int growth_interval) : Published(4294967296.), interval(growth_interval) {}
  int interval;
  int good = 0;
  int hysteresis_left = 2;
};

/// deepspeed/runtime/fp16/loss_scaler.py, DynamicLossScaler: iterations are numbered from 0, and
/// the last bad one is -1 at first.
struct DeepSpeed : Published {
  void iterate(bool bad) override {
    refused = false;
    if (bad) {
      if (hysteresis_left == 1) {
        if (scale == 1.) {
          refused = true;
          return;
        }
        scale = std::max(scale / 2, 1.);
      } else {
        --hysteresis_left;
      }
      last_bad = iteration;
    } else {
      if (consecutive) hysteresis_left = 2;
      const int stable = iteration - last_bad - 1;
      if (stable > 0 && stable % window == 0) {
        if (!consecutive) hysteresis_left = 2;
        scale *= 2;
      }
    }
    ++iteration;
  }
  explicit DeepSpeed(int scale_window, bool consecutive_hysteresis = false)
      : Published(65536.), window(scale_window), consecutive(consecutive_hysteresis) {}
  int window;
  bool consecutive;
  int iteration = 0;
  int last_bad = -1;
  int hysteresis_left = 2;
};

/// fairseq/optim/dynamic_loss_scaler.py, DynamicLossScaler.
struct Fairseq : Published {
  void iterate(bool bad) override {
    refused = false;
    if (!bad) {
      if ((iteration - last_bad) % window == 0) {
        scale *= 2;
        last_change = iteration;
      }
      ++iteration;
      return;
    }
    const double rate = (overflows + 1.) / (iteration - last_change);
    const bool lowers = rate >= tolerance;
    if (lowers && scale / 2 <= 1e-4) {
      refused = true;
      return;
    }
    last_bad = iteration;
    ++overflows;
    if (lowers) {
      scale /= 2;
      last_change = iteration;
      overflows = 0;
    }
    ++iteration;
  }
  explicit Fairseq(int scale_window, double scale_tolerance = 0.)
      : Published(32768.), window(scale_window), tolerance(scale_tolerance) {}
  int window;
  double tolerance;
  int iteration = 0;
  int last_bad = -1;
  int last_change = -1;
  int overflows = 0;
};

/// paddle.amp.GradScaler: bad iterations in a row, counted anew after each that lowers the scale.
struct Paddle : Published {
  void iterate(bool bad) override {
    if (bad) {
      good = 0;
      if (++bad_in_a_row == 2) {
        scale = std::max(scale * 0.5, 1.);
        bad_in_a_row = 0;
      }
    } else {
      bad_in_a_row = 0;
      if (++good == interval) {
        scale *= 2;
        good = 0;
      }
    }
  }
  explicit Paddle(int growth_interval) : Published(65536.), interval(growth_interval) {}
  int interval;
  int good = 0;
  int bad_in_a_row = 0;
};

GradScalerOptions with_interval(GradScalerOptions options, int64_t interval) {
  options.growth_interval = interval;
  return options;
}

struct Case {
  std::string name;
  GradScalerOptions options;
  std::unique_ptr<Published> published;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const int interval : {1, 2, 3, 7}) {
    const auto add = [&](std::string name, GradScalerOptions options, auto published) {
      all.push_back({name + " interval " + std::to_string(interval),
                     with_interval(std::move(options), interval), std::move(published)});
    };
    add("torch", GradScalerOptions::torch(), std::make_unique<Torch>(interval));
    add("megatron", GradScalerOptions::megatron(), std::make_unique<Megatron>(interval));
    add("deepspeed", GradScalerOptions::deepspeed(), std::make_unique<DeepSpeed>(interval));
    auto consecutive = GradScalerOptions::deepspeed();
    consecutive.hysteresis_refill = HysteresisRefill::good_step;
    add("deepspeed consecutive", consecutive, std::make_unique<DeepSpeed>(interval, true));
    add("fairseq", GradScalerOptions::fairseq(), std::make_unique<Fairseq>(interval));
    auto tolerant = GradScalerOptions::fairseq();
    tolerant.overflow_tolerance = 0.3;
    add("fairseq tolerant", tolerant, std::make_unique<Fairseq>(interval, 0.3));
    add("paddle",
        {.min_scale = 1.,
         .hysteresis = 2,
         .hysteresis_refill = HysteresisRefill::good_or_backed_off},
        std::make_unique<Paddle>(interval));
  }
  return all;
}

/// Runs of good and bad iterations that take the scale to its floor and back up.
std::vector<bool> iterations(std::mt19937::result_type seed, std::size_t count) {
  std::mt19937 random(seed);
  std::vector<bool> bad;
  while (bad.size() < count) {
    const bool kind = random() % 2 == 0;
    const std::size_t longest = random() % 8 == 0 ? 40 : 5;
    const std::size_t length = 1 + random() % longest;
    bad.insert(bad.end(), length, kind);
  }
  bad.resize(count);
  return bad;
}

}  // namespace

TEST(ScaleUpdate, IsTheKernelsOnlyWhereNoOptionSaysMore) {
  using torchamp::detail::is_torch_update;
  EXPECT_TRUE(is_torch_update({}));
  EXPECT_FALSE(is_torch_update({.dynamic = false}));
  EXPECT_FALSE(is_torch_update({.hysteresis = 2}));
  EXPECT_FALSE(is_torch_update({.overflow_tolerance = 0.1}));
  EXPECT_FALSE(is_torch_update({.growth_tracker_start = -1}));
  EXPECT_FALSE(is_torch_update(GradScalerOptions::predictive()));
}

TEST(ScaleUpdate, BringsWhatAFileHoldsWithinTheOptionsLimits) {
  const GradScalerOptions options{
      .growth_interval = 1, .min_scale = 4., .max_scale = 64., .hysteresis = 2};
  ScaleMemory<double> memory = torchamp::detail::initial_memory(options);
  memory.credit = 5.;
  EXPECT_EQ(after_update(options, memory, /*bad=*/true).credit, 2.);
  for (const auto& [scale, expected] : {std::pair(0.5, 4.), std::pair(1024., 64.)}) {
    memory.scale = scale;
    EXPECT_EQ(after_update(options, memory, /*bad=*/false).scale, expected);
  }
}

TEST(ScaleUpdate, CountsAnIterationThatIsForgivenAndChangesNothingElse) {
  GradScalerOptions options = GradScalerOptions::predictive();
  options.forgives_bad_losses = true;
  ScaleMemory<double> before = torchamp::detail::initial_memory(options);
  for (int i = 0; i < 3; ++i) before = after_update(options, before, /*bad=*/false, 1024.);
  const ScaleMemory<double> after = after_update(options, before, /*bad=*/true, HUGE_VAL);
  EXPECT_EQ(after.skips, 1.);
  EXPECT_EQ(after.since_change, before.since_change + 1.);
  EXPECT_EQ(after.scale, before.scale);
  EXPECT_EQ(after.growth_tracker, before.growth_tracker);
  EXPECT_EQ(after.credit, before.credit);
  EXPECT_EQ(after.overflows, before.overflows);
  EXPECT_EQ(after.of_rule, before.of_rule);
}

TEST(ScaleUpdate, FollowsThePublishedOnes) {
  for (Case& one : cases()) {
    SCOPED_TRACE(one.name);
    ScaleMemory<double> state = torchamp::detail::initial_memory(one.options);
    int refusals = 0;
    std::vector<bool> walk(45, true);  // down to any floor
    const std::vector<bool> rest = iterations(1, 2000);
    walk.insert(walk.end(), rest.begin(), rest.end());
    for (const bool bad : walk) {
      one.published->iterate(bad);
      // Theirs go on to infinity or 0.
      if (one.published->scale > 0x1p100 || one.published->scale < 0x1p-100) break;
      const ScaleMemory<double> after = after_update(one.options, state, bad);
      const bool refused = ScaleLimits::met(one.options, state, after).min_scale &&
                           one.options.at_min_scale == AtLimit::throw_error;
      ASSERT_EQ(refused, one.published->refused);
      refusals += refused;
      if (!refused) state = after;  // update() throws otherwise
      ASSERT_EQ(state.scale, one.published->scale);
    }
    EXPECT_EQ(refusals > 0, one.options.at_min_scale == AtLimit::throw_error);
  }
}

TEST(ScaleUpdate, FollowsTheTablesOfThePresets) {
  struct Row {
    std::string name;
    GradScalerOptions options;
    std::string iterations;   // . good, x bad
    std::vector<int> powers;  // of two: the scale after each
  };
  const Row table[] = {
      {"torch", GradScalerOptions::torch(), "...x..x...", {16, 16, 17, 16, 16, 16, 15, 15, 15, 16}},
      {"megatron spends its credit of two and has it back after growth",
       GradScalerOptions::megatron(),
       "x.x.x...xx",
       {32, 32, 31, 31, 30, 30, 30, 31, 31, 30}},
      {"megatron stays at its floor",
       [] {
         auto options = GradScalerOptions::megatron();
         options.init_scale = 4.;
         return options;
       }(),
       "xxxxx...",
       {2, 1, 0, 0, 0, 0, 0, 1}},
      {"deepspeed grows one iteration later after a bad one",
       GradScalerOptions::deepspeed(),
       "....x...xx....",
       {16, 16, 16, 17, 17, 17, 17, 17, 16, 15, 15, 15, 15, 16}},
      {"fairseq", GradScalerOptions::fairseq(), "x.x...", {14, 14, 13, 13, 13, 14}},
      {"fairseq with a tolerance of a third",
       [] {
         auto options = GradScalerOptions::fairseq();
         options.overflow_tolerance = 1. / 3.;
         return options;
       }(),
       ".....x..x.x",
       {15, 15, 16, 16, 16, 15, 15, 15, 14, 14, 13}},
  };
  for (Row row : table) {
    SCOPED_TRACE(row.name);
    row.options.growth_interval = 3;
    ScaleMemory<double> state = torchamp::detail::initial_memory(row.options);
    for (std::size_t i = 0; i < row.iterations.size(); ++i) {
      state = after_update(row.options, state, row.iterations[i] == 'x');
      EXPECT_EQ(state.scale, std::ldexp(1., row.powers[i])) << "iteration " << i;
    }
  }
}

TEST(ScaleUpdate, DoesTheSameOnADeviceAsOnTheHost) {
  std::mt19937 random(3);
  const auto one_of = [&](auto... values) {
    const double all[] = {static_cast<double>(values)...};
    return all[random() % std::size(all)];
  };
  for (int trial = 0; trial < 40; ++trial) {
    GradScalerOptions options{.init_scale = one_of(65536, 3, 1000),
                              .growth_factor = one_of(2, 1.1, 1e30),
                              .backoff_factor = one_of(0.5, 0.9, 1e-30),
                              .growth_interval = static_cast<int64_t>(one_of(1, 2, 5)),
                              .dynamic = one_of(0, 1, 1, 1) != 0,
                              .min_scale = one_of(0x1p-126, 0.5),
                              .max_scale = one_of(0x1p127, 1e5)};
    if (trial % 2 == 1) {
      options.hysteresis = static_cast<int64_t>(one_of(1, 2, 3, 70));
      options.hysteresis_refill = static_cast<HysteresisRefill>(random() % 3);
      options.overflow_tolerance = one_of(0, 0.3, 1);
      options.growth_tracker_start = static_cast<int64_t>(one_of(0, -1));
    }
    SCOPED_TRACE(c10::str("trial ", trial));
    ScaleMemory<double> host = torchamp::detail::initial_memory(options);
    LossScale device(options);
    device.create(at::kCPU);
    const torch::NoGradGuard no_grad;
    for (const bool bad : iterations(random(), 60)) {
      host = after_update(options, host, bad);
      device.advance(torch::full({}, bad ? 1.F : 0.F));
      ASSERT_EQ(device.host(), nullptr);
      const ScaleMemory<double> read = device.read();
      ASSERT_EQ(read.scale, host.scale);
      ASSERT_EQ(read.skips, host.skips);
      if (!options.dynamic) continue;
      ASSERT_EQ(read.growth_tracker, host.growth_tracker);
      if (torchamp::detail::is_torch_update(options)) continue;
      ASSERT_EQ(read.credit, host.credit);
      if (options.overflow_tolerance == 0.) continue;
      ASSERT_EQ(read.since_change, host.since_change);
      ASSERT_EQ(read.overflows, host.overflows);
    }
    EXPECT_EQ(device.inverse(at::kCPU).item<float>(), static_cast<float>(1. / host.scale));
  }
}

TEST(ScaleUpdate, GoesOnOnADeviceFromWhatAFileAndANewIntervalHaveSet) {
  std::mt19937 random(9);
  for (const auto refill : {HysteresisRefill::growth, HysteresisRefill::good_step,
                            HysteresisRefill::good_or_backed_off}) {
    GradScalerOptions options{.growth_interval = 7,
                              .min_scale = 1.,
                              .hysteresis = 3,
                              .hysteresis_refill = refill,
                              .growth_tracker_start = -1};
    LossScale device(options);
    device.create(at::kCPU);
    device.leave_host();
    ScaleMemory<double> host = torchamp::detail::initial_memory(options);
    for (int round = 0; round < 6; ++round) {
      host.scale = 1024.;
      host.credit = round % 4;
      host.growth_tracker = round % 3;
      device.set(host);
      options.growth_interval = 4 + round % 2;
      device.set_growth_interval(options.growth_interval);
      host.growth_tracker =
          std::min(host.growth_tracker, static_cast<double>(options.growth_interval - 1));
      for (const bool bad : iterations(random(), 30)) {
        host = after_update(options, host, bad);
        device.advance(torch::full({}, bad ? 1.F : 0.F));
        const ScaleMemory<double> read = device.read();
        ASSERT_EQ(read.scale, host.scale);
        ASSERT_EQ(read.credit, host.credit);
        ASSERT_EQ(read.growth_tracker, host.growth_tracker);
      }
    }
  }
}

TEST(ScaleUpdate, CountsALargeHysteresisOnADeviceExactly) {
  const GradScalerOptions options{.growth_interval = 50, .hysteresis = 3000};
  ScaleMemory<double> host = torchamp::detail::initial_memory(options);
  LossScale device(options);
  device.create(at::kCPU);
  const torch::NoGradGuard no_grad;
  for (int i = 1; i <= 3100; ++i) {
    host = after_update(options, host, /*bad=*/true);
    device.advance(torch::ones({}));
    if (i % 100 != 0 && i < 2990) continue;
    ASSERT_EQ(device.read().credit, host.credit) << i;
    ASSERT_EQ(device.read_scale(), host.scale) << i;
  }
  EXPECT_EQ(host.credit, 0.);
  EXPECT_LT(host.scale, 65536.);
}

/// An update that may have lowered a scale, and has not raised it.
void lower(ScaleBound& bound, double factor, double min_scale) {
  bound.update({.growth_factor = 1., .backoff_factor = factor, .min_scale = min_scale}, true);
}
/// One that may have raised it only.
void grow(ScaleBound& bound, double factor, int64_t interval) {
  bound.update({.growth_factor = factor, .growth_interval = interval}, false);
}

TEST(ScaleBound, IsNeverAboveTheScaleAndNotFarBelowASmallOne) {
  std::mt19937 random(5);
  const torch::NoGradGuard no_grad;
  for (const double factor : {0.5, 0.9, 1e-3}) {
    SCOPED_TRACE(factor);
    const GradScalerOptions options{
        .growth_factor = 1.7, .backoff_factor = factor, .growth_interval = 2};
    LossScale state(options);
    state.create(at::kCPU);
    state.leave_host();
    ScaleBound bound;
    bound.set(options.init_scale);
    for (const bool bad : iterations(random(), 300)) {
      state.advance(torch::full({}, bad ? 1.F : 0.F));
      bound.update(options, /*lowers=*/true);
      bound.look_at(state.scale());
      const double scale = state.read_scale();
      ASSERT_LE(bound.value(), scale);
      ASSERT_GE(bound.at_most(), scale * 0.99999);
      if (scale < 1000.) {
        ASSERT_LE(bound.at_most(), scale * 3. / factor);
      }
      // On a CPU what is asked for is there at once.
      ASSERT_GE(bound.value(), std::min(scale, 1000.) * factor * 0.99);
      ASSERT_TRUE(state.may_be_below_one() || scale >= 1.);
    }
    bound.set(0.25);
    EXPECT_EQ(bound.value(), 0.25);
  }
}

TEST(ScaleBound, HasOneCopyUnderWayAtATime) {
  SKIP_WITHOUT(at::kPrivateUse1);
  const torch::NoGradGuard no_grad;
  const at::Device device(at::kPrivateUse1, 0);
  const at::Tensor scale = torch::full({}, 64., device);
  ScaleBound bound;
  bound.set(64.);
  const simulated::Counts counts;
  double known = 64.;
  const auto lower_it = [&] {
    scale.mul_(0.5);
    known *= 0.5;
    lower(bound, 0.5, 0x1p-20);
    bound.look_at(scale);
    EXPECT_LE(bound.value(), known);
    EXPECT_GE(bound.value(), known * 0.99);
  };
  for (int i = 0; i < 4; ++i) lower_it();
  EXPECT_EQ(counts.now().device_to_host, 1) << "the first has not arrived";
  simulated::wait_for_device(0);
  lower_it();
  EXPECT_EQ(counts.now().device_to_host, 2);
  simulated::wait_for_device(0);
  EXPECT_LE(bound.value(), known);
}

/// A scale on the simulated device, which is behind the host, and its bound.
struct BoundOnDevice {
  explicit BoundOnDevice(double value)
      : scale(torch::full({}, value, at::Device(at::kPrivateUse1, 0))) {
    bound.set_unknown(0x1p24);
    BoundCopies::send(bound, scale);
  }
  void arrive() const { simulated::wait_for_device(0); }
  const torch::NoGradGuard no_grad;
  at::Tensor scale;
  ScaleBound bound;
};

TEST(ScaleBound, CountsWhatUpdatesHaveDoneSinceACopyWasMade) {
  SKIP_WITHOUT(at::kPrivateUse1);
  BoundOnDevice lowered(64.), grown(64.);
  lower(lowered.bound, 0.5, 0x1p-20);
  lowered.arrive();
  EXPECT_LE(lowered.bound.value(), 32.);
  EXPECT_GE(lowered.bound.value(), 31.9);
  EXPECT_EQ(lowered.bound.at_most(), 64.);
  grow(grown.bound, 2., 5);  // nobody knows how many good iterations there were before
  grow(grown.bound, 2., 5);
  grown.arrive();
  EXPECT_EQ(grown.bound.value(), 64.);
  EXPECT_EQ(grown.bound.at_most(), 128.);
}

TEST(ScaleBound, IsNotChangedByACopyOfAScaleThatHasBeenReplaced) {
  SKIP_WITHOUT(at::kPrivateUse1);
  for (const double set : {2., 4096.}) {
    BoundOnDevice old(64.);
    old.bound.set(set);
    old.arrive();
    EXPECT_EQ(old.bound.value(), set);
    EXPECT_EQ(old.bound.at_most(), set);
  }
}

TEST(ScaleBound, KnowsNoMoreFromACopyThanItDidBefore) {
  SKIP_WITHOUT(at::kPrivateUse1);
  BoundOnDevice zero(0.);  // which no update makes
  zero.arrive();
  EXPECT_EQ(zero.bound.value(), 0.);
  EXPECT_EQ(zero.bound.at_most(), 0x1p24);
  BoundOnDevice low(64.);
  lower(low.bound, 0.5, 256.);
  low.arrive();
  EXPECT_EQ(low.bound.value(), 256.) << "of both, what is nearer";
}

TEST(ScaleBound, WaitsForItsOldestCopyAndUsesItAgain) {
  SKIP_WITHOUT(at::kPrivateUse1);
  BoundOnDevice behind(64.);
  BoundCopies::send(behind.bound, behind.scale);
  EXPECT_TRUE(BoundCopies::wait_for_one(behind.bound));
  const CallCounter calls;
  BoundCopies::send(behind.bound, behind.scale);  // where the first copy was
  EXPECT_EQ(calls.called("aten::empty"), 0);
  EXPECT_TRUE(BoundCopies::wait_for_one(behind.bound));
  EXPECT_TRUE(BoundCopies::wait_for_one(behind.bound))
      << "the one before has not waited for this one";
  EXPECT_FALSE(BoundCopies::wait_for_one(behind.bound));
}

TEST(ScaleBound, HasACopyMadeOfASmallScaleOnly) {
  SKIP_WITHOUT(at::kPrivateUse1);
  const torch::NoGradGuard no_grad;
  const at::Tensor scale = torch::full({}, 2048., at::Device(at::kPrivateUse1, 0));
  ScaleBound bound;
  bound.set(2049.);
  const simulated::Counts counts;
  lower(bound, 0.5, 0x1p-20);
  bound.look_at(scale);
  EXPECT_EQ(counts.now().device_to_host, 0);
  lower(bound, 0.999, 0x1p-20);
  bound.look_at(scale);
  EXPECT_EQ(counts.now().device_to_host, 1);
  simulated::wait_for_device(0);
}

TEST(LossScale, NeverTakesTheScaleForSmallerThanItIs) {
  for (const int64_t interval : {1, 3, 7}) {
    torchamp::GradScalerOptions options{.init_scale = 4., .growth_interval = interval};
    LossScale state(options);
    state.create(at::kCPU);
    EXPECT_FALSE(state.may_exceed(4.));
    EXPECT_TRUE(state.may_exceed(3.));
    state.leave_host();
    std::mt19937 random(5);
    int seen = 0;
    for (int i = 0; i < 150; ++i) {
      if (i == 60) options.growth_interval = interval == 7 ? 2 : interval;
      if (i == 60) state.set_growth_interval(options.growth_interval);
      if (i == 90) state.set_scale(16.);
      if (i == 120) state.set_scale(torch::full({}, 1024.));
      state.advance(torch::full({}, random() % 12 == 0 ? 1. : 0.));
      const double scale = state.read_scale();
      for (double limit = 0x1p-4; limit < 0x1p40; limit *= 2.) {
        ASSERT_TRUE(state.may_exceed(limit) || scale <= limit) << i << ' ' << limit;
        seen += state.may_exceed(limit) ? 0 : 1;
      }
    }
    EXPECT_GT(seen, 150) << "nor for as large as can be";
    state.expect_replays();
    EXPECT_TRUE(state.may_exceed(0x1p100));
    options.max_scale = 0x1p20;
    LossScale limited(options);
    limited.create(at::kCPU);
    limited.leave_host();
    limited.expect_replays();
    EXPECT_FALSE(limited.may_exceed(0x1p20));
  }
}
