// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <memory>
#include <string>
#include <string_view>

#include "torchamp/fp8.h"
#include "torchamp/version.h"

namespace torchamp::detail {

// Note [Who compiles fp8]
// torchamp.h brings Policy::fp8, and most programs do not use it. So the table knows fp8 by an
// Fp8Rule: options, and pointers to the functions that carry them out. Only Policy::set,
// Policy::fp8 and the parser of policy_text.h name these functions, and all of them are templates
// over the type of tensors, at::Tensor: where none is used, the compiler reads them without
// resolving a call. What reads TORCHAMP_POLICY is part of every guard, and so cannot make such
// rules.

/// Whether a region whose policy has an fp8 rule makes any product in fp8, and what it calls
/// instead. Shared by the threads that take over the region's state.
class Fp8Usage {
 public:
  virtual ~Fp8Usage() = default;
  virtual bool has_run() const = 0;
  /// A product was in fp8.
  virtual void run() = 0;
  /// A product was called that the rule does not reach, or that could not be in fp8 (`why`).
  virtual void called_instead(std::string op, const std::string& why) = 0;
  /// At the region's end.
  virtual void warn_if_unused() const = 0;
};

/// What an fp8 edit of a policy puts into the table: see Note [Who compiles fp8].
struct Fp8Rule {
  Fp8Options options = {};
  /// Runs a call: takes the arguments off the stack and leaves the result. Where it cannot, says
  /// why, and leaves the stack as it was. Autocast is off. Null: the edit is of another rule.
  std::string (*run)(const Fp8Options&, const c10::OperatorHandle&, at::DeviceType,
                     torch::jit::Stack&) = nullptr;
  /// Why products cannot be made on the current device of a type; empty if they can.
  std::string (*why_not)(const Fp8Options&, at::DeviceType) = nullptr;
  /// As in a policy's text: "fp8", or "fp8(recipe=rowwise strict)".
  std::string (*text)(const Fp8Options&) = nullptr;
  /// For a new region; `outer`: of the region around it, or null.
  std::shared_ptr<Fp8Usage> (*make_usage)(const std::shared_ptr<Fp8Usage>& outer) = nullptr;
};

/// Makes the rule whose options are what a policy's text has in brackets; an unknown one is an
/// error. Null where fp8 is not compiled.
using ParseFp8Rule = Fp8Rule (*)(const std::string& options);

/// Why an overload cannot follow the rule, which is for products whose second factor is a matrix;
/// empty if it can.
inline std::string why_not_fp8(std::string_view full_name) {
  if (full_name == "aten::linear" || full_name == "aten::addmm" || full_name == "aten::mm" ||
      full_name == "aten::matmul") {
    return {};
  }
  return "only linear, addmm, mm and matmul can (ops::dense)";
}

/// Why products of the recipe cannot be in regions of a dtype on a device; empty if they can.
inline std::string_view why_not_fp8_in(const Fp8Options& options, at::DeviceType device,
                                       at::ScalarType dtype) {
  const bool refuses =
      options.recipe == Fp8Recipe::rowwise && dtype == at::kHalf && device != at::kCPU;
  return refuses ? "rowwise products of a GPU are in bf16 only" : "";
}

}  // namespace torchamp::detail
