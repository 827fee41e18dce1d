// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/nan_to_num.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "torchamp/detail/devices.h"
#include "torchamp/detail/graph/body.h"
#include "torchamp/detail/scaler/scale_bound.h"
#include "torchamp/detail/scaler/scale_rule.h"
#include "torchamp/detail/scaler/scale_update.h"
#include "torchamp/detail/scaler/skip_count.h"
#include "torchamp/detail/scaler/spent_credit.h"
#include "torchamp/detail/tensors.h"
#include "torchamp/grad_scaler_options.h"

namespace torchamp::detail {

// Note [Where the scale is known]
//
// The scale lives in a 0-dim fp32 tensor on the device of the first loss. While the host has been
// told every overflow flag so far (an ordinary optimizer's step reads it; on a CPU it lies in host
// memory), it can compute the scale by itself: it keeps a copy of all that the update remembers,
// updates that copy and writes the tensor only when the scale changes. GradScaler::update() then
// launches nothing, and asking for the scale reads nothing.
//
// The first flag that the host does not know, after a fused optimizer's step on a GPU, ends this:
// the memory moves to the device for good, where the update is a few kernels in place. (Not
// back again: a captured CUDA graph may replay those kernels without the host's knowledge.)

/// A GradScaler's scale and what its update remembers, on the host or on a device.
class ScaleState {
 public:
  explicit ScaleState(const GradScalerOptions& options)
      : host_(initial_memory(options)),
        rule_(options.dynamic ? options.follows_gradients.rule() : nullptr),
        credit_(options) {}

  /// By which the update follows the gradients' magnitudes; null where it does not.
  const ScaleRule* rule() const { return rule_; }

  bool created() const { return device_.scale.defined(); }
  /// 0-dim fp32; undefined before create().
  const at::Tensor& scale() const { return device_.scale; }
  at::Tensor scale_on(at::Device device) const { return to_device_async(device, device_.scale); }
  /// The host's copy; null where only the device knows.
  const ScaleMemory<double>* host() const { return on_host_ ? &host_ : nullptr; }

  void create(at::Device device) {
    const c10::InferenceMode no_inference(false);
    const at::TensorOptions options = at::TensorOptions(device).dtype(at::kFloat);
    if (!device.is_cpu()) zero_and_one_ = at::arange(2, options);
    scale_and_skips_ = at::full({2}, host_.scale, options);
    device_.scale = scale_and_skips_.select(0, 0);
    device_.skips = scale_and_skips_.select(0, 1);
  }

  /// As before create().
  void drop() { scale_and_skips_ = device_.scale = device_.skips = zero_and_one_ = at::Tensor(); }

  /// Constants on the scale's device, fp32: one element, and 0-dim. Undefined on the host.
  at::Tensor zero() const {
    return zero_and_one_.defined() ? zero_and_one_.narrow(0, 0, 1) : at::Tensor();
  }
  at::Tensor one() const {
    return zero_and_one_.defined() ? zero_and_one_.select(0, 1) : at::Tensor();
  }

  /// What the host may want a mirror of: the scale and the bad iterations in a row, fp32.
  const at::Tensor& scale_and_skips() const { return scale_and_skips_; }

  /// All of it; reads the device where the host does not know.
  ScaleMemory<double> read() const {
    if (on_host_) return host_;
    ScaleMemory<double> values{};
    for_each_number(
        [](const char*, double& value, const at::Tensor& tensor) { value = tensor.item<double>(); },
        values, device_);
    for (const at::Tensor& number : device_.of_rule) {
      values.of_rule.push_back(number.item<double>());
    }
    if (credit_.defined()) values.credit = credit_.credit();
    values.skips = read_skips();
    return values;
  }
  /// The scale as it stays until it is set, if no update changes it; 0 if not known.
  double scale_if_fixed() { return on_host_ ? host_.scale : is_replayed() ? 0. : bound_->value(); }
  /// Whether it may be; see Note [A scale below 1].
  bool may_be_below_one(const GradScalerOptions& options) {
    if (on_host_) return host_.scale < 1.;
    return options.min_scale < 1. && (rule_ || may_be_below(1., options));
  }
  /// Whether the scale may be more than `limit`; see Note [A large scale and a clip].
  bool may_exceed(double limit, const GradScalerOptions& options) {
    if (on_host_) return host_.scale > limit;
    return options.max_scale > limit && may_be_above(limit, options);
  }
  /// From now on replays may change the scale: those of a CudaGraph, if this is called in its body,
  /// or else, if no CudaGraph is known that they could be of, some that the host never hears of.
  void expect_replays() {
    if (replays_ != Replays::unseen) {
      const bool by_cuda_graph = GraphBody::is_running() || replays_ == Replays::followed;
      replays_ = by_cuda_graph ? Replays::followed : Replays::unseen;
    }
    if (!on_host_) count_skips_at_once();
  }

  double read_scale() const { return on_host_ ? host_.scale : device_.scale.item<double>(); }
  double read_skips() const {
    if (on_host_) return host_.skips;
    return (lazy_skips_.defined() ? lazy_skips_.tensor() : device_.skips).item<double>();
  }
  /// Only where the host does not know: 0-dim, on the device; undefined if lazy_skips() is not.
  at::Tensor skips() const { return lazy_skips_.defined() ? at::Tensor() : device_.skips; }
  const SkipCount& lazy_skips() const { return lazy_skips_; }

  /// 1/scale as a 0-dim fp32 tensor on `device`, computed in fp64 as torch.amp does.
  at::Tensor inverse(at::Device device) const {
    if (on_host_) {
      return at::full({}, 1. / host_.scale, at::TensorOptions(device).dtype(at::kFloat));
    }
    return to_device_async(device, device_.scale.to(number_type()).reciprocal().to(at::kFloat));
  }

  /// Puts these values in place of all that is there. The host must know them.
  void set(const ScaleMemory<double>& values) {
    if (on_host_) {
      const bool changes = values.scale != host_.scale;
      host_ = values;
      if (created() && changes) device_.scale.fill_(values.scale);
      return;
    }
    lazy_skips_ = {};
    for_each_number([](const char*, at::Tensor& tensor, double value) { tensor.fill_(value); },
                    device_, values);
    if (credit_.defined()) credit_.set(values.credit, values.growth_tracker);
    for (std::size_t i = 0; i < device_.of_rule.size(); ++i) {
      device_.of_rule[i].fill_(values.of_rule[i]);
    }
    bound_->set(values.scale, static_cast<int64_t>(values.growth_tracker));
  }

  /// Takes the scale from a tensor that only the device can read; what is not a number within the
  /// limits becomes the nearest limit.
  void set_scale(const at::Tensor& scale, const GradScalerOptions& options) {
    leave_host();
    bound_->set_unknown(options.max_scale);
    device_.scale.copy_(at::nan_to_num(scale.reshape({}), options.min_scale)
                            .clamp(options.min_scale, options.max_scale),
                        /*non_blocking=*/true);
  }

  /// As the scale is written by hand.
  void set_scale(double scale) {
    if (on_host_) {
      ScaleMemory<double> values = host_;
      values.scale = scale;
      set(values);
    } else {
      device_.scale.fill_(scale);
      bound_->set(scale, ScaleBound::grows_at_once);
    }
  }

  /// Keeps the tracker below a shorter interval, so that it is met at the next good iteration.
  void limit_growth_tracker(int64_t growth_interval) {
    const int64_t last = growth_interval - 1;
    if (on_host_) {
      host_.growth_tracker = std::min(host_.growth_tracker, static_cast<double>(last));
    } else {
      device_.growth_tracker.clamp_max_(last);
      if (credit_.defined()) credit_.limit_growth_tracker(last);
    }
  }

  /// One iteration whose flag only the device knows: 0-dim fp32 on the scale's device, 1 if bad or
  /// else 0. `largest`: see after_update(); undefined where it is not known. `shows_skips`: whether
  /// scale_and_skips() is to be up to date. In place, without a read.
  void advance(const GradScalerOptions& options, const at::Tensor& found_inf,
               const at::Tensor& largest = {}, bool shows_skips = false) {
    leave_host();
    const bool by_formula = options.dynamic && !is_torch_update(options) && !credit_.serves();
    const bool lazily = !by_formula && !shows_skips && !is_replayed();
    if (lazily && !lazy_skips_.defined()) {
      lazy_skips_ = SkipCount(device_.skips.to(at::kFloat, false, /*copy=*/true));
    }
    if (!lazily) count_skips_at_once();
    bool counted = false;
    if (!by_formula) {
      if (credit_.serves()) {
        credit_.update(options, device_.scale, found_inf);
      } else if (options.dynamic) {
        at::_amp_update_scale_(device_.scale, device_.growth_tracker, found_inf,
                               options.growth_factor, options.backoff_factor,
                               options.growth_interval);
      }
      if (options.dynamic && may_leave_limits(options)) {
        device_.scale.clamp_(options.min_scale, options.max_scale);
      }
      if (lazily) {
        counted = lazy_skips_.add(found_inf);
      } else {
        at::addcmul_out(device_.skips, found_inf, device_.skips, found_inf);
      }
    } else {
      const at::ScalarType dtype = number_type();
      ScaleMemory<at::Tensor> before;
      for_each_number([dtype](const char*, at::Tensor& number,
                              const at::Tensor& tensor) { number = tensor.to(dtype); },
                      before, device_);
      before.of_rule = device_.of_rule;  // of that dtype
      const at::Tensor largest_number =
          largest.defined() ? largest.to(dtype) : at::zeros({}, before.scale.options());
      const ScaleMemory<at::Tensor> after =
          after_update(options, before, found_inf != 0., largest_number);
      for_each_number(
          [](const char*, at::Tensor& tensor, const at::Tensor& number) { tensor.copy_(number); },
          device_, after);
      for (std::size_t i = 0; i < device_.of_rule.size(); ++i) {
        device_.of_rule[i].copy_(after.of_rule[i]);
      }
    }
    follow(options);
    watch_skips(lazily, counted);
  }

  /// Warns of a long run of bad iterations.
  void warn_of_skips() { on_host_ ? skip_warning_->note(host_.skips) : skip_warning_->look(); }

  /// Moves what is remembered to the device, for good.
  void leave_host() {
    if (!on_host_) return;
    const c10::InferenceMode no_inference(false);
    const auto on_device = [this](double value, at::ScalarType dtype) {
      return at::full({}, value, device_.scale.options().dtype(dtype));
    };
    // As _amp_update_scale_ wants it.
    device_.growth_tracker = on_device(host_.growth_tracker, at::kInt);
    device_.skips.fill_(host_.skips);
    for_each_own_number(
        [&](const char*, at::Tensor& tensor, double value) {
          if (!tensor.defined()) tensor = on_device(value, number_type());
        },
        device_, host_);
    if (rule_) {
      for (const double value : host_.of_rule) {
        device_.of_rule.push_back(on_device(value, number_type()));
      }
    }
    if (credit_.serves()) {
      credit_.create(device_.scale);
      credit_.set(host_.credit, host_.growth_tracker);
      device_.growth_tracker = credit_.growth_tracker();
    }
    bound_->set(host_.scale, static_cast<int64_t>(host_.growth_tracker));
    on_host_ = false;
  }

 private:
  /// From now on each iteration changes device_.skips, which is brought up to date.
  void count_skips_at_once() {
    if (!lazy_skips_.defined()) return;
    device_.skips.copy_(lazy_skips_.tensor());
    if (GraphBody* const body = GraphBody::current()) {
      for (at::Tensor& part : lazy_skips_.parts()) body->kept.push_back(std::move(part));
    }
    lazy_skips_ = {};
  }

  /// Has the host learn of the skips some time.
  void watch_skips(bool lazily, bool counted) {
    if (replays_ == Replays::unseen) return;
    GraphBody* const body = GraphBody::current();
    if (body && body->scales && is_replayed()) {
      body->states.push_back(body->scales->follow(skip_warning_, device_.skips));
    } else if (lazily ? counted : skip_warning_->is_due()) {
      skip_warning_->send(lazily ? lazy_skips_.tensor() : device_.skips);
    }
  }

  /// In which the device computes an update.
  at::ScalarType number_type() const {
    const bool lacks_fp64 = facts_of(device_.scale.device().type()).fp64 == Fp64::no;
    return lacks_fp64 ? at::kFloat : at::kDouble;
  }

  /// Whether the update being made may have taken the scale past its limits.
  bool may_leave_limits(const GradScalerOptions& options) {
    constexpr double rounding = 0x1p-20;  // the device's, and more
    if (!follows_bound(options)) return true;
    return may_be_above(options.max_scale / options.growth_factor * (1. - rounding), options) ||
           may_be_below(options.min_scale / options.backoff_factor * (1. + rounding), options);
  }

  bool follows_bound(const GradScalerOptions& options) const {
    return options.dynamic && !rule_ && replays_ != Replays::unseen;
  }

  bool may_be_below(double limit, const GradScalerOptions& options) {
    if (replays_ == Replays::unseen) return true;
    CapturedBound* const captured = this->captured(options);
    return captured ? captured->may_be_below(limit) : bound_->value() < limit;
  }
  bool may_be_above(double limit, const GradScalerOptions& options) {
    if (replays_ == Replays::unseen) return true;
    CapturedBound* const captured = this->captured(options);
    return captured ? captured->may_be_above(limit) : bound_->at_most() > limit;
  }

  /// What the body of the CudaGraph that is running takes for granted; null outside of one.
  CapturedBound* captured(const GradScalerOptions& options) {
    GraphBody* const body = GraphBody::current();
    if (!body || !body->scales || replays_ != Replays::followed) return nullptr;
    for (const auto& state : body->states) {
      auto* const captured = dynamic_cast<CapturedBound*>(state.get());
      if (captured && captured->is_of(bound_)) return captured;
    }
    const auto captured = body->scales->follow(bound_, device_.scale, ScaleMoves(options));
    body->states.push_back(captured);
    return captured.get();
  }

  void follow(const GradScalerOptions& options) {
    const bool lowers = follows_bound(options);
    ScaleMoves(options).follow(*bound_, lowers);
    if (CapturedBound* const captured = this->captured(options)) {
      captured->add_update(lowers);
    } else if (lowers) {
      bound_->look_at(device_.scale);
    }
  }

  enum class Replays {
    none,
    followed,  ///< see Note [What replays do to the scale]
    unseen,    ///< the scale may be anything
  };
  bool is_replayed() const { return replays_ != Replays::none; }

  bool on_host_ = true;
  ScaleMemory<double> host_;  // where the host knows
  const ScaleRule* rule_;
  SpentCredit credit_;
  std::shared_ptr<SkipWarning> skip_warning_ = std::make_shared<SkipWarning>();
  at::Tensor scale_and_skips_;  // in one piece
  at::Tensor zero_and_one_;
  // Of these, only the scale and the skips (parts of scale_and_skips_) where the host knows.
  ScaleMemory<at::Tensor> device_;
  SkipCount lazy_skips_;  // if defined, what device_.skips does not tell
  std::shared_ptr<ScaleBound> bound_ = std::make_shared<ScaleBound>();
  Replays replays_ = Replays::none;
};

}  // namespace torchamp::detail
