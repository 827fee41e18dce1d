// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <memory>
#include <string>
#include <string_view>

#include "torchamp/version.h"

namespace torchamp::detail {

/// Whether a region whose policy has an OpRule follows it in any call, and what it calls instead.
/// Shared by the threads that take over the region's state.
class OpRuleUsage {
 public:
  virtual ~OpRuleUsage() = default;
  virtual bool has_run() const = 0;
  /// A call followed the rule.
  virtual void run() = 0;
  /// A product was called that the rule does not reach, or that could not follow it (`why`).
  virtual void called_instead(std::string op, const std::string& why) = 0;
  /// At the region's end.
  virtual void warn_if_unused() const = 0;
};

/// How an extra carries out a rule of a policy by itself, options included: products in fp8
/// (torchamp/fp8.h). The table points to it and knows no more. Immutable.
class OpRule {
 public:
  virtual ~OpRule() = default;

  /// Runs a call: takes the arguments off the stack and leaves the result. Where it cannot, says
  /// why, and leaves the stack as it was. Autocast is off.
  virtual std::string run(const c10::OperatorHandle& op, at::DeviceType device,
                          torch::jit::Stack& stack) const = 0;

  /// Why an overload cannot follow the rule; empty if it can.
  virtual std::string why_not_op(std::string_view full_name) const = 0;
  /// Why the current device of a type cannot; empty if it can.
  virtual std::string why_not_on(at::DeviceType device) const = 0;
  /// Why regions of a dtype cannot, on a device that can; empty if they can.
  virtual std::string why_not_in(at::DeviceType device, at::ScalarType dtype) const = 0;
  /// Whether it is an error at the guard that a region cannot.
  virtual bool is_strict() const = 0;

  /// As in a policy's text: "fp8(recipe=rowwise strict)". Rules with one text are the same.
  virtual std::string text() const = 0;

  /// For a new region; `outer`: of the region around it, or null.
  virtual std::shared_ptr<OpRuleUsage> make_usage(
      const std::shared_ptr<OpRuleUsage>& outer) const = 0;
};

/// The rule of Cast::fp8 without options, which torchamp/fp8.h registers; null where no source file
/// includes that.
using MakeOpRule = std::shared_ptr<const OpRule> (*)();

inline MakeOpRule& fp8_rule_maker() {
  static MakeOpRule make = nullptr;
  return make;
}

}  // namespace torchamp::detail
