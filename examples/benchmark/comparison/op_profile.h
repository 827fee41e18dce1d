// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/record_function.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <initializer_list>
#include <memory>
#include <string_view>
#include <vector>

/// Kinds of ops, as the report has columns for them; `rest` is what no op took.
enum class OpKind { product, cast, optimizer, norm, fill, other, rest };

inline constexpr std::array<const char*, 7> kOpKinds{"products", "casts", "optimizer", "norms",
                                                     "fills",    "other", "rest"};

// Note [Where the time of a step goes]
// LibTorch tells the begin and end of each op, and ops call ops. What one takes itself goes to its
// kind; an op that only serves others (a copy, an allocation) to the kind of the op that called it.
// Telling costs time, too: a profile is made apart from the rounds that count, and gives shares.

/// Where the processor's time of one thread goes while this lives, backward included. One at a
/// time.
class OpProfile {
 public:
  OpProfile()
      : handle_(at::addThreadLocalCallback(
            at::RecordFunctionCallback(&begin, &end).scopes({at::RecordScope::FUNCTION}))) {
    current() = this;
  }
  OpProfile(const OpProfile&) = delete;
  OpProfile& operator=(const OpProfile&) = delete;
  ~OpProfile() {
    at::removeCallback(handle_);
    current() = nullptr;
  }

  /// The share of each kind, by kOpKinds; together 1.
  std::array<double, kOpKinds.size()> shares() const {
    const double whole = seconds_since(start_);
    std::array<double, kOpKinds.size()> shares{};
    double ops = 0.;
    for (std::size_t kind = 0; kind + 1 < shares.size(); ++kind) {
      shares[kind] = seconds_[kind] / whole;
      ops += shares[kind];
    }
    shares.back() = 1. - ops;
    return shares;
  }

 private:
  using Clock = std::chrono::steady_clock;
  struct Frame {
    OpKind kind;
    Clock::time_point begin;
    double inner = 0.;  // seconds of the ops that it called
  };

  static double seconds_since(Clock::time_point then) {
    return std::chrono::duration<double>(Clock::now() - then).count();
  }

  static OpProfile*& current() {
    thread_local OpProfile* profile = nullptr;
    return profile;
  }

  static bool begins_with_one_of(std::string_view name,
                                 std::initializer_list<std::string_view> beginnings) {
    for (const std::string_view one : beginnings) {
      if (name.starts_with(one)) return true;
    }
    return false;
  }

  /// `caller`: of the op that calls it.
  static OpKind kind_of(std::string_view name, OpKind caller) {
    if (!name.starts_with("aten::")) return caller;
    name.remove_prefix(6);
    if (begins_with_one_of(name, {"_fused_", "_foreach_", "_amp_"})) return OpKind::optimizer;
    if (begins_with_one_of(name, {"addmm", "mm", "bmm", "baddbmm", "matmul", "linear", "_addmm",
                                  "convolution", "_convolution", "conv2d", "conv_transpose",
                                  "mkldnn_", "_scaled_dot", "scaled_dot", "_flash"})) {
      return OpKind::product;
    }
    if (begins_with_one_of(name, {"to.", "_to_copy", "_autocast_to"}) || name == "to") {
      return OpKind::cast;
    }
    if (begins_with_one_of(
            name, {"layer_norm", "native_layer_norm", "batch_norm", "_batch_norm",
                   "native_batch_norm", "group_norm", "native_group_norm", "softmax", "_softmax",
                   "log_softmax", "_log_softmax", "cross_entropy", "nll_loss"})) {
      return OpKind::norm;
    }
    if (begins_with_one_of(name, {"zero_", "fill_", "zeros", "full", "ones"})) return OpKind::fill;
    if (begins_with_one_of(
            name, {"copy_", "empty", "as_strided", "view", "t", "transpose", "resize_", "detach",
                   "alias", "reshape", "expand", "select", "slice", "clone", "contiguous"}) &&
        caller != OpKind::rest) {
      return caller;
    }
    return OpKind::other;
  }

  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& op) {
    OpProfile& self = *current();
    const OpKind caller = self.frames_.empty() ? OpKind::rest : self.frames_.back().kind;
    self.frames_.push_back({kind_of(op.name(), caller), Clock::now()});
    return nullptr;
  }

  static void end(const at::RecordFunction&, at::ObserverContext*) {
    OpProfile& self = *current();
    const Frame frame = self.frames_.back();
    self.frames_.pop_back();
    const double whole = seconds_since(frame.begin);
    self.seconds_[static_cast<std::size_t>(frame.kind)] += whole - frame.inner;
    if (!self.frames_.empty()) self.frames_.back().inner += whole;
  }

  std::vector<Frame> frames_;
  std::array<double, kOpKinds.size()> seconds_{};
  Clock::time_point start_ = Clock::now();
  at::CallbackHandle handle_;
};
