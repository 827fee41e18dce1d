// SPDX-License-Identifier: BSD-3-Clause
#include "torchamp/detail/extras/weights/derived.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "support/leaf.h"
#include "torchamp/autocast.h"
#include "torchamp/detail/core/runtime/runtime.h"
#include "torchamp/weight_cache.h"

namespace {

using torchamp::detail::DerivedWeights;
using torchamp::detail::Tensors;
using torchamp::detail::WeightForm;
using torchamp::detail::WeightKeep;

constexpr WeightForm form{WeightForm::Kind::cast, 15};
constexpr WeightForm other_form{WeightForm::Kind::fp8, 15};
constexpr WeightKeep always{.until = WeightKeep::Until::dropped, .region = 0};

/// A store that doubles weights, and counts how often.
class Doubled {
 public:
  at::Tensor of(const at::Tensor& weight, WeightKeep keep = always, WeightForm as = form) {
    return store.get(weight, as, keep, [&](const Tensors& reusable) {
      ++made;
      const torch::NoGradGuard no_grad;
      if (reusable.empty()) return Tensors{weight * 2};
      ++reused;
      reusable.front().copy_(weight * 2);
      return reusable;
    })[0];
  }

  void expect_right(const at::Tensor& weight) {
    EXPECT_TRUE(of(weight).equal(weight.detach() * 2));
  }

  DerivedWeights store;
  int made = 0;
  int reused = 0;
};

TEST(DerivedWeights, MakesWhatDoesNotChangeOnce) {
  Doubled doubled;
  const auto weight = leaf({3, 4});
  const auto first = doubled.of(weight);
  EXPECT_TRUE(doubled.of(weight).is_same(first));
  EXPECT_EQ(doubled.made, 1);
  EXPECT_EQ(doubled.store.counts().hits, 1);
  EXPECT_EQ(doubled.store.counts().misses, 1);
  EXPECT_EQ(doubled.store.counts().bytes, 48);
}

TEST(DerivedWeights, DetectsWritesThatLibtorchCounts) {
  Doubled doubled;
  const auto weight = leaf({3, 4});
  const torch::NoGradGuard no_grad;
  doubled.expect_right(weight);
  weight.add_(1);
  doubled.expect_right(weight);
  weight.t()[0].zero_();
  doubled.expect_right(weight);
  weight.detach().mul_(3);
  doubled.expect_right(weight);
  weight.set_data(torch::randn({3, 4}));
  doubled.expect_right(weight);
  EXPECT_EQ(doubled.made, 5);
}

TEST(DerivedWeights, TakesReportsOfWritesThatLibtorchDoesNotCount) {
  Doubled doubled;
  const auto weight = leaf({3, 4});
  const auto other = leaf({3, 4});
  doubled.expect_right(weight);
  doubled.expect_right(other);
  weight.data().add_(1);
  doubled.store.changed(weight);
  doubled.expect_right(weight);
  doubled.expect_right(other);
  EXPECT_EQ(doubled.made, 3);
  *other.data_ptr<float>() = 7;
  doubled.store.all_changed();
  doubled.expect_right(weight);
  doubled.expect_right(other);
  EXPECT_EQ(doubled.made, 5);
}

TEST(DerivedWeights, TakesReportsOfChangesWhileItMakesSomething) {
  DerivedWeights store;
  const auto weight = leaf({3});
  const auto make = [&](const Tensors&) { return Tensors{weight.detach() * 2}; };
  store.get(weight, form, always, [&](const Tensors& reusable) {
    Tensors made = make(reusable);
    weight.data().add_(1);
    store.changed(weight);
    return made;
  });
  EXPECT_TRUE(store.get(weight, form, always, make)[0].equal(weight.detach() * 2));
  weight.detach().add_(1);
  store.get(weight, form, always, [&](const Tensors& reusable) {
    Tensors made = make(reusable);
    weight.detach().add_(1);
    return made;
  });
  EXPECT_TRUE(store.get(weight, form, always, make)[0].equal(weight.detach() * 2));
}

TEST(DerivedWeights, WritesToTheSameMemoryIfNobodyElseHoldsIt) {
  Doubled doubled;
  const auto weight = leaf({3, 4});
  const void* const memory = doubled.of(weight).data_ptr();
  const auto change = [&] { weight.detach().add_(1); };
  change();
  EXPECT_EQ(doubled.of(weight).data_ptr(), memory);
  EXPECT_EQ(doubled.reused, 1);

  const auto held = doubled.of(weight);
  const auto values = held.clone();
  change();
  EXPECT_NE(doubled.of(weight).data_ptr(), memory);
  EXPECT_TRUE(held.equal(values));

  const auto view = doubled.of(weight).view({-1});
  const auto viewed = view.clone();
  change();
  doubled.expect_right(weight);
  EXPECT_TRUE(view.equal(viewed));
  EXPECT_EQ(doubled.reused, 1);
}

TEST(DerivedWeights, MakesAgainWhatSomebodyHasWrittenTo) {
  Doubled doubled;
  const auto weight = leaf({3, 4});
  doubled.of(weight).zero_();
  doubled.expect_right(weight);
}

TEST(DerivedWeights, DistinguishesViewsOfOneWeight) {
  Doubled doubled;
  const auto weight = leaf({4, 4});
  const torch::NoGradGuard no_grad;
  const std::vector<at::Tensor> views = {weight,    weight.t(),          weight[0],
                                         weight[1], weight.view({2, 8}), weight.slice(1, 0, 4, 2)};
  for (int i = 0; i < 2; ++i) {
    for (const auto& view : views) doubled.expect_right(view);
  }
  EXPECT_EQ(doubled.made, 6);
  doubled.expect_right(weight.t());  // another view of the same part
  EXPECT_EQ(doubled.made, 6);
  weight.add_(1);
  for (const auto& view : views) doubled.expect_right(view);
  EXPECT_EQ(doubled.made, 12);
}

TEST(DerivedWeights, DistinguishesFormsAndTensorsWithOneMemory) {
  Doubled doubled;
  const auto weight = leaf({2});
  const auto twin = weight.data();  // has its own version counter
  doubled.of(weight);
  EXPECT_EQ(doubled.made, 1);
  weight.detach().add_(1);  // twin's counter does not see it
  doubled.expect_right(twin);
  twin.add_(1);  // both have counted one write
  doubled.store.changed(weight);
  doubled.expect_right(weight);
  doubled.expect_right(twin);
  doubled.of(weight, always, other_form);
  EXPECT_EQ(doubled.made, 5);
  doubled.of(weight, always, other_form);
  EXPECT_EQ(doubled.made, 5);
}

TEST(DerivedWeights, NeverGivesWhatBelongedToAWeightThatIsGone) {
  Doubled doubled;
  for (int i = 0; i < 300; ++i) {
    doubled.expect_right(leaf({5}));
    auto weight = leaf({5});
    doubled.expect_right(weight);
    weight.set_data(torch::randn({5}));  // the memory may be the one before
    doubled.expect_right(weight);
  }
  EXPECT_EQ(doubled.made, 900);
  doubled.store.end_window();  // drops those that are gone
  EXPECT_EQ(doubled.store.counts().bytes, 0);
}

TEST(DerivedWeights, DoesNotHoldMoreOfThoseThatAreGoneThanTwiceTheOthers) {
  Doubled doubled;
  for (int i = 0; i < 1000; ++i) doubled.of(leaf({1}));
  EXPECT_LE(doubled.store.counts().bytes, 65 * 4);
}

TEST(DerivedWeights, KeepsAsLongAsWasAsked) {
  using Until = WeightKeep::Until;
  Doubled doubled;
  auto& store = doubled.store;
  const auto region = store.begin_region();
  const auto other_region = store.begin_region();
  const auto a = leaf({1});
  const auto b = leaf({1});
  const auto c = leaf({1});
  const auto d = leaf({1});
  doubled.of(a, {Until::region_ends, region});
  doubled.of(b, {Until::region_ends, other_region});
  doubled.of(c, {Until::weights_step, region});
  doubled.of(d, {Until::dropped, region});
  doubled.of(d, {Until::region_ends, region});  // the longest counts
  doubled.of(leaf({1}), {Until::not_kept, region});
  EXPECT_EQ(store.counts().bytes, 16);
  store.end_region(region);
  EXPECT_EQ(store.counts().bytes, 12);
  store.end_window();
  EXPECT_EQ(store.counts().bytes, 8);
  store.end_region(other_region);
  EXPECT_EQ(store.counts().bytes, 4);
  doubled.of(b, {Until::region_ends, other_region});  // is over
  EXPECT_EQ(store.counts().bytes, 4);
  store.clear();
  EXPECT_EQ(store.counts().bytes, 0);
}

TEST(DerivedWeights, KeepsUntilTheLastOfTheRegionsThatAskedHasEnded) {
  using Until = WeightKeep::Until;
  for (const bool first_ends_first : {true, false}) {
    Doubled doubled;
    auto& store = doubled.store;
    const auto weight = leaf({1});
    const auto one = store.begin_region();
    const auto other = store.begin_region();
    for (const auto region : {one, other}) doubled.of(weight, {Until::region_ends, region});
    store.end_region(first_ends_first ? one : other);
    doubled.of(weight, {Until::region_ends, first_ends_first ? other : one});
    EXPECT_EQ(store.counts().misses, 1);
    doubled.of(weight, {Until::region_ends, first_ends_first ? one : other});  // is over
    store.end_region(first_ends_first ? other : one);
    EXPECT_TRUE(store.is_empty());
  }
}

TEST(DerivedWeights, KeepsWhatAnotherThreadHasMadeMeanwhileAsLongAsEitherAsked) {
  using Until = WeightKeep::Until;
  DerivedWeights store;
  const auto weight = leaf({1});
  const auto region = store.begin_region();
  const auto make = [&](const Tensors&) { return Tensors{weight.detach() * 2}; };
  store.get(weight, form, {Until::region_ends, region}, [&](const Tensors& reusable) {
    store.get(weight, form, {Until::dropped, region}, make);  // as another thread may
    return make(reusable);
  });
  store.end_region(region);
  EXPECT_EQ(store.counts().bytes, 4);
}

TEST(DerivedWeights, KeepsForEachRegionThatIsOpenHoweverManyThereAre) {
  Doubled doubled;
  std::vector<std::pair<std::uint64_t, at::Tensor>> regions;
  for (int i = 0; i < 300; ++i) regions.emplace_back(doubled.store.begin_region(), leaf({1}));
  for (const auto& [region, weight] : regions) {
    doubled.of(weight, {WeightKeep::Until::region_ends, region});
  }
  EXPECT_EQ(doubled.store.counts().bytes, 300 * 4);
  for (const auto& [region, weight] : regions) doubled.store.end_region(region);
  EXPECT_TRUE(doubled.store.is_empty());
}

TEST(DerivedWeights, KeepsAndFindsNothingWhileSuspended) {
  Doubled doubled;
  const auto weight = leaf({1});
  doubled.of(weight);
  {
    const DerivedWeights::Suspension suspension(doubled.store);
    doubled.of(weight);
    doubled.of(leaf({1}));
    EXPECT_EQ(doubled.made, 3);
  }
  EXPECT_EQ(doubled.store.counts().bytes, 4);
  doubled.of(weight);
  EXPECT_EQ(doubled.made, 3);
}

TEST(DerivedWeights, LetsTheLeastRecentlyUsedLeaveFirst) {
  Doubled doubled;
  std::vector<at::Tensor> weights;
  for (int i = 0; i < 4; ++i) weights.push_back(leaf({10}));
  doubled.store.set_budget(120);
  for (int i = 0; i < 3; ++i) doubled.of(weights[i]);
  doubled.of(weights[0]);
  doubled.of(weights[3]);  // instead of 1
  EXPECT_EQ(doubled.store.counts().bytes, 120);
  EXPECT_EQ(doubled.made, 4);
  for (const int i : {0, 2, 3}) doubled.of(weights[i]);
  EXPECT_EQ(doubled.made, 4);
  doubled.of(weights[1]);
  EXPECT_EQ(doubled.made, 5);
  doubled.of(leaf({31}));
  EXPECT_EQ(doubled.store.counts().bytes, 120);
  doubled.store.set_budget(50);
  EXPECT_EQ(doubled.store.counts().bytes, 40);
  doubled.of(weights[1]);
  EXPECT_EQ(doubled.made, 6);
}

TEST(DerivedWeights, DoesNotKeepOfTensorsWhoseChangesNobodyCounts) {
  Doubled doubled;
  {
    const c10::InferenceMode inference;
    const auto weight = torch::randn({3});
    doubled.expect_right(weight);
    weight.add_(1);
    doubled.expect_right(weight);
  }
  EXPECT_EQ(doubled.store.counts().bytes, 0);
}

TEST(DerivedWeights, ServesManyThreads) {
  Doubled reference;
  DerivedWeights store;
  std::vector<at::Tensor> weights;
  for (int i = 0; i < 8; ++i) weights.push_back(torch::full({16}, i));
  std::vector<std::thread> threads;
  std::atomic<int> wrong = 0;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 300; ++i) {
        const auto& weight = weights[(i + t) % 8];
        const auto made =
            store.get(weight, form, always, [&](const Tensors&) { return Tensors{weight * 2}; });
        if (made[0][3].item<float>() != 2.F * static_cast<float>((i + t) % 8)) ++wrong;
        if (i % 50 == t) store.all_changed();
        if (i % 70 == t) store.clear();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(KeepOfThisThread, IsTheOutermostGuardsRegion) {
  using torchamp::detail::keep_of_this_thread;
  using Until = WeightKeep::Until;
  (void)torchamp::detail::derived_weights();
  EXPECT_EQ(keep_of_this_thread().until, Until::not_kept);
  std::uint64_t region = 0;
  {
    const torchamp::AutocastGuard guard(torch::kCPU);
    EXPECT_EQ(keep_of_this_thread().until, Until::region_ends);
    region = keep_of_this_thread().region;
    EXPECT_NE(region, 0U);
    {
      const torchamp::AutocastGuard nested(torch::kCPU, {.policy = torchamp::Policy::torch()});
      EXPECT_EQ(keep_of_this_thread().region, region);
      const torchamp::AutocastGuard uncached(torch::kCPU, {.cache_enabled = false});
      EXPECT_EQ(keep_of_this_thread().until, Until::not_kept);
    }
    std::thread([] { EXPECT_EQ(keep_of_this_thread().until, Until::not_kept); }).join();
  }
  const torchamp::AutocastGuard guard(torch::kCPU);
  EXPECT_NE(keep_of_this_thread().region, region);
}

TEST(KeepOfThisThread, IsNothingInARegionThatBeganBeforeTheStore) {
  using torchamp::detail::keep_of_this_thread;
  using Until = WeightKeep::Until;
  auto& known = torchamp::detail::shared_runtime().kept_weights;
  (void)torchamp::detail::derived_weights();
  auto* const store = known.exchange(nullptr);
  const torchamp::AutocastGuard before(torch::kCPU);
  known = store;
  EXPECT_EQ(keep_of_this_thread().until, Until::not_kept);
  {
    const torchamp::AutocastGuard nested(torch::kCPU, {.policy = torchamp::Policy::torch()});
    EXPECT_EQ(keep_of_this_thread().until, Until::region_ends);
    EXPECT_NE(keep_of_this_thread().region, 0U);
    const torchamp::AutocastGuard kept(torch::kCPU, {.cache = torchamp::WeightCache::kept});
    EXPECT_EQ(keep_of_this_thread().until, Until::dropped);
  }
  EXPECT_EQ(keep_of_this_thread().until, Until::not_kept);
}

}  // namespace
