// SPDX-License-Identifier: BSD-3-Clause
// Memory and casts that a function under checkpoint() has in common with what is around it.
#include <ATen/ATen.h>
#include <ATen/SequenceNumber.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <type_traits>
#include <vector>

#include "support/call_counter.h"
#include "support/expect_error.h"
#include "support/leaf.h"
#include "support/memory_meter.h"
#include "torchamp/autocast.h"
#include "torchamp/recompute.h"

namespace {

using at::Tensor;
using torchamp::checkpoint;

Tensor gradient(const Tensor& loss, const Tensor& of) {
  return torch::autograd::grad({loss.sum()}, {of})[0];
}

// ---- Outputs that share memory -----------------------------------------------------------------

/// The gradient of x if the loss goes through h = x^2 and through the function's output of h, which
/// was doubled in place.
template <class Function>
Tensor gradient_through_the_input(Function function, const Tensor& x) {
  const Tensor h = x * x;
  Tensor y = checkpoint(function, h);
  y.mul_(2);
  EXPECT_TRUE(y.is_same(h) || at::equal(h, x * x));
  return gradient((h * 3).sum() + y.sum(), x);
}

TEST(CheckpointMemory, KeepsInPlaceChangesOfAnOutputFromTheInputThatItIsAViewOf) {
  const Tensor x = leaf({2, 3});
  const Tensor expected = 2 * x * (3 + 2);  // h as it was, y doubled
  const auto flat = [](const Tensor& t) { return t.flatten(); };
  const auto transposed = [](const Tensor& t) { return t.t(); };
  EXPECT_TRUE(at::allclose(gradient_through_the_input(flat, x), expected));
  EXPECT_TRUE(at::allclose(gradient_through_the_input(transposed, x), expected));
  torch::nn::Sequential model(torch::nn::Flatten(), torch::nn::Unflatten(1, std::vector{3L, 1L}));
  const auto flattened = [model](const Tensor& t) mutable { return model->forward(t); };
  EXPECT_TRUE(at::allclose(gradient_through_the_input(flattened, x), expected));
}

TEST(CheckpointMemory, HandsOnAnInputThatTheFunctionReturns) {
  const Tensor x = leaf({2, 3});
  torch::nn::Dropout dropout;
  dropout->eval();
  torch::nn::Identity identity;
  const std::function<Tensor(const Tensor&)> functions[] = {
      [&](const Tensor& t) { return dropout->forward(t); },
      [&](const Tensor& t) { return identity->forward(t); }};
  for (const auto& function : functions) {
    // h itself is doubled: both ways to the loss see it.
    EXPECT_TRUE(at::allclose(gradient_through_the_input(function, x), 2 * x * 2 * (3 + 1)));
  }
}

TEST(CheckpointMemory, KeepsInPlaceChangesOfAnOutputFromACapturedTensor) {
  const Tensor x = leaf({2, 3});
  const Tensor h = x * x;
  Tensor y = checkpoint([h](const Tensor&) { return h.view({6}); }, at::ones({1}));
  y.mul_(2);
  EXPECT_TRUE(at::equal(h, x * x));
  EXPECT_TRUE(at::allclose(gradient((h * 3).sum() + y.sum(), x), 2 * x * (3 + 2)));
}

TEST(CheckpointMemory, KeepsInPlaceChangesOfAnOutputFromTheOtherOutputs) {
  const Tensor x = leaf({2, 3});
  auto [y, view, plain] = checkpoint(
      [](const Tensor& t) {
        const Tensor made = t.exp();
        return std::make_tuple(made, made.view({6}), made.detach());
      },
      x);
  const Tensor before = y.detach().clone();
  y.mul_(5);
  EXPECT_TRUE(at::equal(view.view({2, 3}), before));
  EXPECT_TRUE(at::equal(plain, before));
  EXPECT_TRUE(
      at::allclose(gradient(y.sum() + view.pow(2).sum(), x), before * 5 + 2 * before * before));
}

TEST(CheckpointMemory, CopiesNoOutputThatIsTheFunctionsOwn) {
  const void* inside = nullptr;
  const auto function = [&inside](const Tensor& t) {
    const Tensor y = (t * 2).sigmoid();  // which keeps its output for backward
    if (inside == nullptr) inside = y.data_ptr();
    return y.t();
  };
  EXPECT_EQ(checkpoint(function, leaf({2, 3})).data_ptr(), inside);
}

// ---- Captured views whose base has changed -----------------------------------------------------

TEST(CheckpointMemory, CapturesAViewWhoseBaseWasChangedBefore) {
  const Tensor x = leaf({4}), w = leaf({4}), factor = leaf({4});
  const auto loss = [&](bool checkpointed) {
    const Tensor base = w * 1;
    const Tensor view = base.view({2, 2});
    const Tensor part = view.select(0, 1);
    base.mul_(factor);  // what LibTorch knows of the views' histories is out of date
    const auto function = [view, part](const Tensor& t) {
      return (t.view({2, 2}) * view).exp() * part + view.sin();
    };
    const Tensor y = checkpointed ? checkpoint(function, x) : function(x);
    return y.sum() + part.sum();
  };
  const auto plain = torch::autograd::grad({loss(false)}, {x, w, factor});
  const auto checkpointed = torch::autograd::grad({loss(true)}, {x, w, factor});
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(at::allclose(plain[i], checkpointed[i])) << "gradient " << i;
  }
  const auto second_order = [&](bool with) {
    const auto first = torch::autograd::grad({loss(with)}, {w}, {}, true, /*create_graph=*/true);
    return gradient(first[0].pow(2), factor);
  };
  EXPECT_TRUE(at::allclose(second_order(false), second_order(true)));
}

TEST(CheckpointMemory, CapturesAViewOfAParameterThatAnOptimizerHasStepped) {
  const Tensor x = leaf({2, 2}), w = leaf({2, 2});
  const Tensor transposed = w.t();
  for (int step = 0; step < 3; ++step) {
    {
      const at::NoGradGuard no_grad;
      w.mul_(0.5);
    }
    const Tensor y = checkpoint([transposed](const Tensor& t) { return t.mm(transposed); }, x);
    EXPECT_TRUE(at::allclose(gradient(y, w), gradient(x.mm(w.t()), w)));
  }
}

TEST(CheckpointMemory, ComputesNothingForACapturedViewWhoseGradientIsNotAskedFor) {
  const Tensor x = leaf({2, 2}), w = leaf({2, 2});
  const Tensor view = w.t();
  {
    const at::NoGradGuard no_grad;
    w.mul_(2);
  }
  const Tensor y = checkpoint([view](const Tensor& t) { return t.mm(view); }, x);
  const CallCounter calls;
  (void)gradient(y, x);
  EXPECT_EQ(calls.called_anywhere("aten::mm"), 2) << "one again, and one for x";
}

TEST(CheckpointMemory, CapturesAViewThatOnlyAnUnusedOutputDependsOn) {
  const Tensor x = leaf({2, 2}), w = leaf({2, 2});
  const Tensor view = w.t();
  {
    const at::NoGradGuard no_grad;
    w.mul_(2);
  }
  const auto function = [&](const Tensor& t) { return std::make_pair(t * w, view.exp()); };
  const Tensor expected = gradient(function(x).first, w);
  EXPECT_TRUE(at::equal(gradient(checkpoint(function, x).first, w), expected));
}

/// A copy whose gradient goes nowhere.
struct WithoutGradient : torch::autograd::Function<WithoutGradient> {
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    return {Tensor()};
  }
};

TEST(CheckpointMemory, KeepsAnActivationFromWhichNoGradientComes) {
  const Tensor x = leaf({4}), w = leaf({4});
  Tensor kept;
  const auto function = [&](const Tensor& t) {
    if (!kept.defined()) kept = WithoutGradient::apply(w);
    return t * kept + w;
  };
  EXPECT_TRUE(at::equal(gradient(checkpoint(function, x), w), at::ones({4})));
}

TEST(CheckpointMemory, GivesNoGradientIfNoneArrives) {
  const Tensor x = leaf({4});
  const Tensor y = checkpoint([](const Tensor& t) { return t.exp(); }, x);
  WithoutGradient::apply(y).sum().backward();
  EXPECT_FALSE(x.grad().defined());
}

TEST(CheckpointMemory, RefusesActivationsThatTheFunctionKeptFromItsFirstRun) {
  const Tensor x = leaf({4}), w = leaf({4});
  Tensor kept;
  const auto function = [&](const Tensor& t) {
    if (!kept.defined()) kept = (w * w).exp() + w;
    return t * kept;
  };
  EXPECT_ERROR(checkpoint(function, x).sum().backward(),
               "checkpoint: the recomputation used other parameters");
}

TEST(CheckpointMemory, RefusesAParameterThatWasWrittenToBeforeBackward) {
  const Tensor x = leaf({4}), w = leaf({4});
  const auto function = [&](const Tensor& t) { return (t * w).exp(); };
  for (const bool nested : {false, true}) {
    const Tensor y = nested
                         ? checkpoint([&](const Tensor& t) { return checkpoint(function, t); }, x)
                         : checkpoint(function, x);
    {
      const at::NoGradGuard no_grad;
      nested ? w.set_data(w * 2) : void(w.mul_(2));  // in other memory
    }
    EXPECT_ERROR(y.sum().backward(),
                 "checkpoint: a parameter, buffer or other tensor of shape [4] that the function "
                 "reads was changed in place after the forward pass");
    EXPECT_FALSE(w.grad().defined());
    const Tensor again = checkpoint(function, x);
    EXPECT_TRUE(at::equal(gradient(again, w), gradient(function(x), w)));
  }
}

TEST(CheckpointMemory, RefusesAnyTensorThatItReadsAndThatWasWrittenToBeforeBackward) {
  const Tensor x = leaf({4}), w = leaf({4}), frozen = at::rand({4}), shift = at::rand({4});
  const Tensor history = w * 3, rows = at::rand({2, 4}), row = rows[1];
  torch::nn::BatchNorm1d norm(4);
  norm->eval();
  const auto function = [&](const Tensor& t) {
    const Tensor parts[] = {t * frozen, history.exp(), row + shift};
    return at::stack(parts).mul(norm->forward(at::stack(parts))).sin();
  };
  const Tensor written[] = {frozen, shift, history, rows, norm->running_mean};
  for (const bool nested : {false, true}) {
    for (const Tensor& one : written) {
      const auto inner = [&](const Tensor& t) { return checkpoint(function, t); };
      const Tensor y = nested ? checkpoint(inner, x) : checkpoint(function, x);
      {
        const at::NoGradGuard no_grad;
        one.mul_(2);
      }
      EXPECT_ERROR(y.sum().backward(), "was changed in place after the forward pass");
      const Tensor again = checkpoint(function, x);
      EXPECT_TRUE(at::equal(gradient(again, x), gradient(function(x), x)));
    }
  }
}

// What the function makes, and what each of its runs writes to, are its own.
TEST(CheckpointMemory, AllowsWritesToWhatTheFunctionHasMadeOrWritesToItself) {
  const Tensor x = leaf({2, 4}), count = at::zeros({}), scratch = at::zeros({2, 4});
  Tensor kept, sorted;
  const auto function = [&](const Tensor& t) {
    count.add_(1);
    scratch.copy_(t.detach());
    const Tensor place = std::get<1>(t.sort(1));  // an argument of ops within sort
    const Tensor y = t.gather(1, place).exp();
    kept = at::linear(y.detach(), at::ones({4, 4}));
    sorted = std::get<0>(t.detach().sort(1));
    return std::make_tuple(y + kept.sin(), place);
  };
  const Tensor expected = gradient(std::get<0>(function(x)), x);
  const auto [y, place] = checkpoint(function, x);
  const auto [again, and_place] = checkpoint(function, x);
  place.add_(1);
  kept.mul_(2);
  sorted.mul_(2);  // the first argument of an op within sort
  count.zero_();
  EXPECT_TRUE(at::equal(gradient(again, x), expected));  // while the latest kept and sorted live
  EXPECT_TRUE(at::equal(gradient(y, x), expected));
}

TEST(CheckpointMemory, ReadsTensorsMadeInInferenceMode) {
  const Tensor x = leaf({4});
  const Tensor constant = [] {
    const c10::InferenceMode inference;
    return at::rand({4});
  }();
  const auto function = [&](const Tensor& t) { return t.exp() + constant; };
  EXPECT_TRUE(at::equal(gradient(checkpoint(function, x), x), gradient(function(x), x)));
}

TEST(CheckpointMemory, CountsTwoCallsOfAModuleWithBuffersBeforeBackward) {
  torch::nn::BatchNorm1d norm(4);
  const Tensor x = leaf({8, 4});
  const auto of_lambda = [&](const Tensor& t) { return norm->forward(t).sin(); };
  const Tensor y = checkpoint(norm, x) * checkpoint(norm, x) + checkpoint(of_lambda, x);
  const Tensor plain = norm->forward(x);
  EXPECT_TRUE(at::allclose(gradient(y, x), gradient(plain * plain + plain.sin(), x), 1e-5, 1e-6));
}

TEST(CheckpointMemory, RefusesATensorMadeLaterInPlaceOfACapturedOne) {
  const Tensor x = leaf({4}), w = leaf({4});
  Tensor captured = w;
  const Tensor y = checkpoint([&](const Tensor& t) { return t * captured; }, x);
  captured = w * 1;
  EXPECT_ERROR(y.sum().backward(), "checkpoint: the recomputation used other parameters");
}

TEST(CheckpointMemory, RefusesAParameterThatOnlyTheRecomputationUses) {
  const Tensor x = leaf({4}), w = leaf({4}), v = leaf({4});
  int calls = 0;
  const auto function = [&](const Tensor& t) { return ++calls == 1 ? t * w : t * w * v; };
  EXPECT_ERROR(checkpoint(function, x).sum().backward(),
               "checkpoint: the recomputation used other parameters");
}

TEST(CheckpointMemory, RefusesAnotherDtypeInTheRecomputation) {
  int calls = 0;
  const auto function = [&](const Tensor& t) {
    return t.exp().to(++calls == 1 ? at::kFloat : at::kDouble);
  };
  EXPECT_ERROR(checkpoint(function, leaf({4})).sum().backward(),
               "checkpoint: the recomputation gave an output of another shape, dtype or device");
}

// Numbers by which LibTorch orders nodes are counted by each thread for itself.
TEST(CheckpointMemory, LeavesTheGraphOfATensorOfAnotherThreadAlone) {
  const Tensor x = leaf({4}), w = leaf({4});
  Tensor h;
  const std::uint64_t count = at::sequence_number::peek() + 50;
  std::thread([&] {
    for (std::uint64_t i = 0; i < count; ++i) h = w.exp();
  }).join();
  const auto function = [h](Tensor t) {
    for (int i = 0; i < 100; ++i) t = t * 1;  // which takes the numbers around h's
    return t * h;
  };
  const Tensor y = checkpoint(function, x);
  EXPECT_TRUE(at::allclose(gradient(y.sum() + h.sum(), w), w.exp() * (x + 1)));
}

TEST(CheckpointMemory, FindsTensorsInEveryKindOfOutput) {
  const Tensor x = leaf({3});
  const auto [maybe, array, pair] = checkpoint(
      [](const Tensor& t) {
        return std::make_tuple(std::optional(t.exp()), std::array{t.sin(), t.cos()},
                               std::make_pair(2, std::vector{t.tanh()}));
      },
      x);
  for (const Tensor& output : {*maybe, array[0], array[1], pair.second[0]}) {
    EXPECT_EQ(output.grad_fn()->name(), "torchamp::checkpoint");
  }
  EXPECT_TRUE(at::allclose(gradient(array[1], x), -x.sin()));
}

// ---- Lists -------------------------------------------------------------------------------------

TEST(CheckpointMemory, KeepsListsThatItIsGiven) {
  const Tensor x = leaf({3}), y = leaf({3});
  const auto function = [](at::TensorList list, at::IntArrayRef shape, const auto& same) {
    static_assert(std::is_same_v<std::decay_t<decltype(same)>, at::TensorList>);
    return (list[0] * list[1]).exp().view(shape) + same[0];
  };
  Tensor result;
  {
    std::vector<Tensor> list{x, y};
    std::vector<std::int64_t> shape{3};
    result = checkpoint(function, at::TensorList(list), at::IntArrayRef(shape),
                        at::TensorList(list.data() + 1, 1));
    list.assign(2, at::zeros({7}));
    shape = {-7};
  }
  const Tensor expected = (x * y).exp() + y;
  EXPECT_TRUE(at::equal(result, expected));
  EXPECT_TRUE(at::allclose(gradient(result, x), gradient(expected, x)));
}

TEST(CheckpointMemory, TakesTheTensorsOfAListAsInputs) {
  const auto doubled = [](at::TensorList list) { return list[1].mul_(2); };
  EXPECT_ERROR(checkpoint(doubled, at::TensorList({leaf({3}), leaf({3}) * 1})),
               "checkpoint: the function changed its 1. tensor input in place");
}

TEST(CheckpointMemory, FindsTensorsInMapsWithTheirOwnOrder) {
  using Map = std::map<std::string, Tensor, std::greater<>>;
  const Tensor x = leaf({3});
  const Map result = checkpoint(
      [](const Map& in) {
        return Map{{"a", in.at("x").exp()}, {"b", in.at("x").sin()}};
      },
      Map{{"x", x}});
  EXPECT_EQ(result.at("a").grad_fn()->name(), "torchamp::checkpoint");
  EXPECT_TRUE(at::allclose(gradient(result.at("b"), x), x.cos()));
}

// ---- Buffers -----------------------------------------------------------------------------------

TEST(CheckpointMemory, KeepsTheMemoryOfABufferThatIsNamedTwiceAndSkipsUndefinedOnes) {
  torch::nn::BatchNorm1d norm(4);
  const Tensor mean = norm->running_mean, x = leaf({8, 4});
  const void* const memory = mean.data_ptr();
  const Tensor y = checkpoint({.buffers = {mean, Tensor(), mean}}, norm, x);
  const Tensor after = mean.clone();
  y.sum().backward();
  EXPECT_EQ(mean.data_ptr(), memory);
  EXPECT_TRUE(at::equal(mean, after));
}

TEST(CheckpointMemory, CountsBuffersOfASequentialInSegmentsOnce) {
  torch::nn::Sequential model(torch::nn::BatchNorm1d(4), torch::nn::BatchNorm1d(4));
  torchamp::checkpoint_sequential(model, 2, leaf({8, 4})).sum().backward();
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(model[i]->as<torch::nn::BatchNorm1d>()->num_batches_tracked.item<int>(), 1) << i;
  }
}

// ---- The cache of cast weights -----------------------------------------------------------------

TEST(CheckpointMemory, RecomputesWithoutTheCastsThatTheRegionHasCachedSince) {
  const Tensor x = leaf({4, 8}), w = leaf({8, 8});
  const auto layer = [w](const Tensor& t) { return at::linear(t, w).tanh(); };
  const torchamp::AutocastGuard autocast(at::kCPU);
  const Tensor expected = gradient(layer(x), w);
  const Tensor y = checkpoint(layer, x);
  const Tensor after = at::linear(x, w);  // leaves the weight's cast in the cache
  EXPECT_TRUE(at::equal(gradient(y, w), expected));
  EXPECT_TRUE(after.requires_grad());
}

TEST(CheckpointMemory, LeavesNoCastsOfTheRecomputationInTheCache) {
  const Tensor x = leaf({8, 64}), w = leaf({64, 64});
  const torchamp::AutocastGuard autocast(at::kCPU);
  const Tensor y = checkpoint(
      {.preserve_rng_state = false}, [w](const Tensor& t) { return at::linear(t, w); }, x);
  const Tensor gradient_of_y = at::ones_like(y);
  const MemoryMeter memory;
  { (void)torch::autograd::grad({y}, {w}, {gradient_of_y}); }
  EXPECT_EQ(memory.bytes(), 0);
}

}  // namespace
