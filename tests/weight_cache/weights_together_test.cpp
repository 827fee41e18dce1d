// SPDX-License-Identifier: BSD-3-Clause
// torchamp::weights_together() does what LibTorch's cache does, in fewer ops.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/call_counter.h"
#include "support/host_allocation_limit.h"
#include "support/memory_meter.h"
#include "support/weight_caches.h"
#include "torchamp/autocast.h"
#include "torchamp/labs/cast_recorder.h"
#include "torchamp/labs/weights_together.h"
#include "torchamp/optim.h"
#include "torchamp/policy.h"
#include "torchamp/recompute.h"
#include "torchamp/weight_cache.h"

namespace {

using torchamp::AutocastGuard;
using torchamp::WeightCache;
using weight_caches::expect_same;
using weight_caches::Function;
using weight_caches::Tensors;
using weight_caches::values_and_gradients;
using weight_caches::with;

/// Weights and biases of `depth` layers that call torch::linear.
struct Layers {
  explicit Layers(int depth) {
    for (int i = 0; i < depth; ++i) {
      parameters.push_back((torch::randn({8, 8}) * 0.3).set_requires_grad(true));
      parameters.push_back((torch::randn({8}) * 0.3).set_requires_grad(true));
    }
  }
  at::Tensor operator()(at::Tensor x, std::size_t first = 0, std::size_t last = 1000) const {
    for (std::size_t i = first; i < std::min(last, parameters.size() / 2); ++i) {
      x = torch::linear(x, parameters[2 * i], parameters[2 * i + 1]);
    }
    return x;
  }
  Tensors parameters;
};

class WeightsTogether : public ::testing::Test {
 protected:
  void SetUp() override {
    torch::manual_seed(1);
    torch::set_num_threads(1);  // the tensors are small
  }

  /// A region's output and the gradients, of several regions one after another with each cache.
  static void expect_libtorchs(const Function& function, const at::Tensor& input,
                               const Tensors& weights, const std::string& what) {
    for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
      const Tensors expected = run(WeightCache::libtorch, function, input, weights, dtype);
      for (int i = 0; i < 3; ++i) {
        expect_same(run(torchamp::weights_together(), function, input, weights, dtype), expected,
                    what + ", " + c10::toString(dtype) + ", region " + std::to_string(i));
      }
    }
  }
  static Tensors run(const WeightCache& cache, const Function& function, const at::Tensor& input,
                     const Tensors& weights, at::ScalarType dtype = at::kBFloat16) {
    return values_and_gradients(with(cache, dtype), function, input, weights);
  }
};

TEST_F(WeightsTogether, KnowATransposeFromBeforeTheWeightGotOtherMemory) {
  const Tensors weights{torch::randn({8, 8}).set_requires_grad(true),
                        torch::randn({8, 8}).set_requires_grad(true)};
  const Tensors transposes{weights[0].t(), weights[1].t()};
  for (const at::Tensor& weight : weights) weight.set_data(torch::randn({8, 8}));
  const at::Tensor x = torch::randn({2, 8});
  const auto result = [&](const WeightCache& cache) {
    const AutocastGuard autocast(at::kCPU, {.dtype = at::kBFloat16, .cache = cache});
    return x.mm(transposes[0]).mm(transposes[1]).detach();
  };
  const at::Tensor expected = result(WeightCache::libtorch);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(result(torchamp::weights_together()).equal(expected));
}

TEST_F(WeightsTogether, AreNotCastOneByOneFromTheSecondRegionOnNorAreTheirGradients) {
  const Layers net(6);
  const auto input = torch::randn({4, 8}).to(at::kBFloat16);
  for (int i = 0; i < 4; ++i) {
    at::Tensor output;
    {
      const CallCounter ops;
      const AutocastGuard guard(at::kCPU, with(torchamp::weights_together()));
      output = net(input);
      EXPECT_EQ(ops.called_anywhere("aten::_to_copy"), i == 0 ? 12 : 0) << i;
    }
    const auto loss = output.sum();
    const CallCounter ops;
    loss.backward();
    EXPECT_EQ(ops.called_anywhere("aten::_foreach_copy_"), i == 0 ? 0 : 1) << i;
    EXPECT_EQ(ops.called_anywhere("aten::_to_copy"), i == 0 ? 12 : 0) << i;
  }
}

TEST_F(WeightsTogether, AreCastInChunksOfFew) {
  const Layers net(50);
  const auto input = torch::randn({4, 8}).to(at::kBFloat16);
  for (int i = 0; i < 2; ++i) {
    at::Tensor loss;
    {
      const AutocastGuard guard(at::kCPU, with(torchamp::weights_together()));
      loss = net(input).sum();
    }
    const CallCounter ops;
    loss.backward();
    EXPECT_EQ(ops.called_anywhere("aten::_foreach_copy_"), i == 0 ? 0 : 4);  // of 32, 32, 32 and 4
  }
}

TEST_F(WeightsTogether, GiveWhatLibTorchsCacheGives) {
  const Layers layers(5);
  expect_libtorchs([&](const auto& x) { return layers(x); }, torch::randn({3, 8}),
                   layers.parameters, "linear");
  expect_libtorchs([&](const auto& x) { return layers(layers(x)); }, torch::randn({3, 8}),
                   layers.parameters, "each weight twice");
  auto net = weight_caches::make_net();
  const auto forward = weight_caches::forward_of(net);
  expect_libtorchs(forward, torch::randn({3, 8}), net->parameters(), "modules");
  expect_libtorchs(forward, torch::randn({2, 3, 8}), net->parameters(), "three dimensions");
  torch::nn::Linear square(8, 8);
  expect_libtorchs([&](const auto& x) { return square(square(square(x))); }, torch::randn({3, 8}),
                   square->parameters(), "a module three times");
  torch::nn::Sequential conv(torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 4, 3).bias(false)),
                             torch::nn::BatchNorm2d(4), torch::nn::ReLU(),
                             torch::nn::Conv2d(4, 4, 3), torch::nn::Flatten(),
                             torch::nn::Linear(64, 3));
  expect_libtorchs([&](const auto& x) { return conv->forward(x); }, torch::randn({2, 3, 8, 8}),
                   conv->parameters(), "convolutions");
  for (auto& weight : conv->parameters()) {
    if (weight.dim() == 4) {
      const at::NoGradGuard no_grad;
      weight.set_data(weight.contiguous(at::MemoryFormat::ChannelsLast));
    }
  }
  expect_libtorchs([&](const auto& x) { return conv->forward(x); }, torch::randn({2, 3, 8, 8}),
                   conv->parameters(), "channels last");
  torch::nn::GRUCell cell(8, 8);
  expect_libtorchs([&](const auto& x) { return cell(x, cell(x)); }, torch::randn({2, 8}),
                   cell->parameters(), "a cell used twice");
  const auto table = (torch::randn({10, 8}) * 0.3).set_requires_grad(true);
  expect_libtorchs(
      [&](const auto& x) {
        const auto embedded = torch::embedding(table, torch::arange(6));
        return torch::linear(layers(embedded + x), table) + x.mm(table.t()).mm(table).mm(table.t());
      },
      torch::randn({6, 8}), {table, layers.parameters[0], layers.parameters[3]},
      "tied with an embedding, and transposed twice");
}

/// Losses and weights of some steps.
template <class Step>
void expect_same_training(const Step& step) {
  std::vector<Tensors> results;
  for (const WeightCache cache : {WeightCache::libtorch, torchamp::weights_together()}) {
    torch::manual_seed(3);
    Tensors result;
    step(cache, result);
    results.push_back(std::move(result));
  }
  expect_same(results[1], results[0], "training");
}

TEST_F(WeightsTogether, TrainToTheSameWeights) {
  expect_same_training([](const WeightCache& cache, Tensors& result) {
    Layers net(20);
    torchamp::FusedAdamW optimizer(net.parameters, torch::optim::AdamWOptions(1e-3));
    for (int i = 0; i < 5; ++i) {
      at::Tensor loss;
      {
        const AutocastGuard guard(at::kCPU, with(cache));
        loss = net(torch::randn({4, 8})).to(at::kFloat).tanh().pow(2).mean();
      }
      optimizer.zero_grad();
      loss.backward();
      optimizer.step();
      result.push_back(loss.detach());
    }
    for (const auto& weight : net.parameters) result.push_back(weight.detach());
  });
}

TEST_F(WeightsTogether, AreCastAgainAfterAStepWithinTheRegion) {
  expect_same_training([](const WeightCache& cache, Tensors& result) {
    Layers net(4);
    torchamp::FusedSGD optimizer(net.parameters, torch::optim::SGDOptions(0.01));
    for (int region = 0; region < 3; ++region) {
      const AutocastGuard guard(at::kCPU, with(cache));
      for (int i = 0; i < 3; ++i) {
        const auto loss = net(torch::randn({4, 8})).to(at::kFloat).pow(2).mean();
        optimizer.zero_grad();
        loss.backward();
        optimizer.step();
        result.push_back(loss.detach());
      }
    }
  });
}

/// What a change between two uses in one region does, or before the first, to values.
TEST_F(WeightsTogether, AreCastAgainAfterTheyHaveChanged) {
  const at::NoGradGuard no_grad;
  Layers net(3);
  const auto input = torch::randn({4, 8});
  const std::function<void()> changes[] = {
      [&] { net.parameters[2].mul_(2); },
      [&] {
        net.parameters[2].set_data(torch::randn({8, 8}));
      },
      [&] {
        net.parameters[2].data().mul_(2);
        torchamp::weights_changed();
      },
      [&] {
        net.parameters[2].data().mul_(2);
        torchamp::weights_changed({net.parameters[2]});
      },
      [&] {
        net.parameters[2].data().mul_(2);
        torchamp::clear_weight_cache();
      },
  };
  const auto expected = [&] {
    const AutocastGuard guard(at::kCPU, with(WeightCache::none));
    return net(input);
  };
  for (std::size_t i = 0; i < std::size(changes); ++i) {
    for (const bool after_use : {false, true}) {
      for (int region = 0; region < 3; ++region) {
        const AutocastGuard guard(at::kCPU, with(torchamp::weights_together()));
        if (after_use) {
          EXPECT_TRUE(net(input).equal(expected()));
        } else {
          (void)net(input, 0, 1);  // casts the others, too
        }
        changes[i]();
        EXPECT_TRUE(net(input).equal(expected())) << i << ", " << region;
        changes[i]();
        EXPECT_TRUE(net(input).equal(expected())) << i << ", " << region;
      }
    }
  }
}

TEST_F(WeightsTogether, AreForgottenIfARegionDoesNotUseThem) {
  const Layers net(4);
  const auto input = torch::randn({4, 8}).to(at::kBFloat16);
  const at::NoGradGuard no_grad;
  const auto casts_alone = [&](std::size_t last) {
    const CallCounter ops;
    const AutocastGuard guard(at::kCPU, with(torchamp::weights_together()));
    (void)net(input, 0, last);
    return ops.called_anywhere("aten::_to_copy");
  };
  EXPECT_EQ(casts_alone(4), 8);
  EXPECT_EQ(casts_alone(2), 0);  // casts the weights of four layers, uses two
  EXPECT_EQ(casts_alone(4), 4);  // the other two are noted anew
  EXPECT_EQ(casts_alone(4), 0);
  EXPECT_EQ(casts_alone(2), 0);
  EXPECT_EQ(casts_alone(4), 0);  // they are a separate chunk
}

TEST_F(WeightsTogether, FollowModelsThatTakeTurns) {
  const Layers one(3), other(3);
  const auto input = torch::randn({4, 8}).to(at::kBFloat16);
  for (int i = 0; i < 6; ++i) {
    const CallCounter ops;
    const AutocastGuard guard(at::kCPU, with(torchamp::weights_together()));
    (void)(i % 2 ? one : other)(input);
    EXPECT_EQ(ops.called_anywhere("aten::_to_copy"), i < 2 ? 6 : 0) << i;
  }
}

TEST_F(WeightsTogether, CallHooksAsLibTorchsCacheDoes) {
  for (const bool registered_at_first : {true, false}) {
    const Layers net(4);
    std::vector<int> calls(net.parameters.size());
    const auto watch = [&] {
      for (std::size_t i = 0; i < net.parameters.size(); ++i) {
        net.parameters[i].register_hook([&calls, i](const at::Tensor& gradient) {
          EXPECT_TRUE(gradient.defined());
          ++calls[i];
        });
      }
    };
    if (registered_at_first) watch();
    const auto input = torch::randn({4, 8});
    for (int region = 0; region < 3; ++region) {
      if (region == 1 && !registered_at_first) watch();
      calls.assign(calls.size(), 0);
      at::Tensor first, second;
      {
        const AutocastGuard guard(at::kCPU, with(torchamp::weights_together()));
        first = net(input, 0, 2).sum();
        second = net(input, 2, 4).sum();
      }
      const int once = registered_at_first || region > 0 ? 1 : 0;
      first.backward();
      EXPECT_EQ(calls, (std::vector<int>{once, once, once, once, 0, 0, 0, 0})) << region;
      second.backward();
      EXPECT_EQ(calls, std::vector<int>(8, once)) << region;
    }
  }
}

/// Gives the transpose of a weight, but the opposite of its gradient.
struct Reversed : torch::autograd::Function<Reversed> {
  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/, const at::Tensor& x) {
    return x.t();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                                 torch::autograd::variable_list gradients) {
    return {-gradients[0].t()};
  }
};

TEST_F(WeightsTogether, LeaveViewsAloneWhoseGradientsDoNotSimplyGoToTheWeight) {
  const auto in_no_graph = [](const at::Tensor& weight) {
    const at::NoGradGuard no_grad;
    return weight.t();
  };
  const std::function<at::Tensor(const at::Tensor&)> views[] = {
      [](const auto& weight) { return Reversed::apply(weight); },
      in_no_graph,
      [&](const auto& weight) { return in_no_graph(weight).requires_grad_(true); },
      [](const auto& weight) {
        auto view = weight.t();
        view.register_hook([](const at::Tensor& gradient) { return gradient * 2; });
        return view;
      },
      [](const auto& weight) {
        auto view = weight.t();
        view.retain_grad();
        return view;
      },
  };
  const auto weight = (torch::randn({8, 8}) * 0.3).set_requires_grad(true);
  const Layers net(1);
  const auto input = torch::randn({4, 8});
  for (std::size_t i = 0; i < std::size(views); ++i) {
    const auto gradients = [&](const WeightCache& cache, const auto& view_of) {
      weight.mutable_grad() = net.parameters[0].mutable_grad() = at::Tensor();
      const auto view = view_of(weight);
      at::Tensor loss;
      {
        const AutocastGuard guard(at::kCPU, with(cache));
        loss = net(input.mm(view)).to(at::kFloat).pow(2).sum();
      }
      loss.backward();
      const bool has_its_own = view.requires_grad() && (view.is_leaf() || view.retains_grad());
      Tensors result{weight.grad(), net.parameters[0].grad(),
                     has_its_own ? view.grad() : at::Tensor()};
      for (auto& one : result) one = one.defined() ? one : at::zeros({0});
      return result;
    };
    const Tensors expected = gradients(WeightCache::libtorch, views[i]);
    const auto plain_view = [](const at::Tensor& of) { return of.t(); };
    for (int region = 0; region < 3; ++region) {
      (void)gradients(torchamp::weights_together(), plain_view);  // the chunk has the transpose
      expect_same(gradients(torchamp::weights_together(), views[i]), expected,
                  std::to_string(i) + ", region " + std::to_string(region));
    }
  }
}

TEST_F(WeightsTogether, PassTheGradientOfAKeptTransposeToTheWeightAlone) {
  const auto weight = torch::randn({8, 8}).set_requires_grad(true);
  const Layers net(1);
  for (int region = 0; region < 3; ++region) {
    const auto transpose = weight.t();
    at::Tensor loss;
    {
      const AutocastGuard guard(at::kCPU, with(torchamp::weights_together()));
      loss = net(torch::randn({4, 8}).mm(transpose)).sum();
    }
    const auto gradients = torch::autograd::grad({loss}, {weight, transpose}, {},
                                                 /*retain_graph=*/false, /*create_graph=*/false,
                                                 /*allow_unused=*/true);
    EXPECT_TRUE(gradients[0].defined());
    EXPECT_EQ(gradients[1].defined(), region == 0) << "this is what the documentation says";
  }
}

TEST_F(WeightsTogether, HaveTwoCastsIfAPredicateDecidesAboutOneOfTheirOps) {
  const auto weight = torch::randn({8, 8}).set_requires_grad(true);
  const Layers net(1);
  const auto input = torch::randn({4, 8});
  const auto function = [&](const at::Tensor& x) {
    return net(torch::linear(x, weight).mm(weight));
  };
  const auto run_with_predicate = [&](const WeightCache& cache) {
    auto options = with(cache);
    options.policy = torchamp::Policy::standard().fp32(
        {"mm"}, {.predicate = [](const torchamp::OpCall& /*call*/) { return false; }});
    return values_and_gradients(options, function, input, {weight, net.parameters[0]});
  };
  const Tensors expected = run_with_predicate(WeightCache::none);  // the casts' gradients in fp32
  for (int region = 0; region < 3; ++region) {
    expect_same(run_with_predicate(torchamp::weights_together()), expected, std::to_string(region));
  }
}

TEST_F(WeightsTogether, AreNotCastInSmallerChunksAfterTheCacheWasClearedWithinARegion) {
  const Layers net(6);
  const auto input = torch::randn({4, 8}).to(at::kBFloat16);
  for (int region = 0; region < 6; ++region) {
    at::Tensor output;
    {
      const AutocastGuard guard(at::kCPU, with(torchamp::weights_together()));
      const auto hidden = net(input, 0, 2);
      if (region % 2 == 1) torchamp::clear_weight_cache();  // as a guard's end on another thread
      output = net(hidden, 2);
    }
    const auto loss = output.sum();
    const CallCounter ops;
    loss.backward();
    EXPECT_EQ(ops.called_anywhere("aten::_foreach_copy_"), region == 0 ? 0 : 1 + region % 2);
    EXPECT_EQ(ops.called_anywhere("aten::_to_copy"), region == 0 ? 12 : 0) << region;
  }
}

TEST_F(WeightsTogether, NeedNotBeginWithTheSameTensorInEachRegion) {
  const Layers net(3);
  for (int region = 0; region < 4; ++region) {
    const auto input = torch::randn({4, 8}).set_requires_grad(true);  // cast like a weight
    const CallCounter ops;
    const AutocastGuard guard(at::kCPU, with(torchamp::weights_together()));
    (void)net(input);
    EXPECT_EQ(ops.called_anywhere("aten::_to_copy"), region == 0 ? 7 : 1) << region;
  }
}

TEST_F(WeightsTogether, TakeNoGradientOfALossThatDoesNotUseThem) {
  const Layers net(4);
  const auto input = torch::randn({4, 8});
  for (int region = 0; region < 3; ++region) {
    for (const auto& weight : net.parameters) weight.mutable_grad() = at::Tensor();
    at::Tensor first;
    {
      const AutocastGuard guard(at::kCPU, with(torchamp::weights_together()));
      first = net(input, 0, 2).sum();
      (void)net(input, 2, 4).sum();
    }
    first.backward();
    for (std::size_t i = 0; i < 8; ++i) EXPECT_EQ(net.parameters[i].grad().defined(), i < 4) << i;
  }
}

TEST_F(WeightsTogether, GiveGradientsOfSomeWeightsAndOfGradients) {
  const Layers net(3);
  const auto input = torch::randn({4, 8});
  const auto& weights = net.parameters;
  const auto derive = [&](const WeightCache& cache) {
    at::Tensor loss;
    {
      const AutocastGuard guard(at::kCPU, with(cache));
      loss = net(net(input).tanh()).to(at::kFloat).pow(2).sum();
    }
    const auto of_one = torch::autograd::grad({loss}, {weights[2]}, {}, /*retain_graph=*/true)[0];
    const auto again = torch::autograd::grad({loss}, {weights[2]}, {}, /*retain_graph=*/true)[0];
    EXPECT_TRUE(again.equal(of_one));
    Tensors result{of_one};
    const auto recorded = torch::autograd::grad({loss}, {weights[0], weights[3]}, {},
                                                /*retain_graph=*/true, /*create_graph=*/true);
    const auto norm = recorded[0].pow(2).sum() + recorded[1].pow(2).sum();
    for (auto& gradient : torch::autograd::grad({norm}, {weights[0], weights[2], weights[4]})) {
      result.push_back(gradient);
    }
    return result;
  };
  const Tensors expected = derive(WeightCache::libtorch);
  for (int i = 0; i < 3; ++i)
    expect_same(derive(torchamp::weights_together()), expected, "derivatives");
}

TEST_F(WeightsTogether, ServeEvaluationAndTrainingInOneRegion) {
  const Layers net(3);
  const auto input = torch::randn({4, 8});
  const auto expected = run(
      WeightCache::libtorch, [&](const auto& x) { return net(x); }, input, net.parameters);
  for (int i = 0; i < 3; ++i) {
    for (const bool in_inference_mode : {false, true}) {
      const auto mixed = [&](const at::Tensor& x) {
        const auto evaluate = [&] {
          const at::NoGradGuard no_grad;
          EXPECT_TRUE(net(x).equal(expected[0]));
          const c10::InferenceMode inference(in_inference_mode);
          EXPECT_TRUE(net(x).equal(expected[0]));
        };
        evaluate();
        const auto result = net(x);
        evaluate();
        return result;
      };
      expect_same(run(torchamp::weights_together(), mixed, input, net.parameters), expected,
                  "mixed");
    }
  }
}

TEST_F(WeightsTogether, FollowTheDtypeOfANestedRegion) {
  const Layers net(3);
  const auto input = torch::randn({4, 8});
  const auto nested = [&](const at::Tensor& x) {
    const auto before = net(x);
    at::Tensor inside;
    {
      const AutocastGuard guard(at::kCPU, {.dtype = at::kHalf});
      inside = net(x);
      EXPECT_EQ(inside.scalar_type(), at::kHalf);
    }
    at::Tensor plain;
    {
      const AutocastGuard guard(at::kCPU, {.enabled = false});
      plain = net(x);
      EXPECT_EQ(plain.scalar_type(), at::kFloat);
    }
    at::Tensor uncached;
    {
      const AutocastGuard guard(at::kCPU, {.cache = WeightCache::none});
      uncached = net(x);
    }
    return before + inside + plain + uncached + net(x);
  };
  expect_libtorchs(nested, input, net.parameters, "nested");
}

TEST_F(WeightsTogether, MayBeFrozenAndUnfrozen) {
  const Layers net(4);
  const auto input = torch::randn({4, 8});
  for (int i = 0; i < 6; ++i) {
    net.parameters[3].set_requires_grad(i % 3 != 1);
    net.parameters[0].set_requires_grad(i % 4 != 2);
    const auto function = [&](const auto& x) { return net(x); };
    expect_same(run(torchamp::weights_together(), function, input, net.parameters),
                run(WeightCache::libtorch, function, input, net.parameters), std::to_string(i));
  }
}

TEST_F(WeightsTogether, SurviveAnError) {
  const Layers net(4);
  const auto input = torch::randn({4, 8});
  const auto function = [&](const auto& x) { return net(x); };
  const auto expected = run(WeightCache::libtorch, function, input, net.parameters);
  for (int i = 0; i < 4; ++i) {
    try {
      const AutocastGuard guard(at::kCPU, with(torchamp::weights_together()));
      (void)net(input, 0, static_cast<std::size_t>(i));
      throw std::runtime_error("");
    } catch (const std::runtime_error&) {
    }
    EXPECT_ANY_THROW({
      const AutocastGuard guard(at::kCPU, with(torchamp::weights_together()));
      (void)net(torch::randn({4, 7}));
    });
    expect_same(run(torchamp::weights_together(), function, input, net.parameters), expected,
                "after");
  }
}

TEST_F(WeightsTogether, AreStillCastTogetherAfterALackOfMemory) {
  const Layers net(6);
  const auto input = torch::randn({4, 8}).to(at::kBFloat16);
  const at::NoGradGuard no_grad;
  for (int i = 0; i < 4; ++i) {
    if (i > 0) {
      const HostAllocationLimit limit(5);
      const AutocastGuard guard(at::kCPU, with(torchamp::weights_together()));
      EXPECT_THROW((void)net(input), c10::OutOfMemoryError);
    }
    const CallCounter ops;
    const AutocastGuard guard(at::kCPU, with(torchamp::weights_together()));
    (void)net(input);
    EXPECT_EQ(ops.called_anywhere("aten::_to_copy"), i == 0 ? 12 : 0) << i;
  }
}

TEST_F(WeightsTogether, AreFreedWithTheirModel) {
  const auto input = torch::randn({4, 8});
  for (int i = 0; i < 3; ++i) {
    auto net = std::make_unique<Layers>(3);
    for (int region = 0; region < 2; ++region) {
      const AutocastGuard guard(at::kCPU, with(torchamp::weights_together()));
      (*net)(input).sum().backward();
    }
    const auto memory = net->parameters[2].storage().getWeakStorageImpl();
    net.reset();
    EXPECT_TRUE(memory.expired());
  }
}

TEST_F(WeightsTogether, TheirCastsAreFreedWithTheRegionUsedOrNot) {
  const Layers net(3);
  const auto input = torch::randn({4, 8});
  const at::NoGradGuard no_grad;
  for (int region = 0; region < 4; ++region) {
    const MemoryMeter memory;
    {
      const AutocastGuard guard(at::kCPU, with(torchamp::weights_together()));
      (void)net(input, 0, region == 1 ? 1 : 3);
      EXPECT_EQ(memory.bytes(), region == 3 ? 3 * 2 * (64 + 8) : memory.bytes());
    }
    EXPECT_EQ(memory.bytes(), 0) << region;
  }
}

TEST_F(WeightsTogether, OfOneModelServeSeveralThreads) {
  const Layers net(6);
  const auto input = torch::randn({4, 8});
  const auto function = [&](const auto& x) { return net(x); };
  const auto expected = run(WeightCache::libtorch, function, input, net.parameters);
  std::vector<std::thread> threads;
  std::vector<Tensors> results(3);
  for (auto& result : results) {
    threads.emplace_back([&] {
      for (int i = 0; i < 20; ++i) {
        result = run(torchamp::weights_together(), function, input, net.parameters);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& result : results) expect_same(result, expected, "threads");
}

TEST_F(WeightsTogether, GiveTheSameInRecomputation) {
  const Layers net(6);
  const auto input = torch::randn({4, 8}).set_requires_grad(true);
  const auto function = [&](const at::Tensor& x) {
    const auto half = torchamp::checkpoint([&](const at::Tensor& y) { return net(y, 0, 2); }, x);
    return net(torchamp::checkpoint([&](const at::Tensor& y) { return net(y, 2, 4); }, half), 4);
  };
  expect_libtorchs(function, input, net.parameters, "recomputation");
}

TEST_F(WeightsTogether, AreCountedByARecorderAsCastsOfTheOpsThatUseThem) {
  const Layers net(3);
  const auto input = torch::randn({4, 8});
  for (int i = 0; i < 3; ++i) {
    const torchamp::CastRecorder recorder;
    {
      const at::NoGradGuard no_grad;
      const AutocastGuard guard(at::kCPU, with(torchamp::weights_together()));
      (void)net(input);
      (void)net(input);
    }
    const auto total = recorder.report().total();
    EXPECT_EQ(total.cache_misses, 6) << i;
    EXPECT_EQ(total.cache_hits, 6) << i;
    EXPECT_EQ(total.casts, 6 + 2) << i;  // of weights, and of the input for each use
  }
}

}  // namespace
