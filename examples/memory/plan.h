// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "gpt/model.h"
#include "memory/measure.h"
#include "memory/ways.h"

// Note [How memory is planned]
// What weights take is arithmetic: see bytes_a_weight(). What forward keeps for backward depends on
// ops and batch, so it is measured on models of one block and of two. Backward frees a block's
// activations and makes its gradients: so at its peak there is the larger of both for every block
// but one, for which the whole of one block's backward is counted. With recomputation in segments
// there are the inputs of the segments that are not done, gradients of those that are, and
// activations of one.

/// The bytes that a way is expected to take.
struct Plan {
  Bytes weights;
  double peak = 0.;
  double activations() const { return std::max(peak - weights.sum(), 0.); }
};

inline Plan plan(const Way& way, const GptSizes& sizes, std::int64_t rows,
                 const torchamp::ProcessGroupPtr& group) {
  const int processes = group->getSize();
  Way plain = way;
  plain.recomputed = false;
  GptSizes one = sizes, two = sizes;
  one.layers = 1, two.layers = 2;
  const Measured first = measure(plain, one, rows, group),
                 second = measure(plain, two, rows, group);

  const auto gradients = [&](const GptSizes& of) {
    return Weights::of(of).bytes(way, processes).gradients;
  };
  const double activations = second.after_forward - first.after_forward;
  const double gradient = gradients(two) - gradients(one);
  const double last = first.peak - first.kept;  // of one block and what surrounds them
  const double blocks = static_cast<double>(sizes.layers);
  double on_top = std::max({(blocks - 1.) * activations, (blocks - 1.) * gradient}) + last;
  if (way.recomputed) {
    const double segments = std::ceil(std::sqrt(blocks)), length = std::ceil(blocks / segments);
    const double input = static_cast<double>(rows * sizes.length * sizes.width) * 4.;
    on_top = 0.;
    for (double done = 0.; done < segments; ++done) {
      on_top = std::max(on_top, (segments - done) * input + done * length * gradient +
                                    (length - 1.) * std::max(activations, gradient) + last);
    }
  }
  Plan planned{.weights = Weights::of(sizes).bytes(way, processes)};
  planned.peak = std::max(planned.weights.kept() + on_top, planned.weights.sum());
  return planned;
}
