// SPDX-License-Identifier: BSD-3-Clause
// Casts of weights belong to the stream that made them.
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <vector>

#include "simulated_device/device.h"
#include "support/devices.h"
#include "support/tolerances.h"
#include "support/weight_caches.h"
#include "torchamp/autocast.h"
#include "torchamp/labs/weights_together.h"
#include "torchamp/weight_cache.h"

namespace {

using torchamp::AutocastGuard;
using torchamp::WeightCache;

class WeightCachesOfStreams : public testing::TestWithParam<at::DeviceType> {
 protected:
  void SetUp() override { SKIP_WITHOUT(GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(Devices, WeightCachesOfStreams,
                         testing::Values(at::kCUDA, at::kPrivateUse1), device_name);

/// The simulated device refuses work that uses what a stream has not waited for.
TEST_P(WeightCachesOfStreams, GiveNoCastToAStreamThatHasNotWaitedForIt) {
  const at::Device device(GetParam(), 0);
  const c10::impl::VirtualGuardImpl backend(GetParam());
  const at::Tensor weight = at::randn({4, 4}).to(device), input = at::randn({2, 4}).to(device);
  const at::Tensor expected = input.cpu().mm(weight.cpu());
  backend.synchronizeDevice(0);
  for (const WeightCache cache : weight_caches::own_caches) {
    const at::NoGradGuard no_grad;
    const AutocastGuard guard(GetParam(), {.dtype = at::kHalf, .cache = cache});
    const at::Tensor here = at::mm(input, weight);
    at::Tensor there;  // on the host
    {
      const c10::StreamGuard on_other(backend.getNewStream(device));
      for (int i = 0; i < 2; ++i) there = at::mm(input, weight).cpu();
    }
    EXPECT_TRUE(at::equal(there, here.cpu()));
    expect_close(there, expected, at::kHalf);
  }
}

TEST_P(WeightCachesOfStreams, WeightsCastTogetherAreCastAgainOnAnotherStream) {
  const at::Device device(GetParam(), 0);
  const c10::impl::VirtualGuardImpl backend(GetParam());
  const at::Tensor input = at::randn({2, 4}).to(device);
  std::vector<at::Tensor> weights;
  for (int i = 0; i < 3; ++i) {
    weights.push_back(at::randn({4, 4}).to(device).set_requires_grad(true));
  }
  backend.synchronizeDevice(0);
  const auto products = [&] {
    return at::stack({input.mm(weights[0]), input.mm(weights[1]), input.mm(weights[2])});
  };
  for (int region = 0; region < 3; ++region) {
    const AutocastGuard guard(GetParam(),
                              {.dtype = at::kHalf, .cache = torchamp::weights_together()});
    const at::Tensor here = products();
    at::Tensor there;  // on the host
    {
      const c10::StreamGuard on_other(backend.getNewStream(device));
      for (int i = 0; i < 2; ++i) there = products().detach().cpu();
    }
    EXPECT_TRUE(at::equal(there, here.detach().cpu()));
  }
}

}  // namespace
