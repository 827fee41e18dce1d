// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <memory>
#include <utility>

#include "torchamp/detail/graph/body.h"
#include "torchamp/detail/optim/counters.h"

namespace torchamp::detail {

/// What an iteration relies on that was captured while a first step could be still to come: once
/// it has come, there is less to do.
class FirstStepToCome final : public ReplayedState {
 public:
  explicit FirstStepToCome(std::shared_ptr<StepCounter> counter) : counter_(std::move(counter)) {}

  void settle() override {
    if (counter_->may_be_first() && counter_->value.item<float>() > 0.F) counter_->at_least = 1;
  }
  bool holds() override {
    counter_->learn();
    return counter_->may_be_first();
  }
  void note_replay() override {}
  bool wants_look() const override { return counter_->may_be_first() && !counter_->asked; }
  void look() override { counter_->ask(); }

 private:
  std::shared_ptr<StepCounter> counter_;
};

}  // namespace torchamp::detail
