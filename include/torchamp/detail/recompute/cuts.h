// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <cstddef>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "torchamp/detail/recompute/autograd_graph.h"
#include "torchamp/detail/recompute/gradient_sink.h"
#include "torchamp/detail/recompute/reads.h"

namespace torchamp::detail {

// Note [Captured views whose base has changed]
// After an in-place change of its base, a view's node is out of date, and LibTorch makes a new one
// when it is next asked for: while the forward runs, for a view that the function captures. It then
// looks like a node of the function's own, but the view keeps it, and the recomputation meets it
// again as an older node. So a node from the time of the forward from which a single path leads to
// an outer edge is no error: the gradient that arrives there is sent along that path.

/// What a RecomputeNode knows of the graph that its forward has dropped.
struct DroppedGraph {
  NodeEpoch epoch;
  /// The edges that left it, with their places among the RecomputeNode's next edges.
  std::unordered_map<torch::autograd::Edge, std::size_t> outer_edges;
  /// How many leaves the function made itself. Nobody sees their gradient.
  std::size_t inner_leaves = 0;
  ReadTensors reads;

  /// The outer edge to which a single path leads from a node that the forward left behind.
  std::optional<torch::autograd::Edge> outer_edge_behind(torch::autograd::Edge edge) const {
    while (epoch.is_younger(*edge.function)) {
      torch::autograd::Edge only;
      for (const torch::autograd::Edge& next : edge.function->next_edges()) {
        if (!next.is_valid()) continue;
        if (only.is_valid()) return std::nullopt;
        only = next;
      }
      if (!only.is_valid()) return std::nullopt;
      if (outer_edges.contains(only)) return only;
      edge = std::move(only);
    }
    return std::nullopt;
  }
};

/// The ends of a recomputed graph.
struct Sinks {
  struct View {
    NodePtr sink;
    torch::autograd::Edge outer;

    /// Sends what arrived for the view at `edge` on to the outer edge behind it.
    static at::Tensor send_on(const torch::autograd::Edge& edge, const torch::autograd::Edge& outer,
                              const at::Tensor& gradient) {
      return torch::autograd::Engine::get_default_engine().execute(
          {edge}, {gradient}, /*keep_graph=*/true,
          /*create_graph=*/torch::autograd::GradMode::is_enabled(), /*accumulate_grad=*/false,
          {outer})[0];
    }
  };
  std::vector<NodePtr> by_place;  // among the RecomputeNode's next edges
  std::unordered_set<torch::autograd::Node*> of_inputs;
  std::unordered_map<torch::autograd::Edge, View> of_views;
};

/// The end of errors about a recomputation that differs.
inline constexpr const char* unlike_forward =
    " than the forward did. The function must do the same both times; LibTorch's own random "
    "generators are put back for it, others are not.";

/// Turns the edges that leave a recomputed graph to sinks, and back at its end.
class Cuts {
 public:
  /// The graph that `roots` lead to, of nodes of `epoch`, is held against the one of the forward.
  Cuts(const DroppedGraph& forward, const std::vector<torch::autograd::Node*>& roots,
       const NodeEpoch& epoch, Sinks& sinks) {
    std::size_t unknown_leaves = 0;
    walk_graph(roots, [&](auto& from, std::size_t index, const torch::autograd::Edge& edge) {
      if (sinks.of_inputs.contains(edge.function.get())) return false;
      if (const auto outer = forward.outer_edges.find(edge); outer != forward.outer_edges.end()) {
        auto& sink = sinks.by_place[outer->second];
        if (!sink) sink = GradientSink::for_edge(edge);
        cuts_.push_back({&from, index, edge});
        return false;
      }
      if (epoch.is_younger(*edge.function)) return true;
      if (const auto outer = forward.outer_edge_behind(edge)) {
        auto& outer_sink = sinks.by_place[forward.outer_edges.at(*outer)];
        if (!outer_sink) outer_sink = GradientSink::for_edge(*outer);
        const auto [view, is_new] = sinks.of_views.try_emplace(edge);
        if (is_new) view->second = {GradientSink::for_edge(edge), *outer};
        cuts_.push_back({&from, index, edge});
        return false;
      }
      ++unknown_leaves;
      return false;
    });
    std::size_t missing = forward.outer_edges.size();
    for (const auto& [edge, place] : forward.outer_edges) missing -= sinks.by_place[place] ? 1 : 0;
    TORCH_CHECK(missing == 0 && unknown_leaves == forward.inner_leaves,
                "checkpoint: the recomputation used other parameters or captured tensors",
                unlike_forward);
    for (const Cut& cut : cuts_) {
      const auto view = sinks.of_views.find(cut.edge);
      cut.node->next_edges()[cut.index] = {view == sinks.of_views.end()
                                               ? sinks.by_place[forward.outer_edges.at(cut.edge)]
                                               : view->second.sink,
                                           0};
    }
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
  };
  std::vector<Cut> cuts_;
};

}  // namespace torchamp::detail
