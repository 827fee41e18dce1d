// SPDX-License-Identifier: BSD-3-Clause
// Which autocast kernels a policy needs, and the one over the ban of binary cross entropy.
#include "torchamp/detail/core/autocast/autocast_kernel.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "simulated_device/device.h"
#include "support/devices.h"
#include "support/expect_error.h"
#include "support/warnings.h"
#include "torchamp/autocast.h"
#include "torchamp/detail/core/autocast/policy_scope.h"
#include "torchamp/labs/cast_recorder.h"

namespace {

using torchamp::AutocastGuard;
using torchamp::Cast;
using torchamp::Policy;

c10::OperatorHandle op_named(const char* name) {
  return torchamp::detail::find_ops(name, "test").front();
}

/// What torchamp's kernel of the op does under the policy; native if it needs none.
Cast entry(const Policy& policy, const char* name, at::DeviceType device) {
  return torchamp::detail::compiled_rule(*policy.data(), op_named(name), device).rule.cast;
}

std::size_t kernels_on_cpu() {
  const std::size_t cpu = torchamp::detail::device_index(at::kCPU, "test");
  return torchamp::detail::shared_runtime().kernels[cpu].size();
}

TEST(AutocastKernel, IsNotNeededIfLibTorchsListOfCudaAgrees) {
  EXPECT_EQ(entry(Policy::torch().fp32({"softmax"}), "softmax.int", at::kCUDA), Cast::native);
  EXPECT_EQ(entry(Policy::torch().lower_precision({"softmax"}), "softmax.int", at::kCUDA),
            Cast::lower_precision);
}

TEST(AutocastKernel, PromotesByAKernelOfTorchampsWhateverLibTorchsListsSay) {
  // A CPU's kernel casts to fp32; CUDA's throws for two 16-bit dtypes.
  for (const at::DeviceType device : {at::kCPU, at::kCUDA}) {
    EXPECT_EQ(entry(Policy::torch().promote({"grid_sampler"}), "grid_sampler", device),
              Cast::promote);
  }
}

TEST(AutocastKernel, ShieldsOnlyOpsThatAutocastCouldReach) {
  const Policy policy = Policy::torch().unchanged({"relu", "linear", "einsum"});
  EXPECT_EQ(entry(policy, "relu", at::kCPU), Cast::native) << "it calls no op";
  EXPECT_EQ(entry(policy, "linear", at::kCPU), Cast::unchanged) << "it has a kernel of its own";
  EXPECT_EQ(entry(policy, "einsum", at::kCPU), Cast::unchanged) << "it calls others";
}

TEST(AutocastKernel, IsInstalledOnceAndOnlyIfItIsNeeded) {
  { const AutocastGuard guard(at::kCPU, {.policy = Policy::torch().fp32({"erfc"})}); }
  const std::size_t before = kernels_on_cpu();
  EXPECT_GT(before, 0u);
  { const AutocastGuard guard(at::kCPU, {.policy = Policy::torch().promote({"erfc"})}); }
  { const AutocastGuard guard(at::kCPU, {.policy = Policy::torch().native({"erf", "erfc"})}); }
  { const AutocastGuard guard(at::kCPU, {.policy = Policy::torch().unchanged({"erf"})}); }
  EXPECT_EQ(kernels_on_cpu(), before);
}

TEST(AutocastKernel, CastsOneArgumentOfAnAdditionAndNoneIfAnotherIsWide) {
  const at::Tensor narrow = at::ones({2}, at::kBFloat16).requires_grad_();
  const at::Tensor wide = at::ones({2}).requires_grad_();
  const AutocastGuard guard(at::kCPU);
  const auto is_cast = [](const at::Tensor& sum, std::size_t argument) {
    return sum.grad_fn()->next_edge(argument).function->name().find("Copy") != std::string::npos;
  };
  EXPECT_FALSE(is_cast(narrow + wide, 0));
  EXPECT_FALSE(is_cast(wide + narrow, 1));
  EXPECT_TRUE(is_cast(narrow + narrow, 0));
  EXPECT_FALSE(is_cast(narrow + narrow, 1));
}

TEST(AutocastKernel, CastsNothingThatIsWrittenToIntegers) {
  at::Tensor whole = at::zeros({2}, at::kLong);
  for (const at::ScalarType lower : {at::kHalf, at::kBFloat16}) {
    const at::Tensor low = at::full({2}, 1.5, lower);
    const AutocastGuard guard(at::kCPU, lower);
    EXPECT_ERROR(whole.index_put_({at::arange(2)}, low), "source and destination dtypes match");
    EXPECT_ERROR(whole.index_add_(0, at::arange(2), low), "must have the same scalar type");
  }
  EXPECT_TRUE(whole.equal(at::zeros({2}, at::kLong)));
}

TEST(AutocastKernel, LeavesAnOpThatIsSetBackToNativeToTheOpsThatItCalls) {
  EXPECT_EQ(entry(Policy::standard().native({"einsum"}), "einsum", at::kCPU), Cast::native);
  EXPECT_EQ(entry(Policy::standard().unchanged({"einsum"}), "einsum", at::kCPU), Cast::unchanged);
  const AutocastGuard guard(at::kCPU, {.policy = Policy::standard().native({"einsum"})});
  const at::Tensor x = at::ones({2, 2});
  EXPECT_EQ(at::einsum("ij,jk->ik", {x, x}).scalar_type(), at::kBFloat16);
}

TEST(RuleOfCall, IsUnchangedOutsideOfRegionsAndNativeIfLibTorchDecides) {
  const auto rule = [] {
    return torchamp::detail::rule_of_call(op_named("mse_loss"), at::kCPU, {});
  };
  EXPECT_EQ(rule(), Cast::unchanged);
  const AutocastGuard guard(at::kCPU, {.policy = Policy::torch()});
  EXPECT_EQ(rule(), Cast::native);
  const AutocastGuard off(at::kCPU, {.enabled = false});
  EXPECT_EQ(rule(), Cast::unchanged);
}

// cuDNN's autocast kernel knows fp16 only: see Note [Recurrent layers].
TEST(RecurrentLayers, AreCastToTheRegionsDtypeIfCudasListsAreFollowed) {
  for (const char* const op : {"lstm.input", "lstm.data", "gru.input", "gru.data", "rnn_tanh.input",
                               "rnn_tanh.data", "rnn_relu.input", "rnn_relu.data"}) {
    for (const at::DeviceType device : {at::kCUDA, at::kPrivateUse1}) {
      EXPECT_EQ(entry(Policy::standard(), op, device), Cast::lower_precision) << op << device;
      EXPECT_EQ(entry(Policy::torch(), op, device), Cast::native) << op << device;
    }
    EXPECT_EQ(entry(Policy::torch(), op, at::kCPU), Cast::native) << op;
    const Policy edited = Policy::standard().fp32(torchamp::ops::recurrent);
    EXPECT_EQ(entry(edited, op, at::kCUDA), Cast::fp32) << op << ": the family has them";
  }
}

/// The result of an LSTM and the gradients of its input and weights, the region's own work left to
/// `scope`, which is made before the forward pass and ends before the backward pass.
template <class Scope>
std::vector<at::Tensor> lstm_and_gradients(at::ScalarType input_dtype, Scope scope) {
  at::manual_seed(3);
  std::vector<at::Tensor> leaves{at::randn({3, 2, 4}).to(input_dtype)};
  for (const auto& sizes : {std::vector<int64_t>{12, 4}, {12, 3}, {12}, {12}}) {
    leaves.push_back(at::randn(sizes));
  }
  for (at::Tensor& leaf : leaves) leaf.requires_grad_();
  const at::Tensor hidden = at::zeros({1, 2, 3}, leaves[0].options());
  at::Tensor output;
  {
    [[maybe_unused]] const auto region = scope();
    output = std::get<0>(at::lstm(leaves[0], {hidden, hidden}, at::TensorList(leaves).slice(1),
                                  /*has_biases=*/true, /*num_layers=*/1, /*dropout=*/0.,
                                  /*train=*/true, /*bidirectional=*/false, /*batch_first=*/false));
  }
  output.sum().backward();
  std::vector<at::Tensor> result{output.detach()};
  for (const at::Tensor& leaf : leaves) result.push_back(leaf.grad());
  return result;
}

/// LibTorch's own autocast on the calling thread's CPU, while it lives.
class RawAutocast {
 public:
  explicit RawAutocast(at::ScalarType dtype)
      : before_(torchamp::detail::DeviceAutocastState::of(at::kCPU)) {
    torchamp::detail::DeviceAutocastState{at::kCPU, dtype, true}.apply();
  }
  RawAutocast(const RawAutocast&) = delete;
  RawAutocast& operator=(const RawAutocast&) = delete;
  ~RawAutocast() {
    before_.apply();
    at::autocast::clear_cache();
  }

 private:
  torchamp::detail::DeviceAutocastState before_;
};

void expect_equal(const std::vector<at::Tensor>& some, const std::vector<at::Tensor>& others) {
  ASSERT_EQ(some.size(), others.size());
  for (std::size_t i = 0; i < some.size(); ++i) {
    EXPECT_EQ(some[i].scalar_type(), others[i].scalar_type()) << i;
    EXPECT_TRUE(at::equal(some[i], others[i])) << i;
  }
}

class RecurrentLayersOnACpu : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  /// The result under LibTorch's own autocast.
  std::vector<at::Tensor> libtorchs() const {
    return lstm_and_gradients(at::kFloat, [&] { return RawAutocast(GetParam()); });
  }

  /// The result under a guard.
  std::vector<at::Tensor> under(const Policy& policy) const {
    return lstm_and_gradients(at::kFloat, [&] { return HeldGuard(policy, GetParam()); });
  }

 private:
  struct HeldGuard {
    HeldGuard(const Policy& policy, at::ScalarType dtype)
        : guard(at::kCPU, {.dtype = dtype, .policy = policy}) {}
    AutocastGuard guard;
  };
};
INSTANTIATE_TEST_SUITE_P(Dtypes, RecurrentLayersOnACpu, ::testing::Values(at::kBFloat16, at::kHalf),
                         [](const auto& dtype) { return std::string(c10::toString(dtype.param)); });

TEST_P(RecurrentLayersOnACpu, RunIn16BitsAsUnderLibTorchsAutocast) {
  const auto standard = under(Policy::standard());  // also decides how this CPU computes
  EXPECT_EQ(standard[0].scalar_type(), GetParam());
  const auto expected = libtorchs();
  expect_equal(standard, expected);
  expect_equal(under(Policy::torch()), expected);
  expect_equal(under(Policy::standard().native(torchamp::ops::recurrent)), expected);
}

TEST_P(RecurrentLayersOnACpu, AreUnchangedByThemselves) {
  for (const char* const op : {"lstm", "gru", "rnn_tanh", "rnn_relu"}) {
    for (const char* const overload : {"", ".input", ".data"}) {
      const std::string name = std::string(op) + overload;
      const AutocastGuard guard(at::kCPU, GetParam());
      for (const Policy& policy : {Policy::standard(), Policy::torch()}) {
        EXPECT_EQ(policy.effect(name, at::kCPU), Cast::unchanged) << name;
      }
    }
  }
}

TEST_P(RecurrentLayersOnACpu, AreAsEdited) {
  const auto wide = under(Policy::standard().fp32(torchamp::ops::recurrent));
  expect_equal(wide, lstm_and_gradients(at::kFloat, [] { return 0; }));
  const auto low = under(Policy::standard().lower_precision(torchamp::ops::recurrent));
  EXPECT_EQ(low[0].scalar_type(), GetParam());
}

TEST_P(RecurrentLayersOnACpu, AreLibTorchsWhileOneDnnIsOff) {
  auto& context = at::globalContext();
  const bool before = context.userEnabledMkldnn();
  context.setUserEnabledMkldnn(false);
  const auto standard = under(Policy::standard());
  const auto expected = libtorchs();
  context.setUserEnabledMkldnn(before);
  expect_equal(standard, expected);
}

TEST(SimulatedRecurrentLayers, CastInputHiddenStateAndWeightsAndShowTheirCellsNoAutocast) {
  SKIP_WITHOUT(at::kPrivateUse1);
  const auto on_device = [](at::Tensor t) { return t.to(at::Device(at::kPrivateUse1, 0)); };
  const at::Tensor input = on_device(at::rand({3, 1, 4})), hidden = on_device(at::rand({1, 1, 2}));
  const std::vector<at::Tensor> weights{on_device(at::rand({2, 4})), on_device(at::rand({2, 2}))};
  const auto run = [&](at::ScalarType dtype) {
    std::vector<at::Tensor> cast;
    for (const at::Tensor& weight : weights) cast.push_back(weight.to(dtype));
    return at::rnn_tanh(input.to(dtype), hidden.to(dtype), cast, /*has_biases=*/false,
                        /*num_layers=*/1, /*dropout=*/0., /*train=*/false, /*bidirectional=*/false,
                        /*batch_first=*/false);
  };
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    const auto [expected, expected_hidden] = run(dtype);
    const AutocastGuard guard(at::kPrivateUse1, dtype);
    const auto [output, last] = run(at::kFloat);
    EXPECT_EQ(output.scalar_type(), dtype);
    EXPECT_TRUE(at::equal(output, expected));
    EXPECT_TRUE(at::equal(last, expected_hidden));
  }
}

TEST(RecurrentLayers, WarnOfAllButTheirScatteredWeights) {
  const CollectedWarnings warnings;
  {
    const torchamp::detail::NoWarning no_warning(torchamp::detail::scattered_weights);
    TORCH_WARN("RNN module weights are not part of single contiguous chunk of memory. This …");
    TORCH_WARN("something else");
  }
  TORCH_WARN("later");
  EXPECT_EQ(warnings.text(), "something else\nlater\n");
}

TEST(BinaryCrossEntropy, IsInFp32OnEveryDeviceUnderStandard) {
  const Policy policy = Policy::standard();
  for (const at::DeviceType device : {at::kCPU, at::kCUDA, at::kXPU, at::kMPS}) {
    EXPECT_EQ(policy.lookup("binary_cross_entropy", device), Cast::fp32) << device;
  }
  EXPECT_EQ(Policy::torch().lookup("binary_cross_entropy", at::kCUDA), Cast::native);
  const at::Tensor logits = at::linspace(-3, 3, 6), target = at::ones({6});
  const at::Tensor expected = at::binary_cross_entropy(logits.sigmoid(), target);
  const AutocastGuard guard(at::kCPU);
  const at::Tensor loss = at::binary_cross_entropy(logits.sigmoid(), target.to(at::kBFloat16));
  EXPECT_EQ(loss.scalar_type(), at::kFloat);
  EXPECT_TRUE(at::equal(loss, expected));
}

/// Calls the kernel that binary_cross_entropy has for CUDA's autocast, with CPU tensors, which it
/// passes on as they are.
at::Tensor call_cudas_binary_cross_entropy() {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::binary_cross_entropy", "");
  torch::jit::Stack stack{at::full({2}, 0.5), at::ones({2}), c10::IValue(), std::int64_t{1}};
  op.callBoxedForDispatchKey(c10::DispatchKey::AutocastCUDA, stack);
  return stack.back().toTensor();
}

TEST(BinaryCrossEntropy, IsStillBannedOnCudaWithoutStandard) {
  using namespace torchamp::detail;
  const char* const ban = "unsafe to autocast";
  EXPECT_ERROR(call_cudas_binary_cross_entropy(), ban);
  const auto call_under = [](const Policy& policy) {
    policy.data()->compile_once(device_index(at::kCUDA, "test"));
    const auto thread = std::make_shared<ThreadPolicy>();
    thread->in_force[device_index(at::kCUDA, "test")] = policy.data();
    const PolicyScope scope(thread);
    return call_cudas_binary_cross_entropy();
  };
  EXPECT_FLOAT_EQ(call_under(Policy::standard()).item<float>(), -std::log(0.5f));
  EXPECT_ERROR(call_under(Policy::torch()), ban);
  EXPECT_ERROR(call_under(Policy::standard().native({"binary_cross_entropy"})), ban);
  EXPECT_ERROR(call_cudas_binary_cross_entropy(), ban);  // raw at::autocast keeps it
}

TEST(BinaryCrossEntropy, Of16BitProbabilitiesIsWarnedOf) {
  const at::Tensor probability = at::full({4}, 0.5), target = at::ones({4});
  const auto warning_of = [&](at::ScalarType dtype, const Policy& policy) {
    const CollectedWarnings warnings;
    const AutocastGuard guard(at::kCPU, {.policy = policy});
    (void)at::binary_cross_entropy(probability.to(dtype), target.to(dtype));
    return warnings.text();
  };
  EXPECT_NE(warning_of(at::kBFloat16, Policy::standard()).find("probabilities in BFloat16"),
            std::string::npos);
  EXPECT_NE(warning_of(at::kHalf, Policy::standard()).find("probabilities in Half"),
            std::string::npos);
  EXPECT_EQ(warning_of(at::kFloat, Policy::standard()), "");
  EXPECT_EQ(warning_of(at::kBFloat16, Policy::torch()), "");
  const Policy lower = Policy::standard().lower_precision({"binary_cross_entropy"});
  EXPECT_EQ(warning_of(at::kBFloat16, lower), "") << "it is not computed in fp32";
}

class WarningCounter final : public c10::WarningHandler {
 public:
  void process(const c10::Warning&) override { ++count; }
  int count = 0;
};

TEST(BinaryCrossEntropy, IsWarnedOfOnce) {
  WarningCounter counter;
  const c10::WarningUtils::WarningHandlerGuard handler(&counter);
  const AutocastGuard guard(at::kCPU);
  for (int i = 0; i < 3; ++i) {
    (void)at::binary_cross_entropy(at::full({4}, 0.5, at::kBFloat16), at::ones({4}));
  }
  EXPECT_EQ(counter.count, 1);
}

}  // namespace
