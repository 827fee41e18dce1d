// SPDX-License-Identifier: BSD-3-Clause
// The simulated accelerator's graphs: what is recorded is done again, and misuse is found.
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tuple>
#include <vector>

#include "simulated_device/device.h"
#include "support/devices.h"
#include "support/expect_error.h"
#include "support/seed.h"

namespace {

using at::Tensor;
using simulated::Counts;
using simulated::Graph;
using simulated::on;
using simulated::sim0;
using simulated::sim1;

c10::impl::VirtualGuardImpl backend() {
  return c10::impl::VirtualGuardImpl(c10::kPrivateUse1);
}

class SimulatedGraph : public testing::Test {
 protected:
  void SetUp() override {
    SKIP_WITHOUT(at::kPrivateUse1);
    seed_all(3);
    backend().synchronizeDevice(0);
  }

  /// Captures `work` on a side stream.
  template <class Work>
  void capture(Work work) {
    const c10::StreamGuard side(backend().getNewStream(sim0));
    backend().synchronizeDevice(0);
    graph_.begin();
    work();
    graph_.end();
  }

  Graph graph_;
};

TEST_F(SimulatedGraph, DoesNothingInTheCaptureAndAllOfItInEachReplay) {
  Tensor a = torch::ones({3}, on(sim0));
  Tensor b;
  const Counts counts;
  capture([&] {
    a.add_(1.);
    b = torch::cat({a, a}) * 2.;
  });
  EXPECT_EQ(counts.now().kernels, 0);
  EXPECT_EQ(counts.now().bytes_written, 0);
  EXPECT_TRUE(b.isnan().all().item<bool>()) << "poison";
  EXPECT_EQ(a.sum().item<float>(), 3.F);
  for (int i = 1; i <= 3; ++i) {
    const Counts replay;
    graph_.replay();
    EXPECT_EQ(replay.now().kernels, 3);
    EXPECT_EQ(replay.now().graph_launches, 1);
    EXPECT_EQ(replay.now().waits, 0);
    EXPECT_TRUE(b.cpu().eq(2. * (1 + i)).all().item<bool>()) << i;
    EXPECT_EQ(a.sum().item<float>(), 3.F * (1.F + static_cast<float>(i)));
  }
}

TEST_F(SimulatedGraph, WorksOnTheAddressesOfTheCapture) {
  Tensor a = torch::ones({2}, on(sim0));
  const Tensor host = torch::full({2}, 5.F).pin_memory();
  const Tensor back = torch::empty({2}, at::TensorOptions().pinned_memory(true));
  Tensor b = torch::empty({2}, on(sim0));
  capture([&] {
    b.copy_(host, /*non_blocking=*/true);
    b.add_(a);
    back.copy_(b, /*non_blocking=*/true);
  });
  EXPECT_TRUE(back.isnan().all().item<bool>());
  graph_.replay();
  backend().synchronizeDevice(0);
  EXPECT_TRUE(back.eq(6.).all().item<bool>());
  host.fill_(7.);
  a.fill_(2.);
  graph_.replay();
  backend().synchronizeDevice(0);
  EXPECT_TRUE(back.eq(9.).all().item<bool>());
}

TEST_F(SimulatedGraph, HoldsResizedOutputsIndicesAndBackward) {
  const Tensor table = torch::randn({5, 3}, on(sim0)).requires_grad_();
  const Tensor which = torch::zeros({4}, on(sim0, at::kLong));
  Tensor sum = torch::empty({0}, on(sim0));
  torch::embedding(table, which).square().sum().backward();  // warm
  capture([&] {
    table.mutable_grad().reset();
    const Tensor rows = torch::embedding(table, which + 1);
    rows.square().sum().backward();
    at::sum_out(sum, rows.detach(), at::IntArrayRef{0});
  });
  for (const int64_t row : {0, 3}) {
    which.fill_(row);
    graph_.replay();
    const Tensor expected = table.detach()[row + 1] * 4.;
    EXPECT_TRUE(at::allclose(sum.cpu(), expected.cpu()));
    EXPECT_TRUE(at::allclose(table.grad()[row + 1].cpu(), 2. * expected.cpu()));
  }
}

TEST_F(SimulatedGraph, PoisonsInEachReplayWhatTheCaptureFreed) {
  const Tensor a = torch::ones({3}, on(sim0));
  Tensor b;
  void* place = nullptr;
  capture([&] {
    place = (a + 1.).mutable_data_ptr();  // freed at once
    b = at::empty({3}, a.options());      // takes its place
    EXPECT_EQ(b.mutable_data_ptr(), place);
  });
  graph_.replay();
  EXPECT_TRUE(b.isnan().all().item<bool>());
}

TEST_F(SimulatedGraph, KeepsItsMemoryUntilItIsReset) {
  const Tensor a = torch::ones({3000}, on(sim0));
  const std::size_t before = simulated::bytes_in_use(0);
  Tensor b;
  capture([&] { b = (a + 1.) * 2.; });
  const void* const place = b.const_data_ptr();
  const std::size_t with_graph = simulated::bytes_in_use(0);
  EXPECT_GT(with_graph, before);
  b = Tensor();
  EXPECT_EQ(simulated::bytes_in_use(0), with_graph);
  for (int i = 0; i < 4; ++i) EXPECT_NE(torch::empty({3000}, on(sim0)).const_data_ptr(), place);
  graph_.replay();
  graph_.reset();
  EXPECT_EQ(simulated::bytes_in_use(0), before);
  EXPECT_ERROR(graph_.replay(), "replay of a graph without a capture");
}

TEST_F(SimulatedGraph, LeavesWhatIsStillHeldWhenItIsReset) {
  const Tensor a = torch::ones({3}, on(sim0));
  Tensor b;
  capture([&] { b = a + 1.; });
  graph_.replay();
  graph_.reset();
  EXPECT_EQ(b.sum().item<float>(), 6.F);
}

TEST_F(SimulatedGraph, RefusesAReplayThatUsesFreedMemory) {
  Tensor a = torch::ones({3}, on(sim0)), sum = torch::zeros({3}, on(sim0));
  capture([&] { sum.add_(a); });
  graph_.replay();
  a = Tensor();
  EXPECT_ERROR(graph_.replay(), "in a graph uses memory that was freed after the capture");
  const Tensor in_its_place = torch::zeros({3}, on(sim0));
  EXPECT_ERROR(graph_.replay(), "uses memory that was freed");
  EXPECT_EQ(sum.sum().item<float>(), 3.F);
}

TEST_F(SimulatedGraph, DrawsOnFromTheGeneratorAsItIsInEachReplay) {
  const auto draw = [] {
    const Tensor ones = torch::ones({4}, on(sim0));
    return torch::rand({4}, on(sim0)) + std::get<0>(at::native_dropout(ones, 0.5, true));
  };
  seed_all(3);
  std::vector<Tensor> expected;
  for (int i = 0; i < 3; ++i) expected.push_back(draw());
  seed_all(3);
  const at::Generator& generator = at::globalContext().defaultGenerator(sim0);
  const std::uint64_t offset = generator.unsafeGetGeneratorImpl()->get_offset();
  Tensor drawn;
  capture([&] { drawn = draw(); });
  EXPECT_EQ(generator.unsafeGetGeneratorImpl()->get_offset(), offset) << "none in the capture";
  for (int i = 0; i < 3; ++i) {
    graph_.replay();
    EXPECT_TRUE(at::equal(drawn.cpu(), expected[static_cast<std::size_t>(i)].cpu())) << i;
  }
  EXPECT_EQ(generator.unsafeGetGeneratorImpl()->get_offset(), offset + 6);
}

TEST_F(SimulatedGraph, RefusesAGeneratorThatIsNotTheDevices) {
  const auto generator = at::globalContext().defaultGenerator(sim0).clone();
  EXPECT_ERROR(capture([&] { torch::rand({3}, generator, on(sim0)); }),
               "a generator that is not a device's own is not in the graph");
  EXPECT_NO_THROW(graph_.end());
}

TEST_F(SimulatedGraph, IsCapturedOnAStreamThatIsNotTheDefaultOne) {
  EXPECT_ERROR(graph_.begin(), "graphs must be captured on a non-default stream");
}

TEST_F(SimulatedGraph, BelongsToOneDevice) {
  EXPECT_ERROR(capture([] { torch::ones({2}, on(sim0)).to(sim1); }),
               "a graph with a copy to another device");
  EXPECT_NO_THROW(graph_.end());
}

TEST_F(SimulatedGraph, IsInvalidAfterAWait) {
  const Tensor a = torch::ones({3}, on(sim0));
  EXPECT_ERROR(capture([&] {
                 EXPECT_ERROR(a.sum().item<float>(), "not permitted when stream is capturing");
               }),
               "operation failed due to a previous error during capture");
  EXPECT_EQ(a.sum().item<float>(), 3.F) << "it has ended";
}

TEST_F(SimulatedGraph, TakesOtherStreamsInThatWaitForItAndWantsThemBack) {
  Tensor a = torch::ones({3}, on(sim0));
  const c10::Stream other = backend().getNewStream(sim0);
  const auto on_the_other = [&](bool joins) {
    c10::Event event(c10::kPrivateUse1);
    event.record(backend().getStream(sim0));
    event.block(other);
    {
      const c10::StreamGuard guard(other);
      a.add_(1.);
      event.record(other);
    }
    if (joins) event.block(backend().getStream(sim0));
  };
  EXPECT_ERROR(capture([&] { on_the_other(false); }), "capturing stream has unjoined work");
  graph_.reset();
  capture([&] { on_the_other(true); });
  EXPECT_EQ(a.sum().item<float>(), 3.F);
  graph_.replay();
  EXPECT_EQ(a.sum().item<float>(), 6.F);
}

TEST_F(SimulatedGraph, RefusesToWaitForWhatIsNotInTheCapture) {
  c10::Event earlier(c10::kPrivateUse1);
  earlier.record(backend().getStream(sim0));
  EXPECT_ERROR(capture([&] { earlier.block(backend().getStream(sim0)); }),
               "dependency created on uncaptured work in another stream");
  EXPECT_NO_THROW(graph_.end());
}

TEST_F(SimulatedGraph, OrdersItsReplaysByStreamsAsOtherWork) {
  Tensor a = torch::ones({3}, on(sim0));
  capture([&] { a.add_(1.); });
  graph_.replay();
  const c10::StreamGuard guard(backend().getNewStream(sim0));
  EXPECT_ERROR(graph_.replay(), "uses memory that stream 0 still writes");
}

TEST_F(SimulatedGraph, IsReportedIfItIsDestroyedDuringACapture) {
  {
    Graph graph;
    const c10::StreamGuard guard(backend().getNewStream(sim0));
    graph.begin();
  }
  EXPECT_THAT(simulated::take_violations(),
              testing::ElementsAre(testing::HasSubstr("destroyed in the middle of its capture")));
}

}  // namespace
