// SPDX-License-Identifier: BSD-3-Clause
// The typed calls behind at::mm(a, b) and the like, for ops of the cases.
#pragma once

#include <ATen/Operators.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/boxing/KernelFunction.h>

#include <map>
#include <string>
#include <type_traits>

/// By op name ("softmax.int"): takes its arguments from the interpreter's stack and makes the call
/// that at::softmax(x, 0) makes, which does not pass through the stack.
inline const std::map<std::string, c10::KernelFunction>& unboxed_ops() {
#define TORCHAMP_UNBOXED1(op) \
  {#op, c10::KernelFunction::makeFromUnboxedFunction(TORCH_FN(ATEN_FN(op)))},
#define TORCHAMP_UNBOXED2(op, overload) \
  {#op "." #overload,                   \
   c10::KernelFunction::makeFromUnboxedFunction(TORCH_FN(ATEN_FN2(op, overload)))},
#define TORCHAMP_PICK(_1, _2, macro, ...) macro
#define TORCHAMP_UNBOXED(...) \
  TORCHAMP_PICK(__VA_ARGS__, TORCHAMP_UNBOXED2, TORCHAMP_UNBOXED1)(__VA_ARGS__)
  static const std::map<std::string, c10::KernelFunction> ops{
      // LibTorch's CUDA lists.
      AT_FORALL_LOWER_PRECISION_FP(TORCHAMP_UNBOXED)  //
      AT_FORALL_FP32(TORCHAMP_UNBOXED)                //
      AT_FORALL_FP32_SET_OPT_DTYPE(TORCHAMP_UNBOXED)  //
      AT_FORALL_PROMOTE(TORCHAMP_UNBOXED)             //
      TORCHAMP_UNBOXED(norm, Scalar)                  //
      TORCHAMP_UNBOXED(norm, ScalarOpt_dim)           //
      // The rest of Policy::standard().
      TORCHAMP_UNBOXED(add, Tensor)      //
      TORCHAMP_UNBOXED(add, Scalar)      //
      TORCHAMP_UNBOXED(sub, Tensor)      //
      TORCHAMP_UNBOXED(sub, Scalar)      //
      TORCHAMP_UNBOXED(rsub, Tensor)     //
      TORCHAMP_UNBOXED(rsub, Scalar)     //
      TORCHAMP_UNBOXED(mean)             //
      TORCHAMP_UNBOXED(mean, dim)        //
      TORCHAMP_UNBOXED(nansum)           //
      TORCHAMP_UNBOXED(nanmean)          //
      TORCHAMP_UNBOXED(logcumsumexp)     //
      TORCHAMP_UNBOXED(linalg_norm)      //
      TORCHAMP_UNBOXED(var, correction)  //
      TORCHAMP_UNBOXED(std, dim)         //
      TORCHAMP_UNBOXED(var_mean, dim)    //
      TORCHAMP_UNBOXED(std_mean)         //
      TORCHAMP_UNBOXED(trace)            //
      TORCHAMP_UNBOXED(max, dim)         //
      TORCHAMP_UNBOXED(sort)             //
      TORCHAMP_UNBOXED(aminmax)          //
      // Of a CPU's own kernels, and on no list.
      TORCHAMP_UNBOXED(cat)                 //
      TORCHAMP_UNBOXED(stack)               //
      TORCHAMP_UNBOXED(index_copy)          //
      TORCHAMP_UNBOXED(conv2d, padding)     //
      TORCHAMP_UNBOXED(cross_entropy_loss)  //
      TORCHAMP_UNBOXED(fft_fft)             //
      TORCHAMP_UNBOXED(linalg_eigh)         //
      TORCHAMP_UNBOXED(mul, Tensor)         //
      TORCHAMP_UNBOXED(relu)                //
      TORCHAMP_UNBOXED(gelu)                //
      TORCHAMP_UNBOXED(batch_norm)          //
      TORCHAMP_UNBOXED(add_, Tensor)        //
      TORCHAMP_UNBOXED(mm, out)             //
  };
#undef TORCHAMP_UNBOXED
#undef TORCHAMP_PICK
#undef TORCHAMP_UNBOXED2
#undef TORCHAMP_UNBOXED1
  return ops;
}
