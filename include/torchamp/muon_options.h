// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <tuple>

#include "torchamp/detail/core/base/text.h"
#include "torchamp/version.h"

/// @file
/// @brief Core. The options of FusedMuon, and the state that it stores for a parameter.

namespace TORCHAMP_NAMESPACE {

/// The options of FusedMuon, with the names and defaults of torch.optim.Muon. If a group has
/// MuonOptions, all their values apply to it, even values that were not set. (If LibTorch's own
/// options of a group leave values out, LibTorch 2.15 takes these values from the optimizer's
/// defaults.)
struct MuonOptions : public torch::optim::OptimizerCloneableOptions<MuonOptions> {
  /// @cond
  /// In archives, an option that no other optimizer has.
  static constexpr const char* only_option = "ns_coefficients";
  /// @endcond

  /// How the learning rate depends on the shape of a matrix of A rows and B columns.
  enum class AdjustLr {
    original,            ///< lr * sqrt(max(1, A / B))
    match_rms_adamw,     ///< lr * 0.2 * sqrt(max(A, B)): use lr and weight_decay of AdamW
    spectral_unclamped,  ///< lr * sqrt(A / B)
  };
  /// The coefficients a, b and c of an iteration's polynomial a X + b (X X') X + c (X X')^2 X.
  using NsCoefficients = std::tuple<double, double, double>;

  /// All other options have their defaults.
  MuonOptions(double lr = 1e-3) : lr_(lr) {}

  /// @name Options
  /// `options.lr()` reads an option, and `options.lr(0.02)` sets it and returns the options.
  /// @{

  /// The learning rate.
  TORCH_ARG(double, lr);
  /// Weight decay, decoupled as in AdamW: a step subtracts lr * weight_decay times each weight.
  TORCH_ARG(double, weight_decay) = 0.1;
  /// The factor of the previous momentum in each step.
  TORCH_ARG(double, momentum) = 0.95;
  /// Whether a step uses Nesterov momentum.
  TORCH_ARG(bool, nesterov) = true;
  /// The coefficients of the Newton-Schulz iterations.
  TORCH_ARG(NsCoefficients, ns_coefficients) = {3.4445, -4.7750, 2.0315};
  /// A matrix is divided by its norm before the iterations, or by this number if its norm is
  /// smaller.
  TORCH_ARG(double, eps) = 1e-7;
  /// The number of Newton-Schulz iterations, below 100.
  TORCH_ARG(int64_t, ns_steps) = 5;
  /// How the learning rate depends on the shape of a matrix.
  TORCH_ARG(AdjustLr, adjust_lr) = AdjustLr::original;

  /// @}

 private:
  /// In the order of `names`.
  template <class Self>
  static auto all(Self& o) {
    return std::tie(o.lr_, o.weight_decay_, o.momentum_, o.nesterov_, o.ns_coefficients_, o.eps_,
                    o.ns_steps_, o.adjust_lr_);
  }
  static constexpr const char* names[] = {"lr",       "weight_decay",    "momentum",
                                          "nesterov", "ns_coefficients", "eps",
                                          "ns_steps", "adjust_lr"};
  /// In the order of AdjustLr.
  static constexpr const char* adjustments[] = {"original", "match_rms_adamw",
                                                "spectral_unclamped"};

  template <class T>
  static c10::IValue written(const T& value) {
    return value;
  }
  static c10::IValue written(AdjustLr value) {
    return std::string(adjustments[static_cast<std::size_t>(value)]);
  }
  template <class T>
  static void read_option(const c10::IValue& stored, T& value) {
    value = stored.to<T>();
  }
  static void read_option(const c10::IValue& stored, AdjustLr& value) {
    std::size_t i = 0;
    while (i < std::size(adjustments) && stored.toStringRef() != adjustments[i]) ++i;
    TORCHAMP_CHECK(i < std::size(adjustments), "MuonOptions: the archive's adjust_lr is '",
                   detail::shorten(stored.toStringRef()), "', which this version does not have.");
    value = static_cast<AdjustLr>(i);
  }

 public:
  /// Throws for an option that is out of range.
  void check() const {
    const auto at_least_0 = [](const char* name, double value) {
      TORCHAMP_CHECK_VALUE(value >= 0., "FusedMuon: ", name, " is ", value,
                           ". It must be at least 0.");
    };
    at_least_0("lr", lr());
    at_least_0("weight_decay", weight_decay());
    at_least_0("momentum", momentum());
    at_least_0("eps", eps());
    TORCHAMP_CHECK_VALUE(ns_steps() >= 0 && ns_steps() < 100, "FusedMuon: ns_steps is ", ns_steps(),
                         ". It must be at least 0 and below 100.");
  }

  /// Reads all options; an error if one is missing.
  void serialize(torch::serialize::InputArchive& archive) override {
    std::size_t next = 0;
    const auto read = [&](auto& value) {
      c10::IValue stored;
      archive.read(names[next++], stored);
      read_option(stored, value);
    };
    std::apply([&](auto&... value) { (read(value), ...); }, all(*this));
  }
  /// Writes all options.
  void serialize(torch::serialize::OutputArchive& archive) const override {
    std::size_t next = 0;
    const auto write = [&](const auto& value) { archive.write(names[next++], written(value)); };
    std::apply([&](const auto&... value) { (write(value), ...); }, all(*this));
  }
  /// The learning rate, for LibTorch's schedulers.
  double get_lr() const override { return lr(); }
  /// Sets the learning rate, for LibTorch's schedulers.
  void set_lr(const double lr) override { lr_ = lr; }

  /// Whether all options are equal.
  friend bool operator==(const MuonOptions& a, const MuonOptions& b) { return all(a) == all(b); }
};

/// What FusedMuon stores for a parameter.
struct MuonParamState : public torch::optim::OptimizerCloneableParamState<MuonParamState> {
  /// The momentum, of the parameter's shape.
  TORCH_ARG(at::Tensor, momentum_buffer);

 public:
  /// Reads the momentum, if the archive has one.
  void serialize(torch::serialize::InputArchive& archive) override {
    c10::IValue stored;
    if (archive.try_read("momentum_buffer", stored)) momentum_buffer_ = stored.toTensor();
  }
  /// Writes the momentum, if there is one.
  void serialize(torch::serialize::OutputArchive& archive) const override {
    if (momentum_buffer_.defined()) {
      archive.write("momentum_buffer", c10::IValue(momentum_buffer_));
    }
  }
};

}  // namespace TORCHAMP_NAMESPACE
