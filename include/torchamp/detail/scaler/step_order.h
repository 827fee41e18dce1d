// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "torchamp/detail/graph/body.h"
#include "torchamp/detail/tensors.h"

namespace torchamp::detail {

// Note [Orders that train wrongly]
// Some orders of calls step with gradients that have another scale than the scaler divides by. What
// tells is found without a look at values, and where a program may mean it:
//
//   a clip without the scaler    it leaves a note of a gradient, by identity and version. One that
//                                a step finds as it was left, and that is later than scale(), was
//                                clipped while scaled.
//   backward() without scale()   an iteration has gradients but no scale(), and an earlier one had.
//   a clip before backward()     it leaves a note of a parameter that has no gradient.
//   backward() after unscale_    a scaled loss looks, when its backward begins and ends, whether it
//                                changes gradients that are unscaled.
//
// A program that has asked for the scale may multiply by it, and hears nothing.

/// A gradient as it was at some time. Does not keep it alive.
struct SeenGradient {
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  explicit SeenGradient(const at::Tensor& gradient)
      : tensor(gradient.getIntrusivePtr()), version(version_of(gradient)) {}
  bool is(const at::Tensor& other) const {
    return tensor._unsafe_get_target() == other.unsafeGetTensorImpl();
  }
  bool operator==(const SeenGradient& other) const {
    return tensor._unsafe_get_target() == other.tensor._unsafe_get_target() &&
           version == other.version;
  }

  Weak tensor;
  uint32_t version;
};

/// Calls `f` with each parameter of `optimizer` until it returns true; whether it did.
template <class F>
bool any_parameter(const torch::optim::Optimizer& optimizer, const F& f) {
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (parameter.defined() && f(parameter)) return true;
    }
  }
  return false;
}
/// The same with each gradient.
template <class F>
bool any_gradient(const torch::optim::Optimizer& optimizer, const F& f) {
  return any_parameter(optimizer, [&f](const at::Tensor& parameter) {
    const at::Tensor& gradient = parameter.unsafeGetTensorImpl()->grad();
    return gradient.defined() && f(gradient);
  });
}

/// Changes, but for chance, where a gradient is written to or replaced.
inline uint64_t versions_of_gradients(const torch::optim::Optimizer& optimizer) {
  uint64_t sum = 0;
  any_gradient(optimizer, [&sum](const at::Tensor& gradient) {
    sum = sum * 31 + reinterpret_cast<std::uintptr_t>(gradient.unsafeGetTensorImpl());
    sum = sum * 31 + version_of(gradient);
    return false;
  });
  return sum;
}

/// The latest clips of this thread: those that named no scaler, and those that found no gradient.
class PlainClips {
 public:
  /// A clip has left this gradient, one of those that it has limited, or has found none and was
  /// given this parameter.
  static void note(const at::Tensor& gradient_or_parameter, bool knows_scale = false) {
    latest = tick();
    clips()[latest % most] = {latest, SeenGradient(gradient_or_parameter), knows_scale};
  }
  /// Whether one was made after `time`.
  static bool any_since(uint64_t time) { return latest > time; }
  /// Whether one that was made after `time` has left one of these gradients as it is.
  static bool any_since(uint64_t time, const torch::optim::Optimizer& optimizer) {
    return any_gradient(optimizer, [time](const at::Tensor& gradient) {
      return std::ranges::any_of(clips(), [&](const Clip& clip) {
        return clip.time > time && !clip.knows_scale && *clip.left == SeenGradient(gradient);
      });
    });
  }
  /// Whether one that was made after `time` has found none of these gradients, and none has come
  /// since that has found some. `only_late`: not if there are none now either.
  static bool any_in_vain_since(uint64_t time, const torch::optim::Optimizer& optimizer,
                                bool only_late) {
    uint64_t in_vain = 0, found = 0;
    if (!any_since(time)) return false;
    any_parameter(optimizer, [&](const at::Tensor& parameter) {
      const at::Tensor& gradient = parameter.unsafeGetTensorImpl()->grad();
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
    std::optional<SeenGradient> left{};
    bool knows_scale = false;
  };
  static std::array<Clip, most>& clips() {
    static thread_local std::array<Clip, most> clips;
    return clips;
  }
  static inline thread_local uint64_t latest = 0;
};

/// What one scaler has heard in an iteration.
class StepOrder {
 public:
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
    began_at_ = PlainClips::tick();
  }
  /// Warns once of a clip before the gradients came that are now stepped with.
  void warn_of_early_clip(const torch::optim::Optimizer& optimizer) {
    if (warned_of_early_clip_ || !PlainClips::any_in_vain_since(began_at_, optimizer, true)) return;
    warned_of_early_clip_ = true;
    TORCH_WARN(
        "GradScaler::step: a clip in this iteration has found no gradients of this optimizer, and "
        "none came after backward(): nothing was clipped. Clip after the last backward(). This is "
        "said once.");
  }
  /// Whether something was scaled in this iteration.
  bool was_scaled() const { return scaled_at_ != 0; }
  /// Whether the program may multiply by the scale.
  bool was_asked() const { return asked_ || asked_for_good_; }
  /// Whether what comes to be divided may not be scaled, as far as can be told at once.
  bool is_suspect() const {
    return (scaled_at_ == 0 ? had_scale_ && !warned_of_scale_
                            : PlainClips::any_since(scaled_at_) && !warned_of_clip_) &&
           !was_asked();
  }
  /// Warns once of each, if is_suspect().
  void warn(const torch::optim::Optimizer& optimizer, const char* call) {
    if (scaled_at_ == 0) {
      if (!any_gradient(optimizer, [](const at::Tensor&) { return true; })) return;
      warned_of_scale_ = true;
      TORCH_WARN(call,
                 ": nothing was scaled since the last update(), so these gradients are divided by "
                 "a scale that they do not have. Call scaler.scale(loss).backward() in each "
                 "iteration. This is said once.");
    } else if (PlainClips::any_since(scaled_at_, optimizer)) {
      warned_of_clip_ = true;
      TORCH_WARN(call,
                 ": these gradients were clipped while they were scaled, by a clip that does not "
                 "know the scale: it has limited the scaled norm. Call clip_grad_norm_(scaler, "
                 "optimizer, max_norm), or unscale_ before the clip. This is said once.");
    }
  }

 private:
  uint64_t scaled_at_ = 0;                  // 0 if nothing was in this iteration
  uint64_t began_at_ = PlainClips::tick();  // the iteration
  bool had_scale_ = false;                  // some earlier iteration
  bool asked_ = false, asked_for_good_ = false;
  bool warned_of_scale_ = false, warned_of_clip_ = false, warned_of_early_clip_ = false;
};

/// Finds out whether a scaled loss adds to the gradients of an optimizer that are unscaled.
class UnscaledGradients {
 public:
  explicit UnscaledGradients(const torch::optim::Optimizer& optimizer) {
    any_parameter(optimizer, [this](const at::Tensor& parameter) {
      parameters_.emplace_back(parameter.getIntrusivePtr());
      return false;
    });
  }

  /// From now on the backward of `scaled` looks, while `gradients` exist.
  static void watch(const std::shared_ptr<UnscaledGradients>& gradients, const at::Tensor& scaled);

  /// Whether it has added to one that `optimizer` still has.
  bool any_added(const torch::optim::Optimizer& optimizer) const {
    return !added_.empty() && any_gradient(optimizer, [this](const at::Tensor& gradient) {
      return std::ranges::any_of(added_, [&](const auto& added) { return added.is(gradient); });
    });
  }

 private:
  std::vector<SeenGradient> seen() const {
    std::vector<SeenGradient> seen;
    for (const SeenGradient::Weak& weak : parameters_) {
      const auto parameter = weak.lock();
      seen.emplace_back(parameter ? parameter->grad() : at::Tensor());
    }
    return seen;
  }
  void end() {
    const std::vector<SeenGradient> now = seen();
    for (auto i = before_.size(); i-- > 0;) {
      if (!(now[i] == before_[i])) added_.push_back(now[i]);
    }
    before_.clear();
  }

  std::vector<SeenGradient::Weak> parameters_;
  std::vector<SeenGradient> before_, added_;
  int task_ = -1;  // autograd's, in which before_ was seen
};

}  // namespace torchamp::detail
