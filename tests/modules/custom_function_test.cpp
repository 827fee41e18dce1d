// SPDX-License-Identifier: BSD-3-Clause
#include "torchamp/custom_function.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/devices.h"
#include "support/expect_error.h"
#include "support/thread_state.h"
#include "support/tolerances.h"
#include "torchamp/autocast.h"

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using torchamp::AutocastFunction;
using torchamp::AutocastGuard;
using torchamp::Policy;

/// What a forward or backward below saw last.
struct Seen {
  std::optional<torchamp::AutocastState> state;
  at::ScalarType input = at::ScalarType::Undefined;
  at::ScalarType mm = at::ScalarType::Undefined;
  at::ScalarType relu = at::ScalarType::Undefined;

  static Seen now(const at::Tensor& input) {
    const auto wide = at::ones({2, 2}, input.options().dtype(at::kFloat).requires_grad(false));
    return {torchamp::AutocastState::of_this_thread(), input.scalar_type(),
            wide.mm(wide).scalar_type(), wide.to(at::kHalf).relu().scalar_type()};
  }
};
Seen forward_seen;
Seen backward_seen;

/// x^2, with a gradient that can be differentiated again.
template <at::ScalarType... cast_inputs>
struct Square : AutocastFunction<Square<cast_inputs...>, cast_inputs...> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x) {
    forward_seen = Seen::now(x);
    ctx->save_for_backward({x});
    return x * x;
  }
  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    backward_seen = Seen::now(gradients[0]);
    return {gradients[0] * 2 * ctx->get_saved_variables()[0]};
  }
};
struct Double : AutocastFunction<Double, at::kFloat> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& x) { return x * 2; }
  static variable_list backward(AutogradContext*, variable_list gradients) {
    return {gradients[0] * 2};
  }
};
using PlainSquare = Square<>;
using WideSquare = Square<at::kFloat>;

class CustomFunction : public ::testing::TestWithParam<at::DeviceType> {
 protected:
  void SetUp() override {
    SKIP_WITHOUT(GetParam());
    forward_seen = backward_seen = {};
  }
  at::ScalarType low() const { return at::autocast::get_autocast_dtype(GetParam()); }
  at::Tensor input(at::ScalarType dtype = at::kFloat) const {
    return at::arange(1., 4., at::dtype(dtype).device(GetParam())).requires_grad_();
  }
};
INSTANTIATE_TEST_SUITE_P(Devices, CustomFunction, all_devices(), device_name);

TEST_P(CustomFunction, RunsItsBackwardUnderForwardsStateAndPolicy) {
  const auto x = input();
  at::Tensor y;
  {
    const AutocastGuard autocast(
        GetParam(), {.cache_enabled = false, .policy = Policy::standard().fp32({"relu"})});
    y = PlainSquare::apply(x);
  }
  EXPECT_EQ(backward_seen.state, std::nullopt);
  const ThreadState before;
  y.sum().backward();
  EXPECT_EQ(ThreadState(), before);
  EXPECT_EQ(forward_seen.mm, low());
  EXPECT_EQ(forward_seen.relu, at::kFloat);
  EXPECT_EQ(backward_seen.state, forward_seen.state);
  EXPECT_EQ(backward_seen.mm, low());
  EXPECT_EQ(backward_seen.relu, at::kFloat);
  EXPECT_FALSE(backward_seen.state->is_cache_enabled());
  expect_close(x.grad(), 2 * x);
}

TEST_P(CustomFunction, KeepsTheDtypeOfForwardsRegion) {
  const auto other = low() == at::kHalf ? at::kBFloat16 : at::kHalf;
  const auto x = input();
  at::Tensor y;
  {
    const AutocastGuard autocast(GetParam(), other);
    y = PlainSquare::apply(x);
  }
  {
    const AutocastGuard autocast(GetParam());
    y.sum().backward();
  }
  EXPECT_EQ(backward_seen.mm, other);
}

TEST_P(CustomFunction, RunsItsBackwardWithoutAutocastIfForwardHadNone) {
  const auto x = input();
  const auto y = PlainSquare::apply(x);
  const AutocastGuard autocast(GetParam(), {.policy = Policy::standard().fp32({"relu"})});
  const ThreadState before;
  y.sum().backward();
  EXPECT_EQ(ThreadState(), before);
  EXPECT_EQ(backward_seen.mm, at::kFloat);
  EXPECT_EQ(backward_seen.relu, at::kHalf);
}

TEST_P(CustomFunction, RunsItsBackwardUnderForwardsStateOnAnyThreadAndAgain) {
  const auto x = input();
  at::Tensor y;
  {
    const AutocastGuard autocast(GetParam());
    y = PlainSquare::apply(x).sum();
  }
  for (int round = 1; round <= 2; ++round) {
    backward_seen = {};
    std::thread([&] {
      const ThreadState before;
      y.backward({}, /*retain_graph=*/true);
      EXPECT_EQ(ThreadState(), before);
    }).join();
    EXPECT_EQ(backward_seen.mm, low());
    expect_close(x.grad(), round * 2 * x);
  }
}

TEST_P(CustomFunction, CastsItsInputsAndDoesWithoutAutocastWhenAsked) {
  const auto x = input(at::kHalf);
  at::Tensor y;
  {
    const AutocastGuard autocast(GetParam());
    const ThreadState inside;
    y = WideSquare::apply(x);
    EXPECT_EQ(ThreadState(), inside);
    EXPECT_EQ(y.scalar_type(), at::kFloat);
    EXPECT_EQ(forward_seen.input, at::kFloat);
    EXPECT_EQ(forward_seen.mm, at::kFloat);
    y.sum().backward();
    EXPECT_EQ(ThreadState(), inside);
  }
  EXPECT_EQ(backward_seen.input, at::kFloat);
  EXPECT_EQ(backward_seen.mm, at::kFloat);
  EXPECT_EQ(x.grad().scalar_type(), at::kHalf);
  expect_close(x.grad(), 2 * x);
}

TEST_P(CustomFunction, CastsNothingOutsideARegionNorFp64NorOtherDevices) {
  EXPECT_EQ(WideSquare::apply(input(at::kHalf)).scalar_type(), at::kHalf);
  {
    const AutocastGuard autocast(GetParam(), {.enabled = false});
    EXPECT_EQ(WideSquare::apply(input(at::kHalf)).scalar_type(), at::kHalf);
  }
  const AutocastGuard autocast(GetParam());
  EXPECT_EQ(WideSquare::apply(input(at::kDouble)).scalar_type(), at::kDouble);
  const auto meta = at::ones({2}, at::dtype(at::kHalf).device(at::kMeta));
  EXPECT_EQ(Double::apply(meta).scalar_type(), at::kHalf);
}

TEST_P(CustomFunction, DifferentiatesTwiceThroughInputsThatItCast) {
  const auto x = input(at::kHalf);
  const auto plain = input();
  at::Tensor y;
  {
    const AutocastGuard autocast(GetParam());
    y = WideSquare::apply(x).sum();
  }
  const auto gradient = torch::autograd::grad({y}, {x}, {}, std::nullopt, /*create_graph=*/true)[0];
  gradient.pow(2).sum().backward();
  // d/dx (2x)^2
  expect_close(x.grad(), 8 * plain, at::kHalf);
}

/// a * sum(list) + bias, scaled: every kind of input that LibTorch looks into, and others.
struct Mixed : AutocastFunction<Mixed, at::kFloat> {
  static inline std::vector<at::ScalarType> dtypes;
  static inline std::string label;

  static variable_list forward(AutogradContext* ctx, double scale, const at::Tensor& a,
                               const std::optional<at::Tensor>& bias, at::TensorList list,
                               const std::vector<at::Tensor>& others, const at::Tensor& index,
                               std::string text) {
    dtypes = {a.scalar_type(), index.scalar_type(), others[0].scalar_type()};
    for (const auto& tensor : list) dtypes.push_back(tensor.scalar_type());
    if (bias) dtypes.push_back(bias->scalar_type());
    label = std::move(text);
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["list"] = static_cast<std::int64_t>(list.size());
    return {a * scale, list[0] * 2 + list[1]};
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    variable_list result(8, at::Tensor());  // the list counts as its two tensors
    result[1] = gradients[0] * ctx->saved_data["scale"].toDouble();
    result[3] = gradients[1] * 2;
    result[4] = gradients[1];
    return result;
  }
};

TEST_P(CustomFunction, TakesOptionalsListsAndWhatIsNoTensor) {
  const auto a = input(at::kHalf), b = input(at::kHalf), c = input();
  const auto index = at::zeros({1}, at::dtype(at::kLong).device(GetParam()));
  const std::vector<at::Tensor> list{b, c};
  variable_list outputs;
  {
    const AutocastGuard autocast(GetParam());
    outputs = Mixed::apply(3., a, std::optional<at::Tensor>(), at::TensorList(list),
                           std::vector<at::Tensor>{b}, index, std::string("label"));
    EXPECT_EQ(Mixed::dtypes,
              (std::vector{at::kFloat, at::kLong, at::kFloat, at::kFloat, at::kFloat}));
    (void)Mixed::apply(3., a, std::optional<at::Tensor>(b), at::TensorList(list),
                       std::vector<at::Tensor>{b}, index, std::string("label"));
    EXPECT_EQ(Mixed::dtypes.back(), at::kFloat);
  }
  EXPECT_EQ(Mixed::label, "label");
  ASSERT_EQ(outputs.size(), 2u);
  EXPECT_EQ(outputs[0].scalar_type(), at::kFloat);
  (outputs[0].sum() + outputs[1].sum()).backward();
  expect_close(a.grad(), at::full_like(a, 3));
  expect_close(b.grad(), at::full_like(b, 2));
  expect_close(c.grad(), at::full_like(c, 1));
  EXPECT_EQ(b.grad().scalar_type(), at::kHalf);
}

TEST_P(CustomFunction, LosesNoGradientOfAWeightThatOthersUseToo) {
  struct Product : AutocastFunction<Product> {
    static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight) {
      ctx->save_for_backward({x, weight});
      return x.mm(weight);
    }
    static variable_list backward(AutogradContext* ctx, variable_list gradients) {
      const auto saved = ctx->get_saved_variables();
      return {gradients[0].mm(saved[1].t()), saved[0].t().mm(gradients[0])};
    }
  };
  const auto on_device = at::device(GetParam());
  const auto weight = at::eye(2, on_device).requires_grad_();
  const auto x = at::ones({2, 2}, on_device);
  at::Tensor loss;
  {
    const AutocastGuard autocast(GetParam());
    loss = Product::apply(x, weight).sum() + x.mm(weight).sum();
  }
  loss.backward();
  expect_close(weight.grad(), at::full({2, 2}, 4., on_device), low());
}

struct Failing : AutocastFunction<Failing, at::kFloat> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& x, bool fail) {
    if (fail) throw std::runtime_error("forward failed");
    return x * 2;
  }
  static variable_list backward(AutogradContext*, const variable_list&) {
    throw std::runtime_error("backward failed");
  }
};

TEST_P(CustomFunction, RestoresTheStateAfterAnException) {
  const auto x = input(at::kHalf);
  const AutocastGuard autocast(GetParam());
  const ThreadState before;
  EXPECT_THROW(Failing::apply(x, true), std::runtime_error);
  EXPECT_EQ(ThreadState(), before);
  EXPECT_THROW(Failing::apply(x, false).sum().backward(), std::runtime_error);
  EXPECT_EQ(ThreadState(), before);
}

struct Twice : AutocastFunction<Twice, at::kFloat> {
  static at::Tensor forward(AutogradContext* ctx, at::Tensor x) {
    x.mul_(2);
    ctx->mark_dirty({x});
    return x;
  }
  static variable_list backward(AutogradContext*, variable_list gradients) {
    return {gradients[0] * 2};
  }
};

TEST_P(CustomFunction, RefusesToWriteInPlaceToAnInputThatItCast) {
  const at::NoGradGuard no_grad;
  auto wide = input().detach();
  auto narrow = wide.to(at::kHalf);
  const AutocastGuard autocast(GetParam());
  EXPECT_ERROR(Twice::apply(narrow), "AutocastFunction: forward wrote in place to an input that");
  expect_close(narrow, at::arange(1., 4., wide.options()));
  (void)Twice::apply(wide);
  expect_close(wide, 2 * at::arange(1., 4., wide.options()));
}

/// Writes to its first input in one of several ways, and returns something else.
struct Writes : AutocastFunction<Writes, at::kFloat> {
  static at::Tensor forward(AutogradContext*, at::Tensor x, std::optional<at::Tensor> y,
                            at::TensorList list, int way) {
    if (way == 1) x.add_(1);
    if (way == 2) x.view({3}).select(0, 1).fill_(7);
    if (way == 3) y->zero_();
    if (way == 4) list[1].mul_(2);
    if (way == 5) at::exp_out(x, list[0]);
    return list[0] * 2;
  }
  static variable_list backward(AutogradContext*, variable_list gradients) {
    return {at::Tensor(), at::Tensor(), gradients[0] * 2, at::Tensor(), at::Tensor()};
  }
};

TEST_P(CustomFunction, RefusesEveryWriteInPlaceToAnInputThatItCast) {
  const auto make = [&] { return input().detach().to(at::kHalf); };
  const auto call = [&](int way, const at::Tensor& x, const at::Tensor& y, const at::Tensor& a,
                        const at::Tensor& b) {
    return Writes::apply(x, std::optional(y), at::TensorList({a, b}), way);
  };
  for (const bool inference : {false, true}) {
    const c10::InferenceMode mode(inference);
    const AutocastGuard autocast(GetParam());
    for (const int way : {1, 2, 3, 4, 5}) {
      const auto x = make(), y = make(), a = make(), b = make();
      EXPECT_ERROR(call(way, x, y, a, b), "AutocastFunction: forward wrote in place to an input");
      for (const auto& tensor : {x, y, a, b}) EXPECT_TRUE(at::equal(tensor, make())) << way;
    }
    EXPECT_NO_THROW(call(0, make(), make(), make(), make()));
  }
}

struct NarrowWriter : AutocastFunction<NarrowWriter, at::kHalf> {
  static at::Tensor forward(AutogradContext*, at::Tensor weight, bool writes, bool fails) {
    if (writes) weight.zero_();
    if (fails) throw std::runtime_error("forward failed");
    return weight * 2;
  }
  static variable_list backward(AutogradContext*, variable_list gradients) {
    return {gradients[0] * 2, at::Tensor(), at::Tensor()};
  }
};

TEST_P(CustomFunction, LeavesNoCastThatWasWrittenToInTheCache) {
  const auto weight = input();
  const AutocastGuard autocast(GetParam(), at::kHalf);
  EXPECT_ERROR(NarrowWriter::apply(weight, true, false), "forward wrote in place to an input");
  expect_close(NarrowWriter::apply(weight, false, false), 2 * weight);
  EXPECT_THROW(NarrowWriter::apply(weight, true, true), std::runtime_error);
  expect_close(NarrowWriter::apply(weight, false, false), 2 * weight);
}

struct Forgetful : AutocastFunction<Forgetful> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& x) { return x * 2; }
  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    ctx->saved_data.clear();
    return gradients;
  }
};

TEST(CustomFunctionErrors, NameTheRemovedState) {
  const auto y = Forgetful::apply(at::ones({2}).requires_grad_()).sum();
  y.backward({}, /*retain_graph=*/true);
  EXPECT_ERROR(y.backward(), "forward's autocast state is missing in ctx->saved_data. Leave its");
}

struct Overwriting : AutocastFunction<Overwriting> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& x) { return x * 2; }
  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    ctx->saved_data["torchamp.state"] = 1;
    return gradients;
  }
};

TEST(CustomFunctionErrors, NameTheReplacedState) {
  const auto y = Overwriting::apply(at::ones({2}).requires_grad_()).sum();
  y.backward({}, /*retain_graph=*/true);
  EXPECT_ERROR(y.backward(), "forward's autocast state is missing in ctx->saved_data. Leave its");
}

}  // namespace
