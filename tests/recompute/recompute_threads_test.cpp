// SPDX-License-Identifier: BSD-3-Clause
// Casts of weights that functions under checkpoint() share with other threads, or do not.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <atomic>
#include <cstddef>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "support/leaf.h"
#include "torchamp/autocast.h"
#include "torchamp/recompute.h"
#include "torchamp/weight_cache.h"

namespace {

using at::Tensor;
using torchamp::AutocastGuard;
using torchamp::AutocastOptions;
using torchamp::checkpoint;

std::vector<Tensor> gradients_of(const Tensor& loss, const std::vector<Tensor>& leaves) {
  return torch::autograd::grad({loss.sum()}, leaves);
}

/// Threads with and without checkpoint() at once, over one weight: each must get the gradients that
/// it gets alone.
void run_beside_each_other(const Tensor& weight,
                           const std::function<Tensor(const Tensor&)>& function) {
  constexpr int rounds = 400;
  std::vector<Tensor> inputs, expected;
  for (int thread = 0; thread < 4; ++thread) {
    const AutocastGuard autocast(at::kCPU, {.cache_enabled = false});
    inputs.push_back(leaf({2, 8}));
    for (const Tensor& gradient : gradients_of(function(inputs.back()), {inputs.back(), weight})) {
      expected.push_back(gradient);
    }
  }
  std::atomic<int> wrong = 0, ready = 0;
  std::mutex mutex;
  std::string error;
  const auto train = [&](std::size_t thread) {
    const bool checkpointed = thread % 2 == 0;
    const Tensor& x = inputs[thread];
    for (++ready; ready < 4;) std::this_thread::yield();
    for (int round = 0; round < rounds; ++round) {
      try {
        Tensor y;
        {
          const AutocastGuard autocast(at::kCPU);
          y = checkpointed ? checkpoint({.preserve_rng_state = false}, function, x) : function(x);
        }
        const std::vector<Tensor> got = gradients_of(y, {x, weight});
        for (std::size_t i = 0; i < 2; ++i)
          wrong += at::equal(got[i], expected[2 * thread + i]) ? 0 : 1;
      } catch (const std::exception& thrown) {
        const std::scoped_lock lock(mutex);
        error = thrown.what();
      }
    }
  };
  std::vector<std::thread> threads;
  for (std::size_t thread = 0; thread < 4; ++thread) threads.emplace_back(train, thread);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(error, "");
}

TEST(CheckpointThreads, GiveTheirGradientsWhileThreadsCastTheSameWeight) {
  const Tensor w = leaf({8, 8});
  run_beside_each_other(w, [w](const Tensor& t) { return at::linear(t, w).tanh(); });
}

TEST(CheckpointThreads, GiveTheirGradientsIfTheFunctionSelectsTheCacheItself) {
  const Tensor w = leaf({8, 8});
  run_beside_each_other(w, [w](const Tensor& t) {
    const AutocastGuard cached(at::kCPU, {.cache_enabled = true});
    return at::linear(t, w).tanh();
  });
}

/// The gradient of a weight that is used before, in and after a checkpoint.
Tensor shared_gradient(bool checkpointed, const AutocastOptions& options) {
  at::manual_seed(3);
  const Tensor x = leaf({16, 32}), w = leaf({32, 32});
  const AutocastGuard autocast(at::kCPU, options);
  const auto layers = [w](const Tensor& t) { return at::linear(at::linear(t, w).tanh(), w); };
  const Tensor h = at::linear(x, w);
  const Tensor y = checkpointed ? checkpoint(layers, h) : layers(h);
  return gradients_of(at::linear(y, w), {w})[0];
}

TEST(CheckpointThreads, AddGradientsOfAWeightAsIfEachUseHadItsOwnCast) {
  using torchamp::WeightCache;
  for (const WeightCache cache : std::vector<WeightCache>{WeightCache::none, WeightCache::region,
                                                          WeightCache::window, WeightCache::kept}) {
    const Tensor plain = shared_gradient(false, {.cache = cache});
    EXPECT_TRUE(at::equal(shared_gradient(true, {.cache = cache}), plain));
  }
}

TEST(CheckpointThreads, LeaveTheCastsOfTheRegionAroundThem) {
  const Tensor x = leaf({2, 8}), w = leaf({8, 8}), v = leaf({8, 8});
  const AutocastGuard autocast(at::kCPU);
  const auto cast = [&] { return at::autocast::cached_cast(at::kBFloat16, w, at::kCPU); };
  const Tensor before = cast();
  const Tensor y = checkpoint([v](const Tensor& t) { return at::linear(t, v); }, x);
  EXPECT_TRUE(cast().is_same(before));
  (void)gradients_of(y, {v});
  EXPECT_TRUE(cast().is_same(before));
}

}  // namespace
