// SPDX-License-Identifier: BSD-3-Clause
#include "simulated_device/device.h"

#include <ATen/autocast_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>

#include <gmock/gmock.h>

#include <cmath>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "support/devices.h"
#include "support/seed.h"

namespace {

using simulated::Counts;
using simulated::on;
using simulated::sim0;
using simulated::sim1;
using testing::HasSubstr;
using torch::Tensor;

c10::Stream another_stream(c10::Device device = sim0) {
  return c10::impl::VirtualGuardImpl(c10::kPrivateUse1).getStreamFromGlobalPool(device);
}

/// The error that `f` throws; empty if none.
template <class F>
std::string error_of(F&& f) {
  try {
    f();
    return "";
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
}

class SimulatedDevice : public testing::Test {
 protected:
  void SetUp() override {
    SKIP_WITHOUT(at::kPrivateUse1);
    seed_all(3);
  }
};
using SimulatedDeviceDeathTest = SimulatedDevice;

// ---- It computes -------------------------------------------------------------------------------

/// One training step of a small net; returns the parameters behind it, on the CPU.
std::vector<Tensor> trained_on(c10::Device device) {
  seed_all(7);
  torch::nn::Sequential net(torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 3, 3).bias(false)),
                            torch::nn::BatchNorm2d(3), torch::nn::ReLU(), torch::nn::Flatten(),
                            torch::nn::Linear(3 * 4 * 4, 5),
                            torch::nn::LayerNorm(torch::nn::LayerNormOptions({5})));
  const Tensor x = torch::randn({4, 2, 6, 6}), y = torch::randint(5, {4});
  to_device(net, device);
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.01));
  for (int i = 0; i < 3; ++i) {
    optimizer.zero_grad();
    torch::cross_entropy_loss(net->forward(x.to(device)), y.to(device)).backward();
    optimizer.step();
  }
  std::vector<Tensor> result;
  for (const Tensor& p : net->parameters()) result.push_back(p.detach().cpu());
  return result;
}

TEST_F(SimulatedDevice, TrainsAsTheCPUDoes) {
  const std::vector<Tensor> here = trained_on(sim1), there = trained_on(at::kCPU);
  for (std::size_t i = 0; i < here.size(); ++i) {
    EXPECT_TRUE(torch::allclose(here[i], there[i], 1e-4, 1e-5)) << i;
  }
}

TEST_F(SimulatedDevice, DrawsTheNumbersOfACPUGeneratorWithItsSeed) {
  seed_all(11);
  const Tensor cpu = torch::randn({64});
  seed_all(11);
  EXPECT_TRUE(torch::equal(torch::randn({64}, on(sim1)).cpu(), cpu));
}

TEST_F(SimulatedDevice, HasAGeneratorForEachDevice) {
  const Tensor state = at::globalContext().defaultGenerator(sim0).get_state();
  torch::rand({3}, on(sim1));
  EXPECT_TRUE(torch::equal(at::globalContext().defaultGenerator(sim0).get_state(), state));
  torch::rand({3}, on(sim0));
  EXPECT_FALSE(torch::equal(at::globalContext().defaultGenerator(sim0).get_state(), state));
}

TEST_F(SimulatedDevice, SharesStorageBetweenATensorAndItsViews) {
  Tensor a = torch::zeros({2, 3}, on(sim0));
  a.t().select(0, 1).fill_(1.);
  a.view({6}).slice(0, 5, 6).add_(4.);
  EXPECT_TRUE(torch::equal(a.cpu(), torch::tensor({{0., 1., 0.}, {0., 1., 4.}}, at::kFloat)));
  Tensor out = torch::empty({0}, on(sim0, at::kLong));
  torch::nonzero_out(out, a);
  EXPECT_EQ(out.sizes(), (std::vector<int64_t>{3, 2}));
  EXPECT_EQ(out.cpu()[2][1].item<int64_t>(), 2);
}

TEST_F(SimulatedDevice, RunsAutocastOnCUDAsLists) {
  at::autocast::set_autocast_enabled(c10::kPrivateUse1, true);
  const Tensor a = torch::ones({2, 2}, on(sim0));
  EXPECT_EQ(a.mm(a).scalar_type(), at::kHalf);
  EXPECT_EQ(a.to(at::kHalf).exp().scalar_type(), at::kFloat);
  at::autocast::set_autocast_enabled(c10::kPrivateUse1, false);
  at::autocast::clear_cache();
}

TEST_F(SimulatedDevice, RunsBackwardInItsOwnThread) {
  const Tensor x = torch::ones({2}, on(sim0)).requires_grad_();
  const Tensor y = x * 2.;
  std::thread::id thread;
  y.register_hook([&](const Tensor&) { thread = std::this_thread::get_id(); });
  y.sum().backward();
  EXPECT_NE(thread, std::thread::id());
  EXPECT_NE(thread, std::this_thread::get_id());
}

TEST_F(SimulatedDevice, MovesAModuleInPlace) {
  torch::nn::Linear net(2, 2);
  const Tensor held = net->weight;
  to_device(net, sim1);
  EXPECT_EQ(held.device(), sim1);
  EXPECT_TRUE(held.requires_grad());
  net(torch::ones({1, 2}, on(sim1))).sum().backward();
  EXPECT_EQ(held.grad().device(), sim1);
}

// ---- Memory ------------------------------------------------------------------------------------

TEST_F(SimulatedDeviceDeathTest, DiesIfTheHostTouchesItsMemory) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        const Tensor a = torch::ones({3}, on(sim1));
        std::fprintf(stderr, "%f", static_cast<double>(*a.const_data_ptr<float>()));
      },
      "simulated device: the host touched memory of sim:1");
}

TEST_F(SimulatedDevice, FillsFreshMemoryWithPoison) {
  EXPECT_TRUE(torch::empty({5}, on(sim0)).isnan().all().item<bool>());
  EXPECT_TRUE(
      torch::empty({5}, at::TensorOptions().pinned_memory(true)).isnan().all().item<bool>());
}

TEST_F(SimulatedDevice, KnowsPinnedMemory) {
  EXPECT_TRUE(torch::empty({5}, at::TensorOptions().pinned_memory(true)).is_pinned());
  EXPECT_FALSE(torch::empty({5}).is_pinned());
  EXPECT_TRUE(torch::ones({5}).pin_memory().is_pinned());
}

TEST_F(SimulatedDevice, SaysThatItIsOutOfMemory) {
  EXPECT_THROW(torch::empty({int64_t{1} << 40}, on(sim0)), c10::OutOfMemoryError);
  EXPECT_EQ(torch::ones({3}, on(sim0)).sum().item<float>(), 3.F);
}

// ---- Which device ------------------------------------------------------------------------------

TEST_F(SimulatedDevice, RefusesTensorsOfDifferentDevices) {
  const Tensor a = torch::ones({3}, on(sim0)), b = torch::ones({3}, on(sim1));
  EXPECT_THAT(error_of([&] { a + b; }), HasSubstr("same device"));
  EXPECT_THAT(error_of([&] { a + torch::ones({3}); }), HasSubstr("same device"));
  EXPECT_THAT(error_of([&] { a.dot(torch::ones({3})); }), HasSubstr("same device"));
  EXPECT_THAT(error_of([&] { torch::_foreach_add_({a, b}, 1.); }), HasSubstr("same device"));
  EXPECT_NO_THROW(a + torch::tensor(2.));  // a number
}

TEST_F(SimulatedDevice, AllocatesOnTheCurrentDevice) {
  const c10::DeviceGuard guard(sim1);
  EXPECT_EQ(torch::ones({3}, at::TensorOptions(c10::kPrivateUse1)).device(), sim1);
  EXPECT_EQ(torch::ones({3}, on(sim0)).device(), sim0);
}

TEST_F(SimulatedDevice, CopiesBetweenItsDevices) {
  const Tensor a = torch::arange(4, on(sim0));
  const Counts counts;
  const Tensor b = a.to(sim1);
  EXPECT_EQ(counts.now().device_to_device, 1);
  EXPECT_EQ(counts.now().waits, 0);
  EXPECT_TRUE(torch::equal(b.cpu(), torch::arange(4, at::kFloat)));
}

// ---- Streams and events ------------------------------------------------------------------------

TEST_F(SimulatedDevice, WritesANonBlockingCopyWhenTheHostWaits) {
  const Tensor a = torch::ones({3}, on(sim0));
  const Tensor host = torch::empty({3}, at::TensorOptions().pinned_memory(true));
  host.copy_(a, /*non_blocking=*/true);
  EXPECT_TRUE(host.isnan().all().item<bool>()) << "read too early";
  c10::impl::VirtualGuardImpl(c10::kPrivateUse1)
      .synchronizeStream(c10::impl::VirtualGuardImpl(c10::kPrivateUse1).getStream(sim0));
  EXPECT_TRUE(torch::equal(host, torch::ones({3})));
}

TEST_F(SimulatedDevice, WritesANonBlockingCopyWhenItsEventIsWaitedFor) {
  Tensor a = torch::ones({3}, on(sim0));
  const Tensor host = torch::empty({3}, at::TensorOptions().pinned_memory(true));
  host.copy_(a, /*non_blocking=*/true);
  c10::Event event(c10::kPrivateUse1);
  event.record(c10::impl::VirtualGuardImpl(c10::kPrivateUse1).getStream(sim0));
  a.fill_(5.);  // behind the copy
  EXPECT_FALSE(event.query());
  EXPECT_TRUE(host.isnan().all().item<bool>()) << "read too early";
  event.synchronize();
  EXPECT_TRUE(event.query());
  EXPECT_TRUE(torch::equal(host, torch::ones({3})));
}

TEST_F(SimulatedDevice, GetsThroughItsWorkWhileTheHostLaunchesMore) {
  const Tensor host = torch::empty({}, at::TensorOptions().pinned_memory(true));
  Tensor a = torch::ones({}, on(sim0));
  host.copy_(a, /*non_blocking=*/true);
  for (std::uint64_t i = 0; i <= simulated::host_runs_ahead; ++i) a.add_(1.);
  EXPECT_EQ(*host.const_data_ptr<float>(), 1.F);
}

TEST_F(SimulatedDevice, FindsAPinnedSourceChangedUnderACopy) {
  const Tensor host = torch::ones({3}).pin_memory();
  Tensor a = torch::empty({3}, on(sim0));
  a.copy_(host, /*non_blocking=*/true);
  host.fill_(2.);
  a.sum().item<float>();
  EXPECT_THAT(simulated::take_violations(),
              testing::ElementsAre(HasSubstr("the host wrote to pinned memory")));
}

TEST_F(SimulatedDevice, RefusesUseOfWhatAnotherStreamStillWrites) {
  const Tensor a = torch::ones({3}, on(sim0));
  const c10::Stream side = another_stream();
  {
    const c10::StreamGuard guard(side);
    EXPECT_THAT(error_of([&] { a + a; }), HasSubstr("that stream 0 still writes"));
    EXPECT_THAT(error_of([&] { a.cpu(); }), HasSubstr("that stream 0 still writes"));
  }
  c10::Event event(c10::kPrivateUse1);
  event.record(c10::impl::VirtualGuardImpl(c10::kPrivateUse1).getStream(sim0));
  event.block(side);
  const c10::StreamGuard guard(side);
  EXPECT_EQ((a + a).sum().item<float>(), 6.F);
}

TEST_F(SimulatedDevice, RefusesToWriteWhatAnotherStreamStillReads) {
  Tensor a = torch::ones({3}, on(sim0));
  a.sum().item<float>();  // all of it is waited for
  const c10::Stream side = another_stream();
  {
    const c10::StreamGuard guard(side);
    const Tensor b = a + a;
  }
  EXPECT_THAT(error_of([&] { a.fill_(2.); }), HasSubstr("still reads"));
  c10::impl::VirtualGuardImpl(c10::kPrivateUse1).synchronizeStream(side);
  EXPECT_NO_THROW(a.fill_(2.));
}

TEST_F(SimulatedDevice, FindsMemoryFreedWhileAnotherStreamUsesIt) {
  const c10::Stream side = another_stream();
  const auto use = [&](bool recorded) {
    Tensor a = torch::ones({3}, on(sim0));
    a.sum().item<float>();
    const c10::StreamGuard guard(side);
    const Tensor b = a + a;
    if (recorded) a.record_stream(side);
  };
  use(true);
  EXPECT_THAT(simulated::take_violations(), testing::IsEmpty());
  use(false);
  EXPECT_THAT(simulated::take_violations(),
              testing::ElementsAre(HasSubstr("record_stream was not called")));
}

// ---- Capture -----------------------------------------------------------------------------------

TEST_F(SimulatedDevice, RefusesInACaptureWhatAGraphCannotHold) {
  const Tensor a = torch::ones({3}, on(sim0));
  Tensor b = torch::empty({3}, on(sim0));
  const Tensor pinned = torch::empty({3}, at::TensorOptions().pinned_memory(true));
  const c10::impl::VirtualGuardImpl impl(c10::kPrivateUse1);
  const c10::Stream stream = impl.getStream(sim0);
  c10::Event event(c10::kPrivateUse1);
  event.record(stream);
  at::Generator generator = at::globalContext().defaultGenerator(sim0);

  const simulated::Capturing capturing(stream);
  int tried = 0;
  const auto refused = [&](auto&& f) {
    EXPECT_THAT(error_of(f), HasSubstr("not permitted when stream is capturing")) << tried;
    ++tried;
  };
  refused([&] { a.sum().item<float>(); });
  refused([&] { a.cpu(); });
  refused([&] { torch::tensor({2.F, 3.F}, on(sim0)); });
  refused([&] { b.copy_(torch::ones({3}), /*non_blocking=*/true); });
  refused([&] { a.nonzero(); });
  refused([&] { torch::equal(a, a); });
  refused([&] { a.masked_select(a > 0); });
  refused([&] { impl.synchronizeStream(stream); });
  refused([&] { impl.synchronizeDevice(0); });
  refused([&] { event.synchronize(); });
  refused([&] { event.query(); });
  refused([&] { generator.get_state(); });
  refused([&] { generator.set_current_seed(1); });
  EXPECT_NO_THROW(a.add_(1.));
  EXPECT_NO_THROW(pinned.copy_(a, /*non_blocking=*/true));
  EXPECT_NO_THROW(b.copy_(pinned, /*non_blocking=*/true));
  EXPECT_NO_THROW(torch::rand({3}, on(sim0)));
}

TEST_F(SimulatedDevice, RefusesInBackwardsThreadToo) {
  const Tensor x = torch::ones({2}, on(sim0)).requires_grad_();
  const Tensor y = x * 2.;
  y.register_hook([](const Tensor& g) { g.sum().item<float>(); });
  const Tensor loss = y.sum();
  const simulated::Capturing capturing(
      c10::impl::VirtualGuardImpl(c10::kPrivateUse1).getStream(sim0));
  EXPECT_THAT(error_of([&] { loss.backward(); }), HasSubstr("when stream is capturing"));
}

// ---- CUDA's preconditions ----------------------------------------------------------------------

void unscale(const std::vector<Tensor>& gradients, Tensor flag, const Tensor& inverse) {
  at::_amp_foreach_non_finite_check_and_unscale_(gradients, flag, inverse);
}

TEST_F(SimulatedDevice, UnscalesWhatCUDAUnscales) {
  Tensor g = torch::tensor({1.F, INFINITY}, on(sim0));
  Tensor flag = torch::zeros({}, on(sim0));
  const Tensor half = torch::full({}, 0.5, on(sim0));
  unscale({g, torch::ones({2}, on(sim0, at::kHalf))}, flag, half);
  EXPECT_EQ(g[0].item<float>(), 0.5F);
  EXPECT_EQ(flag.item<float>(), 1.F);

  for (const double value : {3e38, 4e38}) {
    const auto wide = torch::full({2}, value, on(sim0, at::kDouble));
    flag = torch::zeros({}, on(sim0));
    unscale({wide}, flag, half);
    EXPECT_EQ(flag.item<float>(), value > 3.5e38 ? 1.F : 0.F) << "fp64 is checked as fp32";
    EXPECT_EQ(wide[1].item<double>(), value / 2);
  }

  const auto bf16 = torch::ones({2}, on(sim0, at::kBFloat16));
  EXPECT_THAT(error_of([&] { unscale({bf16}, flag, half); }),
              HasSubstr("not implemented for 'BFloat16'"));
  EXPECT_THAT(error_of([&] { unscale({g}, torch::full({}, 2., on(sim0)), half); }),
              HasSubstr("found_inf is 2"));
  EXPECT_THAT(error_of([&] { unscale({g}, torch::zeros({2}, on(sim0)), half); }),
              HasSubstr("1-element"));
  EXPECT_THAT(error_of([&] { unscale({g}, flag, torch::ones({}, on(sim0, at::kDouble))); }),
              HasSubstr("float tensor"));
  EXPECT_THAT(error_of([&] { unscale({g}, flag, torch::ones({})); }), HasSubstr("on the device"));
  EXPECT_THAT(error_of([&] {
                unscale({g, torch::ones({2}, on(sim1))}, flag, half);
              }),
              HasSubstr("same device"));
  EXPECT_THAT(error_of([&] { unscale({torch::ones({2}, on(sim1))}, flag, half); }),
              HasSubstr("same device"));
}

struct AdamCall {
  std::vector<Tensor> params, grads, averages, squares, steps;
  Tensor lr, flag;

  explicit AdamCall(c10::Device device) {
    for (auto* const list : {&params, &grads, &averages, &squares}) {
      *list = {torch::ones({2, 3}, on(device))};
    }
    steps = {torch::ones({}, on(device))};
    lr = torch::full({}, 0.1, on(device));
    flag = torch::zeros({}, on(device));
  }
  void operator()() {
    at::_fused_adam_(params, grads, averages, squares, {}, steps, lr, 0.9, 0.99, 0., 1e-8, false,
                     false, {}, flag);
  }
};

TEST_F(SimulatedDevice, StepsAsTheCPUDoes) {
  AdamCall here(sim0), there(at::kCPU);
  here();
  there();
  EXPECT_TRUE(torch::allclose(here.params[0].cpu(), there.params[0]));
  EXPECT_EQ(here.squares[0].cpu()[0][0].item<float>(), there.squares[0][0][0].item<float>());
}

TEST_F(SimulatedDevice, RefusesWhatCUDAsFusedKernelsRefuse) {
  const auto refused = [](auto&& change, const char* why) {
    AdamCall call(sim0);
    change(call);
    EXPECT_THAT(error_of([&] { call(); }), HasSubstr(why));
  };
  refused([](AdamCall& c) { c.lr = c.lr.cpu(); }, "lr is a tensor on cpu");
  refused([](AdamCall& c) { c.steps[0] = c.steps[0].cpu(); }, "a step count is on cpu");
  refused([](AdamCall& c) { c.flag.fill_(2.); }, "found_inf is 2");
  refused([](AdamCall& c) { c.flag = c.flag.cpu(); }, "found_inf must be on the device");
  refused([](AdamCall& c) { c.averages[0] = torch::ones({3, 2}, on(sim0)).t(); }, "other strides");
  refused([](AdamCall& c) { c.grads[0] = torch::ones({2, 3}, on(sim1)); }, "grads[0] is on sim:1");
  refused([](AdamCall& c) { c.squares[0] = c.squares[0].to(at::kHalf); }, "is of Half");
}

TEST_F(SimulatedDevice, UpdatesTheScaleOnTheDevice) {
  Tensor scale = torch::full({}, 8., on(sim0)), tracker = torch::zeros({}, on(sim0, at::kInt));
  at::_amp_update_scale_(scale, tracker, torch::ones({}, on(sim0)), 2., 0.5, 1);
  EXPECT_EQ(scale.item<float>(), 4.F);
  EXPECT_THAT(error_of([&] {
                Tensor host = tracker.cpu();
                at::_amp_update_scale_(scale, host, torch::ones({}, on(sim0)), 2., 0.5, 1);
              }),
              HasSubstr("growth_tracker"));
}

// ---- Counts ------------------------------------------------------------------------------------

TEST_F(SimulatedDevice, CountsKernelsCopiesAndWaits) {
  Tensor a = torch::ones({100}, on(sim0));
  const Counts kernels;
  a.add_(1.);
  torch::_foreach_mul_({a, a.clone()}, 2.);
  a.view({10, 10}).t();
  EXPECT_EQ(kernels.now().kernels, 3);  // one of them the clone
  EXPECT_EQ(kernels.now().bytes_written, 400 * 4);
  EXPECT_EQ(kernels.now().waits, 0);

  const Counts copies;
  a.cpu();
  a[0].item<float>();
  EXPECT_EQ(copies.now().device_to_host, 2);
  EXPECT_EQ(copies.now().waits, 2);
  EXPECT_EQ(copies.now().kernels, 0);

  const Counts uploads;
  torch::ones({3}).to(sim0);
  torch::ones({3}).pin_memory().to(sim0, /*non_blocking=*/true);
  EXPECT_EQ(uploads.now().host_to_device, 2);
  EXPECT_EQ(uploads.now().waits, 1);
}

TEST_F(SimulatedDevice, CountsAKernelForEachTensorOfUnlikeLists) {
  const Counts counts;
  const Tensor a = torch::empty({4}, on(sim0)), b = torch::empty({4}, on(sim0, at::kHalf));
  torch::_foreach_add_({a, b}, 1.);
  EXPECT_EQ(counts.now().kernels, 2);
}

}  // namespace
