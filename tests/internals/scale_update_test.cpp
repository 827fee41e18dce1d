// SPDX-License-Identifier: BSD-3-Clause
// The rules by which other systems change the scale, each stated here once more, in its own terms
// and as plainly as possible, against the one update of torchamp on the host and on a device.
#include <torchamp/detail/core/scaler/loss_scale.h>

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/grad_scaler.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "support/expect_error.h"
#include "support/random_iterations.h"

using torchamp::AtLimit;
using torchamp::GradScaler;
using torchamp::GradScalerOptions;
using torchamp::detail::after_update;
using torchamp::detail::LossScale;
using torchamp::detail::Measured;
using torchamp::detail::ScaleLimits;
using torchamp::detail::ScaleMemory;
using torchamp::detail::ScalerParts;

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
      const int stable = iteration - last_bad - 1;
      if (stable > 0 && stable % window == 0) {
        hysteresis_left = 2;
        scale *= 2;
      }
    }
    ++iteration;
  }
  explicit DeepSpeed(int scale_window) : Published(65536.), window(scale_window) {}
  int window;
  int iteration = 0;
  int last_bad = -1;
  int hysteresis_left = 2;
};

/// fairseq/optim/dynamic_loss_scaler.py, DynamicLossScaler, without a tolerance.
struct Fairseq : Published {
  void iterate(bool bad) override {
    refused = false;
    if (!bad) {
      if ((iteration - last_bad) % window == 0) scale *= 2;
      ++iteration;
      return;
    }
    if (scale / 2 <= 1e-4) {
      refused = true;
      return;
    }
    last_bad = iteration;
    scale /= 2;
    ++iteration;
  }
  explicit Fairseq(int scale_window) : Published(32768.), window(scale_window) {}
  int window;
  int iteration = 0;
  int last_bad = -1;
};

/// What the checks of an iteration's gradients have measured, for the host and for a device.
Measured measured(bool bad) {
  return {.found_inf = {.tensor = torch::full({}, bad ? 1.F : 0.F), .on_host = bad ? 1. : 0.}};
}

constexpr auto& rows = torchamp::detail::scale_memory_rows<double>;

/// Different numbers in all rows, none initial, for options that allow counts up to `rows`.
ScaleMemory<double> numbers() {
  ScaleMemory<double> memory{};
  double next = 2.;
  for (const auto& row : rows) memory.*row.number = row.is_whole ? next++ : 0.5 + next++;
  return memory;
}

/// Expects equal numbers, except of a row that a device does not update by these options.
void expect_same(const ScaleMemory<double>& device, const ScaleMemory<double>& host,
                 const GradScalerOptions& options) {
  for (const auto& row : rows) {
    const bool is_skips = row.number == &ScaleMemory<double>::skips;
    if (torchamp::detail::is_torch_update(options) && row.is_own() && !is_skips) continue;
    ASSERT_EQ(device.*row.number, host.*row.number) << row.name;
  }
}

/// The archive of a scaler, without what is called `without`. (If it is one of torchamp's numbers,
/// the list does not name it.)
std::string archive_of(const GradScaler& scaler, std::string_view without = "") {
  std::stringstream whole;
  torch::save(scaler, whole);
  torch::serialize::InputArchive in;
  in.load_from(whole);
  torch::serialize::OutputArchive out;
  for (const std::string& key : in.keys()) {
    if (!without.empty() && (key == without || key == "torchamp_checksum")) continue;
    c10::IValue value;
    in.read(key, value);
    if (key == "torchamp_numbers" && !without.empty()) {
      std::istringstream list(value.toStringRef());
      std::string names;
      for (std::string name; list >> name;) names += name == without ? "" : name + " ";
      value = names;
    }
    out.write(key, value);
  }
  std::ostringstream bytes;
  out.save_to(bytes);
  return bytes.str();
}

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
    add("fairseq", GradScalerOptions::fairseq(), std::make_unique<Fairseq>(interval));
  }
  return all;
}

}  // namespace

TEST(ScaleUpdate, IsTheKernelsOnlyWithoutFurtherOptions) {
  using torchamp::detail::is_torch_update;
  EXPECT_TRUE(is_torch_update({}));
  EXPECT_FALSE(is_torch_update({.dynamic = false}));
  EXPECT_FALSE(is_torch_update({.hysteresis = 2}));
  EXPECT_FALSE(is_torch_update({.growth_tracker_start = -1}));
}

TEST(ScaleUpdate, ThrowsForANumberThatWasNotMeasured) {
  const std::string error = "GradScaler::update: these options need a number of the gradients";
  EXPECT_ERROR(after_update({}, ScaleMemory<double>{}, Measured()), error);
  EXPECT_ERROR(after_update({}, ScaleMemory<at::Tensor>{}, Measured()), error);
}

TEST(ScaleMemory, EachNumberIsSavedAndLoadedOnTheHostAndOnADevice) {
  const GradScalerOptions options{.hysteresis = 70};
  for (const bool from_device : {false, true}) {
    for (const bool to_device : {false, true}) {
      GradScaler source(options), target(options);
      for (auto [scaler, on_device] :
           {std::pair(&source, from_device), std::pair(&target, to_device)}) {
        ScalerParts::scale(*scaler).create(at::kCPU);
        if (on_device) ScalerParts::scale(*scaler).leave_host();
      }
      ScalerParts::scale(source).set(numbers());
      std::istringstream bytes(archive_of(source));
      torch::load(target, bytes);
      expect_same(ScalerParts::scale(target).read(), numbers(), options);
    }
  }
}

TEST(ScaleMemory, ANumberThatAnArchiveLacksHasItsInitialValue) {
  const GradScalerOptions options{.hysteresis = 70};
  GradScaler source(options);
  ScalerParts::scale(source).create(at::kCPU);
  ScalerParts::scale(source).set(numbers());
  for (const auto& lacking : rows) {
    std::istringstream bytes(archive_of(source, lacking.name));
    GradScaler target(options);
    if (!lacking.is_own()) {
      EXPECT_ERROR(torch::load(target, bytes), "the archive has no \"" + std::string(lacking.name));
      continue;
    }
    torch::load(target, bytes);
    ScaleMemory<double> expected = numbers();
    expected.*lacking.number = lacking.initial(options);
    expect_same(ScalerParts::scale(target).read(), expected, options);
  }
}

TEST(ScaleUpdate, BringsWhatAFileHoldsWithinTheOptionsLimits) {
  const GradScalerOptions options{
      .growth_interval = 1, .min_scale = 4., .max_scale = 64., .hysteresis = 2};
  ScaleMemory<double> memory = torchamp::detail::initial_memory(options);
  memory.credit = 5.;
  EXPECT_EQ(after_update(options, memory, measured(/*bad=*/true)).credit, 2.);
  for (const auto& [scale, expected] : {std::pair(0.5, 4.), std::pair(1024., 64.)}) {
    memory.scale = scale;
    EXPECT_EQ(after_update(options, memory, measured(/*bad=*/false)).scale, expected);
  }
}

TEST(ScaleUpdate, FollowsThePublishedOnes) {
  for (Case& one : cases()) {
    SCOPED_TRACE(one.name);
    ScaleMemory<double> state = torchamp::detail::initial_memory(one.options);
    int refusals = 0;
    std::vector<bool> walk(45, true);  // down to any floor
    const std::vector<bool> rest = random_iterations(1, 2000);
    walk.insert(walk.end(), rest.begin(), rest.end());
    for (const bool bad : walk) {
      one.published->iterate(bad);
      // Theirs go on to infinity or 0.
      if (one.published->scale > 0x1p100 || one.published->scale < 0x1p-100) break;
      const ScaleMemory<double> after = after_update(one.options, state, measured(bad));
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
  };
  for (Row row : table) {
    SCOPED_TRACE(row.name);
    row.options.growth_interval = 3;
    ScaleMemory<double> state = torchamp::detail::initial_memory(row.options);
    for (std::size_t i = 0; i < row.iterations.size(); ++i) {
      state = after_update(row.options, state, measured(row.iterations[i] == 'x'));
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
      options.growth_tracker_start = static_cast<int64_t>(one_of(0, -1));
    }
    SCOPED_TRACE(c10::str("trial ", trial));
    ScaleMemory<double> host = torchamp::detail::initial_memory(options);
    LossScale device(options);
    device.create(at::kCPU);
    const torch::NoGradGuard no_grad;
    for (const bool bad : random_iterations(random(), 60)) {
      const Measured iteration = measured(bad);
      host = after_update(options, host, iteration);
      device.advance(iteration);
      ASSERT_EQ(device.host(), nullptr);
      expect_same(device.read(), host, options);
    }
    EXPECT_EQ(device.inverse(at::kCPU).item<float>(), static_cast<float>(1. / host.scale));
  }
}

TEST(ScaleUpdate, GoesOnOnADeviceFromWhatAFileAndANewIntervalHaveSet) {
  std::mt19937 random(9);
  GradScalerOptions options{
      .growth_interval = 7, .min_scale = 1., .hysteresis = 3, .growth_tracker_start = -1};
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
    for (const bool bad : random_iterations(random(), 30)) {
      const Measured iteration = measured(bad);
      host = after_update(options, host, iteration);
      device.advance(iteration);
      expect_same(device.read(), host, options);
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
    const Measured iteration = measured(/*bad=*/true);
    host = after_update(options, host, iteration);
    device.advance(iteration);
    if (i % 100 != 0 && i < 2990) continue;
    ASSERT_EQ(device.read().credit, host.credit) << i;
    ASSERT_EQ(device.read_scale(), host.scale) << i;
  }
  EXPECT_EQ(host.credit, 0.);
  EXPECT_LT(host.scale, 65536.);
}
