// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <initializer_list>
#include <map>
#include <string>

#include "support/devices.h"
#include "torchamp/labs/cast_recorder.h"

// What the tests of CastRecorder read reports with, and the devices that they run on.
namespace recorder_on {

using torchamp::CastRecorder;
using torchamp::CastReport;
using Calls = std::map<at::ScalarType, std::int64_t>;

/// The report's row for an op; one without any counts if there is none.
inline CastReport::Row row_of(const CastReport& report, const std::string& op,
                              const std::string& module = "", bool backward = false) {
  for (const auto& row : report.rows()) {
    if (row.op == op && row.module == module && row.backward == backward) return row;
  }
  return {};
}
inline CastReport::Row row_of(const CastRecorder& recorder, const std::string& op,
                              const std::string& module = "", bool backward = false) {
  return row_of(recorder.report(), op, module, backward);
}

class Recorder : public ::testing::TestWithParam<at::DeviceType> {
 protected:
  void SetUp() override { SKIP_WITHOUT(GetParam()); }

  at::DeviceType device() const { return GetParam(); }
  at::ScalarType low() const { return at::autocast::get_autocast_dtype(device()); }
  at::Tensor wide(std::initializer_list<std::int64_t> sizes) const {
    return at::ones(sizes, device());
  }
  at::Tensor narrow(std::initializer_list<std::int64_t> sizes) const {
    return at::ones(sizes, at::dtype(low()).device(device()));
  }
};

}  // namespace recorder_on
