// SPDX-License-Identifier: BSD-3-Clause
#include <torchamp/grad_scaler_options.h>

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/grad_scaler.h>

#include <cmath>
#include <string>

#include "support/expect_error.h"

using torchamp::AtLimit;
using torchamp::GradScaler;
using torchamp::GradScalerOptions;

TEST(GradScalerOptions, DefaultsAreTorchAmps) {
  const GradScalerOptions options;
  EXPECT_EQ(options.init_scale, 65536.);
  EXPECT_EQ(options.growth_factor, 2.);
  EXPECT_EQ(options.backoff_factor, 0.5);
  EXPECT_EQ(options.growth_interval, 2000);
  EXPECT_TRUE(options.enabled);
}

TEST(GradScalerOptions, RefusesWhatIsOutOfRangeAndNamesIt) {
  const double nan = std::nan("");
  struct Row {
    GradScalerOptions options;
    std::string error;
  };
  const Row table[] = {
      {{.init_scale = 0.}, "GradScaler: the scale is 0"},
      {{.init_scale = -1.}, "the scale is -1"},
      {{.init_scale = HUGE_VAL}, "the scale is inf"},
      {{.init_scale = nan}, "the scale is nan"},
      {{.init_scale = 1e39}, "the scale is 1e+39"},
      {{.init_scale = 1e-39}, "the scale is 1e-39"},
      {{.growth_factor = 1.}, "the growth factor is 1. It must be finite and above 1"},
      {{.growth_factor = nan}, "the growth factor is nan"},
      {{.growth_factor = HUGE_VAL}, "the growth factor is inf"},
      {{.backoff_factor = 1.}, "the backoff factor is 1. It must be between 0 and 1"},
      {{.backoff_factor = 0.}, "the backoff factor is 0"},
      {{.backoff_factor = -1.}, "the backoff factor is -1"},
      {{.backoff_factor = nan}, "the backoff factor is nan"},
      {{.growth_interval = 0}, "the growth interval is 0"},
      {{.growth_interval = int64_t{1} << 31}, "the growth interval is 2147483648"},
      {{.min_scale = 0.}, "min_scale is 0"},
      {{.min_scale = 1e-39}, "min_scale is 1e-39"},
      {{.max_scale = HUGE_VAL}, "max_scale inf"},
      {{.min_scale = 4., .max_scale = 2.}, "min_scale is 4 and max_scale 2"},
      {{.init_scale = 1., .min_scale = 2.}, "It must be between min_scale (2) and max_scale"},
      {{.hysteresis = 0}, "the hysteresis is 0"},
      {{.growth_tracker_start = 1}, "growth_tracker_start is 1"},
      {{.max_skips_in_a_row = -1}, "max_skips_in_a_row is -1"},
      {{.at_min_scale = AtLimit::call}, "a limit is set to AtLimit::call and on_limit is empty"},
      {{.max_skips_in_a_row = 1, .at_max_skips = AtLimit::call}, "on_limit is empty"},
  };
  for (const Row& row : table) {
    SCOPED_TRACE(row.error);
    EXPECT_ERROR(GradScaler(row.options), row.error);
    GradScalerOptions disabled = row.options;
    disabled.enabled = false;
    EXPECT_NO_THROW(GradScaler{disabled}) << "as torch.amp, which checks only when enabled";
  }
}

TEST(GradScalerOptions, AcceptsEveryPreset) {
  for (const GradScalerOptions& preset :
       {GradScalerOptions::torch(), GradScalerOptions::megatron(), GradScalerOptions::deepspeed(),
        GradScalerOptions::fairseq(), GradScalerOptions::skip_non_finite(),
        GradScalerOptions::fixed(128.)}) {
    EXPECT_NO_THROW(GradScaler{preset});
  }
}
