// SPDX-License-Identifier: BSD-3-Clause
// Files of a TrainingCheckpoint with tensors of a device that this machine does not have.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/lbfgs.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <type_traits>

#include "simulated_device/device.h"
#include "support/devices.h"
#include "support/moved_file.h"
#include "support/sealed.h"
#include "support/temporary_folder.h"
#include "torchamp/optim.h"
#include "torchamp/training_checkpoint.h"

namespace {

using at::Tensor;
using torchamp::TrainingCheckpoint;

/// A run on a device. LibTorch cannot load a whole module to a device of a backend of one's own.
template <class Optimizer, class Options>
struct RunOnDevice {
  RunOnDevice(const std::filesystem::path& path, at::Device device)
      : net(to_device(torch::nn::Linear(3, 2), device)),
        optimizer(net->parameters(), options()),
        tensor(at::ones({2}).to(device)),
        own(at::full({2}, 3.).to(device)),
        checkpoint(path) {
    checkpoint.add("optimizer", optimizer).add("tensor", tensor).add_local("own", own);
    if (device.type() == at::kPrivateUse1) {
      checkpoint.add("weight", net->weight).add("bias", net->bias);
    } else {
      checkpoint.add("model", net);
    }
  }
  static Options options() {
    Options result(0.1);
    if constexpr (std::is_same_v<Optimizer, torch::optim::LBFGS>) result.max_iter(2);
    return result;
  }
  void step() {
    const auto loss = [&] {
      optimizer.zero_grad();
      const Tensor result = net->forward(at::ones({4, 3}).to(net->weight.device())).pow(2).sum();
      result.backward();
      return result;
    };
    if constexpr (std::is_same_v<Optimizer, torch::optim::LBFGS>) {
      optimizer.step(loss);
    } else {
      loss();
      optimizer.step();
    }
  }
  torch::nn::Linear net;
  Optimizer optimizer;
  Tensor tensor, own;
  TrainingCheckpoint checkpoint;
};

/// A run that was saved on a device that is missing goes on here.
template <class Optimizer, class Options>
void expect_goes_on(at::Device device, const std::string& missing) {
  using Run = RunOnDevice<Optimizer, Options>;
  const TemporaryFolder folder;
  Run first(folder / "first.pt", device);
  for (int i = 0; i < 2; ++i) first.step();
  first.checkpoint.save();
  std::ofstream(folder / "second.pt", std::ios::binary)
      << sealed(moved_file(folder / "first.pt", device.str(), missing));
  Run second(folder / "second.pt", device);
  second.own.zero_();
  ASSERT_TRUE(second.checkpoint.load());
  EXPECT_TRUE(at::equal(second.own.cpu(), at::full({2}, 3.)));
  for (const Tensor& tensor : {second.net->weight, second.tensor, second.own}) {
    EXPECT_EQ(tensor.device(), device);
  }
  first.step();
  second.step();
  EXPECT_TRUE(at::equal(second.net->weight.cpu(), first.net->weight.cpu()));
  ASSERT_TRUE(second.checkpoint.load_shared());
}

void expect_all_go_on(at::Device device, const std::string& missing) {
  expect_goes_on<torchamp::FusedAdamW, torch::optim::AdamWOptions>(device, missing);
  expect_goes_on<torch::optim::Adam, torch::optim::AdamOptions>(device, missing);
  expect_goes_on<torch::optim::LBFGS, torch::optim::LBFGSOptions>(device, missing);
}

TEST(MissingDevice, OfTheSimulatedKindIsMadeUpForByTheOneThatIsHere) {
  SKIP_WITHOUT(at::kPrivateUse1);
  expect_all_go_on(simulated::sim0, "sim:7");
}

TEST(MissingDevice, OfAnotherKindIsMadeUpForByTheSimulatedOne) {
  SKIP_WITHOUT(at::kPrivateUse1);
  expect_all_go_on(simulated::sim0, "xpu:0");
}

TEST(MissingDevice, OfCudasKindIsMadeUpForByTheOneThatIsHere) {
  SKIP_WITHOUT(at::kCUDA);
  expect_all_go_on(at::Device(at::kCUDA, 0), "cuda:99");
}

}  // namespace
