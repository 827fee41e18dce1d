// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/detail/extras/shared/captured_call.h"
#include "torchamp/detail/extras/shared/model.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

using Tensors = std::vector<at::Tensor>;

/// Data that all iterations of a CudaGraph share.
struct GraphWork {
  std::vector<std::reference_wrapper<torch::optim::Optimizer>> optimizers;
  std::function<BodyResult(const Tensors&)> body;
  std::vector<Model> models;
  std::int64_t warmup = 1;
  bool when_possible = false;
  bool warned = false;  // of a difference, or that iterations run eagerly
  BodyResult outputs = {};

  void call(const Tensors& inputs) {
    outputs = {};
    BodyResult made = body(inputs);
    for (at::Tensor& output : made.tensors) {
      if (output.defined()) output = output.detach();  // releases the autograd graph
    }
    outputs = std::move(made);
  }

  /// Warns once that iterations run eagerly, with the reason; `why` may begin with the name of the
  /// class.
  void warn_of_eager(std::string why) {
    if (std::exchange(warned, true)) return;
    constexpr const char* name = "CudaGraph: ";
    if (why.starts_with(name)) why.erase(0, std::string(name).size());
    TORCH_WARN("CudaGraph: iterations run eagerly, with the same results: ", why,
               " This warning is given once; without .when_possible it is an error.");
  }
};

/// The gradients of all parameters at one moment. Graphs of micro-batches add to the same memory in
/// each window, so the parameters must still have these gradients when the next graph is replayed.
class GradientList {
 public:
  GradientList() = default;
  explicit GradientList(const GraphWork& work) {
    for (torch::optim::Optimizer& optimizer : work.optimizers) {
      any_parameter(optimizer, [this](const at::Tensor& parameter) {
        gradients_.emplace_back(parameter, gradient_of(parameter));
        return false;
      });
    }
    for (const Model& model : work.models) {  // whose gradients masters take
      for (const at::Tensor& parameter : model.get()->parameters()) {
        gradients_.emplace_back(parameter, gradient_of(parameter));
      }
    }
  }

  /// Whether they are the parameters' present gradients.
  bool are_attached() const {
    return std::ranges::all_of(gradients_, [](const auto& one) {
      return gradient_of(one.first).unsafeGetTensorImpl() == one.second.unsafeGetTensorImpl();
    });
  }
  void attach() const {
    for (const auto& [parameter, gradient] : gradients_) parameter.mutable_grad() = gradient;
  }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients_;  // by parameter
};

}  // namespace TORCHAMP_NAMESPACE::detail
