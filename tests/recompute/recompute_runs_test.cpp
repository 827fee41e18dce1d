// SPDX-License-Identifier: BSD-3-Clause
// How often, on which thread and in which state a checkpointed function runs, and what it stores.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <thread>
#include <vector>

#include "support/devices.h"
#include "support/expect_error.h"
#include "support/leaf.h"
#include "support/memory_meter.h"
#include "torchamp/autocast.h"
#include "torchamp/recompute.h"

namespace {

using at::Tensor;
using torchamp::checkpoint;

TEST(Checkpoint, RunsTheFunctionOncePerPassAndNotWithoutGradients) {
  int calls = 0;
  const Tensor x = leaf({3});
  const auto square = [&calls](const Tensor& h) { return ++calls, h * h; };
  const Tensor y = checkpoint(square, x);
  EXPECT_EQ(calls, 1);
  y.sum().backward({}, /*retain_graph=*/true);
  EXPECT_EQ(calls, 2);
  y.sum().backward();
  EXPECT_EQ(calls, 3);
  {
    const at::NoGradGuard no_grad;
    EXPECT_FALSE(checkpoint(square, x).requires_grad());
  }
  EXPECT_FALSE(checkpoint(square, at::ones({3})).requires_grad());
  EXPECT_EQ(calls, 5);
}

TEST(Checkpoint, KeepsNoActivations) {
  const Tensor x = leaf({1 << 10});
  const auto chain = [](const Tensor& t) { return t.exp().sin().cos().sigmoid(); };
  const auto kept = [&](bool checkpointed) {
    const MemoryMeter memory;
    const Tensor y = checkpointed ? checkpoint({.preserve_rng_state = false}, chain, x) : chain(x);
    return memory.bytes() / static_cast<std::int64_t>(y.nbytes());
  };
  EXPECT_EQ(kept(true), 1);
  EXPECT_EQ(kept(false), 3);
}

TEST(Checkpoint, DropsTheCastsOfItsInputsFromTheCacheOfWeights) {
  const Tensor x = leaf({8, 64}), w = leaf({64, 64});
  const torchamp::AutocastGuard autocast(at::kCPU);
  const MemoryMeter memory;
  const Tensor y = checkpoint(
      {.preserve_rng_state = false}, [w](const Tensor& t) { return at::linear(t, w); }, x);
  EXPECT_EQ(memory.bytes(), static_cast<std::int64_t>(y.nbytes()));
}

TEST(Checkpoint, RunsAgainUnderTheAutocastStateAndPolicyOfTheForward) {
  const Tensor x = leaf({4, 4}), w = leaf({4, 4});
  std::vector<torchamp::AutocastState> seen;
  std::vector<at::ScalarType> dtypes;
  const auto function = [&, w](const Tensor& t) {
    seen.push_back(torchamp::AutocastState::of_this_thread());
    const Tensor y = at::softmax(t.mm(w), 1);
    dtypes.push_back(y.scalar_type());
    return y;
  };
  Tensor y;
  {
    const torchamp::AutocastGuard autocast(
        at::kCPU, {.dtype = at::kHalf,
                   .cache_enabled = false,
                   .policy = torchamp::Policy::standard().lower_precision({"softmax"})});
    y = checkpoint(function, x);
  }
  const auto before = torchamp::AutocastState::of_this_thread();
  y.sum().backward();
  EXPECT_TRUE(torchamp::AutocastState::of_this_thread() == before);
  ASSERT_EQ(seen.size(), 2u);
  EXPECT_TRUE(seen[0] == seen[1]);
  EXPECT_FALSE(seen[0] == before);
  EXPECT_EQ(dtypes, (std::vector{at::kHalf, at::kHalf}));
}

TEST(Checkpoint, CountsAModulesBuffersOnce) {
  torch::nn::Sequential block(torch::nn::Linear(4, 4), torch::nn::BatchNorm1d(4));
  const Tensor x = leaf({8, 4});
  const Tensor y = checkpoint(block, x);
  std::vector<Tensor> after;
  for (const Tensor& buffer : block->buffers()) after.push_back(buffer.clone());
  ASSERT_EQ(after.size(), 3u);
  y.sum().backward();
  for (std::size_t i = 0; i < 3; ++i) EXPECT_TRUE(at::equal(block->buffers()[i], after[i])) << i;

  const Tensor z = checkpoint(
      {.buffers = block->buffers()}, [&](const Tensor& t) { return block->forward(t).tanh(); }, x);
  z.sum().backward();
  EXPECT_EQ(block->buffers()[2].item<std::int64_t>(), 2);
}

TEST(Checkpoint, RunsBackwardOnAnotherThread) {
  const Tensor x = leaf({8}), w = leaf({8});
  Tensor y;
  {
    const torchamp::AutocastGuard autocast(at::kCPU);
    y = checkpoint(
        [w](const Tensor& t) {
          return checkpoint([w](const Tensor& h) { return at::dropout(h * w, 0.5, true); },
                            t.exp());
        },
        x);
  }
  std::thread([&] { y.sum().backward(); }).join();
  const Tensor kept = (y.detach() != 0).to(at::kFloat);
  EXPECT_TRUE(at::equal(x.grad().ne(0).to(at::kFloat), kept));
  EXPECT_TRUE(at::equal(w.grad().ne(0).to(at::kFloat), kept));
}

TEST(Checkpoint, SurvivesALongChain) {
  const Tensor x = leaf({1});
  Tensor h = x;
  for (int i = 0; i < 20000; ++i) {
    h = checkpoint(
        {.preserve_rng_state = false}, [](const Tensor& t) { return t * 1; }, h);
  }
  h.backward();
  EXPECT_EQ(x.grad().item<float>(), 1.f);
  for (int i = 0; i < 20000; ++i) {
    h = checkpoint(
        {.preserve_rng_state = false}, [](const Tensor& t) { return t * 1; }, h);
  }
}

TEST(Checkpoint, ThrowsErrorsAndLeavesStateUnchanged) {
  const Tensor x = leaf({8});
  int calls = 0;
  const int fails_at[] = {1, 2};
  for (const int fails : fails_at) {
    calls = 0;
    const auto function = [&](const Tensor& t) {
      if (++calls == fails) throw std::runtime_error("no luck");
      return at::dropout(t, 0.5, true).exp();
    };
    const auto before = torchamp::AutocastState::of_this_thread();
    at::manual_seed(1);
    bool thrown = false;
    try {
      Tensor y;
      {
        const torchamp::AutocastGuard autocast(at::kCPU);
        y = checkpoint(function, x);
      }
      at::manual_seed(1);
      y.sum().backward();
    } catch (const std::runtime_error& error) {
      thrown = true;
      EXPECT_STREQ(error.what(), "no luck");
    }
    EXPECT_TRUE(thrown);
    EXPECT_TRUE(torchamp::AutocastState::of_this_thread() == before);
    const Tensor next = at::rand({3});
    at::manual_seed(1);
    EXPECT_TRUE(at::equal(next, at::rand({3})));
  }
}

TEST(Checkpoint, RefusesWhatItCannotRunAgain) {
  const Tensor x = leaf({8}), w = leaf({8}), v = leaf({8});
  EXPECT_ERROR(checkpoint([](Tensor t) { return t.mul_(2); }, x * 1),
               "checkpoint: the function changed its 0. tensor input in place");

  int calls = 0;
  EXPECT_ERROR(
      checkpoint([&](const Tensor& t) { return t.slice(0, ++calls).exp(); }, x).sum().backward(),
      "checkpoint: the recomputation gave an output of another shape");
  calls = 0;
  EXPECT_ERROR(
      checkpoint([&](const Tensor& t) { return t * (++calls == 1 ? w : v); }, x).sum().backward(),
      "checkpoint: the recomputation used other parameters");
  calls = 0;
  EXPECT_ERROR(
      checkpoint([&](const Tensor& t) { return ++calls == 1 ? t * w : t * 2; }, x).sum().backward(),
      "checkpoint: the recomputation used other parameters");

  const Tensor input = x * 1;
  const Tensor y = checkpoint([](const Tensor& t) { return t.exp(); }, input);
  input.add_(1);
  EXPECT_ERROR(y.sum().backward(), "modified by an inplace operation");

  const Tensor twice = checkpoint([](const Tensor& t) { return t.exp(); }, x).sum();
  twice.backward();
  EXPECT_ERROR(twice.backward(), "a second time");
}

/// Bytes at the peak of forward and backward of `depth` equal layers, in activations of one layer.
double peak_activations(int depth, bool checkpointed) {
  constexpr std::int64_t size = 1 << 15;
  torch::nn::Sequential model;
  for (int i = 0; i < depth; ++i) model->push_back(torch::nn::Sigmoid());
  const Tensor x = leaf({size});
  const MemoryMeter memory;
  const Tensor y = checkpointed ? torchamp::checkpoint_sequential(model, x) : model->forward(x);
  y.backward(at::ones_like(y));
  return static_cast<double>(memory.peak_bytes()) / (size * 4);
}

TEST(CheckpointSequential, NeedsMemoryOfTheOrderOfTheSquareRootOfTheDepth) {
  for (const int root : {4, 8, 12}) {
    EXPECT_GE(peak_activations(root * root, false), root * root);
    EXPECT_LE(peak_activations(root * root, true), 2 * root + 6);
  }
}

TEST(Checkpoint, PutsBackTheRandomStateOfACudaDevice) {
  SKIP_WITHOUT(at::kCUDA);
  const Tensor x = at::randn({64}, at::kCUDA).set_requires_grad(true);
  const Tensor y = checkpoint([](const Tensor& t) { return at::dropout(t, 0.5, true); }, x);
  const Tensor next = at::rand({3}, at::kCUDA);
  y.sum().backward();
  EXPECT_TRUE(at::equal(x.grad().ne(0), y.ne(0)));
  EXPECT_FALSE(at::equal(next, at::rand({3}, at::kCUDA)));
}

}  // namespace
