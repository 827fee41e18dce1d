// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "torchamp/autocast_state.h"
#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/extras/recompute/cuts.h"
#include "torchamp/detail/extras/shared/kept_tensors.h"
#include "torchamp/detail/extras/shared/rng_state.h"

namespace TORCHAMP_NAMESPACE::detail {

// Note [Weight casts in a recomputed function]
// LibTorch's cache of cast weights returns tensors with a history, to all threads. A cast from
// before the call would be an outer edge that the recomputation, after the region's end, cannot
// reach. A cast of the recomputation, whose edges are cut, would reach the graphs of other threads.
// So the function bypasses this cache, both times. torchamp's own cache holds values, and each use
// has its own node: these may be shared.

/// The state of the forward for the recomputation.
struct RecomputeContext {
  AutocastState autocast = AutocastState::of_this_thread();
  std::optional<RngState> rng;      // unset: not preserved
  std::vector<at::Tensor> buffers;  // that the function changes, and that must change only once
};

// Note [How a function is recomputed]
// The forward call runs the function with autograd on, on inputs detached from their history. The
// resulting graph is searched once for the edges out of it: to the parameters and other tensors
// with a history that the function uses besides its inputs. Then it is dropped, with the
// activations, and replaced by one RecomputeNode with the edges of the inputs and those outer
// edges. So autograd has all dependencies of the function: inputs that do not require grad,
// torch::autograd::grad() of a captured parameter, hooks on parameters (such as the hooks of data
// parallelism) and nested checkpoints behave as without a checkpoint.
//
// Backward rebuilds the graph, redirects each edge out of it to a GradientSink, runs the engine
// from the outputs to the sinks, and returns the gradients there. Without the sinks the engine
// would continue into the graph of the captured tensors, which is the outer backward's task.
//
// "Out of it" means: to a leaf, or to a node that is older than the call or of another thread.

// Note [Outputs that share memory]
// An output's history is the RecomputeNode, even if other tensors share its memory, and their
// history would miss an in-place change of it. So an output is copied if a tensor that remains
// after the call shares its memory: an input, a captured tensor, an output. Outputs without a
// history are copied likewise, except tensors that the function passes through, which belong to
// their creator.

/// The user's function as a function from tensors to tensors.
using TensorFunction = std::function<std::vector<at::Tensor>(std::vector<at::Tensor>)>;

inline bool needs_gradient(const at::Tensor& tensor) {
  return tensor.defined() && tensor.requires_grad();
}

/// Whether another tensor has the same memory.
inline bool shares_memory(const at::Tensor& tensor) {
  return tensor.has_storage() && tensor.storage().use_count() > 1;
}

/// Represents a whole function in the autograd graph, and runs it again in backward.
class RecomputeNode final : public torch::autograd::Node {
 public:
  /// Runs `function`, and gives its outputs a history without its activations.
  static std::vector<at::Tensor> run(TensorFunction function, const std::vector<at::Tensor>& inputs,
                                     RecomputeContext context);

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    released_ = true;
    inputs_.clear();
    function_ = nullptr;
    context_.reset();
  }

  std::string name() const override { return "torchamp::checkpoint"; }

  /// The outward properties of a tensor; unset for an undefined one.
  struct OutputKind : TensorKind {
    std::vector<int64_t> sizes;
    bool operator==(const OutputKind&) const = default;
  };
  static std::optional<OutputKind> kind_of(const at::Tensor& tensor) {
    if (!tensor.defined()) return std::nullopt;
    return OutputKind{TensorKind::of(tensor), tensor.sizes().vec()};
  }

 protected:
  inline torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;

 private:
  /// The inputs whose history a sink stands for, by the sink.
  using InputOfSink = std::unordered_map<torch::autograd::Node*, std::size_t>;

  // The steps of run(), which fill what apply() needs.
  std::vector<at::Tensor> run_first(const TensorFunction& function,
                                    const std::vector<at::Tensor>& inputs,
                                    InputOfSink& input_of_sink);
  std::vector<torch::autograd::Node*> find_own_outputs(std::vector<at::Tensor>& outputs,
                                                       const std::vector<at::Tensor>& inputs,
                                                       const InputOfSink& input_of_sink);
  void copy_other_outputs(std::vector<at::Tensor>& outputs) const;
  torch::autograd::edge_list edges_out_of(const std::vector<torch::autograd::Node*>& roots,
                                          const InputOfSink& input_of_sink) const;
  void set_edges(const std::vector<at::Tensor>& inputs, torch::autograd::edge_list outer);

  // The steps of apply().
  Sinks cut_inputs(std::vector<at::Tensor>& inputs, bool create_graph) const;
  static std::vector<at::Tensor> run_again(const TensorFunction& function,
                                           std::vector<at::Tensor> inputs,
                                           const RecomputeContext& context);
  std::vector<torch::autograd::Node*> roots_of(const std::vector<at::Tensor>& outputs) const;
  torch::autograd::variable_list run_backward(const std::vector<at::Tensor>& outputs,
                                              torch::autograd::variable_list gradients,
                                              const Sinks& sinks, bool create_graph) const;

  bool released_ = false;
  TensorFunction function_;
  std::vector<torch::autograd::SavedVariable> inputs_;
  std::optional<RecomputeContext> context_;
  std::vector<std::optional<std::size_t>> edge_of_input_;  // its place among the next edges
  DroppedGraph forward_;
  std::vector<std::optional<OutputKind>> outputs_;  // all that the function gave
  std::vector<std::size_t> own_outputs_;  // the places of those whose history is this node
};

/// Runs the function on inputs without their histories, and notes what it reads.
inline std::vector<at::Tensor> RecomputeNode::run_first(const TensorFunction& function,
                                                        const std::vector<at::Tensor>& inputs,
                                                        InputOfSink& input_of_sink) {
  std::vector<at::Tensor> cut_inputs = inputs;
  std::vector<uint32_t> versions;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    inputs_.emplace_back(inputs[i], /*is_output=*/false);
    versions.push_back(version_of(inputs[i]));
    if (!needs_gradient(inputs[i])) continue;
    const NodePtr sink = make_node<GradientSink>();
    input_of_sink.emplace(sink.get(), i);
    cut_inputs[i] = with_history(inputs[i], sink);
  }

  forward_.epoch = NodeEpoch();
  std::vector<at::Tensor> outputs;
  {
    const NoCastCache no_cache;
    ReadRecorder recorder;
    outputs = function(std::move(cut_inputs));
    forward_.reads = recorder.take();
  }
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    TORCH_CHECK(version_of(inputs[i]) == versions[i], "checkpoint: the function changed its ", i,
                ". tensor input in place, so backward cannot run it again. Let it use a clone.");
  }
  return outputs;
}

/// Finds the outputs whose history is this node, and returns the ends of their graph. An output
/// that is an input gets the input's history back.
inline std::vector<torch::autograd::Node*> RecomputeNode::find_own_outputs(
    std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
    const InputOfSink& input_of_sink) {
  std::vector<torch::autograd::Node*> roots;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    outputs_.push_back(kind_of(outputs[i]));
    if (!needs_gradient(outputs[i])) continue;
    const torch::autograd::Edge edge = torch::autograd::impl::gradient_edge(outputs[i]);
    if (const auto same = input_of_sink.find(edge.function.get()); same != input_of_sink.end()) {
      outputs[i] = inputs[same->second];
    } else if (forward_.epoch.is_younger(*edge.function)) {
      own_outputs_.push_back(i);
      roots.push_back(edge.function.get());
    }
  }
  forward_.epoch.end();
  return roots;
}

/// Copies outputs without this node's history where Note [Outputs that share memory] says so.
inline void RecomputeNode::copy_other_outputs(std::vector<at::Tensor>& outputs) const {
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (!outputs[i].defined() || std::ranges::count(own_outputs_, i) != 0) continue;
    const bool is_only_handed_on = outputs[i].use_count() > 1;
    const auto came_before = [&](const at::Tensor& other) { return other.is_same(outputs[i]); };
    if (is_only_handed_on ? std::any_of(outputs.data(), &outputs[i], came_before)
                          : shares_memory(outputs[i])) {
      outputs[i] = outputs[i].clone();
    }
  }
}

/// The edges out of the function's graph, other than those to its inputs.
inline torch::autograd::edge_list RecomputeNode::edges_out_of(
    const std::vector<torch::autograd::Node*>& roots, const InputOfSink& input_of_sink) const {
  torch::autograd::edge_list outer;
  std::unordered_set<torch::autograd::Edge> known;
  walk_graph(roots, [&](auto&, std::size_t, const torch::autograd::Edge& edge) {
    if (forward_.epoch.is_younger(*edge.function)) return true;
    if (!input_of_sink.contains(edge.function.get()) && known.insert(edge).second) {
      outer.push_back(edge);
    }
    return false;
  });
  return outer;
}

/// Takes the edges of the inputs, and the edges out of the dropped graph.
inline void RecomputeNode::set_edges(const std::vector<at::Tensor>& inputs,
                                     torch::autograd::edge_list outer) {
  torch::autograd::edge_list edges;
  for (const at::Tensor& input : inputs) {
    if (needs_gradient(input)) {
      edge_of_input_.emplace_back(edges.size());
      edges.push_back(torch::autograd::impl::gradient_edge(input));
    } else {
      edge_of_input_.emplace_back(std::nullopt);
    }
  }
  for (torch::autograd::Edge& edge : outer) {
    // A leaf known only to its node was made by the function itself.
    const auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(edge.function.get());
    if (leaf && leaf->variable.use_count() == 1) {
      ++forward_.inner_leaves;
      continue;
    }
    forward_.outer_edges.emplace(edge, edges.size());
    edges.push_back(std::move(edge));
  }
  set_next_edges(std::move(edges));
}

inline std::vector<at::Tensor> RecomputeNode::run(TensorFunction function,
                                                  const std::vector<at::Tensor>& inputs,
                                                  RecomputeContext context) {
  NodePtr pointer = make_node<RecomputeNode>();
  auto& node = static_cast<RecomputeNode&>(*pointer);
  InputOfSink input_of_sink;
  std::vector<at::Tensor> outputs = node.run_first(function, inputs, input_of_sink);
  const auto roots = node.find_own_outputs(outputs, inputs, input_of_sink);
  if (roots.empty()) {
    node.copy_other_outputs(outputs);
    return outputs;
  }

  torch::autograd::edge_list outer = node.edges_out_of(roots, input_of_sink);
  for (const std::size_t i : node.own_outputs_) outputs[i] = outputs[i].detach();
  // The activations are gone.
  node.copy_other_outputs(outputs);
  for (const std::size_t i : node.own_outputs_) {
    if (shares_memory(outputs[i])) outputs[i] = outputs[i].clone();
  }
  node.set_edges(inputs, std::move(outer));
  node.function_ = std::move(function);
  node.context_ = std::move(context);
  for (const std::size_t i : node.own_outputs_) {
    torch::autograd::impl::set_gradient_edge(outputs[i],
                                             {pointer, node.add_input_metadata(outputs[i])});
  }
  return outputs;
}

/// Makes the histories of inputs end in sinks. With `create_graph`, the recomputed graph stays
/// connected to the inputs' histories.
inline Sinks RecomputeNode::cut_inputs(std::vector<at::Tensor>& inputs, bool create_graph) const {
  Sinks sinks{std::vector<NodePtr>(num_outputs()), {}, {}};
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!edge_of_input_[i]) continue;
    NodePtr& sink = sinks.by_place[*edge_of_input_[i]];
    sink = make_node<GradientSink>();
    if (create_graph) sink->set_next_edges({next_edge(*edge_of_input_[i])});
    sinks.of_inputs.insert(sink.get());
    inputs[i] = with_history(inputs[i], sink);
  }
  return sinks;
}

/// Runs the function once more, in the state of its first run; `context` has that.
inline std::vector<at::Tensor> RecomputeNode::run_again(const TensorFunction& function,
                                                        std::vector<at::Tensor> inputs,
                                                        const RecomputeContext& context) {
  const torch::autograd::AutoGradMode grad_mode(true);
  const AutocastStateGuard autocast(context.autocast);
  const NoCastCache no_cache;
  WriteBack buffers;  // which are changed in copies
  const auto put_buffers_back = c10::make_scope_exit([&] { buffers.put_back(); });
  for (const at::Tensor& buffer : context.buffers) {
    buffers.add(buffer, WriteBack::Copies::none);
    if (buffer.defined()) buffer.set_data(buffer.detach().clone());
  }
  std::optional<RngScope> rng;
  if (context.rng) rng.emplace(*context.rng);
  return function(std::move(inputs));
}

/// The ends of the recomputed graph. Throws if the outputs are unlike the forward's.
inline std::vector<torch::autograd::Node*> RecomputeNode::roots_of(
    const std::vector<at::Tensor>& outputs) const {
  for (std::size_t i = 0; i < outputs_.size(); ++i) {
    TORCH_CHECK(outputs.size() == outputs_.size() && kind_of(outputs[i]) == outputs_[i],
                "checkpoint: the recomputation gave an output of another shape, dtype or "
                "device than the forward did. The function must do the same both times.");
  }
  std::vector<torch::autograd::Node*> roots;
  for (const std::size_t i : own_outputs_) {
    TORCH_CHECK(needs_gradient(outputs[i]), "checkpoint: the recomputation gave other outputs",
                unlike_forward);
    roots.push_back(outputs[i].grad_fn().get());
  }
  return roots;
}

/// The gradients at the sinks, by their places among the next edges. Gradients of a view are sent
/// to its base, see Note [Captured views whose base has changed].
inline torch::autograd::variable_list RecomputeNode::run_backward(
    const std::vector<at::Tensor>& outputs, torch::autograd::variable_list gradients,
    const Sinks& sinks, bool create_graph) const {
  torch::autograd::edge_list from;
  torch::autograd::variable_list arriving;
  for (std::size_t i = 0; i < own_outputs_.size(); ++i) {
    if (!gradients[i].defined()) continue;
    from.push_back(torch::autograd::impl::gradient_edge(outputs[own_outputs_[i]]));
    arriving.push_back(std::move(gradients[i]));
  }
  torch::autograd::edge_list to;
  std::vector<std::pair<std::size_t, torch::autograd::Edge>> ends;  // places, and views before them
  for (std::size_t place = 0; place < num_outputs(); ++place) {
    if (!task_should_compute_output(place)) continue;
    to.emplace_back(sinks.by_place[place], 0);
    ends.emplace_back(place, torch::autograd::Edge());
  }
  for (const auto& [edge, view] : sinks.of_views) {
    if (!task_should_compute_output(view.place)) continue;
    to.emplace_back(view.sink, 0);
    ends.emplace_back(view.place, edge);
  }
  torch::autograd::variable_list result(num_outputs());
  if (to.empty()) return result;
  auto& engine = torch::autograd::Engine::get_default_engine();
  torch::autograd::variable_list arrived = engine.execute(
      from, arriving, /*keep_graph=*/create_graph, create_graph, /*accumulate_grad=*/false, to);
  for (std::size_t i = 0; i < ends.size(); ++i) {
    const auto& [place, view] = ends[i];
    at::Tensor part = std::move(arrived[i]);
    if (view.is_valid()) {
      part = engine.execute({view}, {part}, /*keep_graph=*/true, create_graph,
                            /*accumulate_grad=*/false, {next_edge(place)})[0];
    }
    at::Tensor& sum = result[place];
    sum = sum.defined() && part.defined() ? sum + part : part.defined() ? part : sum;
  }
  return result;
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
    check_unchanged(forward_.reads);
  }
  const bool create_graph = torch::autograd::GradMode::is_enabled();
  Sinks sinks = cut_inputs(inputs, create_graph);
  const NodeEpoch epoch;
  const std::vector<at::Tensor> outputs = run_again(function, std::move(inputs), *context);
  const Cuts cuts(forward_, roots_of(outputs), epoch, sinks);
  return run_backward(outputs, std::move(gradients), sinks, create_graph);
}

}  // namespace TORCHAMP_NAMESPACE::detail
