// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/clamp_max.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "torchamp/accumulate.h"
#include "torchamp/detail/core/base/snapshot.h"
#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/gradients/clip_calls.h"
#include "torchamp/detail/core/scaler/step_ledger.h"
#include "torchamp/detail/extras/shared/master_gradients.h"
#include "torchamp/detail/extras/shared/master_meta.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

TORCHAMP_BODY Accumulation::~Accumulation() {
  if (!window_ || window_->pending == 0) return;
  detail::warn_in_destructor(
      {"Accumulation: destroyed with ", window_->pending, " of ", micro_batches_,
       " micro-batches pending", sum_ ? "" : "; later gradients will be added to theirs",
       ". First call flush() to step with them, or discard() to drop them."});
}

TORCHAMP_BODY std::optional<AccumulationResult> Accumulation::backward(const at::Tensor& loss) {
  TORCH_CHECK_VALUE(loss.defined(), terms_.backward, ": the loss is undefined.");
  const detail::StepLedger& ledger = detail::ScalerParts::ledger(scaler_);
  detail::check_not_scaled(loss, terms_.backward, ledger);
  check_open();
  const at::Tensor part = [&] {
    const c10::impl::ExcludeDispatchKeyGuard uncast(c10::autocast_dispatch_keyset);
    return sum_ ? loss : at::div(loss, static_cast<double>(micro_batches_));
  }();
  detail::check_is_loss(part, terms_.backward);
  const at::Tensor scaled = scaler_.scale(part);
  sum_ ? add_apart(scaled) : add_in_place(scaled);
  if (window_->pending < micro_batches_) return std::nullopt;
  return flush();
}

/// Adds to the present gradients.
TORCHAMP_BODY void Accumulation::add_in_place(const at::Tensor& scaled) {
  if (window_->pending == 0) {
    open_window();
  } else {
    check_window(terms_.backward);
    warn_of_writes();
  }
  stage_ = Stage::adding;
  scaled.backward();
  // Moved to the masters, so that later gradients also add in fp32. Gradients that a reducer has
  // not averaged yet stay in the model, where the reducer expects them.
  const bool is_last = window_->pending + 1 == micro_batches_;
  if (!is_last && !(detail::any_has_left_local &&
                    detail::any_parameter(optimizer_, detail::has_local_gradient))) {
    detail::take_model_gradients(optimizer_);
  }
  detail::separate_window_gradients(optimizer_);
  stage_ = Stage::open;
  note_gradients();
  ++window_->pending;
}

/// Adds to sums outside `.grad`, unless a gradient is not finite.
TORCHAMP_BODY void Accumulation::add_apart(const at::Tensor& scaled) {
  warn_of_others(terms_.backward);
  detail::clear_gradients(optimizer_);
  detail::drop_model_gradients(optimizer_);  // left by an exception
  is_clear_ = false;
  scaled.backward();
  if (const auto unsent = detail::unsent_of(optimizer_); unsent && unsent->any()) {
    unsent->drop();
    TORCH_CHECK(false, terms_.backward,
                ": the gradients of this micro-batch were computed within no_sync() and not sent, "
                "so the processes cannot decide whether to keep them. Leave no_sync() out.");
  }
  if (before_unscale_) before_unscale_();
  detail::warn_of_local_gradients(optimizer_, terms_.backward, warned_of_local_, terms_.send);
  sum_->check(optimizer_);
  try {
    scaler_.unscale_(optimizer_);
    const auto add = sum_->prepared(optimizer_, scaler_.found_inf(optimizer_));
    scaler_.update();  // before the sums change, since it may throw
    add();
  } catch (...) {
    scaler_.discard(optimizer_);
    throw;
  }
  if (++window_->pending == 1) {
    open_window();
    noted_at_ = detail::ClipCalls::now();
  }
  detail::clear_gradients(optimizer_);
  is_clear_ = true;
}

TORCHAMP_BODY void Accumulation::open_window() {
  version_ = version_of_scale();
  detail::note_open(detail::ScalerParts::ledger(scaler_), window_, optimizer_);
}

TORCHAMP_BODY void Accumulation::note_gradients() {
  gradients_ = detail::count_gradients(optimizer_);
  snapshot_ = detail::Snapshot(detail::walk_window(optimizer_));
  taken_ = detail::gradients_moved();
  noted_at_ = detail::ClipCalls::now();
}

TORCHAMP_BODY void Accumulation::note_replayed_backward() {
  if (window_->pending == 0) open_window();
  note_gradients();
  if (++window_->pending == micro_batches_) clear();
}

TORCHAMP_BODY std::function<void()> Accumulation::bookmark() {
  return [this, window = *window_, stage = stage_, gradients = gradients_,
          has_scale = version_ == version_of_scale(), was_unchanged = is_unchanged()] {
    *window_ = window;
    stage_ = stage;
    gradients_ = gradients;
    // LibTorch has counted writes to the scale and the gradients that the device has not executed.
    if (has_scale) version_ = version_of_scale();
    if (was_unchanged) note_gradients();
  };
}

TORCHAMP_BODY std::optional<AccumulationResult> Accumulation::flush() {
  check_whole(terms_.flush);
  if (window_->pending == 0) return std::nullopt;
  if (sum_) return step_with_mean();
  check_window(terms_.flush);
  stage_ = Stage::stepping;
  if (!scaler_.is_unscaled(optimizer_)) {
    const auto unsent = detail::unsent_of(optimizer_);
    if (unsent && unsent->any()) unsent->send();
    if (before_unscale_) before_unscale_();
    detail::warn_of_local_gradients(optimizer_, terms_.flush, warned_of_local_, terms_.send);
  }
  if (before_step_) {
    if (!scaler_.is_unscaled(optimizer_)) scaler_.unscale_(optimizer_);
    before_step_();
  }
  AccumulationResult result(scaler_.step(optimizer_), window_->pending);
  clear();  // if update() throws, the next window must not hold these gradients
  try {
    scaler_.update();
  } catch (...) {
    scaler_.discard(optimizer_);
    throw;
  }
  return result;
}

/// Steps with the mean of the sums. After an error the window is unchanged.
TORCHAMP_BODY AccumulationResult Accumulation::step_with_mean() {
  check_scaled(terms_.flush);
  TORCH_CHECK(before_step_ || !detail::ClipCalls::was_in_vain(noted_at_, optimizer_), terms_.flush,
              ": a clip before this call found no gradients, because the sums are outside .grad. "
              "Clip in before_step([&] { clip_grad_norm_(optimizer, 1.); }).");
  warn_of_others(terms_.flush);
  detail::clear_gradients(optimizer_);  // a failed step may have left its own gradients
  is_clear_ = false;
  auto kept = std::make_shared<detail::ReadOnce>(sum_->kept());
  at::Tensor skipped;  // memory for the code after the step, which must not fail
  if (kept->tensor.defined()) skipped = at::empty_like(kept->tensor);
  detail::take_unscaled(scaler_, optimizer_, sum_->give_mean_to(optimizer_, *kept));
  try {
    if (before_step_) before_step_();
    const bool steps = scaler_.is_enabled() || sum_->any();
    AccumulationResult result(steps ? scaler_.step(optimizer_) : detail::no_step(),
                              window_->pending, std::move(kept));
    if (skipped.defined()) {
      const detail::InternalOps guard;
      at::clamp_max_out(skipped, result.found_inf(), 1.);
      result.kept_->tensor.addcmul_(result.kept_->tensor, skipped, -1.);
    }
    clear();
    scaler_.discard(optimizer_);
    return result;
  } catch (...) {
    scaler_.discard(optimizer_);
    throw;
  }
}

TORCHAMP_BODY void Accumulation::discard() {
  clear();
  detail::drop_model_gradients(optimizer_);
  scaler_.discard(optimizer_);
}

TORCHAMP_BODY int64_t Accumulation::version_of_scale() const {
  const at::Tensor& scale = detail::ScalerParts::scale(scaler_).scale();
  return scale.defined() ? static_cast<int64_t>(scale._version()) : 0;
}

TORCHAMP_BODY void Accumulation::clear() {
  detail::clear_gradients(optimizer_);
  window_->pending = 0;
  window_->was_used = false;
  stage_ = Stage::open;
  gradients_ = 0;
  if (sum_) sum_->clear();
  is_clear_ = true;
}

TORCHAMP_BODY void Accumulation::check_whole(const char* call) const {
  TORCH_CHECK(stage_ != Stage::adding, call,
              ": backward() has failed, so the gradients may hold part of a micro-batch. ",
              terms_.drop);
}

TORCHAMP_BODY void Accumulation::check_open() const {
  check_whole(terms_.backward);
  TORCH_CHECK(stage_ == Stage::open && window_->pending < micro_batches_, terms_.backward,
              ": the step with ", window_->pending, " of ", micro_batches_,
              " micro-batches has failed, so the window accepts no more. Call flush() to try the "
              "step again, or discard() to drop the window.");
  check_scaled(terms_.backward);
}

TORCHAMP_BODY void Accumulation::check_scaled(const char* call) const {
  TORCH_CHECK(!scaler_.is_unscaled(optimizer_) && !scaler_.is_stepped(optimizer_), call,
              ": the gradients of this optimizer have been unscaled or stepped with in this "
              "iteration; scaled ones cannot be added to them. Leave unscale_, step and update "
              "to ",
              terms_.owner, ". ", terms_.drop);
}

TORCHAMP_BODY void Accumulation::check_window(const char* call) const {
  TORCH_CHECK(version_of_scale() == version_, call, ": the scale has changed after ",
              window_->pending, " of ", micro_batches_,
              " micro-batches, whose gradients have the old scale. Leave step and update to ",
              terms_.owner,
              ", set the scale between two windows, and give each optimizer that steps within a "
              "window its own scaler. ",
              terms_.drop);
  TORCH_CHECK(detail::count_gradients(optimizer_) >= gradients_, call, ": the gradients of ",
              window_->pending, " of ", micro_batches_,
              " micro-batches are gone. Leave out zero_grad(): ", terms_.owner,
              " clears them after its step. ", terms_.drop);
  TORCH_CHECK(!window_->was_used, call, ": the scaler has stepped with the gradients of ",
              window_->pending, " of ", micro_batches_,
              " micro-batches, or unscaled them, in an iteration that has ended. Leave step and "
              "update to ",
              terms_.owner, ". ", terms_.drop);
}

/// Whether the gradients of an open window are unchanged since the last backward(), or masters have
/// taken them since.
TORCHAMP_BODY bool Accumulation::is_unchanged() const {
  return taken_ != detail::gradients_moved() ||
         (snapshot_.is_same(detail::walk_window(optimizer_)) &&
          !detail::ClipCalls::has_clipped(noted_at_, optimizer_));
}

TORCHAMP_BODY Accumulation::Look Accumulation::look() const {
  if (window_->pending == 0) return {};
  return {true, is_unchanged(), detail::ScalerParts::ledger(scaler_).use.times_scaled(),
          detail::Snapshot(detail::walk_window(optimizer_))};
}

TORCHAMP_BODY bool Accumulation::has_changed(const Look& before) const {
  return before.is_open && !before.gradients.is_same(detail::walk_window(optimizer_));
}

TORCHAMP_BODY void Accumulation::accept_scaled(const Look& before) {
  const detail::ScaleUse& use = detail::ScalerParts::ledger(scaler_).use;
  const bool may_be_scaled = use.times_scaled() > before.times_scaled || use.was_read();
  if (!before.is_unchanged || !may_be_scaled || !has_changed(before)) return;
  // If some gradients are gone, for example by zero_grad(), check_window() or warn_of_writes()
  // reports it.
  const bool any_gone = std::ranges::any_of(before.gradients, &detail::TensorSnapshot::is_gone);
  if (!any_gone && detail::count_gradients(optimizer_) >= gradients_) note_gradients();
}

TORCHAMP_BODY void Accumulation::warn_of_writes() {
  if (warned_ || is_unchanged()) return;
  warned_ = true;
  TORCH_WARN(terms_.backward, ": the gradients of ", window_->pending, " of ", micro_batches_,
             " micro-batches were written to or replaced since the last call, for example by a "
             "clip, zero_grad(false) or a backward() outside of ",
             terms_.owner, ". Leave it out: ", terms_.owner, " clears gradients after its step. ",
             terms_.change, " This warning is given once.");
}

TORCHAMP_BODY void Accumulation::warn_of_others(const char* call) {
  if (!is_clear_ || warned_ || !detail::any_gradient(optimizer_)) return;
  warned_ = true;
  TORCH_WARN(call, ": the parameters have gradients that do not come from backward() of ",
             terms_.owner,
             "; they are dropped. Call accumulation.backward(loss) for every loss. "
             "(To drop gradients on purpose, call zero_grad().) This warning is given once.");
}

}  // namespace TORCHAMP_NAMESPACE
