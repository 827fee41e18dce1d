// SPDX-License-Identifier: BSD-3-Clause
// backward() within a region: what autograd adds up is no addition of the program's.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "support/devices.h"
#include "support/warnings.h"
#include "torchamp/autocast.h"
#include "torchamp/autocast_state.h"
#include "torchamp/custom_function.h"
#include "torchamp/recompute.h"

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using torchamp::AutocastGuard;
using torchamp::AutocastState;
using torchamp::Policy;

using Gradients = std::vector<torch::Tensor>;

class BackwardInRegion
    : public ::testing::TestWithParam<std::tuple<at::DeviceType, at::ScalarType>> {
 protected:
  void SetUp() override {
    SKIP_WITHOUT(device());
    torch::manual_seed(1);
  }
  static at::DeviceType device() { return std::get<0>(GetParam()); }
  static at::ScalarType dtype() { return std::get<1>(GetParam()); }

  torch::Tensor leaf(at::IntArrayRef sizes, at::ScalarType of = at::kFloat) {
    return torch::randn(sizes).to(device(), of).requires_grad_();
  }
};

std::string name_of(const ::testing::TestParamInfo<BackwardInRegion::ParamType>& info) {
  return name_of_device(std::get<0>(info.param)) +
         (std::get<1>(info.param) == at::kHalf ? "Fp16" : "Bf16");
}
INSTANTIATE_TEST_SUITE_P(Devices, BackwardInRegion,
                         ::testing::Combine(all_devices(),
                                            ::testing::Values(at::kHalf, at::kBFloat16)),
                         name_of);

/// A tensor that is used twice, in such a way that autograd cannot add its gradients in place.
torch::Tensor used_twice(const torch::Tensor& z) {
  return torch::cat({z, z.relu()}, 1).to(torch::kFloat);
}

TEST_P(BackwardInRegion, TakesSumsOfGradientsToTheNextKernelInTheirDtype) {
  const torch::Tensor x = torch::randn({4, 8}).to(device());
  const torch::Tensor w = leaf({8, 8});
  const auto run = [&](bool backward_inside) {
    std::vector<at::ScalarType> sums;
    torch::Tensor loss;
    const auto forward = [&] {
      const torch::Tensor z = torch::mm(x, w);
      z.register_hook([&](const torch::Tensor& sum) { sums.push_back(sum.scalar_type()); });
      loss = used_twice(z).sum();
    };
    Gradients gradients;
    {
      const AutocastGuard guard(device(), dtype());
      forward();
      if (backward_inside) gradients = torch::autograd::grad({loss}, {w});
    }
    if (!backward_inside) gradients = torch::autograd::grad({loss}, {w});
    EXPECT_EQ(sums, std::vector<at::ScalarType>{dtype()});
    return gradients.front();
  };
  EXPECT_TRUE(run(true).equal(run(false)));
}

TEST_P(BackwardInRegion, OfAConvolutionWhoseResultIsUsedTwiceRunsAsOutside) {
  if (device() == at::kPrivateUse1) GTEST_SKIP() << "the simulated device has no convolutions";
  const torch::Tensor x = torch::randn({2, 4, 8, 8}).to(device());
  const torch::Tensor w = leaf({4, 4, 3, 3});
  const AutocastGuard guard(device(), dtype());
  const torch::Tensor z = torch::conv2d(x, w, {}, 1, 1);
  const torch::Tensor y = torch::cat({z, torch::max_pool2d(z, 3, 1, 1)}, 1);
  EXPECT_NO_THROW(y.to(torch::kFloat).sum().backward());
  EXPECT_EQ(w.grad().scalar_type(), at::kFloat);
}

TEST_P(BackwardInRegion, KeepsTheDtypeOfWhatIsAddedToALeafOfAGraphOfGradients) {
  const CollectedWarnings of_create_graph;
  torch::Tensor w = leaf({4, 4}, dtype());
  const AutocastGuard guard(device(), dtype());
  for (int i = 0; i < 2; ++i) {
    used_twice(w * w).sum().backward({}, /*retain_graph=*/true, /*create_graph=*/true);
  }
  EXPECT_EQ(w.grad().scalar_type(), dtype());
  EXPECT_TRUE(w.grad().requires_grad());
  // The gradient's own, in a second backward within the region.
  const torch::Tensor second =
      torch::autograd::grad({w.grad().to(torch::kFloat).pow(2).sum()}, {w}).front();
  EXPECT_EQ(second.scalar_type(), dtype());
  w.mutable_grad().reset();  // the two refer to each other
}

TEST_P(BackwardInRegion, LeavesTheForwardPassThatFollowsToThePolicy) {
  const torch::Tensor w = leaf({4, 4}, dtype());
  const AutocastGuard guard(device(), dtype());
  used_twice(w * w).sum().backward();
  EXPECT_EQ((w + w).scalar_type(), at::kFloat);
}

}  // namespace

// On Windows, a torch::autograd::Function must be of a type with external linkage.
namespace backward_in_region {

/// What an addition in backward gives, and what runs it.
inline at::ScalarType added = at::ScalarType::Undefined;
inline std::function<void(const std::function<void()>& add)> in_a_scope;

template <class Base>
struct Adds : Base {
  static torch::Tensor forward(AutogradContext*, const torch::Tensor& x) { return x.clone(); }
  static variable_list backward(AutogradContext*, variable_list gradients) {
    const torch::Tensor lower = gradients[0].to(torch::kHalf);
    in_a_scope([&] { added = (lower + lower).scalar_type(); });
    return gradients;
  }
};
struct PlainAdds : Adds<torch::autograd::Function<PlainAdds>> {};
struct AutocastAdds : Adds<torchamp::AutocastFunction<AutocastAdds>> {};

}  // namespace backward_in_region

namespace {

using backward_in_region::added;
using backward_in_region::AutocastAdds;
using backward_in_region::in_a_scope;
using backward_in_region::PlainAdds;

TEST_P(BackwardInRegion, FollowsThePolicyIfAFunctionOfTheProgramsMakesAGuard) {
  const torch::Tensor x = leaf({2, 2});
  const auto sum = [&](bool in_region, auto run_in_backward) {
    in_a_scope = run_in_backward;
    added = at::ScalarType::Undefined;
    if (in_region) {
      const AutocastGuard guard(device(), dtype());
      PlainAdds::apply(x).sum().backward();
    } else {
      PlainAdds::apply(x).sum().backward();
    }
    return added;
  };
  const auto plain = [](const auto& add) { add(); };
  const auto guarded = [](const auto& add) {
    const AutocastGuard guard(device(), dtype());
    add();
    const AutocastGuard inner(device(), dtype());
    add();
  };
  const auto restored = [](const auto& add) {
    const AutocastState state = AutocastState::of_this_thread();
    const torchamp::AutocastStateGuard same(state);
    EXPECT_EQ(AutocastState::of_this_thread(), state);
    add();
  };
  for (int i = 0; i < 2; ++i) {  // what one backward pass leaves does not reach the next
    EXPECT_EQ(sum(true, guarded), at::kFloat);
    EXPECT_EQ(sum(false, guarded), at::kFloat);
    EXPECT_EQ(sum(true, restored), at::kFloat);
    EXPECT_EQ(sum(true, plain), at::kHalf) << "autograd's, as far as one can see";
    EXPECT_EQ(sum(false, plain), at::kHalf);
  }
}

TEST_P(BackwardInRegion, FollowsThePolicyInAnAutocastFunction) {
  const torch::Tensor x = leaf({2, 2});
  in_a_scope = [](const auto& add) { add(); };
  for (const bool inside : {true, false}) {
    added = at::ScalarType::Undefined;
    torch::Tensor y;
    {
      const AutocastGuard guard(device(), dtype());
      y = AutocastAdds::apply(x).to(torch::kFloat).sum();
      if (inside) y.backward();
    }
    if (!inside) y.backward();
    EXPECT_EQ(added, at::kFloat) << inside;
  }
}

TEST_P(BackwardInRegion, FollowsThePolicyInARecomputationAndNotInItsOwnSums) {
  const torch::Tensor x = leaf({4, 4}, dtype());
  std::vector<at::ScalarType> sums, of_gradients;
  const auto function = [&](const torch::Tensor& input) {
    const torch::Tensor z = input * 2;
    if (z.requires_grad()) {
      z.register_hook([&](const torch::Tensor& sum) { of_gradients.push_back(sum.scalar_type()); });
    }
    sums.push_back((z + z).scalar_type());
    return used_twice(z);
  };
  const AutocastGuard guard(device(), dtype());
  torchamp::checkpoint(function, x).sum().backward();
  EXPECT_EQ(sums, (std::vector<at::ScalarType>{at::kFloat, at::kFloat}));
  EXPECT_EQ(of_gradients, std::vector<at::ScalarType>{dtype()});
  EXPECT_EQ(x.grad().scalar_type(), dtype());
}

}  // namespace
