// SPDX-License-Identifier: BSD-3-Clause
// The loss scale, on the host or on a device.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/full.h>
#include <ATen/ops/nan_to_num.h>
#include <ATen/ops/ones.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/device_work.h"
#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/gradients/gradient_batch.h"
#include "torchamp/detail/core/scaler/check_options.h"
#include "torchamp/detail/core/scaler/device_update.h"
#include "torchamp/detail/core/scaler/read_once.h"
#include "torchamp/detail/core/scaler/scale_limits.h"
#include "torchamp/detail/core/scaler/scale_update.h"
#include "torchamp/grad_scaler_options.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

// Note [Where the scale is known]
//
// The scale is a 0-dim fp32 tensor on the device of the first loss. As long as the host has every
// overflow flag (an ordinary optimizer's step reads it; a CPU's flag is in host memory), it updates
// its own copy of the state, and writes the tensor only if the scale changes. Then update()
// launches nothing, and a query of the scale reads nothing. After a fused optimizer's step on a GPU
// the host does not have the flag. From then on the state is on the device, permanently, because a
// captured CUDA graph may replay its update without the host; there an update is a few kernels in
// place.

/// Whether gradients must still be divided by the scale.
enum class Gradients { scaled, unscaled };

/// A GradScaler's options, its scale, and the numbers that updates use, on the host or on a device.
class LossScale {
 public:
  /// Error: an option that is out of range.
  explicit LossScale(GradScalerOptions options)
      : options_(std::move(options)), host_(initial_memory(options_)) {
    if (!options_.enabled) return;
    check_options(options_);
    options_.min_scale = as_fp32(options_.min_scale);
    options_.max_scale = as_fp32(options_.max_scale);
  }

  const GradScalerOptions& options() const { return options_; }

  void set_growth_factor(double factor) {
    check_growth_factor("GradScaler::set_growth_factor", factor);
    options_.growth_factor = factor;
  }
  void set_backoff_factor(double factor) {
    check_backoff_factor("GradScaler::set_backoff_factor", factor);
    options_.backoff_factor = factor;
  }
  /// If the tracker already exceeds it, the scale grows at the next good iteration.
  void set_growth_interval(int64_t interval) {
    check_growth_interval("GradScaler::set_growth_interval", interval);
    options_.growth_interval = interval;
    const int64_t last = interval - 1;
    if (on_device_) return on_device_->limit_growth_tracker(last);
    host_.growth_tracker = std::min(host_.growth_tracker, static_cast<double>(last));
  }

  // ---- The scale

  bool created() const { return scale_.defined(); }
  void check_created(const char* call) const {
    TORCHAMP_CHECK(created(), "GradScaler::", call,
                   ": nothing has been scaled yet. Call scale(loss).backward() first.");
  }
  void create(at::Device device) {
    const c10::InferenceMode no_inference(false);
    const at::TensorOptions options = at::TensorOptions(device).dtype(at::kFloat);
    one_ = at::ones({}, options);
    scale_and_skips_ = at::full({2}, host_.scale, options);  // leave_host() fills in the skips
    scale_ = scale_and_skips_.select(0, 0);
    skips_ = scale_and_skips_.select(0, 1);
  }
  /// As before create().
  void drop() { scale_and_skips_ = scale_ = skips_ = one_ = at::Tensor(); }

  /// 0-dim fp32; undefined before create().
  const at::Tensor& scale() const { return scale_; }
  /// 1/scale as a 0-dim fp32 tensor on `device`, computed in fp64 as torch.amp does.
  at::Tensor inverse(at::Device device) const {
    // Replays read the tensor, which an update() outside of the graph changes.
    if (!on_device_ && replays_ == Replays::none) {
      return at::full({}, 1. / host_.scale, at::TensorOptions(device).dtype(at::kFloat));
    }
    const at::ScalarType dtype = number_type_on(scale_.device());
    return to_device_async(device, scale_.to(dtype).reciprocal().to(at::kFloat));
  }
  /// A 1 on the scale's device, 0-dim fp32.
  const at::Tensor& one() const { return one_; }

  /// The host's copy; null if the state is on the device.
  const ScaleMemory<double>* host() const { return on_device_ ? nullptr : &host_; }
  /// The scale and the bad iterations in a row; after keep() of these, later changes do not affect
  /// them.
  ReadOnce scale_once() const {
    return on_device_ ? ReadOnce{.tensor = scale_} : ReadOnce{.on_host = host_.scale};
  }
  ReadOnce skips_once() const {
    return on_device_ ? ReadOnce{.tensor = skips_} : ReadOnce{.on_host = host_.skips};
  }
  double read_scale() const { return scale_once().read(); }

  /// All numbers; synchronises if the state is on the device.
  ScaleMemory<double> read() const {
    ScaleMemory<double> values = host_;
    if (!on_device_) return values;
    values.scale = read_scale();
    values.skips = skips_once().read();
    on_device_->read(values);
    return values;
  }

  /// The result of state_dict() for these values.
  GradScalerState state_of(const ScaleMemory<double>& values) const {
    return {.scale = values.scale,
            .growth_factor = options_.growth_factor,
            .backoff_factor = options_.backoff_factor,
            .growth_interval = options_.growth_interval,
            .growth_tracker = static_cast<int64_t>(values.growth_tracker)};
  }

  /// Loads `state`, which check_state has accepted, and from `rest` the numbers that the state does
  /// not hold.
  void restore(const GradScalerState& state, ScaleMemory<double> rest) {
    rest.scale = static_cast<float>(state.scale);
    rest.growth_tracker =
        static_cast<double>(std::min(state.growth_tracker, state.growth_interval - 1));
    set(rest);
    limits_.forget();
    options_.growth_factor = state.growth_factor;
    options_.backoff_factor = state.backoff_factor;
    options_.growth_interval = state.growth_interval;
  }

  /// Replaces all numbers by these values, which are on the host.
  void set(ScaleMemory<double> values) {
    const bool changes = values.scale != host_.scale;
    host_ = values;  // read() takes numbers from here that a device does not store
    if (!on_device_) {
      if (created() && changes) scale_.fill_(host_.scale);
      return;
    }
    scale_.fill_(host_.scale);
    skips_.fill_(host_.skips);
    on_device_->set(host_);
  }

  /// Sets the scale that the program has chosen.
  void set_scale(double scale) {
    const bool changes = on_device_ || scale != host_.scale;
    host_.scale = scale;
    if (changes) scale_.fill_(scale);
  }
  /// Takes the scale from a tensor on a device, without reading it; a value outside the limits, or
  /// NaN, becomes a limit.
  void set_scale(const at::Tensor& scale) {
    leave_host();
    host_.scale = std::numeric_limits<double>::quiet_NaN();
    scale_.copy_(at::nan_to_num(scale.reshape({}), options_.min_scale)
                     .clamp(options_.min_scale, options_.max_scale),
                 /*non_blocking=*/true);
  }

  // ---- What may be left out because of the scale

  /// Whether scaling is the identity, permanently.
  bool stays_at_one() const { return !options_.dynamic && scale_on_host() == 1.; }
  /// Whether dividing by the scale may turn a finite gradient into an inf. Then the quotients must
  /// be checked: one more launch in a fused step, one more pass in unscale_.
  bool may_be_below_one() const { return options_.min_scale < 1. && !(scale_on_host() >= 1.); }

  /// Prepares for replays of the optimizer's step, which may change the scale. Called before the
  /// step queries the scale.
  void expect_replays() {
    if (replays_ != Replays::none) return;
    replays_ = GraphBody::is_running() ? Replays::of_cuda_graph : Replays::unknown;
  }

  // ---- The update

  /// The numbers of gradients whose check has returned `found_inf`. Every check of gradients ends
  /// here.
  Measured measure(at::Tensor found_inf, const std::vector<GradientBatch>& gradients,
                   Gradients kind) const {
    Measured measured{.found_inf = {.tensor = std::move(found_inf)}};
    for (const MeasuredRow& row : measured_rows) {
      if (row.measure == nullptr) continue;
      at::Tensor number =
          row.measure(gradients, kind == Gradients::scaled ? scale_ : at::Tensor(), options_);
      if (number.defined()) number = to_device_async(scale_.device(), number).to(at::kFloat);
      measured.*row.number = {.tensor = std::move(number)};
    }
    return measured;
  }

  /// Whether the host can make this update.
  bool knows(Measured& measured) const { return !on_device_ && bring_to_host(measured); }

  /// Updates the scale after an iteration, if knows(measured). Returns the limits that are met. If
  /// a limit throws, nothing is changed.
  ScaleLimits::Met update_on_host(const Measured& measured) {
    const ScaleMemory<double> after = after_update(options_, host_, measured);
    const ScaleLimits::Met met = ScaleLimits::met(options_, host_, after);
    ScaleLimits::throw_if_met(options_, met);
    set(after);
    return met;
  }

  /// The same on the device, without a read.
  ScaleLimits::Met update_on_device(const Measured& measured) {
    ScaleLimits::Met met;
    const bool watched = ScaleLimits::watched(options_);
    // The mirror has the numbers of an earlier update, as far as they have arrived: nothing waits.
    if (watched) met = limits_.met_in_mirror(options_);
    ScaleLimits::throw_if_met(options_, met);
    advance(measured);
    if (watched) limits_.mirror.send(scale_and_skips_);
    return met;
  }

  /// Warns or calls back; see ScaleLimits::announce(). Also warns of a long run of bad iterations.
  void announce(const ScaleLimits::Met& met) {
    limits_.announce(options_, met);
    if (on_device_) {
      skip_warning_->warn_if_arrived();
    } else {
      skip_warning_->note(host_.skips);
    }
  }

  /// The update on the device, in place, without a read.
  void advance(const Measured& measured) {
    leave_host();
    const at::Tensor& found_inf = measured.found_inf.tensor;
    if (options_.dynamic) on_device_->make(options_, scale_, measured, skips_);
    at::addcmul_out(skips_, found_inf, skips_, found_inf);  // one more if bad, otherwise 0
    if (replays_ == Replays::unknown) return;
    skip_warning_->count_iteration(skips_);
    if (GraphBody* const body = GraphBody::current()) {
      body->states.push_back(skip_warning_);
    } else if (skip_warning_->wants_look()) {
      skip_warning_->look();
    }
  }

  /// Moves the state to the device, permanently, without a read. From here on host_ is out of date,
  /// except for numbers that the device does not store. Only read() and set() use it then, and
  /// scale_on_host() if the scale is fixed.
  void leave_host() {
    if (on_device_) return;
    const c10::InferenceMode no_inference(false);  // its tensors do not allow later writes
    skips_.fill_(host_.skips);
    if (is_torch_update(options_)) {
      on_device_ = std::make_unique<TorchUpdate>(host_, scale_);
    } else {
      on_device_ = std::make_unique<FormulaUpdate>(host_, scale_);
    }
  }

 private:
  /// The kind of replays that may change the scale. A CudaGraph follows the skips in a row.
  enum class Replays { none, of_cuda_graph, unknown };

  /// NaN if only the device knows the scale.
  double scale_on_host() const {
    const bool is_fixed = !options_.dynamic && replays_ == Replays::none;
    return !on_device_ || is_fixed ? host_.scale : std::numeric_limits<double>::quiet_NaN();
  }

  GradScalerOptions options_;
  ScaleMemory<double> host_;  // valid while the state is on the host
  ScaleLimits limits_;
  std::unique_ptr<DeviceUpdate> on_device_;  // null while the state is on the host
  at::Tensor scale_and_skips_;               // in one piece
  at::Tensor scale_, skips_;                 // its parts, 0-dim
  at::Tensor one_;
  Replays replays_ = Replays::none;
  /// Shared with captured iterations, which may outlive the scaler.
  std::shared_ptr<SkipWarning> skip_warning_ = std::make_shared<SkipWarning>();
};

}  // namespace TORCHAMP_NAMESPACE::detail
