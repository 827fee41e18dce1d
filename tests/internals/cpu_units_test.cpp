// SPDX-License-Identifier: BSD-3-Clause
#include <ATen/core/ivalue.h>
#include <gtest/gtest.h>

#include <string>
#include <unordered_map>

#include "torchamp/detail/extras/shared/cpu_units.h"

namespace {

using torchamp::detail::has_bf16_units;

TEST(CpuUnits, ThoseOfX86AndOfArmMultiplyInBf16) {
  for (const char* const unit : {"amx_bf16", "avx512_bf16", "bf16", "sve_bf16"}) {
    const std::unordered_map<std::string, c10::IValue> cpu{{"neon", true}, {unit, true}};
    EXPECT_TRUE(has_bf16_units(cpu)) << unit;
  }
}

TEST(CpuUnits, OthersDoNot) {
  const std::unordered_map<std::string, c10::IValue> cpu{
      {"avx2", true}, {"bf16", false}, {"sve", true}, {"architecture", "aarch64"}};
  EXPECT_FALSE(has_bf16_units(cpu));
}

}  // namespace
