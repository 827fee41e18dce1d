// SPDX-License-Identifier: BSD-3-Clause
// A Fashion-MNIST classifier, trained on several processes that share each batch. It reaches the
// loss of one process with the whole batch: two processes with 64 images each equal one with
// 128.
//   torchrun --nproc-per-node 2 --no-python 15-data-parallel
#include <torch/torch.h>
#include <torchamp/distributed/data_parallel.h>
#include <torchamp/distributed/process_group.h>
#include <torchamp/torchamp.h>

#include <chrono>
#include <cmath>
#include <iostream>
#include <string>

#include "fashion_mnist/data.h"
#include "support/arguments.h"
#include "support/check.h"
#include "support/format.h"

namespace {

constexpr std::int64_t steps = 300, batch = 128;

struct Result {
  double loss, accuracy;  // on the test images; in per cent
};

Result evaluate(torch::nn::Sequential& model, const torch::data::datasets::MNIST& data) {
  const torch::InferenceMode inference;
  const auto output = model->forward(data.images());
  const auto right = output.argmax(1).eq(data.targets()).to(torch::kFloat).mean();
  return {torch::nn::functional::cross_entropy(output, data.targets()).item<double>(),
          100. * right.item<double>()};
}

/// Each process of `group` takes its part of the same batches.
Result train(const FashionMnist& data, const torchamp::ProcessGroupPtr& group) {
  torch::manual_seed(0);
  const auto order = torch::randperm(data.train.images().size(0));
  // No batch norm: each process would compute its statistics over its own part of the batch.
  torch::nn::Sequential model(torch::nn::Flatten(), torch::nn::Linear(28 * 28, 64),
                              torch::nn::ReLU(), torch::nn::Linear(64, 10));
  torchamp::DistributedDataParallel net(model, group);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  torchamp::GradScaler scaler({.init_scale = 1024.});
  for (std::int64_t step = 0; step < steps; ++step) {
    const auto rows = order.narrow(0, step * batch, batch)
                          .chunk(group->getSize())[static_cast<std::size_t>(group->getRank())];
    const double done = static_cast<double>(step) / static_cast<double>(steps);
    optimizer.param_groups()[0].options().set_lr(0.05 * (1. - done));
    optimizer.zero_grad();
    torch::Tensor loss;
    {
      torchamp::AutocastGuard autocast(torch::kCPU);
      loss = torch::nn::functional::cross_entropy(
          net.forward(data.train.images().index_select(0, rows)),
          data.train.targets().index_select(0, rows));
    }
    scaler.scale(loss).backward();  // the gradients are the averages over all processes
    scaler.step(optimizer);
    scaler.update();
  }
  return evaluate(model, data.test);
}

}  // namespace

int main(int argc, char** argv) {
  return support::run_program("15-data-parallel", [&] {
    std::string folder = "/usr/share/datasets/fashion-mnist";
    support::Arguments arguments("15-data-parallel",
                                 "Trains a classifier of Fashion-MNIST on several processes.");
    arguments.add("--data", "DIR",
                  "The folder of the four files, plain or *.gz.\nDefault: " + folder + ".", folder);
    if (!arguments.parse(argc, argv)) return 0;

    const auto group = torchamp::make_process_group({.timeout = std::chrono::seconds(120)});
    const FashionMnist data = read_fashion_mnist(folder);
    const Result together = train(data, group);
    if (group->getRank() != 0) return 0;

    const Result alone = train(data, torchamp::make_process_group({.environment = {}}));
    const auto print = [](int processes, const Result& result) {
      std::cout << support::format("%d process(es): loss %.4f, accuracy %.2f %%\n", processes,
                                   result.loss, result.accuracy);
    };
    print(group->getSize(), together);
    print(1, alone);
    support::check(std::abs(together.loss - alone.loss) < 0.01 * alone.loss,
                   "the test loss equals the loss of one process with the whole batch");
    support::check(together.accuracy > 75., "the classifier has learnt");
    return 0;
  });
}
