// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/div.h>
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
#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/scaler/step_ledger.h"
#include "torchamp/detail/extras/shared/master_meta.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

inline Accumulation::~Accumulation() {
  if (!window_ || window_->pending == 0) return;
  detail::warn_in_destructor(
      {"Accumulation: destroyed with ", window_->pending, " of ", micro_batches_,
       " micro-batches pending; later gradients will be added to theirs. First call "
       "flush() to step with them, or discard() to drop them."});
}

inline std::optional<StepResult> Accumulation::backward(const at::Tensor& loss) {
  TORCH_CHECK_VALUE(loss.defined(), terms_.backward, ": the loss is undefined.");
  const detail::StepLedger& ledger = detail::ScalerParts::ledger(scaler_);
  ledger.scaled.check_not_in(loss, terms_.backward);
  detail::check_not_scaled_within(loss, terms_.backward, ledger.scaled, ledger.order);
  check_open();
  const at::Tensor part = [&] {
    const c10::impl::ExcludeDispatchKeyGuard uncast(c10::autocast_dispatch_keyset);
    return at::div(loss, static_cast<double>(micro_batches_));
  }();
  detail::check_is_loss(part, terms_.backward);
  const at::Tensor scaled = scaler_.scale(part);
  if (window_->pending == 0) {
    open_window();
  } else {
    check_window(terms_.backward);
    warn_of_writes();
  }
  stage_ = Stage::adding;
  scaled.backward();
  stage_ = Stage::open;
  note_gradients();
  if (++window_->pending < micro_batches_) return std::nullopt;
  return flush();
}

inline void Accumulation::open_window() {
  version_ = version_of_scale();
  detail::note_open(detail::ScalerParts::ledger(scaler_), window_, optimizer_);
}

inline void Accumulation::note_gradients() {
  gradients_ = detail::count_gradients(optimizer_);
  versions_ = detail::versions_of_gradients(optimizer_);
  taken_ = detail::gradients_moved();
  added_at_ = detail::PlainClips::tick();
}

inline void Accumulation::note_replayed_backward() {
  if (window_->pending == 0) open_window();
  note_gradients();
  if (++window_->pending == micro_batches_) clear();
}

inline std::function<void()> Accumulation::bookmark() {
  return [this, window = *window_, stage = stage_, gradients = gradients_,
          has_scale = version_ == version_of_scale(), is_unchanged = is_as_left()] {
    *window_ = window;
    stage_ = stage;
    gradients_ = gradients;
    // LibTorch has counted writes to the scale and the gradients that the device has not executed.
    if (has_scale) version_ = version_of_scale();
    if (is_unchanged) note_gradients();
  };
}

inline std::optional<StepResult> Accumulation::flush() {
  check_whole(terms_.flush);
  if (window_->pending == 0) return std::nullopt;
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
  StepResult result = scaler_.step(optimizer_);
  clear();
  try {
    scaler_.update();
  } catch (...) {
    scaler_.discard(optimizer_);
    throw;
  }
  return result;
}

inline void Accumulation::discard() {
  clear();
  detail::drop_model_gradients(optimizer_);
  scaler_.discard(optimizer_);
}

inline int64_t Accumulation::version_of_scale() const {
  const at::Tensor& scale = detail::ScalerParts::scale(scaler_).scale();
  return scale.defined() ? static_cast<int64_t>(scale._version()) : 0;
}

inline void Accumulation::clear() {
  detail::clear_gradients(optimizer_);
  window_->pending = 0;
  window_->was_used = false;
  stage_ = Stage::open;
  gradients_ = 0;
}

inline void Accumulation::check_whole(const char* call) const {
  TORCH_CHECK(stage_ != Stage::adding, call,
              ": backward() has failed, so the gradients may hold part of a micro-batch. ",
              terms_.drop);
}

inline void Accumulation::check_open() const {
  check_whole(terms_.backward);
  TORCH_CHECK(stage_ == Stage::open, terms_.backward, ": the step with ", window_->pending, " of ",
              micro_batches_,
              " micro-batches has failed, so the window accepts no more. Call flush() to try the "
              "step again, or discard() to drop the window.");
  TORCH_CHECK(!scaler_.is_unscaled(optimizer_) && !scaler_.is_stepped(optimizer_), terms_.backward,
              ": the gradients of this optimizer have been unscaled or stepped with in this "
              "iteration; scaled ones cannot be added to them. Leave unscale_, step and update "
              "to ",
              terms_.owner, ". ", terms_.drop);
}

inline void Accumulation::check_window(const char* call) const {
  TORCH_CHECK(
      version_of_scale() == version_, call, ": the scale has changed after ", window_->pending,
      " of ", micro_batches_,
      " micro-batches, whose gradients have the old scale. Leave step and update to ", terms_.owner,
      ", set the scale between two windows, and give each optimizer that steps within one a "
      "scaler of its own. ",
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

/// Whether the gradients of an open window are as the last backward() has left them, or masters
/// have taken them since.
inline bool Accumulation::is_as_left() const {
  return taken_ != detail::gradients_moved() ||
         (versions_ == detail::versions_of_gradients(optimizer_) &&
          !detail::PlainClips::any_since(added_at_, optimizer_));
}

inline Accumulation::Look Accumulation::look() const {
  if (window_->pending == 0) return {};
  Look look{true,
            is_as_left(),
            detail::versions_of_gradients(optimizer_),
            detail::PlainClips::tick(),
            {}};
  detail::for_each_gradient(
      optimizer_, [&look](const at::Tensor& gradient) { look.gradients.emplace_back(gradient); });
  return look;
}

inline bool Accumulation::has_changed(const Look& before) const {
  return before.is_open && before.versions != detail::versions_of_gradients(optimizer_);
}

inline void Accumulation::accept_scaled(const Look& before) {
  const detail::StepOrder& order = detail::ScalerParts::ledger(scaler_).order;
  const bool may_be_scaled = order.was_scaled_since(before.time) || order.was_asked();
  if (!before.is_as_left || !may_be_scaled || !has_changed(before)) return;
  // Where some are gone, as by zero_grad(), check_window() or warn_of_writes() tells of it.
  const bool any_gone = std::ranges::any_of(before.gradients, &detail::WeakTensor::is_gone);
  if (!any_gone && detail::count_gradients(optimizer_) >= gradients_) note_gradients();
}

inline void Accumulation::warn_of_writes() {
  if (warned_ || is_as_left()) return;
  warned_ = true;
  TORCH_WARN(terms_.backward, ": the gradients of ", window_->pending, " of ", micro_batches_,
             " micro-batches were written to or replaced since the last call, as by a clip, "
             "zero_grad(false) or a backward() beside ",
             terms_.owner, ". Leave it out: ", terms_.owner, " clears gradients after its step. ",
             terms_.change, " This warning is given once.");
}

}  // namespace TORCHAMP_NAMESPACE
