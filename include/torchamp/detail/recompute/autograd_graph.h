// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/SequenceNumber.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <limits>
#include <unordered_set>
#include <utility>
#include <vector>

#include "torchamp/detail/autograd_node.h"

namespace torchamp::detail {

/// Tells the nodes that the calling thread makes after this object, up to end(), from all others.
class NodeEpoch {
 public:
  bool is_younger(const torch::autograd::Node& node) const {
    return node.thread_id() == thread_ && node.sequence_nr() >= first_ &&
           node.sequence_nr() < end_ &&
           dynamic_cast<const torch::autograd::AccumulateGrad*>(&node) == nullptr;
  }

  /// From here on, what the thread makes is none of this epoch's.
  void end() { end_ = at::sequence_number::peek(); }

 private:
  uint64_t thread_ = at::RecordFunction::currentThreadId();
  uint64_t first_ = at::sequence_number::peek();
  uint64_t end_ = std::numeric_limits<uint64_t>::max();
};

/// Calls visit(node, index, edge) for each edge that leaves a node reached from `roots`, and goes
/// on along those for which it returns true.
template <class Visit>
void walk_graph(const std::vector<torch::autograd::Node*>& roots, Visit&& visit) {
  std::vector<torch::autograd::Node*> stack;
  std::unordered_set<torch::autograd::Node*> seen;
  for (auto* root : roots) {
    if (seen.insert(root).second) stack.push_back(root);
  }
  while (!stack.empty()) {
    auto* const node = stack.back();
    stack.pop_back();
    for (std::size_t index = 0; index < node->num_outputs(); ++index) {
      const torch::autograd::Edge& edge = node->next_edge(index);
      if (!edge.is_valid() || !visit(*node, index, edge)) continue;
      if (seen.insert(edge.function.get()).second) stack.push_back(edge.function.get());
    }
  }
}

}  // namespace torchamp::detail
