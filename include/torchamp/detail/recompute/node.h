// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "torchamp/detail/recompute/autograd_graph.h"
#include "torchamp/detail/recompute/context.h"
#include "torchamp/detail/recompute/gradient_sink.h"
#include "torchamp/detail/version_of.h"

namespace torchamp::detail {

// Note [How a function is recomputed]
// The forward call runs the function with autograd on, on inputs that are cut off from their
// history. The graph that comes of it is read once, for the edges that leave it: to the parameters
// and other tensors with a history that the function uses besides its inputs. Then it is dropped,
// and the activations with it. In its place stands one RecomputeNode with the edges of the inputs
// and those outer edges. So autograd knows all that the function depends on: inputs that need no
// gradient, torch::autograd::grad() of a captured parameter, hooks on parameters (such as those of
// c10d's Reducer) and nested checkpoints behave as without a checkpoint.
//
// Backward builds the graph again, turns each edge that leaves it to a GradientSink, lets the
// engine run from the outputs to the sinks, and returns what arrived there. Without the sinks the
// engine would run on into the graph of the captured tensors, which the outer backward does.
//
// "Leaves it" means: to a leaf, or to a node that is older than the call or of another thread.

// Note [Captured views whose base has changed]
// After an in-place change of its base, a view's node is out of date, and LibTorch makes a new one
// when it is next asked for: while the forward runs, for a view that the function captures. It then
// looks like a node of the function's own, but the view keeps it, and the recomputation meets it
// again as an older node. So a node from the time of the forward from which a single path leads to
// an outer edge is no error: the gradient that arrives there is sent along that path.

// Note [Outputs that share memory]
// An output has the RecomputeNode for its history, whatever else views its memory. A change in
// place of one would be unknown to the history of the others. So an output comes as a copy if
// anything that is left after the call has its memory: an input, a captured tensor, an output.

/// A function from tensors to tensors: the user's, with all that is not a tensor left out.
using TensorFunction = std::function<std::vector<at::Tensor>(std::vector<at::Tensor>)>;

inline bool needs_gradient(const at::Tensor& tensor) {
  return tensor.defined() && tensor.requires_grad();
}

/// Whether another tensor has the same memory.
inline bool shares_memory(const at::Tensor& tensor) {
  return tensor.has_storage() && tensor.storage().use_count() > 1;
}

/// Stands for a whole function in the autograd graph, and runs it again in backward.
class RecomputeNode final : public torch::autograd::Node {
 public:
  /// Runs `function`, and gives its outputs a history that keeps none of its activations.
  static std::vector<at::Tensor> run(TensorFunction function, std::vector<at::Tensor> inputs,
                                     RecomputeContext context);

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    released_ = true;
    inputs_.clear();
    function_ = nullptr;
    context_.reset();
  }

  std::string name() const override { return "torchamp::checkpoint"; }

  /// What a tensor is, seen from outside.
  struct OutputInfo {
    std::vector<std::int64_t> sizes;
    std::optional<at::ScalarType> dtype;  // unset: an undefined tensor
    std::optional<at::Device> device;
    bool operator==(const OutputInfo&) const = default;
    static OutputInfo of(const at::Tensor& tensor) {
      if (!tensor.defined()) return {};
      return {tensor.sizes().vec(), tensor.scalar_type(), tensor.device()};
    }
  };

 protected:
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;

 private:
  /// The sinks of a recomputation by the place of their next edge, and those of inputs as a set;
  /// and those of captured views whose base has changed, with the outer edge behind each.
  struct Sinks {
    struct View {
      NodePtr sink;
      torch::autograd::Edge outer;
    };
    std::vector<NodePtr> by_edge;
    std::unordered_set<torch::autograd::Node*> of_inputs;
    std::unordered_map<torch::autograd::Edge, View> of_views;
  };

  /// Turns the edges that leave the recomputed graph to sinks, and back at the end.
  class Cuts {
   public:
    Cuts(const RecomputeNode& node, const std::vector<at::Tensor>& outputs, const NodeEpoch& epoch,
         Sinks& sinks);
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
    };
    std::vector<Cut> cuts_;
  };

  /// The outer edge to which a single path leads from a node that the forward left behind.
  std::optional<torch::autograd::Edge> outer_edge_behind(torch::autograd::Edge edge) const;
  /// Sends what arrived at `view` on to the outer edge behind it.
  static at::Tensor sent_on(const torch::autograd::Edge& view, const torch::autograd::Edge& outer,
                            const at::Tensor& gradient);

  bool released_ = false;
  NodeEpoch forward_;
  TensorFunction function_;
  std::vector<torch::autograd::SavedVariable> inputs_;
  std::optional<RecomputeContext> context_;
  std::vector<std::optional<std::size_t>> edge_of_input_;  // its place among the next edges
  std::unordered_map<torch::autograd::Edge, std::size_t> outer_edges_;  // to their places
  std::size_t inner_leaves_ = 0;          // made by the function itself; nobody sees their gradient
  std::vector<OutputInfo> outputs_;       // all that the function gave
  std::vector<std::size_t> own_outputs_;  // the places of those whose history is this node
};

inline std::vector<at::Tensor> RecomputeNode::run(TensorFunction function,
                                                  std::vector<at::Tensor> inputs,
                                                  RecomputeContext context) {
  using torch::autograd::Edge;
  namespace impl = torch::autograd::impl;

  NodePtr pointer = make_node<RecomputeNode>();
  auto& node = static_cast<RecomputeNode&>(*pointer);
  std::unordered_map<torch::autograd::Node*, std::size_t> input_of_sink;
  std::vector<at::Tensor> cut_inputs = inputs;
  std::vector<std::uint32_t> versions;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    node.inputs_.emplace_back(inputs[i], /*is_output=*/false);
    versions.push_back(version_of(inputs[i]));
    if (!needs_gradient(inputs[i])) continue;
    const NodePtr sink = make_node<GradientSink>();
    input_of_sink.emplace(sink.get(), i);
    cut_inputs[i] = with_history(inputs[i], sink);
  }

  node.forward_ = NodeEpoch();
  std::vector<at::Tensor> outputs;
  {
    const EmptyCastCache cache;
    outputs = function(std::move(cut_inputs));
  }
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    TORCH_CHECK(version_of(inputs[i]) == versions[i], "checkpoint: the function changed its ", i,
                ". tensor input in place, so that backward cannot run it again. Let it work on a "
                "clone.");
  }

  std::vector<torch::autograd::Node*> roots;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    node.outputs_.push_back(OutputInfo::of(outputs[i]));
    if (!needs_gradient(outputs[i])) continue;
    const Edge edge = impl::gradient_edge(outputs[i]);
    if (const auto same = input_of_sink.find(edge.function.get()); same != input_of_sink.end()) {
      outputs[i] = inputs[same->second];
    } else if (node.forward_.is_younger(*edge.function)) {
      node.own_outputs_.push_back(i);
      roots.push_back(edge.function.get());
    }
  }
  node.forward_.end();
  if (roots.empty()) return outputs;

  std::vector<Edge> outer;
  std::unordered_set<Edge> known;
  walk_graph(roots, [&](auto&, std::size_t, const Edge& edge) {
    if (node.forward_.is_younger(*edge.function)) return true;
    if (!input_of_sink.contains(edge.function.get()) && known.insert(edge).second) {
      outer.push_back(edge);
    }
    return false;
  });
  known.clear();
  for (const std::size_t i : node.own_outputs_) outputs[i] = outputs[i].detach();
  // The activations are gone.
  for (const std::size_t i : node.own_outputs_) {
    if (shares_memory(outputs[i])) outputs[i] = outputs[i].clone();
  }

  // A leaf that only its node knows was made by the function itself.
  torch::autograd::edge_list edges;
  for (const at::Tensor& input : inputs) {
    if (needs_gradient(input)) {
      node.edge_of_input_.emplace_back(edges.size());
      edges.push_back(impl::gradient_edge(input));
    } else {
      node.edge_of_input_.emplace_back(std::nullopt);
    }
  }
  for (Edge& edge : outer) {
    const auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(edge.function.get());
    if (leaf && leaf->variable.use_count() == 1) {
      ++node.inner_leaves_;
      continue;
    }
    node.outer_edges_.emplace(edge, edges.size());
    edges.push_back(std::move(edge));
  }
  node.set_next_edges(std::move(edges));
  node.function_ = std::move(function);
  node.context_ = std::move(context);
  for (const std::size_t i : node.own_outputs_) {
    impl::set_gradient_edge(outputs[i], {pointer, node.add_input_metadata(outputs[i])});
  }
  return outputs;
}

inline std::optional<torch::autograd::Edge> RecomputeNode::outer_edge_behind(
    torch::autograd::Edge edge) const {
  while (forward_.is_younger(*edge.function)) {
    torch::autograd::Edge only;
    for (const torch::autograd::Edge& next : edge.function->next_edges()) {
      if (!next.is_valid()) continue;
      if (only.is_valid()) return std::nullopt;
      only = next;
    }
    if (!only.is_valid()) return std::nullopt;
    if (outer_edges_.contains(only)) return only;
    edge = std::move(only);
  }
  return std::nullopt;
}

inline at::Tensor RecomputeNode::sent_on(const torch::autograd::Edge& view,
                                         const torch::autograd::Edge& outer,
                                         const at::Tensor& gradient) {
  return torch::autograd::Engine::get_default_engine().execute(
      {view}, {gradient}, /*keep_graph=*/true,
      /*create_graph=*/torch::autograd::GradMode::is_enabled(), /*accumulate_grad=*/false,
      {outer})[0];
}

inline RecomputeNode::Cuts::Cuts(const RecomputeNode& node, const std::vector<at::Tensor>& outputs,
                                 const NodeEpoch& epoch, Sinks& sinks) {
  static constexpr const char* unlike_forward =
      " than the forward did. The function must do the same both times; LibTorch's own random "
      "generators are put back for it, others are not.";
  std::vector<torch::autograd::Node*> roots;
  for (const std::size_t i : node.own_outputs_) {
    TORCH_CHECK(i < outputs.size() && needs_gradient(outputs[i]),
                "checkpoint: the recomputation gave other outputs", unlike_forward);
    roots.push_back(outputs[i].grad_fn().get());
  }
  std::size_t unknown_leaves = 0;
  walk_graph(roots, [&](auto& from, std::size_t index, const torch::autograd::Edge& edge) {
    if (sinks.of_inputs.contains(edge.function.get())) return false;
    if (const auto outer = node.outer_edges_.find(edge); outer != node.outer_edges_.end()) {
      auto& sink = sinks.by_edge[outer->second];
      if (!sink) sink = GradientSink::for_edge(edge);
      cuts_.push_back({&from, index, edge});
      return false;
    }
    if (epoch.is_younger(*edge.function)) return true;
    if (const auto outer = node.outer_edge_behind(edge)) {
      auto& outer_sink = sinks.by_edge[node.outer_edges_.at(*outer)];
      if (!outer_sink) outer_sink = GradientSink::for_edge(*outer);
      const auto [view, is_new] = sinks.of_views.try_emplace(edge);
      if (is_new) view->second = {GradientSink::for_edge(edge), *outer};
      cuts_.push_back({&from, index, edge});
      return false;
    }
    ++unknown_leaves;
    return false;
  });
  std::size_t known = node.outer_edges_.size();
  for (const auto& [edge, place] : node.outer_edges_) known -= sinks.by_edge[place] ? 1 : 0;
  TORCH_CHECK(known == 0 && unknown_leaves == node.inner_leaves_,
              "checkpoint: the recomputation used other parameters or captured tensors",
              unlike_forward);
  for (const Cut& cut : cuts_) {
    const auto view = sinks.of_views.find(cut.edge);
    cut.node->next_edges()[cut.index] = {view == sinks.of_views.end()
                                             ? sinks.by_edge[node.outer_edges_.at(cut.edge)]
                                             : view->second.sink,
                                         0};
  }
}

inline torch::autograd::variable_list RecomputeNode::apply(
    torch::autograd::variable_list&& gradients) {
  TensorFunction function;
  std::vector<at::Tensor> inputs;
  std::optional<RecomputeContext> context;
  {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(!released_, torch::autograd::ERR_BACKWARD_TWICE);
    function = function_;
    context = context_;
    for (const auto& input : inputs_) inputs.push_back(input.unpack());
  }

  // With create_graph, the recomputed graph stays connected to the inputs' history.
  const bool create_graph = torch::autograd::GradMode::is_enabled();
  Sinks sinks{std::vector<NodePtr>(num_outputs()), {}, {}};
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!edge_of_input_[i]) continue;
    NodePtr& sink = sinks.by_edge[*edge_of_input_[i]];
    sink = make_node<GradientSink>();
    if (create_graph) sink->set_next_edges({next_edge(*edge_of_input_[i])});
    sinks.of_inputs.insert(sink.get());
    inputs[i] = with_history(inputs[i], sink);
  }

  const NodeEpoch epoch;
  std::vector<at::Tensor> outputs;
  {
    const torch::autograd::AutoGradMode grad_mode(true);
    const AutocastStateGuard autocast(context->autocast);
    const EmptyCastCache cache;
    const BufferScope buffers(context->buffers);
    std::optional<RngScope> rng;
    if (context->rng) rng.emplace(*context->rng);
    outputs = function(std::move(inputs));
  }
  for (std::size_t i = 0; i < outputs_.size(); ++i) {
    const bool same =
        outputs.size() == outputs_.size() && OutputInfo::of(outputs[i]) == outputs_[i];
    TORCH_CHECK(same,
                "checkpoint: the recomputation gave an output of another shape, dtype or "
                "device than the forward did. The function must do the same both times.");
  }

  const Cuts cuts(*this, outputs, epoch, sinks);
  torch::autograd::edge_list from;
  torch::autograd::variable_list arriving;
  for (std::size_t i = 0; i < own_outputs_.size(); ++i) {
    if (!gradients[i].defined()) continue;
    from.push_back(torch::autograd::impl::gradient_edge(outputs[own_outputs_[i]]));
    arriving.push_back(std::move(gradients[i]));
  }
  torch::autograd::edge_list to;
  std::vector<std::size_t> places;
  for (std::size_t place = 0; place < num_outputs(); ++place) {
    if (!task_should_compute_output(place)) continue;
    to.emplace_back(sinks.by_edge[place], 0);
    places.push_back(place);
  }
  std::vector<std::pair<torch::autograd::Edge, torch::autograd::Edge>> views;
  for (const auto& [edge, view] : sinks.of_views) {
    if (!task_should_compute_output(outer_edges_.at(view.outer))) continue;
    to.emplace_back(view.sink, 0);
    views.emplace_back(edge, view.outer);
  }
  torch::autograd::variable_list result(num_outputs());
  if (from.empty() || to.empty()) return result;
  torch::autograd::variable_list arrived = torch::autograd::Engine::get_default_engine().execute(
      from, arriving, /*keep_graph=*/create_graph, create_graph, /*accumulate_grad=*/false, to);
  for (std::size_t i = 0; i < places.size(); ++i) result[places[i]] = std::move(arrived[i]);
  for (std::size_t i = 0; i < views.size(); ++i) {
    const at::Tensor& gradient = arrived[places.size() + i];
    if (!gradient.defined()) continue;
    const auto& [view, outer] = views[i];
    const at::Tensor part = sent_on(view, outer, gradient);
    at::Tensor& sum = result[outer_edges_.at(outer)];
    sum = sum.defined() && part.defined() ? sum + part : part.defined() ? part : sum;
  }
  return result;
}

}  // namespace torchamp::detail
