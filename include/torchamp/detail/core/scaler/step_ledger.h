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
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/device_work.h"
#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/detail/core/scaler/loss_scale.h"
#include "torchamp/missing_gradients.h"
#include "torchamp/scaled_step.h"

namespace torchamp::detail {

// Note [An iteration]
//
// An iteration runs from one update() to the next. In it, each optimizer is, in this order,
//
//   ready     scale(), backward(), and as often as the program accumulates
//   unscaled  unscale_(): the gradients are divided by the scale, and whether one of them was inf
//             or NaN is recorded. step() does this first if the program has not.
//   stepped   step(): the optimizer has stepped or been skipped
//
// update() collects what was recorded of all of them and makes them "ready". So one scale serves
// several optimizers, each of which skips by itself, while one bad optimizer lowers the scale for
// all. One that is gone counts for the scale, and is not taken for another; see Note [Which
// optimizer it is].
//
// Gradients are checked as they are when they are unscaled, so an inf that the program puts in
// afterwards is stepped with (but see GradScalerOptions::recheck). A skipped step leaves the other
// gradients unscaled. With a ScaledStep optimizer that is "ready", the gradients are only checked
// and the division is left to the optimizer. Below a scale of 1, dividing may turn a finite
// gradient into an inf, which is looked for, too; see Note [A scale below 1].

/// The processes that have a piece each of some masters.
class Shards {
 public:
  Shards() = default;
  Shards(const Shards&) = delete;
  Shards& operator=(const Shards&) = delete;
  virtual ~Shards() = default;

  /// Makes a number the largest that any process has: found_inf, or the largest gradient.
  virtual void agree_largest(at::Tensor& number) const = 0;

  /// The norm of all gradients, from that of each process's own.
  virtual at::Tensor norm_of_all(const at::Tensor& own, double norm_type) const = 0;

  /// Throws for an optimizer that does not treat every element of a weight by itself.
  virtual void check(const torch::optim::Optimizer& optimizer, const char* call) const = 0;
};

/// Null for what is no piece of a master.
inline std::shared_ptr<Shards> shards_of(const at::Tensor& tensor) {
  const WeightMeta* const meta = weight_meta_of(tensor);
  return meta ? meta->shards : nullptr;
}

/// What the optimizer's parameters are pieces of; null if they are none. An error for an optimizer
/// that cannot step pieces, and for one of weights that have masters.
[[gnu::cold]] inline std::shared_ptr<Shards> shards_of(const torch::optim::Optimizer& optimizer,
                                                       const char* call) {
  std::shared_ptr<Shards> shards;
  any_parameter(optimizer, [&](const at::Tensor& tensor) {
    const WeightMeta* const meta = weight_meta_of(tensor);
    if (!meta) return false;
    TORCHAMP_CHECK(!meta->has_master_apart || meta->masters.expired(), call, ": the parameter ",
                   tensor.sizes(),
                   " of this optimizer belongs to a model under master weights, which would "
                   "overwrite the result of a step. Give the optimizer the masters' parameters().");
    shards = meta->shards;
    return shards != nullptr;
  });
  if (shards) shards->check(optimizer, call);
  return shards;
}

/// What clips leave to the next step of an optimizer.
struct ClipLeft {
  /// Undefined if there is nothing.
  [[gnu::cold]] static Divisor to(const torch::optim::Optimizer& optimizer) {
    const auto* const defers = dynamic_cast<const DefersClips*>(&optimizer);
    return defers ? defers->deferred_clip_.of(optimizer) : Divisor();
  }
  /// False if this optimizer's gradients have to be multiplied now.
  static bool can_be_left_to(const torch::optim::Optimizer& optimizer) {
    return dynamic_cast<const DefersClips*>(&optimizer) != nullptr;
  }
  /// On top of what is left already. Only where it can be.
  [[gnu::cold]] static void add(torch::optim::Optimizer& optimizer, const Divisor& divisor) {
    const InternalOps internal;
    dynamic_cast<DefersClips&>(optimizer).deferred_clip_.add(optimizer, divisor);
  }
  /// The same gradients have other values now. Asks no device for memory.
  static void keep(torch::optim::Optimizer& optimizer, const Divisor& divisor) {
    forget(optimizer);
    add(optimizer, divisor);
  }
  [[gnu::cold]] static void forget(torch::optim::Optimizer& optimizer) {
    if (auto* const defers = dynamic_cast<DefersClips*>(&optimizer)) {
      defers->deferred_clip_.forget();
    }
  }
  /// ScaledStep::step_scaled(); `facts` are for those who defer clips.
  static at::Tensor step_scaled(ScaledStep& optimizer, const at::Tensor& grad_scale,
                                const at::Tensor& found_inf, const StepFacts& facts) {
    auto* const defers = dynamic_cast<DefersClips*>(&optimizer);
    if (!defers) return optimizer.step_scaled(grad_scale, found_inf);
    defers->step_knowing(grad_scale, found_inf, facts);
    return {};
  }
};

/// What a StepResult answers from; shared by its copies. At first, that of a disabled scaler.
struct StepRecord {
  ReadOnce<bool> found_inf{.on_host = false};
  bool had_gradients = true;
  ReadOnce<double> scale{.on_host = 1.};  ///< what the gradients were scaled by
  SkipCount skips{0.};                    ///< bad iterations in a row before this one
  at::Tensor value{};                     ///< what the optimizer's step returned
  std::vector<MissingGradient> missing{};
  int64_t attempts = 1;  ///< evaluations of the first loss, for closures
};

/// How many parameters of `optimizer` have one. Reads no device.
inline std::size_t count_gradients(const torch::optim::Optimizer& optimizer) {
  std::size_t count = 0;
  any_gradient(optimizer, [&](const at::Tensor&) { return ++count == 0; });
  return count;
}

// Note [Which optimizer it is]
// An optimizer's address does not identify it: it may be moved, and another one created there. But
// each has its own map of states, which moves with it and has a maximum load factor, 1/2 by
// default. So an optimizer with records gets a load factor of its own, slightly below that.

/// Numbers optimizers.
class OptimizerNumber {
 public:
  /// 0 if `optimizer` has got none.
  static uint32_t of(const torch::optim::Optimizer& optimizer) {
    const float below_half = 0.5F - optimizer.state().max_load_factor();
    const bool is_ours = below_half > 0.F && below_half <= static_cast<float>(count) * spacing;
    return is_ours ? static_cast<uint32_t>(below_half / spacing) : 0;
  }

  /// Gives it one, if it has none.
  static uint32_t give(torch::optim::Optimizer& optimizer) {
    static std::atomic<uint32_t> last = 0;
    if (of(optimizer) == 0) {
      const uint32_t number = last++ % count + 1;
      optimizer.state().max_load_factor(0.5F - static_cast<float>(number) * spacing);
    }
    return of(optimizer);
  }

 private:
  static constexpr float spacing = 0x1p-25F;  // of fp32 numbers just below 1/2
  static constexpr uint32_t count = 1U << 21;
};

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
  [[gnu::cold]] static bool any_since(uint64_t time, const torch::optim::Optimizer& optimizer) {
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
  [[gnu::cold]] void note_unscaled(const torch::optim::Optimizer& optimizer) {
    if (any_added(optimizer)) forget(optimizer);
    any_parameter(optimizer, [this](const at::Tensor& parameter) {
      unscaled_.emplace_back(parameter);
      return false;
    });
  }
  /// Whether a backward has added to one since, that `optimizer` still has.
  [[gnu::cold]] bool any_added(const torch::optim::Optimizer& optimizer) const {
    return !added_.empty() && any_gradient(optimizer, [this](const at::Tensor& gradient) {
      return std::any_of(added_.begin(), added_.end(),
                         [&](const WeakTensor& one) { return one.is(gradient); });
    });
  }
  [[gnu::cold]] void forget(const torch::optim::Optimizer& optimizer) {
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
  [[gnu::cold]] void warn_of_early_clip(const torch::optim::Optimizer& optimizer) {
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
  [[gnu::cold]] void check(const torch::optim::Optimizer& optimizer, const char* call) {
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

/// How often this thread has moved gradients to master weights.
inline uint64_t& gradients_taken() {
  static thread_local uint64_t times = 0;
  return times;
}
/// Whether masters that `optimizer` steps were given gradients after the first `times` of these.
inline bool any_taken_after(const torch::optim::Optimizer& optimizer, uint64_t times) {
  return any_parameter(optimizer, [&](const at::Tensor& parameter) {
    const WeightMeta* const meta = weight_meta_of(parameter);
    return meta && meta->taken > times;
  });
}

/// How far an optimizer has come in this iteration, see Note [An iteration].
struct OptimizerState {
  enum class Stage { ready, unscaled, stepped };
  Stage stage = Stage::ready;
  ReadOnce<bool> found_inf{};  ///< undefined while ready
  at::Tensor largest{};        ///< magnitude of the scaled gradients, where the update wants it
  bool had_gradients = false;  ///< at least one was checked
  bool agreed = false;         ///< agree_found_inf has been called
  bool rechecked = false;      ///< and that step() has looked once more
  bool exact = false;          ///< the flag is 0 or 1, as kernels want it
  bool in_closure = false;     ///< a step with a closure is being made
  std::size_t gradients = 0;   ///< how many there were when they were unscaled
  uint64_t taken = 0;          ///< gradients_taken() then
  std::shared_ptr<Shards> shards{};  ///< who must agree, where they are shards of gradients
};

/// The states of the few optimizers that one scaler serves, in order of appearance; see Note [Which
/// optimizer it is].
class OptimizerStates {
 public:
  struct Entry {
    uint32_t optimizer;
    OptimizerState state{};
  };

  /// Stays valid until clear().
  [[gnu::cold]] OptimizerState& of(torch::optim::Optimizer& optimizer) {
    const uint32_t number = OptimizerNumber::give(optimizer);
    if (OptimizerState* const state = find(number)) return *state;
    entries_.push_back({number});
    return entries_.back().state;
  }

  /// Null if there is none.
  OptimizerState* find(uint32_t number) {
    for (Entry& entry : entries_) {
      if (entry.optimizer == number) return &entry.state;
    }
    return nullptr;
  }
  OptimizerState* find(const torch::optim::Optimizer& optimizer) {
    return find(OptimizerNumber::of(optimizer));
  }
  const OptimizerState* find(const torch::optim::Optimizer& optimizer) const {
    return const_cast<OptimizerStates*>(this)->find(optimizer);
  }

  bool within_iteration() const {
    return std::any_of(entries_.begin(), entries_.end(), [](const Entry& entry) {
      return entry.state.stage != OptimizerState::Stage::ready;
    });
  }

  /// Makes one ready again, in place.
  void reset(const torch::optim::Optimizer& optimizer) {
    OptimizerState* const state = find(optimizer);
    if (state) *state = {.in_closure = state->in_closure};
  }

  auto begin() { return entries_.begin(); }
  auto end() { return entries_.end(); }
  /// Ends the iteration of all but those whose closure has ended it.
  void clear() {
    entries_.remove_if([](const Entry& entry) { return !entry.state.in_closure; });
  }

 private:
  std::list<Entry> entries_;
};

/// A window of gradient accumulation.
struct AccumulationWindow {
  uint32_t optimizer;     ///< its number
  int64_t pending = 0;    ///< micro-batches
  bool was_used = false;  ///< the scaler has unscaled or stepped with them in an earlier iteration
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

  [[gnu::cold]] void add(const at::Tensor& scaled) {
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

/// What a scaler has heard since the last update(): what it scaled, and how far each optimizer has
/// come.
class StepLedger {
 public:
  [[gnu::cold]] explicit StepLedger(const LossScale& scale)
      : losses(scale.rule() ? scale.rule()->watch_losses(scale.options()) : nullptr) {}

  OptimizerStates optimizers;
  ScaledOutputs scaled;
  mutable StepOrder order;                                 // being asked for the scale counts
  std::vector<std::weak_ptr<AccumulationWindow>> windows;  // that take gradients from this scaler
  std::unique_ptr<LossWatch> losses;                       // with forgives_bad_losses

  /// `output` has become `scaled_output`.
  [[gnu::cold]] void note_scaled(const at::Tensor& scaled_output) {
    scaled.add(scaled_output);
    ScaledBackward::watch(order.backward, scaled_output);
  }

  /// Every parameter of an optimizer that has no gradient at all; warns once in a scaler's life.
  [[gnu::cold]] std::vector<MissingGradient> report_missing(
      const torch::optim::Optimizer& optimizer, at::Device loss_device) {
    std::vector<MissingGradient> missing = missing_gradients(optimizer, loss_device);
    if (std::exchange(warned_of_missing_, true)) return missing;
    std::ostringstream list;
    constexpr std::size_t most = 10;
    for (std::size_t i = 0; i < std::min(missing.size(), most); ++i) {
      list << "\n  " << missing[i];
    }
    if (missing.size() > most) list << "\n  and " << missing.size() - most << " more";
    warn({"GradScaler::step: no parameter of this optimizer has a gradient, so it was not stepped.",
          list.str()});
    return missing;
  }

  /// The optimizer of `state` has stepped or been skipped; what a StepResult answers from.
  [[gnu::cold]] std::shared_ptr<StepRecord> finish(OptimizerState& state, const LossScale& scale,
                                                   at::Tensor value,
                                                   std::vector<MissingGradient> missing,
                                                   int64_t attempts = 1) {
    state.stage = OptimizerState::Stage::stepped;
    auto record = std::make_shared<StepRecord>();
    record->found_inf = state.found_inf;
    record->had_gradients = state.had_gradients;
    record->scale = scale.scale_once();
    record->skips = scale.skips();
    record->value = std::move(value);
    record->missing = std::move(missing);
    record->attempts = attempts;
    if (!scale.host()) records_.push_back(record);
    return record;
  }

  /// Before the scale changes: lets the results that are still in use keep what they tell of it.
  [[gnu::cold]] void keep_results() {
    for (const auto& weak : records_) {
      const auto record = weak.lock();
      if (!record) continue;
      record->scale.keep();
      record->skips.keep();
    }
    records_.clear();
  }

  [[gnu::cold]] void end_iteration() {
    for (const auto& weak : windows) {
      const auto window = weak.lock();
      const OptimizerState* const state = window ? optimizers.find(window->optimizer) : nullptr;
      if (!state || window->pending == 0) continue;
      window->was_used |= state->stage != OptimizerState::Stage::ready;
    }
    optimizers.clear();
    order.end_iteration();
    records_.clear();
    if (losses) losses->forget();
  }

 private:
  std::vector<std::weak_ptr<StepRecord>> records_;  // of this iteration
  bool warned_of_missing_ = false;
};

// ---- What a scaler and its extras do in a step --------------------------------------------------

/// Divides the gradients by the scale, and checks them; what is known of them then.
TORCHAMP_BODY OptimizerState unscale_gradients(torch::optim::Optimizer& optimizer, LossScale& scale,
                                               const char* call);
/// Makes the processes agree on what was found, once.
TORCHAMP_BODY void agree(OptimizerState& state, LossScale& scale, const LossWatch* losses);
/// Throws where it has stepped already, or is stepping.
TORCHAMP_BODY void check_not_stepped(const OptimizerState& state);
/// Has masters notice a step that LibTorch's own optimizers may hide: SGD writes through data().
TORCHAMP_BODY void note_written(const torch::optim::Optimizer& optimizer);

}  // namespace torchamp::detail
