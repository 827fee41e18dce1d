// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <tuple>

#include "support/devices.h"
#include "support/optimizer_kinds.h"
#include "support/seed.h"

/// A kind of optimizer on a device.
class FusedOptimizers : public testing::TestWithParam<std::tuple<Kind, at::DeviceType>> {
 protected:
  void SetUp() override {
    SKIP_WITHOUT(device());
    seed_all(1);
  }
  static const Kind& kind() { return std::get<0>(GetParam()); }
  static at::DeviceType device() { return std::get<1>(GetParam()); }
  static Params params(at::ScalarType dtype = at::kFloat) {
    const auto options = at::TensorOptions(device()).dtype(dtype);
    return {param({5}, options), param({2, 3}, options), param({}, options), param({40}, options)};
  }
};

inline std::string kind_and_device(
    const testing::TestParamInfo<std::tuple<Kind, at::DeviceType>>& info) {
  return std::get<0>(info.param).name + "_" + name_of_device(std::get<1>(info.param));
}

INSTANTIATE_TEST_SUITE_P(Optim, FusedOptimizers,
                         testing::Combine(testing::ValuesIn(kinds()), all_devices()),
                         kind_and_device);
