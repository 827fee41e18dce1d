// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/SequenceNumber.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/autograd_node.h"
#include "torchamp/detail/core/base/devices.h"
#include "torchamp/detail/core/base/snapshot.h"
#include "torchamp/detail/core/policy/schema.h"
#include "torchamp/detail/extras/observe/observer.h"

namespace TORCHAMP_NAMESPACE::detail {

/// Distinguishes the nodes that the calling thread makes after this object, up to end(), from all
/// others.
class NodeEpoch {
 public:
  bool is_younger(const torch::autograd::Node& node) const {
    return node.thread_id() == thread_ && node.sequence_nr() >= first_ &&
           node.sequence_nr() < end_ &&
           dynamic_cast<const torch::autograd::AccumulateGrad*>(&node) == nullptr;
  }

  /// Nodes that the thread makes later do not belong to this epoch.
  void end() { end_ = at::sequence_number::peek(); }

 private:
  uint64_t thread_ = at::RecordFunction::currentThreadId();
  uint64_t first_ = at::sequence_number::peek();
  uint64_t end_ = std::numeric_limits<uint64_t>::max();
};

/// Calls visit(node, index, edge) for each edge of the nodes reached from `roots`, and continues
/// along those for which it returns true.
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

/// The end of a cut graph: receives the gradient of what was cut off.
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

// Note [What a function reads]
// Autograd's graph does not include frozen weights and buffers, nor how often other tensors were
// written to. So the ops of the function's first run are observed: an argument that none of them
// has returned existed before. It is recorded with its version, unless the function itself writes
// to it, as to a batch counter, which belongs to each run. Tensors that are destroyed after the run
// were the function's own.

/// Throws if a tensor that a function has read was written since.
inline void check_unchanged(const std::vector<TensorSnapshot>& reads) {
  for (const TensorSnapshot& read : reads) {
    const at::Tensor tensor = read.lock();
    TORCH_CHECK(
        !tensor.defined() || read.is_same(tensor),
        "checkpoint: a parameter, buffer or other tensor of shape ", tensor.sizes(),
        " that the function reads was changed in place after the forward pass, so backward cannot "
        "run the function again. Step and write to weights after backward().");
  }
}

/// While it lives, observes the ops of the calling thread. Nests.
class ReadRecorder {
 public:
  ReadRecorder() : outer_(std::exchange(innermost(), this)) {
    if (outer_ != nullptr) return;  // the outer recorder's callback reports all ops
    callback_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&begin, &end)
                                               .needsInputs(true)
                                               .needsOutputs(true)
                                               .scopes({at::RecordScope::FUNCTION}));
  }
  ReadRecorder(const ReadRecorder&) = delete;
  ReadRecorder& operator=(const ReadRecorder&) = delete;
  ~ReadRecorder() {
    innermost() = outer_;
    if (outer_ == nullptr) at::removeCallback(callback_);
  }

  /// The read tensors from outside that still exist.
  std::vector<TensorSnapshot> take() {
    std::vector<TensorSnapshot> reads;
    for (const auto& [tensor, seen] : seen_) {
      const at::Tensor alive = seen.lock();
      if (!seen.is_own && alive.defined() && seen.is_same(alive)) reads.push_back(seen);
    }
    return reads;
  }

 private:
  struct Seen : TensorSnapshot {
    std::size_t number;  // of what was seen before
    bool is_own;         // made by an op of the function
  };

  static ReadRecorder*& innermost() {
    static thread_local ReadRecorder* recorder = nullptr;
    return recorder;
  }

  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& op) {
    for (auto* recorder = innermost(); recorder != nullptr; recorder = recorder->outer_) {
      for (const c10::IValue& input : inputs_of(op)) {
        for_each_tensor_of(input, [&](const at::Tensor& tensor) { recorder->see(tensor, false); });
      }
      recorder->seen_at_begin_.push_back(recorder->seen_.size());
    }
    return nullptr;
  }

  static void end(const at::RecordFunction& op, at::ObserverContext*) {
    for (auto* recorder = innermost(); recorder != nullptr; recorder = recorder->outer_) {
      for (const c10::IValue& output : op.outputs()) {
        for_each_tensor_of(output, [&](const at::Tensor& tensor) { recorder->see(tensor, true); });
      }
      recorder->seen_at_begin_.pop_back();
    }
  }

  /// If an output was first recorded since its op began, as an argument of an inner op, the op made
  /// it.
  void see(const at::Tensor& tensor, bool is_output) {
    if (!tensor.defined() || tensor.is_inference()) return;
    const auto known = seen_.find(tensor.unsafeGetTensorImpl());
    if (known == seen_.end()) {
      const Seen seen{TensorSnapshot(tensor), seen_.size(), is_output};
      seen_.emplace(tensor.unsafeGetTensorImpl(), seen);
    } else if (is_output && known->second.number >= seen_at_begin_.back()) {
      known->second.is_own = true;
    }
  }

  ReadRecorder* outer_;
  at::CallbackHandle callback_ = at::INVALID_CALLBACK_HANDLE;
  std::unordered_map<const c10::TensorImpl*, Seen> seen_;
  std::vector<std::size_t> seen_at_begin_;  // of each op that has not ended
};

// Note [Captured views whose base has changed]
// After an in-place change of its base, a view's node is outdated, and LibTorch makes a new one at
// the next query: during the forward, for a view that the function captures. It then looks like a
// node of the function's own, but the view keeps it, and the recomputation finds it as an older
// node. So a node from the forward from which a single path leads to an outer edge is no error: its
// gradient is sent along that path.

/// The data of a RecomputeNode about the graph that its forward has dropped.
struct DroppedGraph {
  NodeEpoch epoch;
  /// The edges out of it, with their places among the RecomputeNode's next edges.
  std::unordered_map<torch::autograd::Edge, std::size_t> outer_edges;
  /// The number of leaves that the function itself made. Their gradients are not used.
  std::size_t inner_leaves = 0;
  std::vector<TensorSnapshot> reads;

  /// `edge`, if it is an outer edge; otherwise the edge at the end of the single path from a node
  /// of the forward.
  std::optional<torch::autograd::Edge> outer_edge_behind(torch::autograd::Edge edge) const {
    while (!outer_edges.contains(edge)) {
      if (!epoch.is_younger(*edge.function)) return std::nullopt;
      torch::autograd::Edge only;
      for (const torch::autograd::Edge& next : edge.function->next_edges()) {
        if (!next.is_valid()) continue;
        if (only.is_valid()) return std::nullopt;
        only = next;
      }
      if (!only.is_valid()) return std::nullopt;
      edge = std::move(only);
    }
    return edge;
  }
};

/// The ends of a recomputed graph.
struct Sinks {
  struct View {
    NodePtr sink;
    std::size_t place;
  };
  std::vector<NodePtr> by_place;  // among the RecomputeNode's next edges
  std::unordered_set<torch::autograd::Node*> of_inputs;
  std::unordered_map<torch::autograd::Edge, View> of_views;
};

/// The end of messages about a recomputation that differs.
inline constexpr const char* unlike_forward =
    " than the forward did. The function must do the same both times; LibTorch's own random "
    "generators are put back for it, others are not.";

/// Redirects the edges out of a recomputed graph to sinks, and restores them at its end.
class Cuts {
 public:
  /// Compares the graph of `roots`, with nodes of `epoch`, to the forward's.
  Cuts(const DroppedGraph& forward, const std::vector<torch::autograd::Node*>& roots,
       const NodeEpoch& epoch, Sinks& sinks) {
    std::size_t unknown_leaves = 0;
    walk_graph(roots, [&](auto& from, std::size_t index, const torch::autograd::Edge& edge) {
      if (sinks.of_inputs.contains(edge.function.get())) return false;
      if (epoch.is_younger(*edge.function)) return true;
      const auto outer = forward.outer_edge_behind(edge);
      if (!outer) {
        ++unknown_leaves;
        return false;
      }
      const std::size_t place = forward.outer_edges.at(*outer);
      NodePtr& sink = sinks.by_place[place];
      if (!sink) sink = GradientSink::for_edge(*outer);
      NodePtr cut_sink = sink;
      if (edge != *outer) {
        auto& view = sinks.of_views[edge];
        if (!view.sink) view = {GradientSink::for_edge(edge), place};
        cut_sink = view.sink;
      }
      cuts_.push_back({&from, index, edge, std::move(cut_sink)});
      return false;
    });
    std::size_t missing = forward.outer_edges.size();
    for (const auto& [edge, place] : forward.outer_edges) missing -= sinks.by_place[place] ? 1 : 0;
    TORCH_CHECK(missing == 0 && unknown_leaves == forward.inner_leaves,
                "checkpoint: the recomputation used other parameters or captured tensors",
                unlike_forward);
    for (const Cut& cut : cuts_) cut.node->next_edges()[cut.index] = {cut.sink, 0};
  }
  Cuts(const Cuts&) = delete;
  Cuts& operator=(const Cuts&) = delete;
  ~Cuts() {
    for (auto& cut : cuts_) cut.node->next_edges()[cut.index] = std::move(cut.edge);
  }

 private:
  struct Cut {
    torch::autograd::Node* node;
    std::size_t index;
    torch::autograd::Edge edge;
    NodePtr sink;
  };
  std::vector<Cut> cuts_;
};

}  // namespace TORCHAMP_NAMESPACE::detail
