// SPDX-License-Identifier: BSD-3-Clause
#include "torchamp/weight_cache.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/expect_error.h"
#include "support/leaf.h"
#include "support/weight_caches.h"
#include "torchamp/autocast.h"
#include "torchamp/labs/cast_recorder.h"
#include "torchamp/labs/module_policy.h"
#include "torchamp/policy_text.h"
#include "torchamp/recompute.h"

namespace {

using torchamp::AutocastGuard;
using torchamp::AutocastOptions;
using torchamp::Policy;
using torchamp::WeightCache;
using weight_caches::expect_same;
using weight_caches::forward_of;
using weight_caches::Function;
using weight_caches::make_net;
using weight_caches::own_caches;
using weight_caches::Tensors;
using weight_caches::values_and_gradients;
using weight_caches::WeightCaches;
using weight_caches::with;

TEST_F(WeightCaches, CastsAWeightThatDoesNotChangeOnce) {
  auto net = make_net();
  const auto input = torch::randn({3, 8});
  for (int i = 0; i < 4; ++i) {
    const AutocastGuard guard(at::kCPU, with(WeightCache::kept));
    net->forward(input).sum().backward();
  }
  EXPECT_EQ(misses(), 4);  // two weights, two biases
  EXPECT_EQ(hits(), 12);
  EXPECT_EQ(bytes(), 2 * (8 * 16 + 16 + 16 * 4 + 4));
}

TEST_F(WeightCaches, KeepsFewCastsOfMatricesThatAreGone) {
  const at::NoGradGuard no_grad;
  const AutocastGuard guard(at::kCPU, with(WeightCache::region));
  const auto x = torch::ones({1, 2048});
  constexpr int64_t a_cast = 2 * 2048 * 2048;
  int64_t most = 0;
  for (int i = 0; i < 12; ++i) {
    (void)torch::matmul(x, torch::empty({2048, 2048}));
    most = std::max(most, bytes());
  }
  EXPECT_LE(most, 3 * a_cast);
}

TEST_F(WeightCaches, GivesWhatCastsForEachUseGive) {
  auto net = make_net();
  expect_plain(forward_of(net), torch::randn({3, 8}), net->parameters(), "two dimensions");
  expect_plain(forward_of(net), torch::randn({2, 3, 8}), net->parameters(), "three dimensions");

  torch::nn::Conv2d conv(3, 4, 3);
  expect_plain([&](const auto& input) { return conv(input); }, torch::randn({2, 3, 8, 8}),
               conv->parameters(), "convolution");
  torch::nn::ConvTranspose1d transposed(3, 4, 3);
  expect_plain([&](const auto& input) { return transposed(input); }, torch::randn({2, 3, 8}),
               transposed->parameters(), "transposed convolution");
  torch::nn::GRUCell cell(8, 8);
  expect_plain([&](const auto& input) { return cell(input, cell(input)); }, torch::randn({2, 8}),
               cell->parameters(), "a cell used twice");
  torch::nn::LSTM lstm(8, 8);
  expect_plain([&](const auto& input) { return std::get<0>(lstm(input)); }, torch::randn({3, 2, 8}),
               lstm->parameters(), "LSTM");
  torch::nn::MultiheadAttention attention(8, 2);
  expect_plain([&](const auto& input) { return std::get<0>(attention(input, input, input)); },
               torch::randn({3, 2, 8}), attention->parameters(), "attention");
  const auto left = leaf({8, 8});
  expect_plain(
      [&](const auto& input) {
        return left.matmul(input).mm(left.t()).mm(left[0].view({8, 1}));
      },
      torch::randn({8, 8}), {left}, "views of one weight");
  const auto bag = leaf({2, 3, 8});
  expect_plain([&](const auto& input) { return torch::bmm(bag, input); }, torch::randn({2, 8, 5}),
               {bag}, "a batch of weights");
}

TEST_F(WeightCaches, FollowsThePolicy) {
  auto net = make_net();
  const auto input = torch::randn({3, 8});
  for (const Policy& policy :
       {Policy::standard().fp32(torchamp::ops::matmul), Policy::torch(),
        Policy::torch().unchanged({"addmm"}), Policy::standard().lower_precision({"relu"}),
        Policy::standard().lower_precision({"addmm"}, {.dtype = at::kBFloat16}),
        Policy::standard().fp32({"addmm"}, {.predicate = [](const torchamp::OpCall& call) {
                                  return call.argument("mat1").toTensor().size(1) == 16;
                                }})}) {
    const auto run = [&](WeightCache cache) {
      return values_and_gradients({.dtype = at::kBFloat16, .policy = policy, .cache = cache},
                                  forward_of(net), input, net->parameters());
    };
    std::ostringstream text;
    text << policy;
    expect_same(run(WeightCache::kept), run(WeightCache::none), text.str());
    expect_same(run(WeightCache::kept), run(WeightCache::none), text.str());
  }
}

TEST_F(WeightCaches, KeepsTheCastOfABiasThatIsAddedInPlace) {
  torch::nn::Linear layer(8, 16);
  const auto input = torch::randn({2, 3, 8});
  const Policy policy = Policy::torch().promote("add_");
  const auto run = [&](const WeightCache& cache) {
    const AutocastGuard guard(at::kCPU, {.policy = policy, .cache = cache});
    const auto output = layer->forward(input);
    output.sum().backward();
    return output.detach();
  };
  const auto plain = run(WeightCache::none);
  const auto gradient = layer->bias.grad().clone();
  for (int i = 0; i < 3; ++i) {
    layer->zero_grad();
    EXPECT_TRUE(run(WeightCache::kept).equal(plain));
    EXPECT_TRUE(layer->bias.grad().equal(gradient));
  }
  EXPECT_EQ(misses(), 2);  // weight and bias
  EXPECT_EQ(hits(), 4);
}

TEST_F(WeightCaches, DoesNotKeepWhatIsAddedInPlaceUnlessItIsAParameter) {
  const at::NoGradGuard no_grad;
  const Policy policy = Policy::torch().promote("add_");
  const AutocastGuard guard(at::kCPU, {.policy = policy, .cache = WeightCache::kept});
  auto sum = torch::zeros({3, 4}, at::kBFloat16);
  sum.add_(torch::ones({3, 4})).add_(torch::ones({4}));
  EXPECT_EQ(misses(), 0);
  EXPECT_TRUE(sum.eq(2).all().item<bool>());
}

TEST_F(WeightCaches, CoversModulesWithAPolicyOfTheirOwn) {
  auto net = make_net();
  const auto input = torch::randn({3, 8});
  torchamp::ModulePolicies{{"0", Policy::standard().fp32({"addmm"})}, {"2", Policy::torch()}}
      .apply_to(*net);
  expect_plain(forward_of(net), input, net->parameters(), "module policies");
  torchamp::clear_weight_cache();
  const auto before = hits();
  for (int i = 0; i < 2; ++i) {
    const AutocastGuard guard(at::kCPU, with(WeightCache::kept));
    net->forward(input);
  }
  EXPECT_EQ(hits() - before, 2);
}

TEST_F(WeightCaches, AddsTheGradientsOfTwoUsesInTheWeightsDtype) {
  const auto weight = leaf({4, 4});
  const Function twice = [&](const at::Tensor& input) {
    return input.mm(weight) + (input * 300).mm(weight);
  };
  expect_plain(twice, torch::randn({4, 4}), {weight}, "used twice");
}

TEST_F(WeightCaches, TakesFrozenWeights) {
  auto net = make_net();
  for (auto& parameter : net->parameters()) parameter.set_requires_grad(false);
  const auto input = leaf({3, 8});
  expect_plain(forward_of(net), input, {input}, "frozen");
  EXPECT_EQ(misses(), 3 * 5);  // four, and the leaf that is the input, for each cache
  torch::nn::Conv1d conv(3, 4, 3);
  conv->weight.set_requires_grad(false);
  const auto signal = leaf({2, 3, 9});
  expect_plain([&](const auto& x) { return conv(x); }, signal, {signal, conv->bias}, "frozen conv");
}

TEST_F(WeightCaches, DoesNotKeepCastsOfActivations) {
  const torch::NoGradGuard no_grad;
  torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({8}));
  const auto x = torch::randn({2, 4, 8});
  const AutocastGuard guard(at::kCPU, with(WeightCache::kept));
  const auto y = norm(x);
  torch::matmul(y, y.transpose(1, 2));
  torch::bmm(y, x.transpose(1, 2));
  EXPECT_EQ(bytes(), 0);
}

TEST_F(WeightCaches, ServesGraphsWithWhatWasCastWithoutOne) {
  auto net = make_net();
  const auto input = torch::randn({3, 8});
  const auto expected = plain(forward_of(net), input, net->parameters());
  {
    const torch::NoGradGuard no_grad;
    const AutocastGuard guard(at::kCPU, with(WeightCache::kept));
    net->forward(input);
  }
  {
    const c10::InferenceMode inference;
    const AutocastGuard guard(at::kCPU, with(WeightCache::kept));
    EXPECT_TRUE(net->forward(input).is_inference());
  }
  expect_same(
      values_and_gradients(with(WeightCache::kept), forward_of(net), input, net->parameters()),
      expected, "after no_grad");
  EXPECT_EQ(misses(), 4);
  {
    torchamp::clear_weight_cache();
    const c10::InferenceMode inference;
    const AutocastGuard guard(at::kCPU, with(WeightCache::kept));
    net->forward(input);
  }
  expect_same(
      values_and_gradients(with(WeightCache::kept), forward_of(net), input, net->parameters()),
      expected, "after inference mode");
  EXPECT_EQ(misses(), 8);
}

TEST_F(WeightCaches, LetsGraphsGoBackwardAgain) {
  auto net = make_net();
  const auto input = torch::randn({3, 8});
  const auto gradients_of = [&](WeightCache cache) {
    net->zero_grad();
    const AutocastGuard guard(at::kCPU, with(cache));
    const auto first = net->forward(input).sum();
    const auto second = net->forward(input * 2).sum();
    first.backward({}, /*retain_graph=*/true);
    first.backward();
    second.backward();
    net->forward(input).sum().backward();
    Tensors gradients;
    for (const auto& parameter : net->parameters()) gradients.push_back(parameter.grad());
    return gradients;
  };
  const auto expected = gradients_of(WeightCache::none);
  for (const auto cache : own_caches) expect_same(gradients_of(cache), expected, "again");
}

TEST_F(WeightCaches, HasGradientsOfGradients) {
  const auto weight = leaf({4, 4});
  const auto input = torch::randn({4, 4});
  const auto second_order = [&](WeightCache cache) {
    const AutocastGuard guard(at::kCPU, with(cache));
    const auto loss = input.mm(weight).mm(weight).sum();
    const auto first = torch::autograd::grad({loss}, {weight}, {}, true, /*create_graph=*/true);
    return torch::autograd::grad({first[0].pow(2).sum()}, {weight});
  };
  expect_same(second_order(WeightCache::kept), second_order(WeightCache::none), "second order");
}

TEST_F(WeightCaches, ServesRecomputation) {
  auto net = make_net();
  const auto input = leaf({3, 8});
  const Function recomputed = [&](const at::Tensor& x) { return torchamp::checkpoint(net, x); };
  auto weights = net->parameters();
  weights.push_back(input);
  const auto gradients_of = [&](WeightCache cache) {
    for (auto& weight : weights) weight.mutable_grad() = at::Tensor();
    {
      const AutocastGuard guard(at::kCPU, with(cache));
      torchamp::checkpoint(net, input).sum().backward();
    }
    Tensors gradients;
    for (const auto& weight : weights) gradients.push_back(weight.grad());
    return gradients;
  };
  expect_same(gradients_of(WeightCache::kept), gradients_of(WeightCache::none), "recomputed");
  EXPECT_EQ(misses(), 4);
  EXPECT_EQ(hits(), 4);
}

TEST_F(WeightCaches, KeepsNothingBeyondTheOutermostGuardUnlessAsked) {
  auto net = make_net();
  const auto input = torch::randn({3, 8});
  {
    const AutocastGuard outer(at::kCPU, at::kBFloat16);
    {
      const AutocastGuard guard(at::kCPU, with(WeightCache::region));
      net->forward(input);
      net->forward(input);
    }
    EXPECT_EQ(misses(), 4);
    EXPECT_GT(bytes(), 0);
    {
      const AutocastGuard guard(at::kCPU, with(WeightCache::region));
      net->forward(input);
    }
    EXPECT_EQ(misses(), 4);
  }
  EXPECT_EQ(bytes(), 0);
  try {
    const AutocastGuard guard(at::kCPU, with(WeightCache::region));
    net->forward(input);
    throw std::runtime_error("in a region");
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(bytes(), 0);
}

TEST_F(WeightCaches, IsInheritedByNestedGuards) {
  auto net = make_net();
  const auto input = torch::randn({3, 8});
  const AutocastGuard outer(at::kCPU, with(WeightCache::kept));
  net->forward(input);
  {
    const AutocastGuard nested(at::kCPU, {.policy = Policy::torch()});
    net->forward(input);
    const AutocastGuard enabled(at::kCPU, {.cache_enabled = true});
    net->forward(input);
  }
  EXPECT_EQ(misses(), 4);
  EXPECT_EQ(hits(), 8);
  {
    const AutocastGuard off(at::kCPU, {.enabled = false});
    EXPECT_EQ(net->forward(input).scalar_type(), at::kFloat);
    const AutocastGuard uncached(at::kCPU, {.cache_enabled = false});
    net->forward(input);
    const AutocastGuard libtorchs(at::kCPU, with(WeightCache::libtorch));
    net->forward(input);
  }
  EXPECT_EQ(hits(), 8);
  net->forward(input);
  EXPECT_EQ(hits(), 12);
}

TEST_F(WeightCaches, RefusesOptionsThatContradictEachOther) {
  const auto make = [](AutocastOptions options) { const AutocastGuard guard(at::kCPU, options); };
  const auto state = at::autocast::is_autocast_enabled(at::kCPU);
  for (const WeightCache cache :
       std::vector<WeightCache>{WeightCache::libtorch, WeightCache::region, WeightCache::kept}) {
    EXPECT_ERROR((make({.cache_enabled = false, .cache = cache})),
                 "cache_enabled = false contradicts cache, which keeps casts");
  }
  EXPECT_ERROR((make({.cache_enabled = true, .cache = WeightCache::none})),
               "cache_enabled = true contradicts cache, which is WeightCache::none");
  EXPECT_EQ(at::autocast::is_autocast_enabled(at::kCPU), state);
  EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
  make({.cache_enabled = true, .cache = WeightCache::region});
  make({.cache_enabled = false, .cache = WeightCache::none});
  EXPECT_ERROR(torchamp::set_weight_cache_budget(-1), "-1 bytes is not a budget");
}

TEST_F(WeightCaches, KeepsTwoDtypesAtOnce) {
  auto net = make_net();
  const auto input = torch::randn({3, 8});
  for (int i = 0; i < 3; ++i) {
    for (const auto dtype : {at::kBFloat16, at::kHalf}) {
      expect_same(values_and_gradients(with(WeightCache::kept, dtype), forward_of(net), input,
                                       net->parameters()),
                  plain(forward_of(net), input, net->parameters(), dtype), "two dtypes");
    }
  }
  EXPECT_EQ(misses(), 8);
}

TEST_F(WeightCaches, ServesTwoThreadsWithTwoDtypes) {
  auto net = make_net();
  const auto input = torch::randn({3, 8});
  const at::ScalarType dtypes[] = {at::kBFloat16, at::kHalf};
  Tensors expected[2];
  for (int t = 0; t < 2; ++t) {
    expected[t] = plain(forward_of(net), input, net->parameters(), dtypes[t]);
  }
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 50; ++i) {
        expect_same(values_and_gradients(with(own_caches[i % 3], dtypes[t]), forward_of(net), input,
                                         net->parameters()),
                    expected[t], "threads");
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST_F(WeightCaches, StaysWithinItsBudget) {
  auto net = make_net();
  const auto input = torch::randn({3, 8});
  const auto expected = plain(forward_of(net), input, net->parameters());
  for (const int64_t budget : {0, 100, 300}) {
    torchamp::set_weight_cache_budget(budget);
    for (int i = 0; i < 2; ++i) {
      expect_same(
          values_and_gradients(with(WeightCache::kept), forward_of(net), input, net->parameters()),
          expected, "budget");
      EXPECT_LE(bytes(), budget);
    }
  }
  torchamp::set_weight_cache_budget(std::numeric_limits<int64_t>::max());
}

TEST_F(WeightCaches, KeepsACastForTheLongestOfTheCachesThatUseIt) {
  const at::Tensor weight = leaf({4, 4}), input = torch::randn({2, 4});
  const WeightCache caches[] = {WeightCache::kept, WeightCache::region, WeightCache::kept};
  for (const WeightCache cache : caches) {
    const AutocastGuard guard(at::kCPU, with(cache));
    (void)input.mm(weight);
  }
  EXPECT_EQ(misses(), 1);
}

TEST_F(WeightCaches, DropsWhatIsUnusedForLongestIfItsBudgetIsShort) {
  const at::Tensor first = leaf({4, 4}), second = leaf({4, 4}), third = leaf({4, 4});
  const at::Tensor input = torch::randn({2, 4});
  torchamp::set_weight_cache_budget(2 * 4 * 4 * 2);  // two casts
  const AutocastGuard guard(at::kCPU, with(WeightCache::kept));
  for (const at::Tensor& weight : {first, second, first, third}) (void)input.mm(weight);
  const int64_t before = misses();
  (void)input.mm(first);
  EXPECT_EQ(misses(), before);
  (void)input.mm(second);
  EXPECT_EQ(misses(), before + 1);
  torchamp::set_weight_cache_budget(std::numeric_limits<int64_t>::max());
}

TEST_F(WeightCaches, DoesNotChangeRawAutocast) {
  auto net = make_net();
  const auto input = torch::randn({3, 8});
  const auto raw = [&] {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::increment_nesting();
    const auto output = net->forward(input);
    const bool casts_once = net->forward(input).equal(output);
    at::autocast::decrement_nesting();
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    EXPECT_TRUE(casts_once);
    return output;
  };
  const auto before = raw();
  {
    const AutocastGuard guard(at::kCPU, with(WeightCache::kept));
    net->forward(input);
  }
  const auto looked = hits() + misses();
  EXPECT_TRUE(raw().equal(before));
  {
    const AutocastGuard guard(at::kCPU, at::kBFloat16);
    EXPECT_TRUE(net->forward(input).equal(before));
  }
  EXPECT_EQ(hits() + misses(), looked);
}

TEST_F(WeightCaches, IsInTheCastReport) {
  auto net = make_net();
  const auto input = torch::randn({3, 8});
  const torchamp::CastRecorder recorder(*net);
  for (int i = 0; i < 3; ++i) {
    if (i == 2) {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : net->parameters()) parameter.add_(1);
    }
    const AutocastGuard guard(at::kCPU, with(WeightCache::kept));
    net->forward(input);
  }
  const auto report = recorder.report();
  const auto total = report.total();
  EXPECT_EQ(total.cache_hits, 4);
  EXPECT_EQ(total.cache_misses, 8);
  EXPECT_EQ(total.casts, 8 + 3);  // of weights, and of each call's input
  std::ostringstream text;
  text << report;
  EXPECT_NE(text.str().find("kept"), std::string::npos) << text.str();
  EXPECT_NE(report.to_json().find("\"cache_hits\": 4, \"cache_misses\": 8"), std::string::npos);
}

}  // namespace
