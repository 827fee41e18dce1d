// SPDX-License-Identifier: BSD-3-Clause
// On the stand-in CUDA's ops compute the CPU's values, in the order of streams and captures.
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "cuda_on_host/stand_in.h"

namespace {

using at::Tensor;

struct MirrorCase {
  std::string name;
  std::function<Tensor(const Tensor&)> f;
  std::vector<int64_t> sizes;
};

std::ostream& operator<<(std::ostream& out, const MirrorCase& c) {
  return out << c.name;
}

Tensor values_of(const std::vector<int64_t>& sizes) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(1);
  return at::randn(sizes, generator);
}

/// Parameters that are the same on both devices.
Tensor weight_like(const Tensor& input, const std::vector<int64_t>& sizes) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(2);
  return at::randn(sizes, generator).to(input.options());
}

Tensor run_lstm(const Tensor& x) {
  std::vector<Tensor> weights;
  for (const std::vector<int64_t>& sizes :
       std::vector<std::vector<int64_t>>{{12, 4}, {12, 3}, {12}, {12}})
    weights.push_back(weight_like(x, sizes));
  const Tensor state = at::zeros({1, x.size(1), 3}, x.options());
  return std::get<0>(at::lstm(x, {state, state}, weights, true, 1, 0., true, false, false));
}

const std::vector<MirrorCase> mirror_cases{
    {"Products",
     [](const Tensor& x) {
       return at::matmul(x, weight_like(x, {5, 3}));
     },
     {4, 5}},
    {"Convolutions",
     [](const Tensor& x) {
       return at::conv2d(x, weight_like(x, {4, 3, 3, 3}), {}, 2, 1);
     },
     {2, 3, 8, 8}},
    {"TransposedConvolutions",
     [](const Tensor& x) {
       return at::conv_transpose2d(x, weight_like(x, {3, 4, 3, 3}));
     },
     {2, 3, 5, 5}},
    {"BatchNorm",
     [](const Tensor& x) {
       return at::batch_norm(x, weight_like(x, {3}), weight_like(x, {3}), {}, {}, true, 0.1, 1e-5,
                             true);
     },
     {4, 3, 5, 5}},
    {"LayerNorm", [](const Tensor& x) { return at::layer_norm(x, {6}); }, {5, 6}},
    {"Softmax", [](const Tensor& x) { return at::log_softmax(x, -1); }, {5, 6}},
    {"Attention",
     [](const Tensor& x) {
       return at::scaled_dot_product_attention(x, x, x, {}, 0., /*is_causal=*/true);
     },
     {2, 2, 16, 8}},
    {"RecurrentLayers", run_lstm, {5, 2, 4}},
    {"Reductions", [](const Tensor& x) { return at::var(x, 0) + x.sum(0) + x.amax(0); }, {5, 6}},
    {"Masks", [](const Tensor& x) { return x.index({x > 0}) * 2; }, {5, 6}},
    {"Sorts", [](const Tensor& x) { return std::get<0>(x.sort(-1)).cumsum(-1); }, {5, 6}},
    {"InPlaceOps", [](const Tensor& x) { return x.clone().mul_(3).add_(x).clamp_min_(0); }, {9}},
    {"Casts", [](const Tensor& x) { return x.to(at::kHalf).to(at::kFloat); }, {9}},
    {"Interpolation",
     [](const Tensor& x) {
       return at::upsample_bilinear2d(x, {7, 7}, false);
     },
     {1, 2, 4, 4}},
};

class Mirror : public testing::TestWithParam<MirrorCase> {};
INSTANTIATE_TEST_SUITE_P(Ops, Mirror, testing::ValuesIn(mirror_cases),
                         [](const auto& instance) { return instance.param.name; });

TEST_P(Mirror, GivesTheCpusValuesAndGradients) {
  const auto run = [](c10::Device device) {
    const Tensor x = values_of(GetParam().sizes).to(device).requires_grad_();
    const Tensor y = GetParam().f(x);
    (y * y).sum().backward();
    return std::pair(y.detach().cpu(), x.grad().cpu());
  };
  const auto [y, grad] = run(at::kCUDA);
  const auto [y_expected, grad_expected] = run(at::kCPU);
  EXPECT_TRUE(at::allclose(y, y_expected, 1e-4, 1e-5)) << y << y_expected;
  EXPECT_TRUE(at::allclose(grad, grad_expected, 1e-4, 1e-4)) << grad << grad_expected;
}

TEST(MirrorValues, ProductsIn16BitsAreRoundedOnce) {
  for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16}) {
    const Tensor a = values_of({8, 300}).to(dtype), b = values_of({300, 8}).to(dtype);
    const Tensor expected = at::mm(a.to(at::kFloat), b.to(at::kFloat)).to(dtype);
    EXPECT_TRUE(at::equal(at::mm(a.cuda(), b.cuda()).cpu(), expected)) << dtype;
  }
}

TEST(MirrorValues, LinearAlgebraAndFourierTransformsIn16BitsAreRefusedAsByAGpu) {
  const Tensor x = (at::eye(4) * 3 + 1).to(at::kCUDA);
  for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16}) {
    const Tensor narrow = x.to(dtype);
    EXPECT_THROW(at::linalg_cholesky(narrow), c10::Error) << dtype;
    EXPECT_THROW(at::linalg_eigh(narrow), c10::Error) << dtype;
    EXPECT_THROW(at::det(narrow), c10::Error) << dtype;
    EXPECT_THROW(at::svd(narrow), c10::Error) << dtype;
    EXPECT_THROW(at::fft_fft(narrow.slice(1, 0, 3)), c10::Error) << dtype << ", of three";
  }
  EXPECT_THROW(at::fft_fft(x.to(at::kBFloat16)), c10::Error);
  const Tensor half = at::fft_fft(x.to(at::kHalf));
  EXPECT_EQ(half.scalar_type(), at::kComplexHalf);
  EXPECT_TRUE(at::allclose(half.to(at::kComplexFloat), at::fft_fft(x), 1e-2, 1e-2));
  EXPECT_EQ(at::fft_irfft(half.slice(1, 0, 3)).scalar_type(), at::kHalf);
}

/// As on an H200.
TEST(MirrorValues, TheKernelThatUnscalesChecksFp64AsFp32) {
  const auto options = at::TensorOptions(at::kCUDA);
  for (const double value : {3e38, 4e38}) {
    const Tensor gradient = at::full({2}, value, options.dtype(at::kDouble));
    Tensor found_inf = at::zeros({}, options);
    at::_amp_foreach_non_finite_check_and_unscale_({gradient}, found_inf,
                                                   at::full({}, 0.5, options));
    EXPECT_EQ(found_inf.item<float>(), value > 3.5e38 ? 1.F : 0.F);
    EXPECT_EQ(gradient[1].item<double>(), value / 2);
  }
}

TEST(MirrorValues, AGraphComputesAtEachLaunchAndNotInTheCapture) {
  const Tensor x = at::ones({4}, at::kCUDA), y = at::zeros({4}, at::kCUDA);
  at::cuda::CUDAGraph graph;
  {
    const c10::cuda::CUDAStreamGuard side(c10::cuda::getStreamFromPool());
    graph.capture_begin();
    y.add_(x * 2);
    graph.capture_end();
  }
  EXPECT_EQ(y.sum().item<double>(), 0.);
  for (const double expected : {8., 16., 40.}) {
    if (expected == 40.) x.fill_(3.);
    graph.replay();
    EXPECT_EQ(y.sum().item<double>(), expected);
  }
}

TEST(MirrorValues, RandomNumbersFollowTheSeedAndThePosition) {
  const auto two = [] {
    torch::cuda::manual_seed(5);
    const Tensor first = at::rand({8}, at::kCUDA).cpu();
    return std::pair(first, at::rand({8}, at::kCUDA).cpu());
  };
  const auto [a, b] = two();
  const auto [c, d] = two();
  EXPECT_TRUE(at::equal(a, c) && at::equal(b, d));
  EXPECT_FALSE(at::equal(a, b));
  const double kept =
      at::dropout(at::ones({10000}, at::kCUDA), 0.25, true).gt(0).sum().item<double>();
  EXPECT_NEAR(kept, 7500, 250);
}

TEST(MirrorValues, SparseTensorsAreCoalescedAndAddedToDenseOnes) {
  const auto run = [](c10::Device device) {
    const Tensor rows = at::tensor({2, 0, 2}, at::kLong).view({1, 3}).to(device);
    const Tensor sparse = at::sparse_coo_tensor(rows, values_of({3, 2}).to(device), {4, 2});
    Tensor dense = at::ones({4, 2}, device);
    dense.add_(sparse, 2.);
    return at::cat({sparse.coalesce()._values(), dense}).cpu();
  };
  EXPECT_TRUE(at::allclose(run(at::kCUDA), run(at::kCPU)));
}

/// The memory of a tensor, whoever has it.
Tensor memory_of(const Tensor& tensor) {
  return at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(), tensor.options());
}

TEST(MirrorValues, MemoryThatIsFreedHoldsNaNs) {
  Tensor x = at::ones({1000}, at::kCUDA);
  const Tensor memory = memory_of(x);
  EXPECT_EQ(memory.cpu().sum().item<double>(), 1000.);
  x.reset();
  EXPECT_TRUE(memory.cpu().isnan().all().item<bool>());
}

TEST(MirrorValues, MemoryThatACaptureFreesHoldsNaNsAfterEachLaunch) {
  const Tensor x = at::ones({4}, at::kCUDA);
  Tensor y = at::zeros({4}, at::kCUDA), memory;
  at::cuda::CUDAGraph graph;
  {
    const c10::cuda::CUDAStreamGuard side(c10::cuda::getStreamFromPool());
    graph.capture_begin();
    Tensor twice = x * 2;
    memory = memory_of(twice);
    y.copy_(twice);
    twice.reset();
    graph.capture_end();
  }
  for (int i = 0; i < 2; ++i) {
    memory.zero_();
    graph.replay();
    c10::cuda::device_synchronize();
    EXPECT_TRUE(memory.cpu().isnan().all().item<bool>());
    EXPECT_EQ(y.sum().item<double>(), 8.);
  }
}

// ---- Late work ---------------------------------------------------------------------------------

class LateWork : public testing::Test {
 protected:
  void SetUp() override { stand_in_late(true); }
  void TearDown() override { stand_in_late(false); }
};

TEST_F(LateWork, TrainsAsEarlyWorkDoes) {
  const auto train = [] {
    torch::manual_seed(1);
    torch::nn::Linear net(4, 2);
    net->to(at::kCUDA);
    torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(0.1));
    for (int i = 0; i < 3; ++i) {
      optimizer.zero_grad();
      net->forward(at::ones({3, 4}, at::kCUDA)).pow(2).sum().backward();
      optimizer.step();
    }
    return net->weight.detach().cpu();
  };
  const Tensor late = train();
  stand_in_late(false);
  EXPECT_TRUE(at::equal(late, train()));
}

TEST_F(LateWork, IsInTheOrderOfTheTensorsDeviceWhateverTheCurrentOne) {
  const Tensor x = at::zeros({4}, at::Device(at::kCUDA, 1));
  const c10::cuda::CUDAGuard elsewhere(0);
  for (int i = 0; i < 3; ++i) x.add_(1.);
  const Tensor y = (x * 2).to(at::Device(at::kCUDA, 0)) + 1;
  EXPECT_EQ(y.sum().item<double>(), 28.);
}

TEST_F(LateWork, AMissingRecordStreamShows) {
  for (const bool recorded : {false, true}) {
    const c10::cuda::CUDAStream here = c10::cuda::getCurrentCUDAStream(),
                                side = c10::cuda::getStreamFromPool();
    Tensor x = at::full({1000}, 1., at::kCUDA);
    at::cuda::CUDAEvent made;
    made.record(here);
    made.block(side);
    Tensor doubled;
    {
      const c10::cuda::CUDAStreamGuard guard(side);
      doubled = x * 2;
      if (recorded) x.record_stream(side);
    }
    x.reset();
    const Tensor other = at::full({1000}, 5., at::kCUDA);  // in the same memory, if it is free
    here.synchronize();
    side.synchronize();
    EXPECT_EQ(doubled[0].item<double>(), recorded ? 2. : 10.);
  }
}

TEST_F(LateWork, AMissingRecordStreamShowsThoughNobodyTakesTheMemory) {
  for (const bool recorded : {false, true}) {
    const c10::cuda::CUDAStream here = c10::cuda::getCurrentCUDAStream(),
                                side = c10::cuda::getStreamFromPool();
    Tensor x = at::full({1000}, 1., at::kCUDA);
    at::cuda::CUDAEvent made;
    made.record(here);
    made.block(side);
    Tensor doubled;
    {
      const c10::cuda::CUDAStreamGuard guard(side);
      doubled = x * 2;
      if (recorded) x.record_stream(side);
    }
    x.reset();
    here.synchronize();
    side.synchronize();
    EXPECT_EQ(doubled.isnan().all().item<bool>(), !recorded) << doubled[0];
  }
}

TEST_F(LateWork, AMissingEventBetweenStreamsShows) {
  for (const bool ordered : {false, true}) {
    const c10::cuda::CUDAStream side = c10::cuda::getStreamFromPool();
    const Tensor x = at::zeros({4}, at::kCUDA);
    c10::cuda::getCurrentCUDAStream().synchronize();
    x.fill_(1.);
    if (ordered) {
      at::cuda::CUDAEvent filled;
      filled.record();
      filled.block(side);
    }
    const c10::cuda::CUDAStreamGuard guard(side);
    EXPECT_EQ((x + 1)[0].item<double>(), ordered ? 2. : 1.);
    c10::cuda::device_synchronize();
  }
}

}  // namespace
