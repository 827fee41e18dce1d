// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/Context.h>
#include <c10/core/Device.h>
#include <gtest/gtest.h>

#include <string>

#include "simulated_device/device.h"

/// The devices that tests with a device variant run on: TEST_P bodies take GetParam().
inline auto all_devices() {
  return ::testing::Values(at::kCPU, at::kCUDA, at::kPrivateUse1);
}

/// For tests of counts, limits and settings that only the simulated device has.
inline auto simulated_device() {
  return ::testing::Values(at::kPrivateUse1);
}

inline std::string name_of_device(at::DeviceType device) {
  return device == at::kPrivateUse1 ? "Simulated" : c10::DeviceTypeName(device);
}

/// Names the instances "CPU", "CUDA" and "Simulated".
inline std::string device_name(const ::testing::TestParamInfo<at::DeviceType>& info) {
  return name_of_device(info.param);
}

/// First line of a test body that runs on `device`.
#define SKIP_WITHOUT(device)                                   \
  if ((device) == at::kCUDA && !at::hasCUDA())                 \
    GTEST_SKIP() << "this LibTorch sees no CUDA device";       \
  if ((device) == at::kPrivateUse1 && !simulated::available()) \
  GTEST_SKIP() << "a CUDA device is in the simulated one's place"
