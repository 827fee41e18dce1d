// SPDX-License-Identifier: BSD-3-Clause
// What quantisation to fp8 costs in LibTorch's real CUDA code: kernels, and bytes that they read
// and write. The table in examples/guide/contributors.md is what is counted here.
#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <ostream>
#include <set>
#include <string>
#include <string_view>

#include "cuda_on_host/stand_in.h"
#include "support/contributors_page.h"
#include "torchamp/detail/extras/observe/observer.h"
#include "torchamp/labs/fp8.h"
#include "torchamp/torchamp.h"

namespace {

using torch::Tensor;
using torchamp::Fp8Recipe;

constexpr int64_t side = 256;  ///< of each dimension

/// Kernels, and bytes of the tensors that they read and write, of the calling thread's ops and of
/// those of its backward, which runs on another thread meanwhile. One at a time.
class TrafficMeter {
 public:
  struct Traffic {
    uint64_t kernels = 0;
    int64_t bytes = 0;
  };

  TrafficMeter() {
    totals() = {};
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&enter, &leave)
                                             .needsInputs(true)
                                             .needsOutputs(true)
                                             .scopes({at::RecordScope::FUNCTION}));
  }
  ~TrafficMeter() { at::removeCallback(handle_); }
  TrafficMeter(const TrafficMeter&) = delete;
  TrafficMeter& operator=(const TrafficMeter&) = delete;

  Traffic products() const { return totals().products; }
  Traffic others() const { return totals().others; }

 private:
  struct Totals {
    Traffic products, others;
    uint64_t within = 0;  ///< kernels of ops that have ended, for those that called them
  };
  struct Op final : at::ObserverContext {
    uint64_t before = 0, within_before = 0;
    int64_t read = 0, written = 0;
  };
  static Totals& totals() {
    static Totals totals;
    return totals;
  }
  static uint64_t kernels() {
    StandInCounts counts;
    stand_in_counts(&counts);
    return counts.kernels;
  }

  static int64_t bytes_of(const c10::IValue& value) {
    if (!value.isTensor() || !value.toTensor().defined() || !value.toTensor().is_cuda()) return 0;
    const Tensor& tensor = value.toTensor();
    int64_t elements = 1;
    for (int64_t d = 0; d < tensor.dim(); ++d) {
      if (tensor.stride(d) != 0) elements *= tensor.size(d);
    }
    return elements * static_cast<int64_t>(tensor.element_size());
  }

  static std::unique_ptr<at::ObserverContext> enter(const at::RecordFunction& fn) {
    static const std::set<std::string_view> stores_only{"aten::copy_", "aten::fill_",
                                                        "aten::zero_"};
    auto op = std::make_unique<Op>();
    op->before = kernels();
    op->within_before = totals().within;
    const auto schema = fn.operator_schema();
    if (!schema) return op;
    const auto inputs = torchamp::detail::inputs_of(fn);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const c10::Argument& argument = schema->arguments()[i];
      const bool writes = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
      if (writes) op->written += bytes_of(inputs[i]);
      const bool reads = !writes || (!argument.is_out() && stores_only.count(fn.name()) == 0);
      if (reads) op->read += bytes_of(inputs[i]);
    }
    return op;
  }

  static void leave(const at::RecordFunction& fn, at::ObserverContext* context) {
    const Op& op = *static_cast<Op*>(context);
    Totals& all = totals();
    const uint64_t launched = kernels() - op.before;
    const uint64_t own = launched - (all.within - op.within_before);
    all.within = op.within_before + launched;
    if (own == 0) return;
    Traffic& to = std::string_view(fn.name()) == "aten::_scaled_mm" ? all.products : all.others;
    to.kernels += own;
    to.bytes += op.read + op.written;
    const auto schema = fn.operator_schema();
    if (!schema) return;
    const auto outputs = fn.outputs();
    for (std::size_t i = 0; i < outputs.size() && i < schema->returns().size(); ++i) {
      if (schema->returns()[i].alias_info() == nullptr) to.bytes += bytes_of(outputs[i]);
    }
  }

  at::CallbackHandle handle_;
};

struct Fp8Row {
  std::string what;
  Fp8Recipe recipe;
  at::ScalarType weights;  ///< their dtype
};
std::ostream& operator<<(std::ostream& out, const Fp8Row& row) {
  return out << row.what;
}

/// For each element of an operand: amax reads it, scaling reads it and writes a code. The second
/// product takes a transposed copy of the codes, or, if rows have scales, a separate form.
int64_t least_bytes(Fp8Recipe recipe, int64_t of_element) {
  const int64_t form = 2 * of_element + 1;
  return form + (recipe == Fp8Recipe::rowwise ? form : 2);
}

class Fp8Costs : public testing::TestWithParam<Fp8Row> {};
INSTANTIATE_TEST_SUITE_P(
    Recipes, Fp8Costs,
    testing::Values(Fp8Row{"`tensorwise`, bf16", Fp8Recipe::tensorwise, at::kBFloat16},
                    Fp8Row{"`tensorwise`, fp32", Fp8Recipe::tensorwise, at::kFloat},
                    Fp8Row{"`rowwise`, bf16", Fp8Recipe::rowwise, at::kBFloat16},
                    Fp8Row{"`rowwise`, fp32", Fp8Recipe::rowwise, at::kFloat}),
    [](const auto& instance) {
      return std::string(instance.param.recipe == Fp8Recipe::rowwise ? "Rowwise" : "Tensorwise") +
             (instance.param.weights == at::kFloat ? "Fp32Weights" : "Bf16Weights");
    });

/// A layer whose dimensions are all `side`, in a region in bf16.
struct Layer {
  explicit Layer(const Fp8Row& row)
      : w(at::randn({side, side}, at::kCUDA).to(row.weights).requires_grad_()),
        policy(torchamp::fp8(torchamp::Policy::standard(), torchamp::ops::dense,
                             {.recipe = row.recipe, .strict = true})) {
    const torchamp::AutocastGuard warm_up = guard();
    (void)torch::linear(x, w);
  }
  torchamp::AutocastGuard guard() const {
    return torchamp::AutocastGuard(at::kCUDA, {.dtype = at::kBFloat16, .policy = policy});
  }

  Tensor x = at::randn({side, side}, at::kCUDA).to(at::kBFloat16).requires_grad_();
  Tensor g = at::randn({side, side}, at::kCUDA).to(at::kBFloat16);
  Tensor w;
  torchamp::Policy policy;
};

double per_element(const TrafficMeter::Traffic& traffic) {
  return static_cast<double>(traffic.bytes) / (side * side);
}

TEST_P(Fp8Costs, ALayerCostsWhatTheGuideSaysAndNearlyTheLeast) {
  const Fp8Row& row = GetParam();
  const Layer layer(row);
  StandInCounts before, after;
  stand_in_counts(&before);
  const TrafficMeter meter;
  const torchamp::AutocastGuard guard = layer.guard();
  const Tensor y = torch::linear(layer.x, layer.w);
  (void)torch::autograd::grad({y}, {layer.x, layer.w}, {layer.g});
  stand_in_counts(&after);
  EXPECT_EQ(after.waits, before.waits);
  EXPECT_EQ(after.to_host, before.to_host);
  EXPECT_EQ(after.to_device, before.to_device);

  const int64_t of_weights = row.weights == at::kFloat ? 4 : 2;
  const int64_t least = 2 * least_bytes(row.recipe, 2) + least_bytes(row.recipe, of_weights);
  EXPECT_LE(per_element(meter.others()), 1.3 * static_cast<double>(least));
  const std::string line = "| " + row.what + " | " + std::to_string(meter.products().kernels) +
                           " | " + std::to_string(meter.others().kernels) + " | " +
                           std::to_string(std::lround(per_element(meter.others()))) + " | " +
                           std::to_string(least) + " |";
  expect_on_contributors_page(line);
}

TEST_P(Fp8Costs, AWeightThatIsUsedAgainInARegionCostsNothing) {
  const Layer layer(GetParam());
  const torchamp::AutocastGuard guard = layer.guard();
  const torch::NoGradGuard no_grad;
  (void)torch::linear(layer.x, layer.w);
  const TrafficMeter meter;
  (void)torch::linear(layer.x, layer.w);
  EXPECT_EQ(meter.products().kernels, 1U);
  EXPECT_EQ(meter.others().kernels, 7U) << "amax, five for the scale, codes";
  EXPECT_LE(per_element(meter.others()), 5.5) << "bf16 twice, a code";
}

}  // namespace
