// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/nan_to_num.h>
#include <ATen/ops/stack.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/device_work.h"
#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/scaler/check_options.h"
#include "torchamp/detail/core/scaler/scale_bound.h"
#include "torchamp/detail/core/scaler/scale_update.h"
#include "torchamp/grad_scaler_options.h"
#include "torchamp/version.h"

namespace torchamp::detail {

/// A 0-dim fp32 tensor, read at most once. As a bool, whether it is not 0.
template <class T>
struct ReadOnce {
  at::Tensor tensor{};
  std::optional<T> on_host{};

  /// What can be told without waiting for a device.
  std::optional<T> without_reading() const {
    if (on_host) return on_host;
    if (tensor.is_cpu()) return static_cast<T>(*tensor.const_data_ptr<float>());
    return std::nullopt;
  }

  /// Reads the device where the host does not know.
  T read() {
    if (!on_host) on_host = static_cast<T>(tensor.item<float>());
    return *on_host;
  }

  /// Makes a later change of the tensor invisible.
  void keep() {
    if (!on_host) tensor = tensor.clone();
  }
};

// ---- A scale, where it lives --------------------------------------------------------------------

/// Bad iterations in a row, counted from their flags on a device when someone asks. Until then an
/// iteration costs no launch, and six in so many together. Copies stay what they are, as long as
/// what they are counted from does.
class SkipCount {
 public:
  SkipCount() = default;
  /// From `count`, 0-dim fp32, on.
  explicit SkipCount(at::Tensor count) : before_(std::move(count)) {}
  /// One that the host knows.
  explicit SkipCount(double count) : on_host_(count) {}

  bool defined() const { return before_.defined(); }

  /// One iteration more. `found_inf`, 0-dim fp32, is 1 if it was bad, or else 0, and stays so.
  void add(const at::Tensor& found_inf) { flags_.push_back(found_inf); }
  /// Lets go of the flags, so that the next tensor() takes no launch.
  void count() {
    before_ = tensor();
    flags_.clear();
  }

  /// Makes a later change of what it is counted from on invisible.
  void keep() {
    if (!on_host_ && flags_.empty()) before_ = before_.clone();
  }

  /// Adds what it is counted from.
  void add_parts_to(std::vector<at::Tensor>& parts) const {
    parts.insert(parts.end(), flags_.begin(), flags_.end());
    parts.push_back(before_);
  }

  /// 0-dim fp32; not to be changed.
  [[gnu::cold]] at::Tensor tensor() const {
    if (flags_.empty()) return before_;
    // From the latest back, 1 as long as all were bad.
    const at::Tensor bad = at::stack(flags_).flip(0).cumprod(0);
    return bad.sum() + bad.select(0, -1) * before_;
  }

  /// For the host, which remembers it.
  double read() {
    if (!on_host_) on_host_ = tensor().item<double>();
    return *on_host_;
  }

 private:
  std::optional<double> on_host_;
  at::Tensor before_;
  std::vector<at::Tensor> flags_;  // of the iterations since
};

/// Warns of a long run of bad iterations, once. Where only the device knows the run, it is copied
/// to the host once in `interval` iterations, and nobody waits for the copy.
class SkipWarning {
 public:
  static constexpr int64_t many = 100, interval = 32;

  [[gnu::cold]] void note(double skips) {
    if (skips < many || warned_) return;
    warned_ = true;
    warn({"GradScaler::update: gradients held infs or NaNs in the last ",
          static_cast<int64_t>(skips),
          " iterations, and their steps were skipped. If the data or the weights hold a NaN, no "
          "scale helps: overflow_report() (torchamp/overflow_report.h) names the layers whose "
          "gradients do, first_non_finite_op() (torchamp/non_finite_op.h) the op that made the "
          "first one. This warning is given once."});
  }

  /// `skips`, 0-dim fp32: what there is now.
  void send(const at::Tensor& skips) {
    iterations_ = 0;
    mirror_.send(skips);
  }
  void count_iteration() { ++iterations_; }
  /// Whether to send().
  bool is_due() const { return iterations_ >= interval; }
  /// Warns if what has arrived says so.
  void look() {
    if (!mirror_.empty()) note(mirror_[0]);
  }

 private:
  bool warned_ = false;
  int64_t iterations_ = 0;
  HostMirror mirror_;
};

/// What GradScaler::update does about the limits of GradScalerOptions.
class ScaleLimits {
 public:
  /// The limits that an iteration has met, and what to say of them.
  struct Met {
    bool min_scale = false;
    bool skips_in_a_row = false;
    double scale = 0.;
    int64_t skips = 0;
  };

  static Met met(const GradScalerOptions& options, const ScaleMemory<double>& before,
                 const ScaleMemory<double>& after) {
    const auto skips = static_cast<int64_t>(after.skips);
    // since_change is 0 only where the scale was lowered or grew; a bad iteration has lowered it.
    const bool lowered = options.dynamic && skips > 0 && after.since_change == 0.;
    return {.min_scale = lowered && before.scale <= options.min_scale,
            .skips_in_a_row = reaches_limit(options, skips),
            .scale = after.scale,
            .skips = skips};
  }

  /// Throws if a limit that is met says so. Nothing has been changed yet.
  [[gnu::cold]] static void throw_if_met(const GradScalerOptions& options, const Met& met) {
    TORCHAMP_CHECK(!met.min_scale || options.at_min_scale != AtLimit::throw_error,
                   "GradScaler::update: gradients hold infs or NaNs and the scale, ", met.scale,
                   ", is at min_scale. Look for what produces them (torchamp/overflow_report.h "
                   "names the layers), or set at_min_scale to continue.");
    TORCHAMP_CHECK(!met.skips_in_a_row || options.at_max_skips != AtLimit::throw_error,
                   "GradScaler::update: gradients held infs or NaNs in ", met.skips,
                   " consecutive iterations; max_skips_in_a_row is ", options.max_skips_in_a_row,
                   "; the scale is ", met.scale,
                   ". Look for what produces them (torchamp/overflow_report.h names the layers), ",
                   "or set at_max_skips to continue.");
  }

  /// Warns or calls back. The iteration has ended.
  [[gnu::cold]] void announce(const GradScalerOptions& options, const Met& met) {
    if (met.min_scale && options.at_min_scale == AtLimit::warn && !warned_) {
      warn({"GradScaler::update: gradients hold infs or NaNs and the scale, ", met.scale,
            ", is at min_scale: steps are skipped until they are finite."});
    }
    if (met.skips_in_a_row && options.at_max_skips == AtLimit::warn) {
      warn({"GradScaler::update: gradients held infs or NaNs in ", met.skips,
            " iterations in a row; the scale is ", met.scale, '.'});
    }
    warned_ = met.min_scale || (warned_ && met.scale <= options.min_scale);
    // A copy: the function may make another scaler of this one.
    const auto on_limit = options.on_limit;
    if (met.min_scale && options.at_min_scale == AtLimit::call) {
      on_limit({ScaleLimit::Kind::min_scale, met.scale, met.skips});
    }
    if (met.skips_in_a_row && options.at_max_skips == AtLimit::call) {
      on_limit({ScaleLimit::Kind::skips_in_a_row, met.scale, met.skips});
    }
  }

  // Note [Limits that only the device knows]
  // There the scale and the count of skips are copied to host memory behind the update, and a later
  // update() acts on what has arrived meanwhile. With the default limits there is nothing to act on
  // but a warning at 2^-126, so no copy is made.

  static bool watched(const GradScalerOptions& options) {
    const bool floor = options.at_min_scale == AtLimit::throw_error ||
                       options.at_min_scale == AtLimit::call ||
                       (options.at_min_scale == AtLimit::warn &&
                        options.min_scale > std::numeric_limits<float>::min());
    const bool skips =
        options.max_skips_in_a_row > 0 && options.at_max_skips != AtLimit::keep_going;
    return floor || skips;
  }

  HostMirror mirror;  ///< of the scale and the skips

  /// The limits that the mirror shows to be met, each once.
  Met met_in_mirror(const GradScalerOptions& options) {
    if (mirror.empty()) return {};
    const double scale = mirror[0];
    const auto skips = static_cast<int64_t>(mirror[1]);
    const bool is_new = skips != seen_skips_;
    seen_skips_ = skips;
    if (!is_new || skips == 0) return {.scale = scale};
    return {.min_scale = options.dynamic && scale <= options.min_scale,
            .skips_in_a_row = reaches_limit(options, skips),
            .scale = scale,
            .skips = skips};
  }

 private:
  static bool reaches_limit(const GradScalerOptions& options, int64_t skips) {
    return options.max_skips_in_a_row > 0 && skips > 0 && skips % options.max_skips_in_a_row == 0;
  }

  bool warned_ = false;  // since the scale was last above its floor
  int64_t seen_skips_ = 0;
};

// Note [Where the scale is known]
//
// The scale is a 0-dim fp32 tensor on the device of the first loss. While the host knows every
// overflow flag (an ordinary optimizer's step reads it; a CPU's is in host memory), it updates its
// own copy of the state, and writes the tensor only when the scale changes: update() launches
// nothing, and a query of the scale reads nothing. The first flag that the host does not know,
// after a fused optimizer's step on a GPU, moves the state to the device for good (a captured CUDA
// graph may replay its update unseen), where the update is a few kernels in place.

/// What the optimizers of an iteration have found in their gradients.
struct Findings {
  std::vector<at::Tensor> flags{};  ///< of each: 0-dim fp32, non-zero for an inf or a NaN
  at::Tensor largest{};             ///< magnitude of the scaled gradients, where a ScaleRule asks
  bool known = true;                ///< to the host, without a read
  bool bad = false;                 ///< as far as known
};

/// A GradScaler's options, its scale, and what the updates remember, on the host or on a device.
class LossScale {
 public:
  /// Error: an option that is out of range.
  [[gnu::cold]] explicit LossScale(GradScalerOptions options)
      : options_(std::move(options)),
        host_(initial_memory(options_)),
        rule_(options_.dynamic ? options_.follows_gradients.rule() : nullptr) {
    if (!options_.enabled) return;
    check_options(options_);
    options_.min_scale = as_fp32(options_.min_scale);
    options_.max_scale = as_fp32(options_.max_scale);
  }

  const GradScalerOptions& options() const { return options_; }
  /// By which the update follows the gradients' magnitudes; null where it does not.
  const ScaleRule* rule() const { return rule_; }

  void set_growth_factor(double factor) {
    check_growth_factor("GradScaler::set_growth_factor", factor);
    options_.growth_factor = factor;
  }
  void set_backoff_factor(double factor) {
    check_backoff_factor("GradScaler::set_backoff_factor", factor);
    options_.backoff_factor = factor;
  }
  /// A shorter one is met at the next good iteration.
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
  [[gnu::cold]] void create(at::Device device) {
    const c10::InferenceMode no_inference(false);
    const at::TensorOptions options = at::TensorOptions(device).dtype(at::kFloat);
    const at::Tensor zero_and_one = at::arange(2, options);
    zero_ = zero_and_one.narrow(0, 0, 1);
    one_ = zero_and_one.select(0, 1);
    scale_and_skips_ = at::full({2}, host_.scale, options);
    scale_ = scale_and_skips_.select(0, 0);
    skips_ = scale_and_skips_.select(0, 1);
  }
  /// As before create().
  [[gnu::cold]] void drop() { scale_and_skips_ = scale_ = skips_ = zero_ = one_ = at::Tensor(); }

  /// 0-dim fp32; undefined before create().
  const at::Tensor& scale() const { return scale_; }
  /// 1/scale as a 0-dim fp32 tensor on `device`, computed in fp64 as torch.amp does.
  [[gnu::cold]] at::Tensor inverse(at::Device device) const {
    if (!on_device_) {
      return at::full({}, 1. / host_.scale, at::TensorOptions(device).dtype(at::kFloat));
    }
    const at::ScalarType dtype = number_type_on(scale_.device());
    return to_device_async(device, scale_.to(dtype).reciprocal().to(at::kFloat));
  }
  /// Constants on the scale's device, fp32: one element, and 0-dim.
  const at::Tensor& zero() const { return zero_; }
  const at::Tensor& one() const { return one_; }

  /// The host's copy; null where only the device knows.
  const ScaleMemory<double>* host() const { return on_device_ ? nullptr : &host_; }
  /// The scale, and the bad iterations in a row; kept through changes by their keep().
  ReadOnce<double> scale_once() const {
    return on_device_ ? ReadOnce<double>{.tensor = scale_}
                      : ReadOnce<double>{.on_host = host_.scale};
  }
  [[gnu::cold]] SkipCount skips() const {
    if (!on_device_) return SkipCount(host_.skips);
    return lazy_skips_.defined() ? lazy_skips_ : SkipCount(skips_);
  }
  double read_scale() const { return scale_once().read(); }

  /// All of it; reads the device where the host does not know.
  ScaleMemory<double> read() const {
    ScaleMemory<double> values = host_;
    if (!on_device_) return values;
    values.scale = read_scale();
    values.skips = skips().read();
    on_device_->read(values);
    return values;
  }

  /// What state_dict() gives of these values.
  GradScalerState state_of(const ScaleMemory<double>& values) const {
    return {.scale = values.scale,
            .growth_factor = options_.growth_factor,
            .backoff_factor = options_.backoff_factor,
            .growth_interval = options_.growth_interval,
            .growth_tracker = static_cast<int64_t>(values.growth_tracker)};
  }

  /// Takes over `state`, which check_state has passed, and of `rest` what the state does not hold.
  void restore(const GradScalerState& state, ScaleMemory<double> rest) {
    rest.scale = static_cast<float>(state.scale);
    rest.growth_tracker =
        static_cast<double>(std::min(state.growth_tracker, state.growth_interval - 1));
    set(std::move(rest));
    options_.growth_factor = state.growth_factor;
    options_.backoff_factor = state.backoff_factor;
    options_.growth_interval = state.growth_interval;
  }

  /// Puts these values in place of all that is there. The host must know them.
  [[gnu::cold]] void set(ScaleMemory<double> values) {
    const bool changes = values.scale != host_.scale;
    host_ = std::move(values);  // on a device, what nobody there keeps
    if (!on_device_) {
      if (created() && changes) scale_.fill_(host_.scale);
      return;
    }
    lazy_skips_ = {};
    scale_.fill_(host_.scale);
    skips_.fill_(host_.skips);
    on_device_->set(host_);
    followed_->bound.set(host_.scale, static_cast<int64_t>(host_.growth_tracker));
  }

  /// As the scale is written by hand.
  void set_scale(double scale) {
    const bool changes = on_device_ || scale != host_.scale;
    host_.scale = scale;
    if (changes) scale_.fill_(scale);
    if (on_device_) followed_->bound.set(scale, ScaleBound::grows_at_once);
  }
  /// Takes the scale from a tensor that only the device can read; what is not a number within the
  /// limits becomes the nearest limit.
  [[gnu::cold]] void set_scale(const at::Tensor& scale) {
    leave_host();
    followed_->bound.set_unknown(options_.max_scale);
    scale_.copy_(at::nan_to_num(scale.reshape({}), options_.min_scale)
                     .clamp(options_.min_scale, options_.max_scale),
                 /*non_blocking=*/true);
  }

  // ---- What may be left out because of the scale

  /// Whether scaling is the identity, and not just for the time being.
  bool stays_at_one() {
    if (options_.dynamic) return false;
    return (!on_device_ ? host_.scale : is_replayed() ? 0. : followed_->bound.value()) == 1.;
  }
  /// Whether it may be; see Note [A scale below 1].
  bool may_be_below_one() {
    if (!on_device_) return host_.scale < 1.;
    return options_.min_scale < 1. && (rule_ || may_be_below(1.));
  }
  /// Whether the scale may be more than `limit`; see Note [A large scale and a clip].
  bool may_exceed(double limit) {
    if (!on_device_) return host_.scale > limit;
    return options_.max_scale > limit && may_be_above(limit);
  }
  /// From now on replays may change the scale: those of a CudaGraph, if this is called in its body,
  /// or else, if no CudaGraph is known that they could be of, some that the host never hears of.
  void expect_replays() {
    if (!is_replayed()) replays_ = GraphBody::is_running() ? Replays::followed : Replays::unseen;
    if (on_device_) count_skips_at_once();
  }

  // ---- The update

  /// Whether the host can make this update.
  bool knows(const Findings& found) const { return !on_device_ && found.known; }

  /// Brings the scale to what it is after an iteration; a limit that throws changes nothing.
  /// Returns the limits that are met. Without a read.
  [[gnu::cold]] ScaleLimits::Met update(const Findings& found) {
    ScaleLimits::Met met;
    if (found.flags.empty()) return met;
    if (knows(found)) {
      const double largest = found.largest.defined() ? found.largest.item<double>() : 0.;
      ScaleMemory<double> after = after_update(options_, host_, found.bad, largest);
      met = ScaleLimits::met(options_, host_, after);
      ScaleLimits::throw_if_met(options_, met);
      set(std::move(after));
      return met;
    }
    const bool watched = ScaleLimits::watched(options_);
    if (watched) met = limits_.met_in_mirror(options_);
    ScaleLimits::throw_if_met(options_, met);
    at::Tensor flag = found.flags.front();
    for (std::size_t i = 1; i < found.flags.size(); ++i) flag = at::add(flag, found.flags[i]);
    advance(found.flags.size() > 1 ? flag.clamp_max(1.) : flag, found.largest, watched);
    if (watched) limits_.mirror.send(scale_and_skips_);
    return met;
  }

  /// Warns or calls back; see ScaleLimits::announce(). A long run of bad iterations is told, too.
  void announce(const ScaleLimits::Met& met) {
    limits_.announce(options_, met);
    on_device_ ? followed_->warning.look() : followed_->warning.note(host_.skips);
  }

  /// One iteration whose flag only the device knows: 0-dim fp32 on the scale's device, 1 if bad or
  /// else 0. `largest`: see after_update(); undefined where it is not known. `shows_skips`: whether
  /// scale_and_skips_ is to be up to date. In place, without a read.
  [[gnu::cold]] void advance(const at::Tensor& found_inf, const at::Tensor& largest = {},
                             bool shows_skips = false) {
    leave_host();
    if (rule_ || shows_skips || is_replayed()) count_skips_at_once();
    if (options_.dynamic) {
      on_device_->make(options_, scale_, found_inf, largest, skips_);
      if (!rule_ && may_leave_limits()) scale_.clamp_(options_.min_scale, options_.max_scale);
    }
    if (rule_ || shows_skips || is_replayed()) {
      at::addcmul_out(skips_, found_inf, skips_, found_inf);
    } else {
      if (!lazy_skips_.defined()) {
        lazy_skips_ = SkipCount(skips_.to(at::kFloat, false, /*copy=*/true));
      }
      lazy_skips_.add(found_inf);
    }
    follow();
    watch_skips();
  }

  /// Moves what is remembered to the device, for good.
  [[gnu::cold]] void leave_host() {
    if (on_device_) return;
    const c10::InferenceMode no_inference(false);
    skips_.fill_(host_.skips);
    on_device_ = rule_ ? rule_->on_device(host_, scale_)
                       : std::make_unique<CountedUpdate>(options_, host_, scale_);
    followed_->bound.set(host_.scale, static_cast<int64_t>(host_.growth_tracker));
  }

 private:
  enum class Replays {
    none,
    followed,  ///< see Note [What replays do to the scale]
    unseen,    ///< the scale may be anything
  };

  /// What replays may still need when the scaler is gone.
  struct Followed {
    ScaleBound bound;
    SkipWarning warning;
  };

  bool is_replayed() const { return replays_ != Replays::none; }

  /// From now on each iteration changes skips_, which is brought up to date.
  [[gnu::cold]] void count_skips_at_once() {
    if (!lazy_skips_.defined()) return;
    skips_.copy_(lazy_skips_.tensor());
    if (GraphBody* const body = GraphBody::current()) lazy_skips_.add_parts_to(body->kept);
    lazy_skips_ = {};
  }

  /// Has the host learn of the skips some time.
  [[gnu::cold]] void watch_skips() {
    if (replays_ == Replays::unseen) return;
    followed_->warning.count_iteration();
    GraphBody* const body = GraphBody::current();
    if (body && body->scales && is_replayed()) {
      body->scales->watch_skips(*body, {followed_, &followed_->warning}, skips_);
    } else if (followed_->warning.is_due()) {
      if (lazy_skips_.defined()) lazy_skips_.count();
      followed_->warning.send(skips().tensor());
    }
  }

  /// Whether the update being made may have taken the scale past its limits.
  [[gnu::cold]] bool may_leave_limits() {
    constexpr double rounding = 0x1p-20;  // the device's, and more
    if (!follows_bound()) return true;
    return may_be_above(options_.max_scale / options_.growth_factor * (1. - rounding)) ||
           may_be_below(options_.min_scale / options_.backoff_factor * (1. + rounding));
  }

  bool follows_bound() const { return options_.dynamic && !rule_ && replays_ != Replays::unseen; }

  [[gnu::cold]] bool may_be_below(double limit) {
    if (replays_ == Replays::unseen) return true;
    CapturedBound* const captured = this->captured();
    return captured ? captured->may_be_below(limit) : followed_->bound.value() < limit;
  }
  [[gnu::cold]] bool may_be_above(double limit) {
    if (replays_ == Replays::unseen) return true;
    CapturedBound* const captured = this->captured();
    return captured ? captured->may_be_above(limit) : followed_->bound.at_most() > limit;
  }

  /// What the body of the CudaGraph that is running takes for granted; null outside of one.
  [[gnu::cold]] CapturedBound* captured() {
    GraphBody* const body = GraphBody::current();
    const bool is_followed = body && body->scales && replays_ == Replays::followed;
    return is_followed
               ? &body->scales->bound_in(*body, {followed_, &followed_->bound}, scale_, options_)
               : nullptr;
  }

  [[gnu::cold]] void follow() {
    const bool lowers = follows_bound();
    followed_->bound.update(options_, lowers);
    if (CapturedBound* const captured = this->captured()) {
      captured->add_update(lowers);
    } else if (lowers) {
      followed_->bound.look_at(scale_);
    }
  }

  GradScalerOptions options_;
  ScaleMemory<double> host_;  // where the host knows
  const ScaleRule* rule_;
  ScaleLimits limits_;
  std::unique_ptr<DeviceUpdate> on_device_;  // null where the host knows
  at::Tensor scale_and_skips_;               // in one piece
  at::Tensor scale_, skips_;                 // its parts, 0-dim
  at::Tensor zero_, one_;
  SkipCount lazy_skips_;  // if defined, what skips_ does not tell
  std::shared_ptr<Followed> followed_ = std::make_shared<Followed>();
  Replays replays_ = Replays::none;
};

}  // namespace torchamp::detail
