// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/Context.h>
#include <c10/core/Device.h>
#include <gtest/gtest.h>

#include <string>

/// The devices that tests with a GPU variant run on: TEST_P bodies take GetParam().
inline auto all_devices() {
  return ::testing::Values(at::kCPU, at::kCUDA);
}

/// Names the instances "CPU" and "CUDA".
inline std::string device_name(const ::testing::TestParamInfo<at::DeviceType>& info) {
  return c10::DeviceTypeName(info.param);
}

/// First line of a test body that runs on `device`.
#define SKIP_WITHOUT(device) \
  if ((device) == at::kCUDA && !at::hasCUDA()) GTEST_SKIP() << "this LibTorch sees no CUDA device"
