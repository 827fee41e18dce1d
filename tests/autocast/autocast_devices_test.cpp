// SPDX-License-Identifier: BSD-3-Clause
// Devices and dtypes that a region takes, refuses, or does without.
#include <ATen/ATen.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "support/cpu_dtypes.h"
#include "support/devices.h"
#include "support/expect_error.h"
#include "support/thread_state.h"
#include "support/warnings.h"
#include "torchamp/autocast.h"

namespace {

using cpu_dtypes::mm_dtype;
using cpu_dtypes::ones;
using ::testing::HasSubstr;
using torchamp::AutocastGuard;

TEST(AutocastGuard, TakesADeviceWhereverItTakesAType) {
  const at::Tensor x = ones(at::kCPU, at::kFloat);
  const at::Device device = x.device();
  const ThreadState before;
  {
    const AutocastGuard autocast(device);
    EXPECT_EQ(mm_dtype(), at::kBFloat16);
    const AutocastGuard dtype(device, at::kHalf);
    EXPECT_EQ(mm_dtype(), at::kHalf);
    const AutocastGuard options(device, {.dtype = at::kBFloat16});
    EXPECT_EQ(mm_dtype(), at::kBFloat16);
    const AutocastGuard braces(device, {});
    const AutocastGuard indexed({at::kCPU, 0}, {.enabled = false});
    EXPECT_EQ(mm_dtype(), at::kFloat);
    const AutocastGuard of_tensor{x.device(), at::kHalf};
    EXPECT_EQ(mm_dtype(), at::kHalf);
  }
  EXPECT_EQ(ThreadState(), before);
}

TEST(AutocastGuard, AddsNumbersOfHostAndDeviceInFp32) {
  SKIP_WITHOUT(at::kPrivateUse1);
  const at::Tensor host = at::full({}, 2., at::kHalf), device = host.to(at::kPrivateUse1);
  const AutocastGuard guard(at::kPrivateUse1);
  EXPECT_EQ((host + device).scalar_type(), at::kFloat);
  EXPECT_EQ((device + host).scalar_type(), at::kFloat);
}

TEST(AutocastGuard, ADeviceWithoutAutocastIsAnError) {
  const at::Device meta(at::kMeta);
  EXPECT_ERROR(AutocastGuard guard(meta),
               "AutocastGuard: LibTorch has no autocast for the device type 'meta'.");
  const ThreadState before;
  EXPECT_ERROR(
      AutocastGuard guard(at::kMeta),
      "AutocastGuard: LibTorch has no autocast for the device type 'meta'. Pass torch::kCPU");
  EXPECT_ERROR(
      AutocastGuard guard(static_cast<at::DeviceType>(99)),
      "AutocastGuard: LibTorch has no autocast for the device type '99'. Pass torch::kCPU");
  EXPECT_EQ(ThreadState(), before);
}

TEST(AutocastGuard, ADtypeThatIsNotFloatingIsAnError) {
  const ThreadState before;
  EXPECT_ERROR(
      AutocastGuard guard(at::kCPU, at::kInt),
      "AutocastGuard: the dtype Int is not floating-point. Pass torch::kHalf or torch::kBFloat16.");
  EXPECT_EQ(ThreadState(), before);
}

TEST(AutocastGuard, ADtypeThatIsNotFloatingIsAnErrorInADisabledRegionToo) {
  const ThreadState before;
  for (const at::ScalarType dtype : {at::kInt, at::kBool, at::kComplexFloat}) {
    EXPECT_ERROR(AutocastGuard guard(at::kCPU, {.dtype = dtype, .enabled = false}),
                 "is not floating-point. Pass torch::kHalf or torch::kBFloat16.");
    EXPECT_EQ(ThreadState(), before);
  }
  const AutocastGuard wide(at::kCPU, {.dtype = at::kBFloat16, .enabled = false});
  const AutocastGuard nested(at::kCPU);
  EXPECT_EQ(mm_dtype(), at::kBFloat16);
}

TEST(AutocastGuard, AnUnsupportedFloatingDtypeWarnsAndRunsDisabled) {
  const CollectedWarnings warnings;
  const AutocastGuard autocast(at::kCPU, at::kFloat);
  EXPECT_THAT(warnings.text(), HasSubstr("autocast on cpu supports fp16 and bf16, not Float"));
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  const AutocastGuard another(at::kCPU, at::kDouble);
  EXPECT_THAT(warnings.text(), HasSubstr("not Double"));
}

TEST(AutocastGuard, ARegionOfABackendThatIsNotThereWarnsOfEachAndRunsDisabled) {
  for (const auto& [device, is_there] :
       {std::pair(at::kMPS, at::hasMPS()), std::pair(at::kXPU, at::hasXPU()),
        std::pair(at::kXLA, at::hasXLA()), std::pair(at::kHPU, at::hasHPU())}) {
    if (is_there) continue;
    const ThreadState before;
    {
      const CollectedWarnings warnings;
      const AutocastGuard autocast(device);
      const std::string name = c10::DeviceTypeName(device);
      EXPECT_THAT(warnings.text(), HasSubstr("AutocastGuard: there is no " + name + " device. " +
                                             name + " regions run with autocast disabled."));
      EXPECT_FALSE(at::autocast::is_autocast_enabled(device));
    }
    EXPECT_EQ(ThreadState(), before);
  }
}

/// Counts warnings as a program sees them: those that are given only once, once.
struct CountedWarnings final : c10::WarningHandler {
  int count = 0;
  void process(const c10::Warning&) override { ++count; }
};

TEST(AutocastGuard, WarnsOfAMissingBackendOnceAndNotOfADisabledRegion) {
  if (c10::impl::hasDeviceGuardImpl(at::kIPU)) GTEST_SKIP() << "this LibTorch has IPUs";
  CountedWarnings warnings;
  const c10::WarningUtils::WarningHandlerGuard counted(&warnings);
  { const AutocastGuard disabled(at::kIPU, {.enabled = false}); }
  EXPECT_EQ(warnings.count, 0);
  for (int i = 0; i < 3; ++i) const AutocastGuard autocast(at::kIPU);
  EXPECT_EQ(warnings.count, 1);
}

TEST(AutocastGuard, ACudaRegionWithoutACudaDeviceWarnsAndRunsDisabled) {
  if (at::hasCUDA()) GTEST_SKIP() << "this LibTorch sees a CUDA device";
  const CollectedWarnings warnings;
  const AutocastGuard autocast(at::kCUDA);
  EXPECT_THAT(warnings.text(), HasSubstr("AutocastGuard: there is no CUDA device"));
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCUDA));
}

}  // namespace
