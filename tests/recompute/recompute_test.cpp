// SPDX-License-Identifier: BSD-3-Clause
#include "torchamp/recompute.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "support/call_counter.h"
#include "support/expect_error.h"
#include "support/leaf.h"
#include "torchamp/autocast.h"

namespace {

using at::Tensor;
using torchamp::checkpoint;

/// The gradients of `loss`'s sum with respect to `leaves`; an undefined one as an empty tensor.
std::vector<Tensor> gradients(const Tensor& loss, const std::vector<Tensor>& leaves) {
  auto result = torch::autograd::grad({loss.sum()}, leaves, {}, std::nullopt,
                                      /*create_graph=*/false, /*allow_unused=*/true);
  for (Tensor& gradient : result) {
    if (!gradient.defined()) gradient = at::empty({0});
  }
  return result;
}

/// Expects the same outputs and gradients, bit for bit, from the same seed; of the leaf `summed`,
/// if given, but for the order in which its parts are added up.
void expect_as_without(const std::function<Tensor(bool checkpointed)>& loss,
                       const std::vector<Tensor>& leaves,
                       std::optional<std::size_t> summed = std::nullopt) {
  at::manual_seed(7);
  const Tensor plain = loss(false);
  const auto plain_gradients = gradients(plain, leaves);
  const Tensor plain_next = at::rand({3});
  at::manual_seed(7);
  const Tensor checkpointed = loss(true);
  const auto checkpointed_gradients = gradients(checkpointed, leaves);
  EXPECT_TRUE(at::equal(plain, checkpointed));
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    const Tensor &a = plain_gradients[i], &b = checkpointed_gradients[i];
    EXPECT_TRUE(summed == i ? at::allclose(a, b, 1e-5, 1e-6) : at::equal(a, b)) << "leaf " << i;
  }
  EXPECT_TRUE(at::equal(plain_next, at::rand({3}))) << "the random state after backward";
}

/// Calls it under checkpoint() or not.
template <class Function, class... Inputs>
auto call(bool checkpointed, Function function, Inputs... inputs) {
  return checkpointed ? checkpoint(function, inputs...) : function(inputs...);
}

TEST(Checkpoint, GivesTheSameGradientsBitForBitWithDropout) {
  const Tensor x = leaf({4, 8}), w = leaf({8, 8});
  expect_as_without(
      [&](bool checkpointed) {
        const auto layer = [w](const Tensor& h) { return at::dropout(h.mm(w).tanh(), 0.5, true); };
        Tensor h = call(checkpointed, layer, x);
        h = call(checkpointed, layer, at::dropout(h, 0.3, true));
        return h * h;
      },
      {x, w});
}

TEST(Checkpoint, GivesGradientsToCapturedParametersWhenNoInputNeedsOne) {
  const Tensor x = at::randn({4, 8}), w = leaf({8, 8});
  expect_as_without(
      [&](bool checkpointed) {
        return call(
            checkpointed, [w](const Tensor& h) { return h.mm(w).tanh(); }, x);
      },
      {w});
  checkpoint([w](const Tensor& h) { return h.mm(w).tanh(); }, x).sum().backward();
  EXPECT_TRUE(w.grad().defined());
}

TEST(Checkpoint, FiresTheHooksOfCapturedParametersOnce) {
  const Tensor w = leaf({8});
  int hooks = 0;
  w.register_hook([&hooks](const Tensor&) { ++hooks; });
  checkpoint([w](const Tensor& h) { return (h * w).exp() * w; }, leaf({8})).sum().backward();
  EXPECT_EQ(hooks, 1);
}

TEST(Checkpoint, LeavesGradAloneUnderAutogradGrad) {
  const Tensor x = leaf({8}), w = leaf({8});
  gradients(checkpoint([w](const Tensor& h) { return (h * w).exp(); }, x), {w});
  EXPECT_FALSE(w.grad().defined());
  EXPECT_FALSE(x.grad().defined());
}

TEST(Checkpoint, ComputesOnlyTheGradientsThatAreAskedFor) {
  const Tensor x = leaf({4, 8}), w = leaf({8, 8});
  const auto products = [](const Tensor& y, const Tensor& of) {
    const CallCounter calls;
    (void)gradients(y, {of});
    return calls.called_anywhere("aten::mm");
  };
  const auto function = [w](const Tensor& t) { return t.mm(w).tanh(); };
  EXPECT_EQ(products(function(x), w), 1);
  EXPECT_EQ(products(checkpoint(function, x), w), 2) << "one again, and one for w";
  EXPECT_EQ(products(checkpoint(function, x), x), 2);
}

TEST(Checkpoint, ComputesNoGradientOfALeafThatTheFunctionHasMade) {
  const auto function = [](const Tensor& t) { return t.mm(leaf({8, 8})); };
  const Tensor y = checkpoint(function, at::randn({4, 8})).sum();
  const CallCounter calls;
  y.backward();
  EXPECT_EQ(calls.called_anywhere("aten::mm"), 1) << "the function's own, again";
}

// w and 2w both enter the function: the gradient of 2w must reach w once, through the outer graph.
TEST(Checkpoint, CapturesTensorsWithAHistory) {
  const Tensor x = leaf({4, 8}), w = leaf({8, 8});
  expect_as_without(
      [&](bool checkpointed) {
        const Tensor twice = (w * 2).sigmoid();
        const Tensor h = call(
            checkpointed, [w, twice](const Tensor& t) { return t.mm(twice).tanh() + t.mm(w); }, x);
        return h.exp() + twice.sum();
      },
      {x, w});
}

TEST(Checkpoint, AcceptsInputsOfWhichOneIsMadeFromTheOther) {
  const Tensor x = leaf({8});
  expect_as_without(
      [&](bool checkpointed) {
        const Tensor y = x.exp();
        return call(
            checkpointed, [](const Tensor& a, const Tensor& b) { return (a * b).sin() * a; }, x, y);
      },
      {x});
}

TEST(Checkpoint, TakesAndGivesNestedValues) {
  using Pair = std::pair<Tensor, std::vector<Tensor>>;
  const Tensor x = leaf({8}), y = leaf({8}), constant = at::randn({8});
  const auto function = [](const Pair& in, double scale, std::optional<Tensor> more,
                           const std::string& name) {
    const Tensor sum = in.first + in.second[0] * scale + *more;
    return std::make_tuple(sum.exp(), std::vector{sum.sin(), sum.argmax()}, name + "!", 3);
  };
  expect_as_without(
      [&](bool checkpointed) {
        const auto [a, rest, text, number] = call(checkpointed, function, Pair{x, {y}}, 0.5,
                                                  std::optional(constant), std::string("text"));
        EXPECT_EQ(text, "text!");
        EXPECT_EQ(number, 3);
        EXPECT_EQ(rest[1].scalar_type(), at::kLong);
        EXPECT_FALSE(rest[1].requires_grad());
        return a * rest[0];
      },
      {x, y});
}

TEST(Checkpoint, ComputesGradientsOfTheOutputsThatAreUsed) {
  const Tensor x = leaf({8}), w = leaf({8});
  expect_as_without(
      [&](bool checkpointed) {
        return call(
                   checkpointed, [w](const Tensor& t) { return std::make_pair(t.exp(), t * w); }, x)
            .first;
      },
      {x, w});
}

TEST(Checkpoint, PassesThroughWhatTheFunctionOnlyHandsOn) {
  const Tensor x = leaf({8}), w = leaf({8}), constant = at::randn({8});
  const auto [same, captured, plain, made, undefined] = checkpoint(
      [w, constant](const Tensor& t) { return std::make_tuple(t, w, constant, t.exp(), Tensor()); },
      x);
  EXPECT_TRUE(same.is_same(x));
  EXPECT_TRUE(captured.is_same(w));
  EXPECT_TRUE(plain.is_same(constant));
  EXPECT_EQ(made.grad_fn()->name(), "torchamp::checkpoint");
  EXPECT_FALSE(undefined.defined());
}

TEST(Checkpoint, GivesViewsAndOutputsThatMayBeChangedInPlace) {
  const Tensor x = leaf({8});
  expect_as_without(
      [&](bool checkpointed) {
        const Tensor input = x * 1;
        Tensor y = call(
            checkpointed, [](const Tensor& t) { return t.exp().sin(); }, input);
        y.mul_(2);
        const Tensor view = call(
            checkpointed,
            [](const Tensor& t) {
              return t.view({2, 4}).t();
            },
            input);
        return y.view({4, 2}) * view;
      },
      {x});
}

TEST(Checkpoint, CopiesViewsOfOthersThatNeedNoGradient) {
  const Tensor x = leaf({8}), plain = at::randn({8}), constant = at::randn({8});
  const auto [made, cut, again] = checkpoint(
      [](const Tensor& t) {
        const Tensor y = t.exp();
        return std::make_tuple(y, t.detach(), y.detach());
      },
      x);
  EXPECT_FALSE(cut.is_alias_of(x));
  EXPECT_FALSE(again.is_alias_of(made));
  const auto [view, captured, twice, and_twice] = checkpoint(
      [constant](const Tensor& t) {
        const Tensor half = t / 2;
        return std::make_tuple(t.view({2, 4}), constant.view({2, 4}), half, half);
      },
      plain);
  EXPECT_FALSE(view.is_alias_of(plain));
  EXPECT_FALSE(captured.is_alias_of(constant));
  EXPECT_FALSE(twice.is_alias_of(and_twice));
  EXPECT_TRUE(at::equal(view.view({8}), plain));
}

TEST(Checkpoint, AllowsLeavesMadeInTheFunction) {
  const Tensor x = leaf({8});
  expect_as_without(
      [&](bool checkpointed) {
        return call(
            checkpointed, [](const Tensor& t) { return t.exp() * leaf({8}); }, x);
      },
      {x});
}

TEST(Checkpoint, Nests) {
  const Tensor x = leaf({4, 8}), w = leaf({8, 8});
  expect_as_without(
      [&](bool checkpointed) {
        const Tensor outside = w.exp();
        const auto inner = [w, outside](const Tensor& h) {
          return at::dropout(h.mm(w).tanh(), 0.5, true) + h.mm(outside);
        };
        const auto outer = [=](const Tensor& h) {
          const Tensor twice = call(checkpointed, inner, call(checkpointed, inner, h));
          return at::dropout(twice, 0.5, true).sigmoid();
        };
        return call(checkpointed, outer, call(checkpointed, outer, x));
      },
      {x, w}, /*summed=*/1);  // w's gradient is a sum over all calls
}

TEST(Checkpoint, HasSecondDerivatives) {
  const Tensor x = leaf({6}), w = leaf({6});
  const auto penalty = [&](bool checkpointed) {
    const Tensor outside = (w * 3).sin();
    const Tensor y = call(
        checkpointed, [w, outside](const Tensor& t) { return (t * w).exp() * outside + t.pow(3); },
        x.sigmoid());
    const auto first = torch::autograd::grad({y.sum()}, {x, w}, {}, true, /*create_graph=*/true);
    return first[0].pow(2) + first[1].pow(2);
  };
  const auto plain = gradients(penalty(false), {x, w});
  const auto checkpointed = gradients(penalty(true), {x, w});
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(at::allclose(plain[i], checkpointed[i], 1e-5, 1e-6));
}

TEST(Checkpoint, GivesTheSameGradientsUnderAutocastWithAWeightThatWasCastBefore) {
  const Tensor x = leaf({4, 8}), w = leaf({8, 8});
  expect_as_without(
      [&](bool checkpointed) {
        const torchamp::AutocastGuard autocast(at::kCPU);
        Tensor h = at::linear(x, w);
        for (int i = 0; i < 2; ++i) {
          h = call(
              checkpointed, [w](const Tensor& t) { return at::linear(t, w).tanh(); }, h);
        }
        return h;
      },
      {x});
  // Backward inside the region: the cache holds casts of the weight.
  const auto of_weight = [&](bool checkpointed) {
    const torchamp::AutocastGuard autocast(at::kCPU);
    const Tensor h = call(
        checkpointed, [w](const Tensor& t) { return at::linear(t, w).tanh(); }, at::linear(x, w));
    return gradients(h, {w})[0];
  };
  EXPECT_TRUE(at::allclose(of_weight(false), of_weight(true), 1e-2, 1e-2));
}

TEST(CheckpointSequential, GivesTheSameGradientsForAnyNumberOfSegments) {
  torch::nn::Sequential model;
  for (int i = 0; i < 5; ++i) {
    model->push_back(torch::nn::Linear(6, 6));
    model->push_back(torch::nn::Dropout(0.5));
  }
  const Tensor x = at::randn({3, 6});
  for (const std::int64_t segments : {1, 2, 3, 7, 10}) {
    expect_as_without(
        [&](bool checkpointed) {
          return checkpointed ? torchamp::checkpoint_sequential(model, segments, x)
                              : model->forward(x);
        },
        model->parameters());
  }
  EXPECT_ERROR(torchamp::checkpoint_sequential(model, 11, x),
               "checkpoint_sequential: cannot split 10 modules into 11 segments");
  EXPECT_ERROR(torchamp::checkpoint_sequential(model, 0, x), "Pass a number from 1 to 10.");
  torch::nn::Sequential empty;
  EXPECT_ERROR(torchamp::checkpoint_sequential(empty, x),
               "the Sequential has no modules. Add some");
}

}  // namespace
