// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/clamp_max.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "torchamp/accumulate.h"
#include "torchamp/detail/core/base/device_work.h"
#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/scaler/step_ledger.h"
#include "torchamp/detail/extras/shared/master_meta.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

inline SafeAccumulation::~SafeAccumulation() {
  if (!window_ || window_->pending == 0) return;
  detail::warn_in_destructor({"SafeAccumulation: destroyed with ", window_->pending,
                              " micro-batch(es) pending. Call flush() or discard() first."});
}

inline std::optional<SafeAccumulationResult> SafeAccumulation::backward(const at::Tensor& loss) {
  check_ready("backward");
  TORCH_CHECK_VALUE(loss.defined(), "SafeAccumulation::backward: the loss is undefined.");
  TORCH_CHECK(micro_batches_ == 0 || window_->pending < micro_batches_,
              "SafeAccumulation::backward: the step with ", window_->pending,
              " micro-batches has failed, so the window accepts no more. Call flush() to try the "
              "step again, or discard() to drop the window.");
  detail::check_not_scaled_within(loss, "SafeAccumulation::backward",
                                  detail::ScalerParts::ledger(scaler_).scaled,
                                  detail::ScalerParts::ledger(scaler_).order);
  detail::check_is_loss(loss, "SafeAccumulation::backward");
  const at::Tensor scaled = scaler_.scale(loss);
  warn_of_others("backward");
  detail::clear_gradients(optimizer_);
  detail::drop_model_gradients(optimizer_);  // left by an exception
  is_clear_ = false;
  scaled.backward();
  if (const auto unsent = detail::unsent_of(optimizer_); unsent && unsent->any()) {
    unsent->drop();
    TORCH_CHECK(false,
                "SafeAccumulation::backward: the gradients of this micro-batch were computed "
                "within no_sync() and not sent, so the processes cannot decide whether to keep "
                "them. Leave no_sync() out.");
  }
  if (before_unscale_) before_unscale_();
  detail::warn_of_local_gradients(optimizer_, "SafeAccumulation", warned_of_local_);
  sum_.check(optimizer_);
  try {
    scaler_.unscale_(optimizer_);
    const auto add = sum_.prepared(optimizer_, scaler_.found_inf(optimizer_));
    scaler_.update();  // before the sums change, since it may throw
    add();
  } catch (...) {
    scaler_.discard(optimizer_);
    throw;
  }
  if (++window_->pending == 1) {
    detail::note_open(detail::ScalerParts::ledger(scaler_), window_, optimizer_);
    began_at_ = detail::PlainClips::tick();
  }
  detail::clear_gradients(optimizer_);
  is_clear_ = true;
  if (window_->pending != micro_batches_) return std::nullopt;
  return step();
}

inline std::optional<SafeAccumulationResult> SafeAccumulation::flush() {
  if (window_->pending == 0) return std::nullopt;
  return step();
}

inline SafeAccumulationResult SafeAccumulation::step(const std::function<void()>& before_step) {
  const std::function<void()>& call = before_step ? before_step : before_step_;
  TORCH_CHECK(window_->pending > 0,
              "SafeAccumulation::step: there is no micro-batch. Call backward(loss) first.");
  check_ready("step");
  TORCH_CHECK(call || !detail::PlainClips::any_in_vain_since(began_at_, optimizer_, false),
              "SafeAccumulation::step: a clip before this call found no gradients, since the "
              "sums are kept outside .grad. Clip in a function passed to before_step() or step(): "
              "step([&] { clip_grad_norm_(optimizer, 1.); }).");
  warn_of_others("step");
  detail::clear_gradients(optimizer_);  // a step that has failed may have left its own
  is_clear_ = false;
  auto kept = std::make_shared<detail::ReadOnce<double>>(sum_.kept());
  at::Tensor skipped;  // memory for what comes after the step, where nothing may fail
  if (kept->tensor.defined()) skipped = at::empty_like(kept->tensor);
  at::Tensor flag = sum_.give_mean_to(optimizer_, *kept);
  if (scaler_.is_enabled()) {
    detail::take_unscaled(detail::ScalerParts::ledger(scaler_), optimizer_, std::move(flag),
                          sum_.any());
  }
  try {
    if (call) call();
    if (scaler_.is_enabled() || sum_.any()) {
      const at::Tensor found_inf = scaler_.step(optimizer_).found_inf();
      const detail::InternalOps guard;
      if (skipped.defined()) {
        at::clamp_max_out(skipped, found_inf, 1.);
        kept->tensor.addcmul_(kept->tensor, skipped, -1.);
      }
    }
  } catch (...) {
    scaler_.discard(optimizer_);
    throw;
  }
  const int64_t micro_batches = window_->pending;
  clear();
  return {std::move(kept), micro_batches};
}

inline void SafeAccumulation::discard() {
  clear();
  detail::drop_model_gradients(optimizer_);
}

inline void SafeAccumulation::warn_of_others(const char* call) {
  if (!is_clear_ || warned_ || !detail::any_gradient(optimizer_)) return;
  warned_ = true;
  TORCH_WARN("SafeAccumulation::", call,
             ": the parameters have gradients that do not come from backward() of this "
             "accumulation; they are dropped. Call accumulation.backward(loss) for every loss. "
             "(To drop gradients on purpose, call zero_grad().) This warning is given once.");
}

inline void SafeAccumulation::clear() {
  detail::clear_gradients(optimizer_);
  is_clear_ = true;
  scaler_.discard(optimizer_);
  sum_.clear();
  window_->pending = 0;
}

inline void SafeAccumulation::check_ready(const char* call) const {
  TORCH_CHECK(!scaler_.is_unscaled(optimizer_) && !scaler_.is_stepped(optimizer_),
              "SafeAccumulation::", call,
              ": the program has unscaled the gradients of this optimizer, or stepped with them, "
              "in this iteration. Leave unscale_, step and update to the accumulation, or call "
              "update() before.");
}

}  // namespace TORCHAMP_NAMESPACE
