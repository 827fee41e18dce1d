// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/util/ArrayRef.h>

namespace torchamp::detail {

// Note [Inputs without NDEBUG]
// at::RecordFunction::inputs() checks, in a program compiled without NDEBUG, a flag that LibTorch's
// own build, which has NDEBUG, never sets: there it always throws. The flag lies in padding, so the
// layout is the same in both, and the inputs are there. Such programs read the member past the
// check; naming it is allowed in an explicit instantiation.
#ifdef NDEBUG

/// The arguments of the op that is being recorded. In a start callback only.
inline c10::ArrayRef<const c10::IValue> recorded_inputs(const at::RecordFunction& op) {
  return op.inputs();
}

#else

c10::ArrayRef<const c10::IValue> recorded_inputs(const at::RecordFunction& op);

template <auto member>
struct RecordedInputs {
  friend c10::ArrayRef<const c10::IValue> recorded_inputs(const at::RecordFunction& op) {
    return op.*member;
  }
};
extern template struct RecordedInputs<&at::RecordFunction::inputs_>;

#endif

}  // namespace torchamp::detail
