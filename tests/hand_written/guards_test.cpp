// SPDX-License-Identifier: BSD-3-Clause
// Guards as programs write them, each with one fault, next to torchamp's guard. The guide's page
// hand-written.md has a row for each test of this folder.
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/autocast.h>

#include <cstddef>
#include <stdexcept>
#include <vector>

#include "simulated_device/device.h"
#include "support/call_counter.h"
#include "support/devices.h"
#include "support/thread_state.h"

namespace {

namespace autocast = at::autocast;
using at::Tensor;
using torchamp::AutocastGuard;

/// Restores what the faulty guards leave behind.
class HandWrittenGuard : public testing::Test {
 protected:
  void TearDown() override {
    autocast::clear_cache();
    for (std::size_t i = 0; i < autocast_devices.size(); ++i) {
      autocast::set_autocast_enabled(autocast_devices[i], before_.enabled[i]);
      autocast::set_autocast_dtype(autocast_devices[i], before_.dtypes[i]);
    }
    EXPECT_EQ(ThreadState(), before_);
  }

 private:
  ThreadState before_;
};

/// Neither counts its nesting nor clears the cache.
class NeverClears {
 public:
  NeverClears() { autocast::set_autocast_enabled(at::kCPU, true); }
  NeverClears(const NeverClears&) = delete;
  NeverClears& operator=(const NeverClears&) = delete;
  ~NeverClears() { autocast::set_autocast_enabled(at::kCPU, before_); }

 private:
  bool before_ = autocast::is_autocast_enabled(at::kCPU);
};

struct Trained {
  double first_loss = 0., last_loss = 0., weight = 0.;
};

/// Ten steps from 1 towards 3.
template <class MakeGuard>
Trained train_with(const MakeGuard& make_guard) {
  const Tensor weight = torch::ones({1, 1}, torch::requires_grad());
  torch::optim::SGD optimizer({weight}, torch::optim::SGDOptions(0.25));
  Trained trained;
  for (int step = 0; step < 10; ++step) {
    Tensor loss;
    {
      [[maybe_unused]] const auto guard = make_guard();
      loss = (torch::mm(torch::ones({1, 1}), weight) - 3.).square().sum();
    }
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    (step == 0 ? trained.first_loss : trained.last_loss) = loss.item<double>();
  }
  trained.weight = weight.item<double>();
  return trained;
}

TEST_F(HandWrittenGuard, ThatNeverClearsTheCacheTrainsOnTheCastsOfTheFirstStep) {
  const Trained by_hand = train_with([] { return NeverClears(); });
  EXPECT_EQ(by_hand.first_loss, 4.);
  EXPECT_EQ(by_hand.last_loss, 4.) << "the first weight's";
  EXPECT_EQ(by_hand.weight, 11.);
  autocast::clear_cache();
  const Trained trained = train_with([] { return AutocastGuard(at::kCPU); });
  EXPECT_EQ(trained.first_loss, 4.);
  EXPECT_LT(trained.last_loss, 1e-3);
  EXPECT_NEAR(trained.weight, 3., 0.02);
}

/// Sets a dtype, and leaves it.
class LeavesItsDtype {
 public:
  explicit LeavesItsDtype(at::ScalarType dtype) {
    autocast::set_autocast_enabled(at::kCPU, true);
    autocast::set_autocast_dtype(at::kCPU, dtype);
  }
  LeavesItsDtype(const LeavesItsDtype&) = delete;
  LeavesItsDtype& operator=(const LeavesItsDtype&) = delete;
  ~LeavesItsDtype() { autocast::set_autocast_enabled(at::kCPU, before_); }

 private:
  bool before_ = autocast::is_autocast_enabled(at::kCPU);
};

/// In a later region without a dtype.
double product_of_300_and_300() {
  const AutocastGuard guard(at::kCPU);
  return torch::mm(torch::full({1, 1}, 300.), torch::full({1, 1}, 300.)).item<double>();
}

TEST_F(HandWrittenGuard, ThatLeavesItsDtypeGivesItToLaterRegions) {
  { const AutocastGuard guard(at::kCPU, at::kHalf); }
  EXPECT_NEAR(product_of_300_and_300(), 90000., 256.) << "in bf16";
  { const LeavesItsDtype guard(at::kHalf); }
  EXPECT_EQ(product_of_300_and_300(), HUGE_VAL) << "in fp16";
}

/// Switches off at its end, whatever was before.
class SwitchesOff {
 public:
  SwitchesOff() {
    autocast::set_autocast_enabled(at::kCPU, true);
    autocast::increment_nesting();
  }
  SwitchesOff(const SwitchesOff&) = delete;
  SwitchesOff& operator=(const SwitchesOff&) = delete;
  ~SwitchesOff() {
    if (autocast::decrement_nesting() == 0) autocast::clear_cache();
    autocast::set_autocast_enabled(at::kCPU, false);
  }
};

/// The bytes of an element that a region computes after a guard inside it has ended.
template <class MakeGuard>
std::size_t bytes_after(const MakeGuard& make_inner) {
  const Tensor x = torch::ones({2, 2});
  const AutocastGuard outer(at::kCPU);
  { [[maybe_unused]] const auto inner = make_inner(); }
  return torch::mm(x, x).element_size();
}

TEST_F(HandWrittenGuard, ThatSwitchesOffEndsTheRegionAroundIt) {
  EXPECT_EQ(bytes_after([] { return SwitchesOff(); }), 4U) << "fp32";
  EXPECT_EQ(bytes_after([] { return AutocastGuard(at::kCPU); }), 2U);
}

/// The last activation of a model whose input is bad.
Tensor throwing_forward() {
  throw std::runtime_error("a batch of another shape");
}

/// 257 is not a number of bf16.
double product_of_257_and_1() {
  return torch::mm(torch::full({1, 1}, 257.), torch::ones({1, 1})).item<double>();
}

TEST_F(HandWrittenGuard, ThatIsTwoCallsStaysOnAfterAnException) {
  try {
    const AutocastGuard guard(at::kCPU);
    throwing_forward();
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(product_of_257_and_1(), 257.);
  try {
    autocast::set_autocast_enabled(at::kCPU, true);
    throwing_forward();
    autocast::set_autocast_enabled(at::kCPU, false);
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(product_of_257_and_1(), 256.);
}

TEST_F(HandWrittenGuard, ForACpuCastsNothingOfAModelOnAnotherDevice) {
  SKIP_WITHOUT(at::kPrivateUse1);
  const Tensor weight = torch::ones({2, 2}, simulated::on(simulated::sim0));
  autocast::set_autocast_enabled(at::kCPU, true);
  EXPECT_EQ(torch::mm(weight, weight).element_size(), 4U);
  autocast::set_autocast_enabled(at::kCPU, false);
  const AutocastGuard guard(weight.device(), at::kHalf);
  EXPECT_EQ(torch::mm(weight, weight).element_size(), 2U);
}

/// Clears the cache at its end, also within another region.
class ClearsEarly {
 public:
  ClearsEarly() { autocast::set_autocast_enabled(at::kCPU, true); }
  ClearsEarly(const ClearsEarly&) = delete;
  ClearsEarly& operator=(const ClearsEarly&) = delete;
  ~ClearsEarly() {
    autocast::clear_cache();
    autocast::set_autocast_enabled(at::kCPU, before_);
  }

 private:
  bool before_ = autocast::is_autocast_enabled(at::kCPU);
};

/// How often a region casts a weight that it uses four times, each time after a guard inside it.
template <class MakeGuard>
int casts_between(const MakeGuard& make_inner) {
  const Tensor x = torch::ones({1, 2}, torch::kBFloat16);
  const Tensor weight = torch::ones({2, 2}, torch::requires_grad());
  const AutocastGuard outer(at::kCPU);
  const CallCounter calls;
  for (int i = 0; i < 4; ++i) {
    { [[maybe_unused]] const auto inner = make_inner(); }
    (void)torch::mm(x, weight);
  }
  return calls.called_anywhere("aten::_to_copy");
}

TEST_F(HandWrittenGuard, ThatDoesNotCountItsNestingHasWeightsCastAgain) {
  EXPECT_EQ(casts_between([] { return ClearsEarly(); }), 4);
  EXPECT_EQ(casts_between([] { return AutocastGuard(at::kCPU); }), 1);
}

}  // namespace
