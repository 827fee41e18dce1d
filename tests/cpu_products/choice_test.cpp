// SPDX-License-Identifier: BSD-3-Clause
// When a CPU computes products of 16-bit operands in fp32, and who notices.
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "support/expect_error.h"
#include "support/warnings.h"
#include "torchamp/autocast.h"
#include "torchamp/cpu_products.h"
#include "torchamp/optim.h"

namespace {

using torchamp::AutocastGuard;
using torchamp::CpuProducts;

/// How many kernels of torchamp's the op has under the CPU's key.
int kernels_of(const char* name) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  const std::string state = op.dumpState();
  int count = 0;
  for (std::size_t at = state.find("\nCPU"); at != state.npos; at = state.find("\nCPU", at + 1)) {
    const std::string line = state.substr(at + 1, state.find('\n', at + 1) - at - 1);
    if (line.find("torchamp kernel") != line.npos) ++count;
  }
  return count;
}

/// In a separate process, which ends with 0 and prints "passed".
#define EXPECT_IN_NEW_PROCESS(test)                               \
  do {                                                            \
    ::testing::FLAGS_gtest_death_test_style = "threadsafe";       \
    EXPECT_EXIT(                                                  \
        {                                                         \
          test();                                                 \
          const bool failed = ::testing::Test::HasFailure();      \
          std::fprintf(stderr, failed ? "failed\n" : "passed\n"); \
          std::exit(failed ? 1 : 0);                              \
        },                                                        \
        ::testing::ExitedWithCode(0), "passed");                  \
  } while (false)

void set_environment(const char* value) {
#ifdef _WIN32
  _putenv_s("TORCHAMP_CPU_PRODUCTS", value);
#else
  setenv("TORCHAMP_CPU_PRODUCTS", value, 1);
#endif
}

void guard_in(at::ScalarType dtype) {
  const AutocastGuard guard(at::kCPU, dtype);
}

TEST(CpuProducts, StayLibTorchsUntilAGuardIn16BitsIsMade) {
  EXPECT_IN_NEW_PROCESS([] {
    torchamp::set_cpu_products(CpuProducts::fp32);
    EXPECT_EQ(torchamp::cpu_products(at::kHalf), CpuProducts::fp32);
    { const AutocastGuard off(at::kCPU, {.enabled = false}); }
    (void)at::mm(at::ones({2, 2}, at::kHalf), at::ones({2, 2}, at::kHalf));
    EXPECT_EQ(kernels_of("aten::mm"), 0);
    const CollectedWarnings warnings;
    guard_in(at::kHalf);
    EXPECT_EQ(kernels_of("aten::mm"), 1);
    EXPECT_EQ(kernels_of("aten::convolution"), 1);
    EXPECT_EQ(kernels_of("aten::mkldnn_rnn_layer"), 1);
    guard_in(at::kBFloat16);
    EXPECT_EQ(kernels_of("aten::mm"), 1);
    EXPECT_EQ(warnings.text(), "");
  });
}

TEST(CpuProducts, AreDecidedByTheFirstStepOfMuonWithoutAGuard) {
  EXPECT_IN_NEW_PROCESS([] {
    torchamp::set_cpu_products(CpuProducts::fp32);
    const at::Tensor weight = at::ones({2, 3}).requires_grad_();
    torchamp::FusedMuon muon(std::vector<at::Tensor>{weight});
    weight.mutable_grad() = at::ones({2, 3});
    EXPECT_EQ(kernels_of("aten::bmm"), 0);
    muon.step();
    EXPECT_EQ(kernels_of("aten::bmm"), 1);
    EXPECT_EQ(kernels_of("aten::baddbmm"), 1);
  });
}

TEST(CpuProducts, AreAsTheEnvironmentSays) {
  EXPECT_IN_NEW_PROCESS([] {
    set_environment("libtorch");
    guard_in(at::kBFloat16);
    guard_in(at::kHalf);
    for (const char* const op : {"aten::mm", "aten::convolution", "aten::mkldnn_rnn_layer"}) {
      EXPECT_EQ(kernels_of(op), 0) << op;
    }
    EXPECT_EQ(torchamp::cpu_products(at::kHalf), CpuProducts::libtorch);
  });
  EXPECT_IN_NEW_PROCESS([] {
    set_environment("fp32");
    EXPECT_EQ(torchamp::cpu_products(at::kBFloat16), CpuProducts::fp32);
    guard_in(at::kBFloat16);
    EXPECT_EQ(kernels_of("aten::mm"), 1);
  });
  EXPECT_IN_NEW_PROCESS([] {
    set_environment("fast");
    EXPECT_ERROR(guard_in(at::kHalf),
                 "TORCHAMP_CPU_PRODUCTS is 'fast'. Set it to fp32 or libtorch");
    EXPECT_ERROR((void)torchamp::cpu_products(at::kHalf), "TORCHAMP_CPU_PRODUCTS is 'fast'");
    torchamp::set_cpu_products(CpuProducts::libtorch);
    guard_in(at::kHalf);
  });
}

at::Tensor foreign_mm(const at::Tensor& left, const at::Tensor& right) {
  return at::full({left.size(0), right.size(1)}, 7, left.options());
}

TEST(CpuProducts, LeaveAnotherLibrarysKernelInItsPlace) {
  EXPECT_IN_NEW_PROCESS([] {
    const CollectedWarnings of_the_replacement;
    torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__);
    library.impl("mm", foreign_mm);
    torchamp::set_cpu_products(CpuProducts::fp32);
    guard_in(at::kHalf);
    EXPECT_EQ(kernels_of("aten::mm"), 0);
    EXPECT_EQ(kernels_of("aten::bmm"), 1);
    const at::Tensor ones = at::ones({2, 2}, at::kHalf);
    EXPECT_EQ(at::mm(ones, ones)[0][0].item<double>(), 7.);
    library.reset();
    EXPECT_EQ(at::mm(ones, ones)[0][0].item<double>(), 2.);
  });
}

TEST(CpuProducts, StayLibTorchsOnACpuThatIsFastInThem) {
  EXPECT_IN_NEW_PROCESS([] {
    set_environment("");
    guard_in(at::kBFloat16);
    if (torchamp::cpu_products(at::kBFloat16) == CpuProducts::fp32) return;  // a slow CPU
    for (const char* const op : {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}) {
      EXPECT_EQ(kernels_of(op), 0) << op;
    }
  });
}

/// How many threads an op uses while products are measured.
struct ThreadsOfAMeasurement {
  int here = 0, in_another_thread = 0;
} threads_of_a_measurement;

at::Tensor observing_mm(const at::Tensor& left, const at::Tensor& right) {
  threads_of_a_measurement.here = at::get_num_threads();
  std::thread([] { threads_of_a_measurement.in_another_thread = at::get_num_threads(); }).join();
  return at::zeros({left.size(0), right.size(1)}, left.options());
}

TEST(CpuProducts, AreMeasuredOnOneThreadWithoutALimitForOthers) {
  EXPECT_IN_NEW_PROCESS([] {
    set_environment("");
    at::set_num_threads(3);
    const CollectedWarnings of_the_replacement;
    torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__);
    library.impl("mm", observing_mm);
    (void)torchamp::cpu_products(at::kHalf);
    EXPECT_EQ(threads_of_a_measurement.here, 1);
    EXPECT_EQ(threads_of_a_measurement.in_another_thread, 3);
    EXPECT_EQ(at::get_num_threads(), 3);
  });
}

TEST(CpuProducts, FollowTheLastCallFromTheNextGuardOn) {
  // LibTorch's addbmm rounds after each matrix: 256 + 1 is 256 in bf16.
  const auto sum = [] {
    const at::Tensor matrices = at::ones({3, 1, 1}, at::kBFloat16);
    return at::addbmm(at::full({1, 1}, 256., at::kBFloat16), matrices, matrices).item<double>();
  };
  torchamp::set_cpu_products(CpuProducts::fp32);
  guard_in(at::kBFloat16);
  EXPECT_EQ(sum(), 260.) << "259, rounded once";
  torchamp::set_cpu_products(CpuProducts::libtorch);
  guard_in(at::kBFloat16);
  EXPECT_EQ(sum(), 256.);
  torchamp::set_cpu_products(CpuProducts::fastest);
}

TEST(CpuProducts, AreRefusedForOtherDtypes) {
  EXPECT_ERROR((void)torchamp::cpu_products(at::kFloat), "cpu_products: the dtype Float");
}

/// The least processor time of five products of matrices, or of five convolutions and their
/// gradients.
double seconds(CpuProducts products, at::ScalarType dtype, bool of_convolutions) {
  torchamp::set_cpu_products(products);
  guard_in(dtype);
  const at::Tensor matrix = at::ones({192, 192}, dtype);
  const at::Tensor image = at::ones({2, 16, 12, 12}, dtype).requires_grad_();
  const at::Tensor weight = at::ones({16, 16, 3, 3}, dtype).requires_grad_();
  double least = std::numeric_limits<double>::max();
  for (int i = 0; i < 5; ++i) {
    const std::clock_t begin = std::clock();
    if (of_convolutions) {
      at::conv2d(image, weight).sum().backward();
    } else {
      (void)at::mm(matrix, matrix);
    }
    least = std::min(least, static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC);
  }
  return least;
}

TEST(CpuProducts, AreTheFasterOnesByDefault) {
  const int threads = at::get_num_threads();
  at::set_num_threads(1);  // several wait for each other while other programs run
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    for (const bool of_convolutions : {false, true}) {
      const double chosen = seconds(CpuProducts::fastest, dtype, of_convolutions);
      const double libtorchs = seconds(CpuProducts::libtorch, dtype, of_convolutions);
      const double in_fp32 = seconds(CpuProducts::fp32, dtype, of_convolutions);
      EXPECT_LE(chosen, 6 * std::min(libtorchs, in_fp32)) << dtype << ' ' << of_convolutions;
    }
  }
  torchamp::set_cpu_products(CpuProducts::fastest);
  at::set_num_threads(threads);
}

}  // namespace
