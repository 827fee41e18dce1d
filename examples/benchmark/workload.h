// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

/// A workload's sizes by name, such as {"batch", 16}. models.py knows the same names.
using Sizes = std::map<std::string, std::int64_t>;

/// How large a workload is: `small` for steps of milliseconds, `large` so that products take most
/// of a step on a CPU with fast 16-bit units, `full` for a GPU.
enum class Preset { small, large, full };

/// How a workload's weights are updated.
struct Recipe {
  enum class Optimizer { adam, adamw, sgd } optimizer = Optimizer::adam;
  double learning_rate = 1e-3;
  double clip_norm = 0.;          ///< 0: no clipping
  std::int64_t accumulate = 1;    ///< batches per optimizer step
  std::int64_t warmup_steps = 0;  ///< in which the learning rate rises
  bool weight_average = false;    ///< keeps an exponential moving average of all weights
};

/// A model, its data and its loss. A twin in models.py does the same in Python.
class Workload {
 public:
  virtual ~Workload() = default;
  virtual torch::nn::Module& module() = 0;
  virtual Recipe recipe() const = 0;

  /// A batch on the CPU. Depends on LibTorch's CPU generator alone.
  virtual std::vector<at::Tensor> make_batch() const = 0;

  /// Forward and loss: what a guard is laid around.
  virtual at::Tensor loss(const std::vector<at::Tensor>& batch) = 0;

  /// What the model says of a batch, without a loss: what inference is measured by.
  virtual at::Tensor predict(const std::vector<at::Tensor>& batch) = 0;

  /// From now on backward computes the activations within layers again, which forward does not
  /// keep. False: this model cannot.
  virtual bool recompute() { return false; }

  /// From now on linear layers are those of torch::nn::Linear, which adds the bias of an input with
  /// three dimensions in an op. False: this model cannot.
  virtual bool add_biases_apart() { return false; }
};

inline std::int64_t count_parameters(const torch::nn::Module& module) {
  std::int64_t count = 0;
  for (const at::Tensor& parameter : module.parameters()) count += parameter.numel();
  return count;
}

/// Start weights that Python's twin finds too: from one generator, in the order of the parameters.
/// Matrices and kernels are normal by their fan-in, vectors 1 (a norm's weight) or 0.
inline void initialize(torch::nn::Module& module, std::uint64_t seed) {
  const torch::NoGradGuard no_grad;
  torch::manual_seed(seed);
  for (auto& item : module.named_parameters()) {
    at::Tensor& parameter = item.value();
    if (parameter.dim() >= 2) {
      const double fan_in = static_cast<double>(parameter.numel() / parameter.size(0));
      parameter.normal_(0., std::sqrt(1. / fan_in));
    } else {
      parameter.fill_(item.key().ends_with("weight") ? 1. : 0.);
    }
  }
}
