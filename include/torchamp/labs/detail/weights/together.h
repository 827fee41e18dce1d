// SPDX-License-Identifier: BSD-3-Clause
// Casts of weights in groups.
#pragma once

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/record_function.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/autograd_node.h"
#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/extras/weights/cast.h"
#include "torchamp/detail/extras/weights/derived.h"
#include "torchamp/detail/extras/weights/weight_stamp.h"

namespace TORCHAMP_NAMESPACE::detail {

// Note [Weights cast together]
// LibTorch casts each weight separately at its first use in a region, and each gradient separately
// in backward. A model mostly uses the same weights in the same order in each region. So torchamp
// records, per thread, which weights a region casts, and in which order: a CastChunk. If a later
// region casts the first weight of a chunk, one op casts the whole chunk, each weight into its own
// tensor, with one node of the graph for all. If a region has not used a weight of a chunk, the
// weight is removed when the chunk is cast the next time. A weight in no chunk is recorded for a
// new chunk.
//
// The casts live as long as entries of LibTorch's own cache: they are attached to an entry of that
// cache, the cast of an empty tensor of the thread. So if the cache is cleared, they are dropped,
// and only the thread that made them can find them. In a capture the casts are part of the
// graph.
//
// The graph goes from a transpose's cast directly to the weight, without the transpose. So a
// transpose counts as a use of the weight only if its node does nothing else: see
// passes_gradient_on().
//
// The gradients of a chunk reach the weights when the last of them is computed, so later than with
// separate nodes. If a weight has two or more other gradients, the order of the sum may differ.
//
// Backward reaches a chunk's node if it reaches any of the casts. The node then passes undefined
// gradients to weights whose casts were not reached. Without hooks LibTorch ignores these; so
// weights with hooks have their own nodes.

/// An argument of an op: a weight, or the transpose of a weight, as in torch::nn::Linear.
struct WeightUse {
  at::Tensor weight;  ///< undefined if the argument is neither
  bool is_transposed = false;

  /// Distinguishes uses while their weights live.
  std::uintptr_t key() const { return key_of(weight.unsafeGetTensorImpl(), is_transposed); }
  static std::uintptr_t key_of(const c10::TensorImpl* weight, bool is_transposed) {
    return reinterpret_cast<std::uintptr_t>(weight) | static_cast<std::uintptr_t>(is_transposed);
  }
};

/// Whether LibTorch's cache would store the cast of a tensor in a region of the device, and
/// LibTorch counts the tensor's changes.
inline bool is_castable_weight(const at::TensorBase& tensor, at::DeviceType device) {
  if (!tensor.requires_grad() || !tensor.is_leaf() || tensor.is_view()) return false;
  if (tensor.scalar_type() != at::kFloat || tensor.unsafeGetTensorImpl()->get_backend_meta()) {
    return false;
  }
  const at::Tensor weight(tensor);
  return at::autocast::is_eligible(weight, device) && counts_changes(weight) &&
         weight.is_non_overlapping_and_dense() && !at::isTensorSubclassLike(weight);
}

/// Whether a hook of the program runs when a gradient reaches the node.
inline bool has_hooks(torch::autograd::Node& node) {
  return !node.pre_hooks().empty() || !node.post_hooks().empty() ||
         !node.tensor_pre_hooks().empty() || !node.retains_grad_hooks().empty();
}

/// Whether code of the program runs when the weight's gradient arrives.
inline bool has_gradient_hooks(const at::Tensor& weight) {
  namespace impl = torch::autograd::impl;
  if (!impl::hooks(weight).empty() || impl::post_acc_grad_hooks(weight)) return true;
  const auto accumulator = impl::try_get_grad_accumulator(weight);
  return accumulator && has_hooks(*accumulator);
}

/// Whether the gradient of a view, a transpose of the weight by its strides, is the transpose of
/// the weight's gradient: there is no custom function or hook between them, and the view was made
/// with a graph.
inline bool passes_gradient_on(const at::Tensor& view, const at::TensorBase& weight) {
  if (!c10::GradMode::is_enabled()) return true;
  if (!view.requires_grad()) return false;
  const auto& node = view.grad_fn();
  if (!node || has_hooks(*node)) return false;
  const std::string name = node->name();
  return (name == "TBackward0" || name == "TransposeBackward0") &&
         node->next_edge(0).function ==
             torch::autograd::impl::try_get_grad_accumulator(at::Tensor(weight));
}

/// Whether a view has the two dimensions of the weight, transposed, and its memory. (A view from
/// before a set_data() has the old memory.)
inline bool is_transpose(const at::Tensor& view, const at::TensorBase& weight) {
  return view.dim() == 2 && weight.dim() == 2 && view.size(0) == weight.size(1) &&
         view.size(1) == weight.size(0) && view.stride(0) == weight.stride(1) &&
         view.stride(1) == weight.stride(0) && view.storage_offset() == weight.storage_offset() &&
         storage_of(view) == storage_of(at::Tensor(weight)) && !view.is_neg() && !has_tangent(view);
}

/// Identifies the weight.
inline WeightUse weight_use(const at::Tensor& tensor, at::DeviceType device) {
  if (!tensor.defined() || tensor.scalar_type() != at::kFloat || tensor.is_nested()) return {};
  if (!tensor.is_view()) {
    return is_castable_weight(tensor, device) ? WeightUse{tensor, false} : WeightUse();
  }
  const at::TensorBase& weight = tensor._base();
  const bool is_known = is_transpose(tensor, weight) && is_castable_weight(weight, device) &&
                        passes_gradient_on(tensor, weight);
  return is_known ? WeightUse{at::Tensor(weight), true} : WeightUse();
}

/// The node of a chunk's casts.
class CastChunkBackward final : public torch::autograd::Node {
 public:
  explicit CastChunkBackward(at::ScalarType of_weights) : dtype_(of_weights) {}

  /// Puts `cast`, one of the weight or its transpose, into the graph.
  static void add(const NodePtr& node, const WeightUse& use, at::Tensor& cast) {
    auto& self = static_cast<CastChunkBackward&>(*node);
    self.is_transposed_.push_back(use.is_transposed);
    self.add_next_edge(torch::autograd::impl::gradient_edge(use.weight));
    torch::autograd::create_gradient_edge(cast, node);
  }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    const bool is_recorded = c10::GradMode::is_enabled();
    torch::autograd::variable_list results(gradients.size());
    Tensors narrow, wide;
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      at::Tensor gradient = std::move(gradients[i]);
      if (!gradient.defined() || !task_should_compute_output(i)) continue;
      if (is_transposed_[i]) gradient = gradient.t();
      if (is_recorded || at::isTensorSubclassLike(gradient) || gradient.layout() != at::kStrided ||
          !gradient.is_non_overlapping_and_dense()) {
        results[i] = gradient.to(dtype_);
      } else {
        wide.push_back(results[i] = at::empty_like(gradient, gradient.options().dtype(dtype_)));
        narrow.push_back(std::move(gradient));
      }
    }
    if (!wide.empty()) at::_foreach_copy_(wide, narrow);
    return results;
  }
  std::string name() const override { return "CastChunkBackward"; }

 private:
  at::ScalarType dtype_;
  std::vector<bool> is_transposed_;
};

/// Weights that a region cast one after another.
struct CastChunk {
  struct Member {
    WeakTensor weight;
    bool is_transposed;
    bool is_used = true;  // in the latest region that cast the chunk

    std::uintptr_t key() const { return WeightUse::key_of(weight.address(), is_transposed); }
  };

  /// Limits of a chunk: few weights, so that unused casts cost little; few elements, because
  /// backward holds the gradients of a chunk until the last is computed.
  static constexpr std::size_t most_members = 32;
  static constexpr int64_t most_elements = int64_t{1} << 23;

  bool takes(const at::Tensor& weight) const {
    return weight.device() == device && members.size() < most_members &&
           elements + weight.numel() <= most_elements;
  }

  at::Device device;
  std::vector<Member> members;
  int64_t elements = 0;
  std::uint64_t cast_in = 0;  // the number of the latest CastPool that cast it
};

/// The chunks of a thread and device type.
struct CastChunks {
  struct Place {
    WeakTensor weight;
    std::shared_ptr<CastChunk> chunk;
  };
  std::unordered_map<std::uintptr_t, Place> of_weight;  // by WeightUse::key()
  at::Tensor anchor;        // the empty weight whose cast has the CastPool
  std::uint64_t pools = 0;  // number of pools that were made

  /// Removes destroyed weights.
  void purge() {
    std::erase_if(of_weight, [](const auto& one) { return one.second.weight.is_gone(); });
  }
};

/// The casts of a thread and device type. Lives as long as an entry of LibTorch's cache.
class CastPool final : public c10::BackendMeta {
 public:
  explicit CastPool(CastChunks& chunks) : chunks_(chunks), number_(++chunks.pools) {
    chunks.purge();
  }

  /// The cast for a use; undefined if LibTorch must make it.
  at::Tensor cast(const WeightUse& use, at::ScalarType dtype) {
    Entry* entry = find(use);
    const bool is_known = entry != nullptr;
    if (!is_known || !entry->serves(use.weight)) {
      if (!cast_chunk(use, dtype)) {
        if (!is_known) note(use);
        cast_alone(use, dtype);
      }
      entry = find(use);
    }
    return entry->take(use, dtype);
  }

 private:
  struct Entry {
    WeightStamp stamp;
    WeakTensor weight;                    // protects its address from reuse
    at::Tensor cast;                      // undefined: LibTorch casts
    std::shared_ptr<CastChunk> in_chunk;  // null: cast alone
    std::size_t member = 0;               // the place in the chunk
    bool is_taken = false;

    bool serves(const at::Tensor& of) const {
      if (!cast.defined()) return true;
      return stamp.is_of(of) && stamp.holds(of) &&
             (!c10::GradMode::is_enabled() || cast.requires_grad());
    }

    at::Tensor take(const WeightUse& use, at::ScalarType dtype) {
      if (!cast.defined()) return {};
      // Without a group each transpose has its own cast, so the gradients of two transposes add in
      // the weight's dtype.
      if (is_taken && use.is_transposed && cast.requires_grad()) return {};
      WeightCastNote note{.hit = is_taken,
                          .from = use.weight.scalar_type(),
                          .to = dtype,
                          .numel = use.weight.numel()};
      note.in_place = !is_taken && in_chunk != nullptr;
      note.tell();
      is_taken = true;
      if (in_chunk) in_chunk->members[member].is_used = true;
      return cast;
    }
  };

  Entry* find(const WeightUse& use) {
    const auto place = entries_.find(use.key());
    return place == entries_.end() ? nullptr : &place->second;
  }

  void put(const WeightUse& use, at::Tensor cast, std::shared_ptr<CastChunk> in_chunk = nullptr,
           std::size_t member = 0) {
    entries_.insert_or_assign(use.key(), Entry{WeightStamp(use.weight), WeakTensor(use.weight),
                                               std::move(cast), std::move(in_chunk), member});
  }

  /// Casts a weight like LibTorch's cache; LibTorch casts the transpose of a weight.
  void cast_alone(const WeightUse& use, at::ScalarType dtype) {
    const c10::InferenceMode normal(false);
    put(use, use.is_transposed ? at::Tensor() : use.weight.to(dtype));
  }

  /// Records a weight that is in no chunk.
  void note(const WeightUse& use) {
    if (!open_ || !open_->takes(use.weight)) {
      open_ = std::make_shared<CastChunk>(CastChunk{.device = use.weight.device(), .members = {}});
    }
    chunks_.of_weight.insert_or_assign(use.key(), CastChunks::Place{WeakTensor(use.weight), open_});
    open_->members.push_back({WeakTensor(use.weight), use.is_transposed});
    open_->elements += use.weight.numel();
  }

  /// Casts the chunk of this use, from this weight on; false if there is none. If the latest region
  /// has not used this weight, this may be the same region after its cache was cleared: so no
  /// member is removed from the chunk.
  bool cast_chunk(const WeightUse& first, at::ScalarType dtype) {
    const auto place = chunks_.of_weight.find(first.key());
    if (place == chunks_.of_weight.end()) return false;
    const std::shared_ptr<CastChunk> known = place->second.chunk;
    if (known == open_) return false;
    auto& all = known->members;
    auto from = std::ranges::find(all, first.key(), &CastChunk::Member::key);
    if (from == all.end()) return false;
    const bool begins = known->cast_in != number_ && from->is_used;
    if (begins) {
      std::erase_if(all, [](const auto& member) { return !member.is_used; });
      from = std::ranges::find(all, first.key(), &CastChunk::Member::key);
    }
    std::vector<WeightUse> uses;
    std::vector<std::size_t> members;
    for (auto member = from; member != all.end(); ++member) {
      WeightUse use{member->weight.lock(), member->is_transposed};
      if (!use.weight.defined() || use.weight.device() != known->device ||
          !is_castable_weight(use.weight, known->device.type())) {
        continue;
      }
      const Entry* const entry = find(use);
      if (entry != nullptr && entry->serves(use.weight)) continue;
      uses.push_back(std::move(use));
      members.push_back(static_cast<std::size_t>(member - all.begin()));
    }
    if (uses.size() < 2 || uses.front().key() != first.key()) return false;
    open_.reset();
    Tensors casts = cast_all(uses, dtype);
    if (begins) {  // after what can fail
      for (auto& member : all) member.is_used = false;
    }
    known->cast_in = number_;
    for (std::size_t i = 0; i < uses.size(); ++i) {
      put(uses[i], std::move(casts[i]), known, members[i]);
    }
    return true;
  }

  static Tensors cast_all(const std::vector<WeightUse>& uses, at::ScalarType dtype) {
    const c10::InferenceMode normal(false);
    Tensors weights, casts;
    {
      const at::AutoDispatchBelowADInplaceOrView plain;
      const at::DisableRecordFunctionGuard told_by_notes;
      for (const WeightUse& use : uses) {
        weights.push_back(use.weight);
        casts.push_back(at::empty_like(use.weight, use.weight.options().dtype(dtype)));
      }
      at::_foreach_copy_(casts, weights);
      for (std::size_t i = 0; i < uses.size(); ++i) {
        if (uses[i].is_transposed) casts[i] = casts[i].t();
      }
    }
    if (c10::GradMode::is_enabled()) put_into_graph(uses, casts);
    return casts;
  }

  static void put_into_graph(const std::vector<WeightUse>& uses, Tensors& casts) {
    const NodePtr of_chunk = make_node<CastChunkBackward>(at::kFloat);
    for (std::size_t i = 0; i < uses.size(); ++i) {
      const bool is_alone = has_gradient_hooks(uses[i].weight);
      CastChunkBackward::add(is_alone ? make_node<CastChunkBackward>(at::kFloat) : of_chunk,
                             uses[i], casts[i]);
    }
  }

  CastChunks& chunks_;
  std::uint64_t number_;
  std::unordered_map<std::uintptr_t, Entry> entries_;
  std::shared_ptr<CastChunk> open_;  // the chunk that is being recorded
};

/// The calling thread's pool for regions of a device, and the tensor that keeps it alive.
struct CastPoolHandle {
  at::Tensor keeps;
  CastPool* pool;
};

/// The calling thread's pool; a new one if LibTorch's cache has been cleared. `dtype` is the
/// region's dtype; the region uses LibTorch's cache.
inline CastPoolHandle cast_pool(at::Device device, at::ScalarType dtype) {
  static thread_local std::unordered_map<at::DeviceType, CastChunks> of_thread;
  CastChunks& chunks = of_thread[device.type()];
  const c10::InferenceMode normal(false);
  const at::AutoGradMode with_gradients(true);
  const at::DisableRecordFunctionGuard not_an_op_of_the_program;
  if (!chunks.anchor.defined()) {
    chunks.anchor =
        at::empty({0}, at::TensorOptions(device).dtype(at::kFloat)).set_requires_grad(true);
  }
  at::Tensor keeps = at::autocast::cached_cast(dtype, chunks.anchor, device.type());
  c10::TensorImpl* const impl = keeps.unsafeGetTensorImpl();
  if (impl->get_backend_meta() == nullptr) {
    impl->set_backend_meta(c10::make_intrusive<CastPool>(chunks));
  }
  auto* const pool = static_cast<CastPool*>(impl->get_backend_meta());
  return {std::move(keeps), pool};
}

}  // namespace TORCHAMP_NAMESPACE::detail
