// SPDX-License-Identifier: BSD-3-Clause
// The stream that a graph captures on.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <set>
#include <vector>

#include "support/devices.h"
#include "support/expect_error.h"
#include "torchamp/detail/extras/graph/recorder.h"

namespace {

using torchamp::detail::OwnStream;

TEST(SimulatedOwnStream, IsNobodyElsesWhileItLives) {
  SKIP_WITHOUT(at::kPrivateUse1);
  const c10::Device device(at::kPrivateUse1, 1);
  std::set<c10::StreamId> ids;
  std::vector<std::unique_ptr<OwnStream>> streams;
  for (int i = 0; i < 64; ++i) {  // all that there are
    streams.push_back(std::make_unique<OwnStream>(device));
    EXPECT_EQ(streams.back()->get().device(), device);
    EXPECT_TRUE(ids.insert(streams.back()->get().id()).second) << i;
  }
  EXPECT_ERROR(OwnStream{device}, "CudaGraph: 64 graphs exist and use all of LibTorch's streams");
  const c10::StreamId free = streams[40]->get().id();
  streams[40] = nullptr;
  EXPECT_EQ(OwnStream(device).get().id(), free);
  const OwnStream of_another_device(c10::Device(at::kPrivateUse1, 0));
}

}  // namespace
