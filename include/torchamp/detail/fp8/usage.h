// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/util/Exception.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "torchamp/detail/policy/rule.h"
#include "torchamp/version.h"

namespace torchamp::detail {

/// Whether a region makes any product in fp8, and what it calls instead.
class Fp8Usage final : public OpRuleUsage {
 public:
  explicit Fp8Usage(std::shared_ptr<OpRuleUsage> outer) : outer_(std::move(outer)) {}

  bool has_run() const override { return has_run_.load(std::memory_order_relaxed); }

  void run() override {
    if (has_run()) return;
    has_run_.store(true, std::memory_order_relaxed);
    if (outer_ != nullptr) outer_->run();
  }

  void called_instead(std::string op, const std::string& why) override {
    if (op.starts_with("aten::")) op.erase(0, 6);
    if (!why.empty()) op += " (" + why + ')';
    const std::scoped_lock<std::mutex> lock(mutex_);
    const bool is_known = (", " + called_ + ", ").find(", " + op + ", ") != std::string::npos;
    if (is_known || called_.size() > 500) return;
    called_ += (called_.empty() ? "" : ", ") + op;
  }

  void warn_if_unused() const override {
    if (has_run()) return;
    const std::scoped_lock<std::mutex> lock(mutex_);
    if (called_.empty()) return;
    TORCH_WARN_ONCE(
        "AutocastGuard: the policy has an fp8 rule, but no product of the region was in fp8. "
        "Called instead: ",
        called_,
        ". The rule may name ops that the model does not call: torch::nn::Linear calls addmm or "
        "matmul, not linear; ops::dense names them all.");
  }

 private:
  std::shared_ptr<OpRuleUsage> outer_;
  std::atomic<bool> has_run_ = false;
  mutable std::mutex mutex_;
  std::string called_;
};

}  // namespace torchamp::detail
