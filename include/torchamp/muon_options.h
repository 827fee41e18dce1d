// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/arg.h>

#include <array>
#include <cstdint>
#include <tuple>

#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/optim/stored_fields.h"
#include "torchamp/version.h"

/// @file
/// @brief Core. The options of FusedMuon, and the state that it stores for a parameter.

namespace TORCHAMP_NAMESPACE {

/// The options of FusedMuon, with the names and defaults of torch.optim.Muon. If a group has
/// MuonOptions, all their values apply to it, even values that were not set. (If LibTorch's own
/// options of a group leave values out, LibTorch 2.15 takes these values from the optimizer's
/// defaults.)
struct MuonOptions : public detail::StoredOptions<MuonOptions> {
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

  /// @cond
  template <class Self>
  static auto fields(Self& o) {
    using detail::Field;
    return std::tuple{Field{"lr", o.lr()},
                      Field{"weight_decay", o.weight_decay()},
                      Field{"momentum", o.momentum()},
                      Field{"nesterov", o.nesterov()},
                      Field{"ns_coefficients", o.ns_coefficients()},
                      Field{"eps", o.eps()},
                      Field{"ns_steps", o.ns_steps()},
                      Field{"adjust_lr", o.adjust_lr()}};
  }
  /// In the order of AdjustLr.
  static constexpr auto names_of(AdjustLr) {
    return std::array{"original", "match_rms_adamw", "spectral_unclamped"};
  }
  /// @endcond
};

/// What FusedMuon stores for a parameter.
struct MuonParamState : public detail::StoredState<MuonParamState> {
  /// The momentum, of the parameter's shape.
  TORCH_ARG(at::Tensor, momentum_buffer);

 public:
  /// @cond
  template <class Self>
  static auto fields(Self& state) {
    return std::tuple{detail::Field{"momentum_buffer", state.momentum_buffer()}};
  }
  /// @endcond
};

}  // namespace TORCHAMP_NAMESPACE
