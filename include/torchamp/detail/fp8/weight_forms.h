// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/InferenceMode.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "torchamp/detail/fp8/quantize.h"
#include "torchamp/detail/fp8/recipes.h"
#include "torchamp/detail/tensors.h"
#include "torchamp/detail/weights/derived.h"
#include "torchamp/detail/weights/store.h"
#include "torchamp/fp8_options.h"

namespace torchamp::detail {

/// A weight's form and that of its transpose: see Note [Two forms of an operand].
struct WeightForms {
  Fp8Matrix plain, transposed;
};

/// Puts the tensors of a form behind `tensors`.
inline void append_tensors(const Fp8Matrix& form, std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : {form.codes, form.inverse_scale, form.block_scales}) {
    if (tensor.defined()) tensors.push_back(tensor);
  }
}

/// A weight's form whose tensors begin at `place` of `tensors`; `place` then is behind them.
inline Fp8Matrix form_of(Fp8Recipe recipe, int64_t rows, int64_t columns,
                         const std::vector<at::Tensor>& tensors, std::size_t& place) {
  const bool has_scale = recipe == Fp8Recipe::tensorwise || recipe == Fp8Recipe::nvfp4;
  const bool has_blocks = recipe != Fp8Recipe::tensorwise;
  Fp8Matrix form{rows, columns, tensors[place++], {}, {}, {}};
  if (has_scale) form.inverse_scale = tensors[place++];
  if (has_blocks) form.block_scales = tensors[place++];
  form.block = block_of(recipe, Fp8Operand::weight);
  return form;
}

/// The forms of a weight [N, K], the transposed one if it is wanted. Those of parameters are kept
/// as casts of weights are: see Note [What is derived from weights].
inline WeightForms weight_forms(const Fp8Options& options, const at::Tensor& w, bool transposed) {
  constexpr auto operand = Fp8Operand::weight;
  // A GPU wants rows that lie behind each other; a CPU takes what is there.
  const bool is_view = w.is_cpu() && is_transposable(options.recipe, operand);
  const auto make = [&](const std::vector<at::Tensor>&) {
    const c10::InferenceMode no_inference(false);
    const InternalOps internal;
    std::vector<at::Tensor> tensors;
    const auto plain = quantize_as(options, operand, /*transposed=*/false, w);
    append_tensors(plain, tensors);
    if (transposed && !is_view) {
      auto form = quantize_transposed(options, operand, w, plain);
      if (!w.is_cpu()) form.codes = form.codes.contiguous();
      append_tensors(form, tensors);
    }
    return tensors;
  };
  const at::Tensor owner = w.is_view() ? at::Tensor(w._base()) : w;
  const bool is_parameter = owner.is_leaf() && owner.requires_grad();
  if (w.numel() == 0) {
    const auto empty = quantize(w, at::kFloat8_e4m3fn);
    return {empty, empty.t()};
  }
  const auto variant = static_cast<std::uint32_t>(options.recipe) + (transposed ? 256U : 0U);
  const WeightKeep keep = is_parameter ? keep_of_this_thread() : WeightKeep();
  const std::vector<at::Tensor> tensors =
      derived_weights().get(w, {WeightForm::Kind::fp8, variant}, keep, make);
  std::size_t place = 0;
  WeightForms forms;
  forms.plain = form_of(options.recipe, w.size(0), w.size(1), tensors, place);
  if (transposed) {
    forms.transposed =
        is_view ? forms.plain.t() : form_of(options.recipe, w.size(1), w.size(0), tensors, place);
  }
  return forms;
}

}  // namespace torchamp::detail
