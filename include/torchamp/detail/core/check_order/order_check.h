// SPDX-License-Identifier: BSD-3-Clause
// Warnings about calls that train wrongly, in a scaler's first iterations.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <cstdint>
#include <list>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "torchamp/detail/core/base/device_work.h"
#include "torchamp/detail/core/base/snapshot.h"
#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/check_order/gradient_norms.h"
#include "torchamp/detail/core/gradients/clip_calls.h"
#include "torchamp/detail/core/gradients/optimizer_identity.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

// Note [Orders that train wrongly]
// Some orders of calls train wrongly, but each call by itself is right. In a scaler's first
// iterations an OrderCheck takes a Snapshot of weights and gradients at each event:
//
//   scaled      scale() has multiplied a loss: the weights that it is computed from
//   backward    of a scaled loss begins, and ends: the gradients, their norms, and the weights
//   divided     unscale_ or step divides an optimizer's gradients: before it, and after it
//   stepped     step has stepped or skipped an optimizer: before it, and after it
//   updated     update() ends the iteration
//
// Each row of the table in order_check-inl.h describes a mistake: the event at which it is
// detected, its condition, and the sentence of the warning. A row warns once. The first iterations
// may be slow, so a row may examine whatever it needs; later iterations cost nothing. A mistake
// that begins later is not reported. In a CudaGraph, which cannot read, and in all iterations
// after one, nothing is checked.

/// Watches the first iterations of one scaler. Not safe to use from several threads at once.
class OrderCheck {
 public:
  explicit OrderCheck(std::int64_t first_iterations) : iterations_left_(first_iterations) {}

  /// The scaler's state at an event.
  struct Moment {
    /// Whether the program has read the scale, and may multiply by it.
    bool knows_scale = false;
    /// Whether only update(new_scale) changes it.
    bool is_fixed = false;
    /// The optimizer whose gradients are divided, or that steps; null at other events.
    const torch::optim::Optimizer* optimizer = nullptr;
  };
  /// The sentences to warn with after the event, because a handler of warnings may call the scaler.
  using Sentences = std::vector<const char*>;

  void note_scaled(const at::Tensor& scaled);
  /// Records a loss that is unchanged at a scale of 1, so no hook reports when its backward begins.
  void note_loss_without_hook();
  void note_backward_begins();
  void note_backward_ends();

  /// Before unscale_ or step divides the gradients by the scale.
  Sentences divides(const Moment& moment);
  /// Before step steps, even if unscale_ has divided the gradients.
  Sentences steps(const Moment& moment);
  /// unscale_ has divided the gradients. `found_inf`: 0-dim fp32.
  void note_unscaled(const torch::optim::Optimizer& optimizer, const at::Tensor& found_inf);
  /// step has stepped or skipped; `skipped` is false if only a device holds the flag.
  void note_stepped(const torch::optim::Optimizer& optimizer, bool skipped);
  /// The program drops the records of the optimizer.
  void forget(const torch::optim::Optimizer& optimizer);
  /// The iteration ends.
  Sentences updates(const Moment& moment);
  /// The program has set or stored the scale of this iteration.
  void note_scale_is_known() { scale_is_known_ = true; }

  /// Whether this iteration is checked.
  bool is_looking() const { return iterations_left_ > 0 && !GraphBody::is_running(); }

 private:
  /// A weight of the scaled losses, at the end of their last backward.
  struct Trained {
    TensorSnapshot weight{}, gradient{};
    bool in_this_iteration = false, in_earlier_iteration = false;
    bool was_cleared = false;  ///< or written to in another way, before the next backward
  };
  /// What the scaler has done with an optimizer in the iteration.
  struct Handled {
    OptimizerIdentity optimizer;
    Snapshot parameters{}, gradients{};
    bool skipped = false;
    at::Tensor found_inf{};  ///< defined if it was unscaled and not stepped
  };
  struct Row;
  static const Row rows[];
  enum class When { divides, steps, updates };

  Sentences made_at(When when, const Moment& moment);

  // The rows' conditions.
  bool scales_nothing(const Moment& moment) const;
  bool runs_no_backward(const Moment& moment) const;
  bool clips_scaled(const Moment& moment) const;
  bool has_clipped_scaled(const Moment& moment) const;
  bool clips_nothing(const Moment& moment) const;
  bool keeps_gradients(const Moment& moment) const;
  bool steps_beside(const Moment& moment) const;
  bool has_stepped_with_infs(const Moment& moment) const;
  bool is_all_fp64(const Moment& moment) const;

  void add_leaves(const at::Tensor& scaled);
  Handled& handled(const torch::optim::Optimizer& optimizer);
  void look_for_kept_gradients();
  void collect_unchecked_steps();
  bool moves_gradients() const;
  bool is_copy(const at::Tensor& weight) const;

  std::int64_t iterations_left_;
  std::uint64_t warned_ = 0;  // a bit for each row

  // Of this iteration:
  std::uint64_t began_ = ClipCalls::now();
  bool scaled_ = false, scale_is_known_ = false;
  bool ran_backward_ = false;
  bool scaled_gradient_ = false;  // or a tensor that may be one, which another backward takes
  std::vector<WeakTensor> leaves_;
  std::unordered_set<const c10::TensorImpl*> reached_;  // those, and the graphs' other leaves
  bool any_matrix_ = false, all_fp64_ = true;           // of these
  Snapshot weights_at_begin_, gradients_at_begin_;      // of leaves_, of the last backward
  std::list<Handled> handled_;
  std::optional<GradientNorms> norms_;  // when the last backward had ended

  // Of this iteration and of earlier ones:
  bool had_scale_ = false;
  std::unordered_map<const c10::TensorImpl*, Trained> trained_;
  std::list<Handled> last_handled_;
  std::vector<WeakTensor> kept_;       // gradients of a skipped step to which a backward has added
  std::list<GradientNorms> compared_;  // whose numbers a device has not sent yet
  HostMirror unchecked_inf_;           // of steps after unscale_
  std::vector<WeakTensor> unchecked_weights_;
};

}  // namespace TORCHAMP_NAMESPACE::detail

#if TORCHAMP_BODIES
#include "torchamp/detail/core/check_order/order_check-inl.h"  // IWYU pragma: export
#endif
