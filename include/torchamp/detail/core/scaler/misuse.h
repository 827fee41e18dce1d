// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "torchamp/detail/core/base/device_work.h"
#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/version.h"

namespace torchamp::detail {

// Note [Orders that train wrongly]
// Some orders of calls step with gradients that have another scale than the scaler divides by. What
// tells is found without a look at values, and where a program may mean it:
//
//   a clip without the scaler    it leaves a note of a gradient, by identity and version. One that
//                                a step finds as it was left, and that is later than scale(), was
//                                clipped while scaled.
//   backward() without scale()   an iteration has gradients but no scale(), and an earlier one had;
//                                or none of what was scaled has run its backward.
//   a clip before backward()     it leaves a note of a parameter that has no gradient.
//   backward() after unscale_    a scaled loss looks, when its backward begins and ends, whether it
//                                changes gradients that are unscaled.
//
// A program that has asked for the scale may multiply by it, and hears nothing.

/// The latest clips of this thread: those that named no scaler, and those that found no gradient.
class PlainClips {
 public:
  /// A clip has left this gradient, one of those that it has limited, or has found none and was
  /// given this parameter.
  static void note(const at::Tensor& gradient_or_parameter, bool knows_scale = false) {
    latest = tick();
    clips()[latest % most] = {latest, SeenTensor(gradient_or_parameter), knows_scale};
  }
  /// Whether one that was made after `time` has left one of these gradients as it is.
  static bool any_since(uint64_t time, const torch::optim::Optimizer& optimizer) {
    return latest > time && any_gradient(optimizer, [time](const at::Tensor& gradient) {
             return std::any_of(clips().begin(), clips().end(), [&](const Clip& clip) {
               return clip.time > time && !clip.knows_scale && clip.left->is_unchanged(gradient);
             });
           });
  }
  /// Whether one that was made after `time` has found none of these gradients, and none has come
  /// since that has found some. `only_late`: not if there are none now either.
  static bool any_in_vain_since(uint64_t time, const torch::optim::Optimizer& optimizer,
                                bool only_late) {
    uint64_t in_vain = 0, found = 0;
    if (latest <= time) return false;
    any_parameter(optimizer, [&](const at::Tensor& parameter) {
      const at::Tensor& gradient = gradient_of(parameter);
      for (const Clip& clip : clips()) {
        if ((only_late && !gradient.defined()) || clip.time <= time) continue;
        if (clip.left->is(parameter)) in_vain = std::max(in_vain, clip.time);
        if (clip.left->is(gradient)) found = std::max(found, clip.time);
      }
      return false;
    });
    return in_vain > found;
  }
  /// Later than all before, in all threads.
  static uint64_t tick() {
    static std::atomic<uint64_t> time = 0;
    return time.fetch_add(1, std::memory_order_relaxed) + 1;
  }

 private:
  static constexpr uint64_t most = 8;
  struct Clip {
    uint64_t time = 0;
    std::optional<SeenTensor> left{};
    bool knows_scale = false;
  };
  static std::array<Clip, most>& clips() {
    static thread_local std::array<Clip, most> clips;
    return clips;
  }
  static inline thread_local uint64_t latest = 0;
};

/// What the backward of scaled losses has done in an iteration, as the hooks tell that share this.
class ScaledBackward {
 public:
  /// From now on the backward of `scaled` tells. What has no graph may be a gradient.
  static void watch(const std::shared_ptr<ScaledBackward>& backward, const at::Tensor& scaled);
  /// Whether any has run.
  bool has_run() const { return has_run_; }

  /// The gradients of `optimizer` are unscaled from now on.
  void note_unscaled(const torch::optim::Optimizer& optimizer) {
    if (any_added(optimizer)) forget(optimizer);
    any_parameter(optimizer, [this](const at::Tensor& parameter) {
      unscaled_.emplace_back(parameter);
      return false;
    });
  }
  /// Whether a backward has added to one since, that `optimizer` still has.
  bool any_added(const torch::optim::Optimizer& optimizer) const {
    return !added_.empty() && any_gradient(optimizer, [this](const at::Tensor& gradient) {
      return std::any_of(added_.begin(), added_.end(),
                         [&](const WeakTensor& one) { return one.is(gradient); });
    });
  }
  void forget(const torch::optim::Optimizer& optimizer) {
    std::erase_if(added_, [&](const WeakTensor& one) {
      return any_gradient(optimizer, [&](const at::Tensor& its) { return one.is(its); });
    });
    std::erase_if(unscaled_, [&](const WeakTensor& one) {
      return any_parameter(optimizer, [&](const at::Tensor& its) { return one.is(its); });
    });
  }
  void end_iteration() {
    has_run_ = false;
    unscaled_.clear();
    added_.clear();
  }

 private:
  /// A gradient as a backward has found it.
  struct Found {
    WeakTensor parameter;
    SeenTensor gradient;
  };

  static void begin(const std::shared_ptr<ScaledBackward>& backward);
  void end(const std::vector<Found>& gradients);

  std::atomic<bool> has_run_ = false;
  std::mutex mutex_;                  // of what follows, where losses on several devices run
  std::vector<WeakTensor> unscaled_;  // parameters
  std::vector<WeakTensor> added_;     // gradients
  int task_ = -1;                     // autograd's, in which the last backward was seen
};

/// What one scaler has heard in an iteration.
class StepOrder {
 public:
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
  void end_iteration() {
    had_scale_ |= scaled_at_ != 0;
    scaled_at_ = 0;
    asked_ = false;
    backward->end_iteration();
    began_at_ = PlainClips::tick();
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
  /// Whether something was scaled in this iteration.
  bool was_scaled() const { return scaled_at_ != 0; }
  /// Whether the program may multiply by the scale.
  bool was_asked() const { return asked_ || asked_for_good_; }
  /// Warns once where the gradients that are to be divided may not be scaled, and once where they
  /// were clipped while scaled.
  void check(const torch::optim::Optimizer& optimizer, const char* call) {
    if (was_asked()) return;
    if (scaled_at_ == 0 ? had_scale_ : !backward->has_run()) {
      if (warned_of_scale_ || !any_gradient(optimizer)) return;
      warned_of_scale_ = true;
      warn({call, ": ",
            scaled_at_ == 0 ? "nothing was scaled since the last update()"
                            : "no backward() of what scale() returned was called",
            ", so the scale is not that of these gradients. Call scaler.scale(loss).backward() in "
            "each iteration, and update() once, after the last step. This warning is given once."});
    } else if (scaled_at_ != 0 && !warned_of_clip_ &&
               PlainClips::any_since(scaled_at_, optimizer)) {
      warned_of_clip_ = true;
      warn({call,
            ": these gradients were clipped while scaled, so the scaled norm was limited. Call "
            "clip_grad_norm_(scaler, optimizer, max_norm), or unscale_ before the clip. This "
            "warning is given once."});
    }
  }

 private:
  uint64_t scaled_at_ = 0;                  // 0 if nothing was in this iteration
  uint64_t began_at_ = PlainClips::tick();  // the iteration
  bool had_scale_ = false;                  // some earlier iteration
  bool asked_ = false, asked_for_good_ = false;
  bool warned_of_scale_ = false, warned_of_clip_ = false, warned_of_early_clip_ = false;
};

/// The tensors that a scaler has made and that are still in use, to tell a loss that is scaled
/// twice. Known by identity alone: what is computed from one of them (its sum with another, its
/// gradients for a penalty) is not taken for it. Keeps none of them alive.
class ScaledOutputs {
 public:
  void check_not_in(const at::Tensor& output, const char* call) const {
    for (const Scaled& scaled : scaled_) {
      TORCHAMP_CHECK_VALUE(!scaled.tensor.is(output), call,
                           ": this tensor has been scaled already, and its gradients would be too "
                           "large by the scale. Pass the loss as it was before scale().");
    }
  }

  void add(const at::Tensor& scaled) {
    std::erase_if(scaled_, [end = scaled_.data() + scaled_.size()](const Scaled& one) {
      return end - &one >= most_gone && one.tensor.is_gone();
    });
    const auto& node = scaled.grad_fn();
    scaled_.push_back({WeakTensor(scaled), node.get(), node ? node->sequence_nr() : 0});
  }

  /// Whether `node` has made one of the last few, which may be gone.
  bool are_made_by(const torch::autograd::Node& node) const {
    return std::any_of(scaled_.begin(), scaled_.end(), [&](const Scaled& one) {
      return one.maker == &node && one.sequence == node.sequence_nr();
    });
  }

 private:
  struct Scaled {
    WeakTensor tensor;
    const torch::autograd::Node* maker;
    uint64_t sequence;  // one at the same address has another number
  };
  static constexpr std::ptrdiff_t most_gone = 8;

  std::vector<Scaled> scaled_;
};

}  // namespace torchamp::detail
