// SPDX-License-Identifier: BSD-3-Clause
// A step of the comparison's models, compared with Python's step: the host's calls and the device's
// work. The table in examples/guide/contributors.md is what is counted here.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <fstream>
#include <map>
#include <memory>
#include <ostream>
#include <string>
#include <utility>

#include "benchmark/comparison/trainer.h"
#include "benchmark/models/bert.h"
#include "benchmark/models/feed_forward.h"
#include "benchmark/models/gpt.h"
#include "benchmark/models/unet.h"
#include "cuda_on_host/stand_in.h"
#include "support/contributors_page.h"
#include "support/op_count.h"

namespace {

struct Model {
  std::string name, title;
  Sizes sizes;  // the sizes of steps_python.py
  std::unique_ptr<Workload> (*make)(const Sizes&);
};
std::ostream& operator<<(std::ostream& out, const Model& model) {
  return out << model.name;
}

template <class Kind>
Model model_of(std::string name, std::string title, Sizes sizes) {
  return {
      std::move(name), std::move(title), std::move(sizes),
      [](const Sizes& its) -> std::unique_ptr<Workload> { return std::make_unique<Kind>(its); }};
}

/// What Python's twin takes, by steps_python.py: "gpt fused" -> {"kernels", 331}, …
std::map<std::string, support::OpCounts> recorded_steps() {
  std::map<std::string, support::OpCounts> steps;
  std::ifstream in("cuda_on_host/steps_python.txt");
  std::string model, part, name;
  for (std::int64_t count = 0; in >> model >> part >> name >> count;) {
    steps[model + ' ' + part][name] = count;
  }
  return steps;
}

struct Step {
  support::OpCounts ops;
  std::int64_t kernels = 0, waits = 0;
};

/// Of a step in fp16 after some others, or of the first batch's loss and its gradients.
Step step_of(const Model& model, const char* optimizer, bool whole = true) {
  Trainer trainer(model.make(model.sizes), Way{"cpp", "torch", "fp16", optimizer}, at::kCUDA);
  trainer.run(3);
  torch::cuda::synchronize();
  StandInCounts before, after;
  stand_in_counts(&before);
  Step step{.ops = trainer.count_ops(whole)};
  stand_in_counts(&after);
  step.kernels = static_cast<std::int64_t>(after.kernels - before.kernels);
  step.waits = static_cast<std::int64_t>(after.waits - before.waits);
  return step;
}

class StepsComparedWithPython : public ::testing::TestWithParam<Model> {
 protected:
  void SetUp() override {
#if TORCH_VERSION_MINOR != 15
    GTEST_SKIP() << "Python's counts are those of LibTorch 2.15";
#endif
  }
  const support::OpCounts& recorded(const std::string& part) {
    static const std::map<std::string, support::OpCounts> steps = recorded_steps();
    return steps.at(GetParam().name + ' ' + part);
  }
};
INSTANTIATE_TEST_SUITE_P(
    CudaOnHost, StepsComparedWithPython,
    ::testing::Values(
        model_of<FeedForward>("feed_forward", "feed-forward", {{"batch", 8}, {"hidden", 32}}),
        model_of<UNet>("unet", "UNet", {{"batch", 1}, {"side", 32}, {"channels", 4}}),
        model_of<Bert>("bert", "BERT, two layers",
                       {{"batch", 2},
                        {"length", 16},
                        {"layers", 2},
                        {"width", 32},
                        {"heads", 2},
                        {"vocabulary", 64}}),
        model_of<GptWorkload>(
            "gpt", "GPT, two layers, two micro-batches",
            {{"batch", 2}, {"length", 16}, {"layers", 2}, {"width", 32}, {"heads", 2}})),
    [](const auto& one) { return one.param.name; });

TEST_P(StepsComparedWithPython, LossAndGradientsCallTheSameOps) {
  const Step ours = step_of(GetParam(), "fused", /*whole=*/false);
  EXPECT_EQ(support::difference(ours.ops, recorded("loss")), "");
}

TEST_P(StepsComparedWithPython, AStepIsNoMoreThanPythons) {
  const Step fused = step_of(GetParam(), "fused"), plain = step_of(GetParam(), "stock");
  support::OpCounts python = recorded("fused"), python_plain = recorded("stock");
  const auto take = [](support::OpCounts& counts, const char* name) {
    const std::int64_t count = counts.at(name);
    counts.erase(name);
    return count;
  };
  const std::int64_t kernels = take(python, "kernels"), waits = take(python, "waits");
  const std::int64_t plain_kernels = take(python_plain, "kernels");
  EXPECT_LE(fused.kernels, kernels);
  EXPECT_LE(support::sum_of(fused.ops), support::sum_of(python));
  EXPECT_EQ(fused.waits, 0);
  EXPECT_EQ(waits, 0);
  EXPECT_EQ(plain.waits, take(python_plain, "waits"));
  const auto cell = [](std::int64_t number) { return " | " + std::to_string(number); };
  expect_on_contributors_page("| " + GetParam().title + cell(support::sum_of(fused.ops)) +
                              cell(support::sum_of(python)) + cell(fused.kernels) + cell(kernels) +
                              cell(plain.kernels) + cell(plain_kernels) + " |");
}

}  // namespace
