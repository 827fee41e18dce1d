// SPDX-License-Identifier: BSD-3-Clause
// Orders of calls that train wrongly: what a scaler hears in an iteration, and warns of.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/any.h>
#include <c10/core/Layout.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/device_work.h"
#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/detail/core/scaler/plain_clips.h"
#include "torchamp/detail/core/scaler/plain_steps.h"
#include "torchamp/detail/core/scaler/shared_gradients.h"
#include "torchamp/version.h"

namespace torchamp::detail {

// Note [Orders that train wrongly]
// Some orders of calls step with gradients that have another scale than the scaler divides by. What
// tells is found without a look at values, and where a program may mean it. (Only before a warning,
// values are read: zeros are right at any scale, and a copy of stepped weights was not stepped.)
//
//   a clip without the scaler    it leaves a note of a gradient, by identity and version. One that
//                                a step finds as it was left, and that is later than scale(), was
//                                clipped while scaled.
//   backward() without scale()   an iteration has gradients but no scale(), and an earlier one had;
//                                or it has scaled losses alone, numbers with a graph, and none of
//                                them has run its backward. (Another tensor that was scaled may be
//                                a gradient, which a backward takes without a word.)
//   a clip before backward()     it leaves a note of a parameter that has no gradient.
//   backward() after unscale_    a scaled loss looks, when its backward begins and ends, whether it
//                                changes gradients that are unscaled.
//   a gradient divided twice     see Note [Gradients of several optimizers].
//   optimizer.step()             see Note [A step beside the scaler] and
//                                Note [A step that skips nothing].
//   no zero_grad() after a skip  a scaled loss looks, when its backward begins, whether the
//                                gradient that the last step left is as it was.
//
// A program that has asked for the scale may multiply by it, and hears nothing. Scaling a number
// that has no graph, such as 1, asks for it, too.

/// What the backward of scaled losses has done in an iteration, as the hooks tell that share this.
/// Backwards of several devices come from several threads, so each public function takes the lock
/// for all of its work.
class ScaledBackward {
 public:
  /// From now on the backward of `scaled` tells. What has no graph may be a gradient.
  static void watch(const std::shared_ptr<ScaledBackward>& backward, const at::Tensor& scaled);

  /// Whether any has run, or what was scaled may be a gradient, with which another goes on.
  bool may_have_run() const {
    const std::scoped_lock lock(mutex_);
    return has_run_ || has_scaled_gradient_;
  }

  /// unscale_() or step() has left the gradients of `optimizer` as they are now, also where the
  /// step was skipped: a backward that adds to them is told.
  void note_left(const torch::optim::Optimizer& optimizer) {
    const std::scoped_lock lock(mutex_);
    // A program that has asked for the scale may have added to unscaled ones: what was noted of
    // these before is out of date.
    if (has_added(optimizer)) drop(optimizer);
    unscaled_.note(optimizer);
    if (plain_steps_.is_looking()) SteppedWeights::note(optimizer);
  }
  /// A clip that knows the scaler has written to unscaled gradients of `optimizer`.
  TORCHAMP_RARE void note_clipped(const torch::optim::Optimizer& optimizer) {
    const std::scoped_lock lock(mutex_);
    unscaled_.note_clipped(optimizer);
  }
  /// See UnscaledGradients.
  void check_unshared(const torch::optim::Optimizer& optimizer, const char* call) const {
    const std::scoped_lock lock(mutex_);
    unscaled_.check_unshared(optimizer, call);
  }
  /// Whether a backward has added to one since, that `optimizer` still has.
  bool any_added(const torch::optim::Optimizer& optimizer) const {
    const std::scoped_lock lock(mutex_);
    return has_added(optimizer);
  }
  TORCHAMP_RARE void forget(const torch::optim::Optimizer& optimizer) {
    const std::scoped_lock lock(mutex_);
    drop(optimizer);
  }
  /// Whether a step of the last iteration has left a gradient that was still there, as it was, when
  /// the first backward of this one began.
  bool has_kept_gradients() const {
    const std::scoped_lock lock(mutex_);
    const auto is_there = [](const UnscaledGradients::Left& left) {
      return left.gradient.is(gradient_of(left.parameter.lock()));
    };
    return has_kept_gradients_ && std::any_of(last_left_.begin(), last_left_.end(), is_there);
  }
  /// See UnscaledGradients.
  std::vector<at::Tensor> written_weights(const OptimizerIdentity& optimizer) const {
    const std::scoped_lock lock(mutex_);
    return unscaled_.written_weights(optimizer);
  }
  /// A loss stays as it is, at a scale of 1, so no hook will tell when its backward begins: it is
  /// taken to begin now.
  void note_loss_without_hook() {
    const std::scoped_lock lock(mutex_);
    look_for_kept_gradients();
  }

  /// What to warn of, see PlainSteps.
  struct Told {
    bool plain_step, all_fp64;
  };
  Told end_iteration() {
    const std::scoped_lock lock(mutex_);
    const bool all_fp64 = plain_steps_.all_fp64() && !std::exchange(warned_of_fp64_, true);
    // What this iteration's optimizers have left is looked at twice before it is forgotten.
    const bool any_plain_step = plain_steps_.end_iteration(unscaled_);
    last_left_.clear();
    unscaled_.for_first([this](const UnscaledGradients::Left& one) { last_left_.push_back(one); });
    unscaled_.clear();
    added_.clear();
    has_run_ = has_scaled_gradient_ = has_kept_gradients_ = false;
    return {any_plain_step, all_fp64};
  }

 private:
  /// A gradient that was unscaled in this iteration, as another backward finds it.
  struct Found {
    UnscaledGradients::Name owner;
    WeakTensor parameter;
    SeenTensor gradient;
    bool is_as_left;  ///< by its owner, not written to since
  };

  /// A hook at each scaled loss, which a thread of autograd calls before the loss's gradient flows
  /// on. `task` is autograd's number of this call of backward(). Takes the lock.
  static void on_begin(const std::shared_ptr<ScaledBackward>& backward, int task);
  /// Autograd's callback once that call has written all gradients, and not if it throws. Takes the
  /// lock.
  void on_end(const std::vector<Found>& at_begin, const std::vector<PlainSteps::Scaled>& weights);

  // What follows takes no lock: the caller holds it.

  void look_for_kept_gradients();
  bool has_added(const torch::optim::Optimizer& optimizer) const {
    return !added_.empty() && any_gradient(optimizer, [this](const at::Tensor& gradient) {
      return std::any_of(added_.begin(), added_.end(),
                         [&](const WeakTensor& one) { return one.is(gradient); });
    });
  }
  TORCHAMP_RARE void drop(const torch::optim::Optimizer& optimizer) {
    std::erase_if(added_, [&](const WeakTensor& one) {
      return any_gradient(optimizer, [&](const at::Tensor& its) { return one.is(its); });
    });
    unscaled_.forget(optimizer);
  }
  bool watches_gradients() const { return !unscaled_.empty() || plain_steps_.is_looking(); }
  std::vector<Found> find_unscaled() const;

  mutable std::mutex mutex_;  // of all that follows
  bool has_run_ = false, has_scaled_gradient_ = false;
  UnscaledGradients unscaled_;                      // and by whom
  PlainSteps plain_steps_;                          // of optimizers that this scaler does not step
  std::list<WeakTensor> added_;                     // gradients
  std::vector<UnscaledGradients::Left> last_left_;  // of the last iteration, one of each optimizer
  bool has_kept_gradients_ = false;
  bool warned_of_fp64_ = false;
  int task_ = -1;  // autograd's, in which the last backward was seen
};

/// What one scaler has heard in an iteration. Only the thread that calls the scaler uses it; what
/// backward threads tell is in `backward`.
class StepOrder {
 public:
  explicit StepOrder(bool scale_is_fixed) : is_fixed_(scale_is_fixed) {}

  /// Shared with hooks, which may outlive the scaler.
  std::shared_ptr<ScaledBackward> backward = std::make_shared<ScaledBackward>();

  void note_scaled() {
    scaled_at_ = PlainClips::tick();
    if (GraphBody::is_running()) asked_for_good_ = true;  // a replay scales, too
  }
  void note_asked(bool for_good) {
    asked_ = true;
    asked_for_good_ |= for_good;
  }
  /// The program has set the scale of this iteration, or has got it with the state.
  void note_known() { known_ = true; }
  /// What to warn of.
  ScaledBackward::Told end_iteration() {
    had_scale_ |= scaled_at_ != 0;
    scaled_at_ = 0;
    ScaledBackward::Told told = backward->end_iteration();
    told.plain_step = told.plain_step && !was_asked() && !is_fixed_;
    asked_ = known_ = false;
    began_at_ = PlainClips::tick();
    return told;
  }
  /// Warns once of a clip before the gradients came that are now stepped with.
  void warn_of_early_clip(const torch::optim::Optimizer& optimizer) {
    if (warned_of_early_clip_ || !PlainClips::any_in_vain_since(began_at_, optimizer, true)) return;
    warned_of_early_clip_ = true;
    warn(
        {"GradScaler::step: a clip in this iteration found no gradients of this optimizer, and "
         "none followed after backward(), so nothing was clipped. Clip after the last backward(). "
         "This warning is given once."});
  }
  TORCHAMP_RARE static void warn_of_plain_step() {
    warn(
        {"GradScaler::update: weights that no scaler.step() of this iteration steps were changed "
         "while their gradients were scaled. optimizer.step() steps with gradients that are too "
         "large by the scale: call scaler.step(optimizer) for each optimizer, before update(). "
         "This warning is given once."});
  }
  TORCHAMP_RARE static void warn_of_fp64() {
    warn(
        {"GradScaler::update: every weight that the scaled losses are computed from is fp64, which "
         "a region never casts, so all products were computed in fp64. Make the model fp32. This "
         "warning is given once."});
  }
  /// Whether something was scaled in this iteration.
  bool was_scaled() const { return scaled_at_ != 0; }
  /// Whether something was, after `time` (PlainClips::tick()).
  bool was_scaled_since(uint64_t time) const { return scaled_at_ > time; }
  /// Whether the program may multiply by the scale.
  bool was_asked() const { return asked_ || asked_for_good_; }
  /// Throws where a gradient that is to be divided has been for another optimizer. Warns once where
  /// they may not be scaled, and once where they were clipped while scaled.
  void check(const torch::optim::Optimizer& optimizer, const char* call) {
    backward->check_unshared(optimizer, call);
    if (was_asked() || is_fixed_) return;
    // A program that has not scaled anything yet gets an error elsewhere.
    const bool scaled_nothing = scaled_at_ == 0 && had_scale_;
    const bool ran_no_backward = scaled_at_ != 0 && !backward->may_have_run();
    if (scaled_nothing || ran_no_backward) {
      if (warned_of_scale_ || !any_gradient(optimizer, is_not_zero)) return;
      warned_of_scale_ = true;
      warn({call, ": ",
            scaled_nothing ? "nothing was scaled since the last update()"
                           : "no backward() of what scale() returned was called",
            ", so the scale is not that of these gradients. Call scaler.scale(loss).backward() in "
            "each iteration, and update() once, after the last step. This warning is given once."});
    } else if (scaled_at_ != 0 && !warned_of_clip_ && !known_ &&
               PlainClips::any_since(scaled_at_, optimizer)) {
      warned_of_clip_ = true;
      warn({call,
            ": these gradients were clipped while scaled, so the scaled norm was limited. Call "
            "clip_grad_norm_(scaler, optimizer, max_norm), or unscale_ before the clip. This "
            "warning is given once."});
    }
  }

 private:
  /// Zeros are right at any scale, those of a batch that was passed over, say. Looked for on the
  /// host alone: a step waits for no device.
  TORCHAMP_RARE static bool is_not_zero(const at::Tensor& gradient) {
    const InternalOps guard;
    const bool is_looked_at = gradient.is_cpu() && gradient.layout() == at::kStrided;
    return !is_looked_at || gradient.any().item<bool>();
  }

  uint64_t scaled_at_ = 0;                  // 0 if nothing was in this iteration
  uint64_t began_at_ = PlainClips::tick();  // the iteration
  bool had_scale_ = false;                  // some earlier iteration
  bool asked_ = false, asked_for_good_ = false, known_ = false;
  bool is_fixed_;  // only update(new_scale) changes the scale
  bool warned_of_scale_ = false, warned_of_clip_ = false, warned_of_early_clip_ = false;
};

}  // namespace torchamp::detail
