// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <utility>

#include "torchamp/detail/libtorch.h"
#include "torchamp/detail/recompute/autograd_graph.h"

namespace torchamp::detail {

/// The end of a graph that was cut: what arrives here is the gradient of what was cut off.
struct GradientSink final : torch::autograd::Node {
  /// In place of `edge`, and with its shape and dtype.
  static NodePtr for_edge(const torch::autograd::Edge& edge) {
    const auto& metadata = edge.function->input_metadata(edge.input_nr);
    NodePtr sink = make_node<GradientSink>();
    if (metadata.was_default_constructed()) {
      sink->add_input_metadata(undefined_input());
    } else {
#if TORCHAMP_LIBTORCH >= 210
      sink->add_input_metadata(metadata.options(), metadata.shape_as_dim_vector(),
                               metadata.is_tensor_subclass(), metadata.is_nested_tensor(),
                               metadata.grad_dtype());
#else
      sink->add_input_metadata(metadata.options(), metadata.shape_as_dim_vector(),
                               metadata.is_tensor_subclass(), metadata.is_nested_tensor());
#endif
    }
    return sink;
  }

  /// Only in the backward of a backward, where the sink is an identity.
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    return std::move(gradients);
  }
};

/// A copy of `tensor` that shares its memory and whose history begins at `node`.
inline at::Tensor with_history(const at::Tensor& tensor, const NodePtr& node) {
  at::Tensor cut = tensor.detach();
  torch::autograd::impl::set_gradient_edge(cut, {node, node->add_input_metadata(cut)});
  return cut;
}

}  // namespace torchamp::detail
