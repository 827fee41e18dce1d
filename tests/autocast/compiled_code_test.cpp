// SPDX-License-Identifier: BSD-3-Clause
// Code that AOTInductor compiled calls LibTorch's kernels by C shims and reads what they return as
// the dtype that it was compiled for: see Note [Compiled code].
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>
#include <torch/version.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "support/op_call.h"
#include "support/op_case.h"
#include "support/python.h"
#include "support/temporary_folder.h"
#include "torchamp/autocast.h"

namespace {

using torchamp::AutocastGuard;
using torchamp::Policy;

const Policy tried_policies[] = {
    Policy::standard(), Policy::torch(), Policy::torch().lower_precision(torchamp::ops::conv),
    Policy::standard().lower_precision({"_convolution", "convolution"}),
    Policy::standard().set(torchamp::Cast::lower_precision, "_convolution",
                           {.dtype = at::kBFloat16})};

/// Calls `check` in a region of each policy and 16-bit dtype.
template <class Check>
void in_every_region(const Check& check) {
  for (const Policy& policy : tried_policies) {
    for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
      const AutocastGuard guard(at::kCPU, {.dtype = dtype, .policy = policy});
      check();
    }
  }
}

at::Tensor convolution_by_shim(at::Tensor x, at::Tensor w, bool transposed) {
  using torch::aot_inductor::tensor_pointer_to_tensor_handle;
  const std::int64_t ones[] = {1, 1}, zeros[] = {0, 0};
  AtenTensorHandle result = nullptr;
  const AOTITorchError error = aoti_torch_cpu_convolution(
      tensor_pointer_to_tensor_handle(&x), tensor_pointer_to_tensor_handle(&w), nullptr, ones, 2,
      zeros, 2, ones, 2, transposed, zeros, 2, 1, &result);
  TORCH_CHECK(error == AOTI_TORCH_SUCCESS, "the shim failed");
  const std::unique_ptr<at::Tensor> owned(
      torch::aot_inductor::tensor_handle_to_tensor_pointer(result));
  return *owned;
}

TEST(CompiledCode, AConvolutionsShimGivesTheDtypeThatItIsCalledWithUnderEveryPolicy) {
  const at::Tensor x = at::linspace(-1, 1, 48).view({1, 3, 4, 4});
  const at::Tensor w = at::linspace(-1, 2, 81).view({3, 3, 3, 3});
  for (const bool transposed : {false, true}) {
    const at::Tensor expected = convolution_by_shim(x, w, transposed);
    in_every_region([&] {
      const at::Tensor result = convolution_by_shim(x, w, transposed);
      ASSERT_EQ(result.scalar_type(), at::kFloat) << "transposed: " << transposed;
      EXPECT_TRUE(result.equal(expected));
    });
  }
}

// That packages of older versions make by aoti_torch_convolution.
TEST(CompiledCode, ACallOfConvolutionByNameGivesTheDtypeThatItIsCalledWithUnderEveryPolicy) {
  const at::Tensor x = at::linspace(-1, 1, 48).view({1, 3, 4, 4});
  const at::Tensor w = at::linspace(-1, 2, 81).view({3, 3, 3, 3});
  in_every_region([&] {
    EXPECT_EQ(at::convolution(x, w, {}, {1, 1}, {0, 0}, {1, 1}, false, {0, 0}, 1).scalar_type(),
              at::kFloat);
  });
}

TEST(CompiledCode, EagerConvolutionsAreStillCast) {
  const at::Tensor x = at::linspace(-1, 1, 48).view({1, 3, 4, 4});
  const at::Tensor w = at::linspace(-1, 2, 81).view({3, 3, 3, 3});
  in_every_region([&] {
    const at::ScalarType region = at::autocast::get_autocast_dtype(at::kCPU);
    EXPECT_EQ(at::conv2d(x, w).scalar_type(), region);
    EXPECT_EQ(at::conv_transpose2d(x, w).scalar_type(), region);
  });
}

// ---- Every shim ---------------------------------------------------------------------------------

/// Ops with a shim whose kernel may call others, in the syntax of tests/parity/cases.txt. (Those
/// that only allocate, copy, index or draw numbers are left out.)
const char* const shims[] = {
    "_fused_rms_norm(x(2, 3), [3], x(3), 1e-5)",
    "convolution(x(1, 2, 4, 4), x(3, 2, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)",
    "convolution_backward(x(1, 3, 4, 4), x(1, 2, 4, 4), x(3, 2, 3, 3), [3], [1, 1], [1, 1], "
    "[1, 1], False, [0, 0], 1, [True, True, True])",
    "native_dropout(x(2, 3), 0.0, True)",
    "_trilinear(x(2, 3), x(2, 3), x(2, 3), [], [], [], [1])",
    "_embedding_bag(x(4, 3), int64(4), int64(2, values=[0, 2]), False, 1)",
    "_embedding_bag_forward_only(x(4, 3), int64(4), int64(2, values=[0, 2]), False, 0)",
    "_embedding_bag_per_sample_weights_backward(x(2, 3), x(4, 3), int64(4), "
    "int64(2, values=[0, 2]), int64(4, values=[0, 0, 1, 1]), 0)",
    "_cdist_forward(x(2, 3), x(4, 3), 2, None)",
    "_cdist_backward(x(2, 4), x(2, 3), x(4, 3), 2, x(2, 4))",
    "_pdist_forward(x(3, 2))",
    "_pdist_backward(x(3), x(3, 2), 2, x(3))",
    "segment_reduce(x(4), \"mean\", lengths=int64(2, values=[2]))",
    "soft_margin_loss_backward(x(), x(3), x(3), 1)",
    "logcumsumexp(x(2, 3), 1)",
    "cumsum(x(2, 3), 1)",
    "cumprod(x(2, 3), 1)",
    "addbmm(x(2, 2), x(2, 2, 3), x(2, 3, 2))",
    "addmv(x(2), x(2, 3), x(3))",
    "_addmm_activation(x(2, 2), x(2, 3), x(3, 2), use_gelu=True)",
    "_scaled_dot_product_flash_attention_for_cpu(x(1, 2, 8, 8), x(1, 2, 8, 8), x(1, 2, 8, 8))",
    "grid_sampler_3d(x(1, 2, 3, 3, 3), x(1, 2, 2, 2, 3, fill=\"unit\"), 0, 0, False)",
    "grid_sampler_2d_backward(x(1, 2, 2, 2), x(1, 2, 3, 3), x(1, 2, 2, 2, fill=\"unit\"), 0, 0, "
    "False, [True, True])",
    "upsample_bicubic2d_backward(x(1, 2, 4, 5), [4, 5], [1, 2, 3, 3], False)",
    "upsample_linear1d_backward(x(1, 2, 5), [5], [1, 2, 3], False)",
    "histc(x(4), 3)",
    "histogram.bin_ct(x(4), 3)",
    "_histogramdd_from_bin_cts(x(4, 2), [2, 2])",
    "index_put(x(4), [int64(2, values=[1, 3])], x(2))",
    "index_reduce(x(3, 2), 0, int64(2, values=[2, 0]), x(2, 2), \"prod\")",
    "masked_scatter(x(2, 3), bool(2, 3, values=[1, 0]), x(2, 3))",
    "masked_scatter_backward(x(2, 3), bool(2, 3, values=[1, 0]), [2, 3])",
    "max_unpool2d(x(1, 1, 2, 2), int64(1, 1, 2, 2, values=[0, 3, 8, 15]), [4, 4])",
    "max_pool3d_with_indices(x(1, 2, 3, 3, 3), [2, 2, 2])",
    "_adaptive_avg_pool3d(x(1, 2, 3, 3, 3), [2, 2, 2])",
    "avg_pool3d(x(1, 2, 3, 3, 3), [2, 2, 2])",
    "pow.Tensor_Tensor(x(3, fill=\"positive\"), x(3))",
    "pow.Tensor_Scalar(x(3, fill=\"positive\"), 2)",
    "pow.Scalar(2, x(3))",
    "add.Tensor(x(3), x(3))",
    "mul.Tensor(x(3), x(3))",
    "mul.Scalar(x(3), 2)",
    "median(x(3))",
    "nanmedian(x(3))",
    "sort(x(3))",
    "topk(x(3), 2)",
    "cat([x(3), x(3)])",
    "pad(x(2, 4), [1, 1])",
    "polar(x(3), x(3))",
    "replication_pad2d_backward(x(1, 4, 4), x(1, 2, 2), [1, 1, 1, 1])",
    "lu_unpack(x(3, 3), int32(3, values=[1, 2, 3]))",
    "geqrf(x(3, 2))",
    "ormqr(x(3, 2), x(2), x(3, 2))",
    "cholesky_solve(x(3, 2), x(3, 3, fill=\"spd\"))",
    "cholesky_inverse(x(3, 3, fill=\"spd\"))",
    "scatter_reduce.two(x(2, 3), 0, int64(2, 3, values=[0, 1, 1]), x(2, 3), \"sum\")"};

/// What the op's kernel computes, called as a shim does: without the dispatcher.
Outcome by_kernel(const OpCase& op_case, const c10::OperatorHandle& op, const Variant& variant) {
  return outcome_of(make_arguments(op_case, op.schema(), variant), [&](Stack& stack) {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  });
}

std::string dtypes_of(const Outcome& outcome) {
  std::string text;
  for (const c10::IValue& value : outcome.values) {
    text += value.isTensor() ? python_name(value.toTensor().scalar_type()) : value.tagKind();
    text += ' ';
  }
  return outcome.error + text;
}

TEST(CompiledCode, NoKernelThatAShimCallsGivesAnotherDtypeInARegion) {
  const at::NoGradGuard no_grad;  // as compiled code runs
  int computed = 0;
  for (const char* const text : shims) {
    const OpCase op_case = OpCaseParser(text).parse();
    const auto op = find_op(op_case.op);
    if (!op) continue;  // of another LibTorch
    for (const at::ScalarType region : {at::kBFloat16, at::kHalf}) {
      for (const at::ScalarType x : {at::kFloat, region}) {
        const Variant variant{at::kCPU, region, x};
        const std::string expected = dtypes_of(by_kernel(op_case, *op, variant));
        const AutocastGuard guard(at::kCPU, {.dtype = region, .policy = Policy::standard()});
        EXPECT_EQ(dtypes_of(by_kernel(op_case, *op, variant)), expected)
            << text << "\n  " << label(op_case, variant);
        computed += expected.find("Error") == std::string::npos ? 1 : 0;
      }
    }
  }
  EXPECT_GT(computed, 100);
}

// ---- A package ----------------------------------------------------------------------------------

TEST(CompiledCode, APackageWithConvolutionsGivesTheSameInsideARegion) {
  const TemporaryFolder folder;
  const std::string path = (folder / "model.pt2").string();
  const Answer found = python("-c 'import torch; print(torch.__version__)'");
  if (found.status != 0 || !found.output.starts_with(TORCH_VERSION)) {
    GTEST_SKIP() << "no Python with torch " << TORCH_VERSION
                 << " (set TORCHAMP_TEST_PYTHON to one): " << found.output;
  }
  const Answer made = python("parity/compiled_package.py '" + path + "'");
  ASSERT_EQ(made.status, 0) << made.output;
  const at::NoGradGuard no_grad;
  torch::inductor::AOTIModelPackageLoader package(path);
  const at::Tensor x = at::linspace(-1, 1, 384).view({2, 3, 8, 8});
  const at::Tensor expected = package.run({x}).at(0);
  in_every_region([&] { EXPECT_TRUE(package.run({x}).at(0).equal(expected)); });
}

}  // namespace
