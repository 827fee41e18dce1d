// SPDX-License-Identifier: BSD-3-Clause
#include "torchamp/detail/core/gradients/unscale.h"

#include <sys/mman.h>
#include <torch/torch.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "simulated_device/counts.h"
#include "simulated_device/facts.h"
#include "support/call_counter.h"
#include "support/devices.h"
#include "support/non_finite.h"
#include "support/seed.h"
#include "torchamp/detail/core/gradients/multiply.h"

namespace {

using torchamp::detail::GradientBatch;
using torchamp::detail::TensorKind;
using Tensors = std::vector<at::Tensor>;

GradientBatch batch_of(const Tensors& gradients) {
  return {TensorKind::of(gradients.at(0)), gradients};
}

class Unscale : public testing::TestWithParam<at::DeviceType> {
 protected:
  void SetUp() override {
    SKIP_WITHOUT(GetParam());
    seed_all(4);
  }
  static at::TensorOptions options(at::ScalarType dtype = at::kFloat) {
    return at::TensorOptions(GetParam()).dtype(dtype);
  }
  static at::Tensor number(double value) { return torch::full({}, value, options()); }

  /// Dense ones, transposed ones, ones with gaps, and empty ones.
  static Tensors gradients_of(at::ScalarType dtype) {
    return {torch::randn({3, 4}, options()).to(dtype),
            torch::randn({5, 2}, options()).to(dtype).t(),
            torch::randn({4, 6}, options()).to(dtype).slice(1, 0, 6, 2),
            torch::empty({0}, options(dtype)), torch::randn({}, options()).to(dtype)};
  }
  static constexpr at::ScalarType dtypes[] = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16};
};

INSTANTIATE_TEST_SUITE_P(Devices, Unscale, all_devices(), device_name);

class CountedUnscale : public Unscale {};

INSTANTIATE_TEST_SUITE_P(Devices, CountedUnscale, simulated_device(), device_name);

}  // namespace

TEST_P(Unscale, ChecksGradientsOfEveryDtypeWithoutChangingThemOrTheirVersions) {
  for (const at::ScalarType dtype : dtypes) {
    for (const float value : {1.F, kInf, -kInf, kNaN}) {
      for (const std::size_t place : {0U, 1U, 2U, 4U}) {
        SCOPED_TRACE(c10::str(dtype, ' ', value, " in ", place));
        const Tensors gradients = gradients_of(dtype);
        at::Tensor first = gradients[place];
        while (first.dim() > 0) first = first[0];
        first.fill_(value);
        Tensors before;
        for (const at::Tensor& gradient : gradients) before.push_back(gradient.clone());
        const auto version = gradients[0]._version();
        at::Tensor flag = number(0.);
        torchamp::detail::check_finite({batch_of(gradients)}, flag);
        EXPECT_EQ(flag.item<float>(), value == 1.F ? 0.F : 1.F);
        torchamp::detail::check_finite({batch_of(gradients)}, flag);
        EXPECT_EQ(flag.item<float>(), value == 1.F ? 0.F : 1.F) << "looked at twice";
        EXPECT_EQ(gradients[0]._version(), version);
        for (std::size_t i = 0; i < gradients.size(); ++i) {
          EXPECT_TRUE(torch::allclose(gradients[i], before[i], 0., 0., /*equal_nan=*/true)) << i;
        }
      }
    }
  }
}

TEST_P(Unscale, FindsNothingInEmptyGradients) {
  at::Tensor flag = number(0.);
  torchamp::detail::check_finite({batch_of({torch::empty({0}, options())})}, flag);
  EXPECT_EQ(flag.item<float>(), 0.F);
}

TEST_P(Unscale, MultipliesGradientsOfEveryDtypeByAFactorInFp32) {
  const float factor = 0.3333F;  // which 16 bits do not hold
  for (const at::ScalarType dtype : dtypes) {
    SCOPED_TRACE(dtype);
    const Tensors gradients = gradients_of(dtype);
    Tensors expected;
    for (const at::Tensor& gradient : gradients) {
      expected.push_back((gradient.to(at::kDouble) * factor).to(at::kFloat).to(dtype));
    }
    at::Tensor flag = number(0.);
    torchamp::detail::multiply_and_check(
        {batch_of(gradients)}, [&](at::Device) { return number(factor); }, flag);
    EXPECT_EQ(flag.item<float>(), 0.F);
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      EXPECT_TRUE(torch::allclose(gradients[i], expected[i], dtype == at::kDouble ? 1e-7 : 0., 0.))
          << i;
    }
    gradients[2][0][0].fill_(kInf);
    torchamp::detail::multiply_and_check(
        {batch_of(gradients)}, [](at::Device) { return number(0.); }, flag);
    EXPECT_EQ(flag.item<float>(), 1.F) << "looked at before it was multiplied";
  }
}

TEST_P(Unscale, TakesPartsOfBoundedSizeThroughFp32) {
  const Tensors gradients{
      torch::ones({3}, options(at::kBFloat16)), torch::ones({2}, options(at::kBFloat16)),
      torch::ones({9}, options(at::kBFloat16)), torch::empty({0}, options(at::kBFloat16)),
      torch::ones({1}, options(at::kBFloat16))};
  std::vector<int64_t> parts;
  const GradientBatch narrow = batch_of(gradients);
  const torchamp::detail::WideCopies copies(narrow, /*elements_at_once=*/5);
  copies.through([&](const GradientBatch& wide) {
    EXPECT_EQ(wide.dtype, at::kFloat);
    int64_t elements = 0;
    for (const at::Tensor& copy : wide.gradients) elements += copy.mul_(2.).numel();
    parts.push_back(elements);
  });
  EXPECT_EQ(parts, (std::vector<int64_t>{5, 9, 1}));
  for (const at::Tensor& gradient : gradients) EXPECT_TRUE((gradient == 2.).all().item<bool>());
}

TEST_P(CountedUnscale, MultipliesGradientsCorrectlyWithoutTheKernelOfMpsThatZeroesThem) {
  const simulated::UnscaleKernelOfOldMps kernel;
  torchamp::detail::DeviceFacts mps = simulated::facts_like(at::kMPS);
  EXPECT_EQ(mps.unscales_fp16, TORCHAMP_LIBTORCH >= 213);
  for (const bool is_old : {false, true}) {
    mps.unscales_fp16 = !is_old;
    const simulated::Facts facts(mps);
    for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16, at::kFloat}) {
      SCOPED_TRACE(c10::str(dtype, is_old ? " before 2.13" : ""));
      const Tensors gradients{torch::full({3}, 8., options(dtype))};
      at::Tensor flag = number(0.);
      torchamp::detail::multiply_and_check(
          {batch_of(gradients)}, [](at::Device) { return number(0.125); }, flag);
      EXPECT_EQ(flag.item<float>(), 0.F);
      const bool is_zeroed = dtype == at::kHalf && !is_old;  // so the kernel is as it was
      EXPECT_EQ(gradients[0][2].item<float>(), is_zeroed ? 0.F : 1.F);
      gradients[0][1].fill_(kInf);
      torchamp::detail::multiply_and_check(
          {batch_of(gradients)}, [](at::Device) { return number(1.); }, flag);
      EXPECT_EQ(flag.item<float>(), 1.F);
    }
  }
}

TEST_P(CountedUnscale, LaunchesNoMoreKernelsForMoreGradients) {
  for (const at::ScalarType dtype : dtypes) {
    const auto kernels = [&](int64_t count) {
      Tensors gradients;
      for (int64_t i = 0; i < count; ++i) gradients.push_back(torch::ones({2}, options(dtype)));
      at::Tensor flag = number(0.), factor = number(0.5);
      const simulated::Counts counts;
      torchamp::detail::multiply_and_check(
          {batch_of(gradients)}, [&](at::Device) { return factor; }, flag);
      torchamp::detail::check_finite({batch_of(gradients)}, flag);
      EXPECT_EQ(counts.now().waits, 0);
      return counts.now().kernels;
    };
    EXPECT_EQ(kernels(300), kernels(3)) << dtype;
  }
}

TEST_P(Unscale, FindsWhatIsNotFiniteInLargeGradients) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  const auto flag_of = [&](const Tensors& gradients) {
    at::Tensor flag = number(0.);
    torchamp::detail::check_finite({batch_of(gradients)}, flag);
    return flag.item<float>();
  };
  for (const at::ScalarType dtype : dtypes) {
    SCOPED_TRACE(dtype);
    // With a norm that fp32 does not hold.
    const at::Tensor dense =
        torch::full({201, 201}, dtype == at::kHalf ? 6e4 : 1e30, options(dtype));
    const at::Tensor small = torch::ones({3}, options(dtype));
    const at::Tensor gapped = torch::ones({201, 402}, options(dtype)).narrow(1, 0, 201);
    EXPECT_EQ(flag_of({dense, small, dense.t(), gapped}), 0.F);
    for (const at::Tensor& gradient : {dense, small, gapped}) {
      const at::Tensor last = gradient.view(gradient.sizes()).select(0, -1);
      for (const double bad : {infinity, -infinity, std::nan("")}) {
        const at::Tensor before = last.clone();
        (last.dim() == 0 ? last : last.select(0, -1)).fill_(bad);
        EXPECT_EQ(flag_of({dense, small, dense.t(), gapped}), 1.F) << bad;
        last.copy_(before);
      }
    }
  }
}

TEST(UnscaleOnACpu, LooksAtLargeGradientsWithoutWritingToThem) {
  constexpr std::size_t bytes = std::size_t{1} << 20;
  void* const memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  const at::Tensor gradient = at::from_blob(memory, {static_cast<int64_t>(bytes / sizeof(float))});
  gradient.fill_(1.5);
  ASSERT_EQ(mprotect(memory, bytes, PROT_READ), 0);  // a write ends the program
  at::Tensor flag = torch::zeros({});
  torchamp::detail::check_finite({batch_of({gradient})}, flag);
  EXPECT_EQ(flag.item<float>(), 0.F);
  munmap(memory, bytes);
}

TEST_P(CountedUnscale, OnlyReadsToCheck) {
  for (const at::ScalarType dtype : dtypes) {
    const Tensors gradients{torch::ones({1000}, options(dtype)),
                            torch::ones({500}, options(dtype))};
    at::Tensor flag = number(0.);
    const simulated::Counts counts;
    torchamp::detail::check_finite({batch_of(gradients)}, flag);
    EXPECT_LE(counts.now().bytes_written, 64) << dtype;
  }
}
