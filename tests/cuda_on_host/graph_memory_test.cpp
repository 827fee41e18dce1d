// SPDX-License-Identifier: BSD-3-Clause
// Bytes that captured steps take from the device for their graphs.
#include <c10/cuda/CUDACachingAllocator.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "torchamp/cuda_graph.h"
#include "torchamp/optim.h"
#include "torchamp/training_step.h"

namespace {

/// Bytes of all pools of graphs.
std::int64_t bytes_of_graphs() {
  using Pool = decltype(c10::cuda::CUDACachingAllocator::SegmentInfo::owner_private_pool_id);
  c10::cuda::CUDACachingAllocator::emptyCache();
  std::int64_t bytes = 0;
  for (const auto& segment : c10::cuda::CUDACachingAllocator::snapshot().segments) {
    const bool is_of_graph = segment.owner_private_pool_id != Pool{};
    if (is_of_graph) bytes += static_cast<std::int64_t>(segment.total_size);
  }
  return bytes;
}

/// A training whose activations take megabytes, captured for each of `shapes` numbers of rows.
class TrainingByRows {
 public:
  explicit TrainingByRows(std::int64_t shapes) : step_(net_, optimizer_, options(shapes)) {}
  ~TrainingByRows() { torch::cuda::synchronize(); }
  TrainingByRows(const TrainingByRows&) = delete;
  TrainingByRows& operator=(const TrainingByRows&) = delete;

  void train(std::int64_t rows) {
    const at::Tensor x = at::ones({rows, 64}, at::kCUDA);
    for (int i = 0; i < 3; ++i) {
      step_({x}, [this](const std::vector<at::Tensor>& in) {
        ++calls;
        return net_->forward(in[0]).pow(2).mean();
      });
    }
  }

  int calls = 0;

 private:
  static torchamp::TrainingStepOptions options(std::int64_t shapes) {
    torchamp::TrainingStepOptions options;
    options.dtype = at::kHalf;
    options.capture = torchamp::CudaGraphOptions{.warmup = 1, .shapes = shapes};
    return options;
  }
  static torch::nn::Sequential make_net() {
    torch::nn::Sequential net(torch::nn::Linear(64, 2048), torch::nn::ReLU(),
                              torch::nn::Linear(2048, 1));
    net->to(at::kCUDA);
    return net;
  }

  torch::nn::Sequential net_ = make_net();
  torchamp::FusedAdamW optimizer_{net_->parameters(), torch::optim::AdamWOptions(1e-3)};
  torchamp::TrainingStep step_;
};

/// Of a step with a graph for each of these shapes, and of as many steps with a graph each.
std::int64_t graphs_of_one_step(const std::vector<std::int64_t>& rows) {
  const std::int64_t before = bytes_of_graphs();
  TrainingByRows training(static_cast<std::int64_t>(rows.size()));
  for (const std::int64_t one : rows) training.train(one);
  const int captured = training.calls;
  for (const std::int64_t one : rows) training.train(one);
  EXPECT_EQ(training.calls, captured) << "one of them is not replayed";
  return bytes_of_graphs() - before;
}
std::int64_t graphs_of_several_steps(const std::vector<std::int64_t>& rows) {
  const std::int64_t before = bytes_of_graphs();
  std::vector<std::unique_ptr<TrainingByRows>> trainings;
  for (const std::int64_t one : rows) {
    trainings.push_back(std::make_unique<TrainingByRows>(1));
    trainings.back()->train(one);
  }
  return bytes_of_graphs() - before;
}

TEST(GraphMemory, GraphsOfSeveralShapesTakeNoMoreThanTheLargest) {
  const std::int64_t largest = graphs_of_one_step({1024}),
                     three = graphs_of_one_step({1024, 768, 512}),
                     rising = graphs_of_one_step({512, 768, 1024}),
                     separate = graphs_of_several_steps({1024, 768, 512});
  RecordProperty("largest", std::to_string(largest));
  RecordProperty("separate", std::to_string(separate));
  EXPECT_GT(largest, 0);
  EXPECT_LE(three, largest);
  EXPECT_LE(rising, largest + largest / 10) << "later graphs find what the earlier ones had";
  EXPECT_GE(separate, 5 * largest / 2) << "so the test sees what graphs do not share";
  EXPECT_EQ(bytes_of_graphs(), 0) << "and it goes with them";
}

}  // namespace
