// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/optim/kernels.h"
#include "torchamp/detail/core/optim/plan.h"
#include "torchamp/detail/extras/masters/split_weight.h"

namespace TORCHAMP_NAMESPACE::detail {

// Note [Steps by chunks]
// Split weights are joined to masters and stepped chunk by chunk, in buffers that fit a CPU's
// cache. A chunk holds several small weights or a part of a large one. ATen's kernels round the
// last few elements of a tensor differently. So a chunk ends at the end of a weight, or at a
// multiple of chunk_unit elements: then the results are those for whole weights.

/// Where a parameter is cut: a multiple of what a kernel takes in one vector or one block.
inline constexpr int64_t chunk_unit = 1 << 12;

/// The list for an empty chunk. Kernels step fp32 weights, so a chunk joins masters, steps and
/// splits them.
inline StepList empty_chunk(const StepList& list) {
  StepList chunk_list = list.emptied();
  chunk_list.dtype = at::kFloat;
  return chunk_list;
}

/// The maximum number of elements in a chunk of `list`: small enough for a CPU's cache, large
/// enough for a device.
inline int64_t split_chunk_elements(const StepList& list) {
  int64_t elements = 0, largest = 0;
  for (const at::Tensor& param : list.params) {
    elements += param.numel();
    largest = std::max(largest, param.numel());
  }
  elements = std::min(elements, int64_t{1} << (list.device.is_cpu() ? 16 : 21));
  return list.takes_parts ? elements : std::max(elements, largest);
}

/// Steps split weights: both halves, in memory of fp32. SplitRuns::join writes a chunk's masters to
/// the buffer and returns them as parts of it; split() writes them back to the halves.
class SplitStep final : public StepMethod {
 public:
  void check(const at::Tensor& weight, const at::Tensor& gradient,
             ErrorPlace where) const override {
    check_split(weight, gradient, where);
  }

  bool holds(const at::Tensor& weight, const at::Tensor& gradient) const override {
    const SplitWeight& split = *split_of(weight);
    return gradient.scalar_type() == at::kFloat && split.fits(weight) && split.is_unwritten(weight);
  }

  at::Tensor master(const at::Tensor& weight) const override {
    return joined(weight, *split_of(weight));
  }

  at::Tensor buffer(const StepList& list) const override {
    return list.scalars->buffer(at::kFloat, split_chunk_elements(list));
  }

  void step(KernelStep kernel, const StepList& list) const override {
    const int64_t most = split_chunk_elements(list);
    const at::Tensor masters = part_of(list.buffer, 0, most);
    SplitRuns runs(list.device);
    StepList chunk_list = empty_chunk(list);
    std::vector<at::Tensor> shapes;  // of whole weights
    int64_t room = most;
    const auto add = [&](std::size_t i, int64_t begin, int64_t size) {
      const auto part = [&](const at::Tensor& tensor) { return part_of(tensor, begin, size); };
      const auto whole = [](const at::Tensor& tensor) { return tensor; };
      runs.add(part(list.params[i]), part(split_of(list.params[i])->low));
      if (list.takes_parts) {
        chunk_list.add_beside_param(list, i, part);
      } else {
        shapes.push_back(list.params[i]);
        chunk_list.add_beside_param(list, i, whole);
      }
      room -= size;
    };
    const auto step_chunk = [&] {
      if (room == most) return;
      chunk_list.params = runs.join(masters);
      for (std::size_t i = 0; i < shapes.size(); ++i) {
        at::Tensor& master = chunk_list.params[i];
        master = master.as_strided(shapes[i].sizes(), shapes[i].strides(), master.storage_offset());
      }
      kernel(chunk_list, *list.scalars);
      shapes.clear();
      runs.split(masters);
      runs = SplitRuns(list.device);
      chunk_list = empty_chunk(list);
      room = most;
    };

    for (std::size_t i = 0; i < list.params.size(); ++i) {
      const int64_t size = list.params[i].numel();
      if (!list.takes_parts && room < size) step_chunk();
      for (int64_t begin = 0; begin < size;) {
        int64_t part = std::min(size - begin, room);
        if (part < size - begin) part -= part % chunk_unit;
        if (part > 0) add(i, begin, part);
        begin += part;
        if (begin < size || room == 0) step_chunk();
      }
    }
    step_chunk();
  }

  void note_stepped(const at::Tensor& weight) const override {
    split_of(weight)->note_version(weight);
  }
};

inline const SplitStep split_step{};

inline c10::intrusive_ptr<SplitWeight> make_split_weight(at::Tensor low) {
  auto split = c10::make_intrusive<SplitWeight>();
  split->low = std::move(low);
  split->step_method = &split_step;
  return split;
}

}  // namespace TORCHAMP_NAMESPACE::detail
