// SPDX-License-Identifier: BSD-3-Clause
// Many features on one model: two processes, each with half of the split bf16 masters and of the
// optimizer's state; gradients accumulated in fp32; a guard, a scaler, micro-batches,
// recomputation, clipping, and a checkpoint to resume from.
//   torchrun --nproc-per-node 2 --no-python 16-all-together
#include <torch/torch.h>
#include <torchamp/distributed/checkpoint.h>
#include <torchamp/distributed/process_group.h>
#include <torchamp/distributed/sharded_masters.h>
#include <torchamp/recompute.h>
#include <torchamp/torchamp.h>
#include <torchamp/training_checkpoint.h>

#include <chrono>
#include <iostream>
#include <string>

#include "support/arguments.h"
#include "support/check.h"
#include "support/format.h"

namespace {

using torch::nn::LayerNorm;
using torch::nn::LayerNormOptions;
using torch::nn::Linear;

struct BlockImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) { return x + down(torch::gelu(up(norm(x)))); }
  LayerNorm norm = register_module("norm", LayerNorm(LayerNormOptions({32})));
  Linear up = register_module("up", Linear(32, 64));
  Linear down = register_module("down", Linear(64, 32));
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) {
    return last(torchamp::checkpoint_sequential(blocks, first(x)));
  }
  Linear first = register_module("first", Linear(8, 32));
  torch::nn::Sequential blocks =
      register_module("blocks", torch::nn::Sequential(Block(), Block(), Block(), Block()));
  Linear last = register_module("last", Linear(32, 2));
};
TORCH_MODULE(Net);

struct Training {
  Training(torchamp::ProcessGroupPtr processes, const std::string& file)
      : group(std::move(processes)), checkpoint(file) {
    checkpoint.add("model", masters).add("optimizer", optimizer).add("scaler", scaler);
    checkpoint.add("step", step);
    torch::manual_seed(static_cast<std::uint64_t>(group->getRank()));  // of each one's data
  }

  /// One step with a batch in four micro-batches; returns the mean loss.
  double train_one_step() {
    constexpr int parts = 4;
    double mean = 0.;
    optimizer.zero_grad();
    for (int part = 0; part < parts; ++part) {
      const auto data = torch::randn({16, 8});
      const auto target = data.narrow(1, 0, 2).sin();
      const auto no_sync = masters.no_sync(part + 1 < parts);  // send once, after the last
      torch::Tensor loss;
      {
        torchamp::AutocastGuard autocast(torch::kCPU);
        loss = torch::mse_loss(net->forward(data), target);
      }
      scaler.scale(loss / parts).backward();
      mean += loss.item<double>() / parts;
    }
    torchamp::clip_grad_norm_(scaler, optimizer, 1.);  // by the norm of all processes' gradients
    scaler.step(optimizer);                            // on both processes, or on none
    scaler.update();
    masters.copy_to_model();
    ++step;
    return mean;
  }

  torchamp::ProcessGroupPtr group;
  Net net;
  torchamp::ShardedMasterWeights masters{
      net, group, {.dtype = torch::kBFloat16, .storage = torchamp::MasterStorage::split}};
  torchamp::FusedAdamW optimizer{masters.parameters(), torch::optim::AdamWOptions(3e-3)};
  torchamp::GradScaler scaler{{.init_scale = 1024.}};
  std::int64_t step = 0;
  torchamp::TrainingCheckpoint checkpoint;
};

torch::Tensor as_one_vector(const std::vector<torch::Tensor>& tensors) {
  std::vector<torch::Tensor> flat;
  for (const auto& tensor : tensors) flat.push_back(tensor.detach().to(torch::kFloat).flatten());
  return torch::cat(flat);
}

bool same_everywhere(const torchamp::ProcessGroupPtr& group, const torch::Tensor& mine) {
  std::vector<torch::Tensor> first{mine.clone()};
  group->broadcast(first)->wait();
  return torch::equal(first[0], mine);
}

}  // namespace

int main(int argc, char** argv) {
  return support::run_program("16-all-together", [&] {
    std::string file = "16-all-together.pt";
    support::Arguments arguments("16-all-together", "Trains with many features of torchamp.");
    arguments.add("--checkpoint", "FILE",
                  "The checkpoint to resume from and to write. Default: " + file + ".", file);
    if (!arguments.parse(argc, argv)) return 0;

    const auto group = torchamp::make_process_group({.timeout = std::chrono::seconds(60)});
    Training training(group, file);
    const bool loaded = torchamp::load_together(training.checkpoint, group);
    if (loaded && group->getRank() == 0) {
      std::cout << "going on at step " << training.step << '\n';
    }
    double loss = 0.;
    for (const std::int64_t end = training.step + 150; training.step < end;) {
      loss = training.train_one_step();
      if (training.step % 50 == 0) torchamp::save_together(training.checkpoint, group);
      if (training.step % 25 == 0 && group->getRank() == 0) {
        std::cout << support::format("step %d: loss %.4f, scale %g\n",
                                     static_cast<int>(training.step), loss,
                                     training.scaler.get_scale());
      }
    }
    const auto weights = as_one_vector(training.net->parameters());
    const auto pieces = as_one_vector(training.masters.parameters());
    const bool same = same_everywhere(group, weights);
    if (group->getRank() != 0) return same ? 0 : 1;
    std::cout << support::format("this process steps %d of %d weights\n",
                                 static_cast<int>(pieces.numel()),
                                 static_cast<int>(weights.numel()));
    support::check(same, "all processes have the same weights, bit for bit");
    support::check(pieces.numel() * group->getSize() == weights.numel(),
                   "each process stores its share of masters and states");
    support::check(loss < 0.02, "the loss has fallen to less than a twentieth");
    return 0;
  });
}
