// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/Context.h>
#include <torch/version.h>

#include <algorithm>
#include <exception>
#include <iostream>
#include <string>
#include <utility>

#include "benchmark/comparison/measure.h"
#include "benchmark/comparison/op_profile.h"
#include "benchmark/comparison/predictor.h"
#include "benchmark/comparison/trainer.h"
#include "benchmark/comparison/way.h"
#include "benchmark/models.h"
#include "support/format.h"
#include "support/peak_memory.h"

/// What a worker trains, or predicts with.
struct WorkerOptions {
  std::string model;
  bool predicts = false;
  Way way;
  std::string device = "cpu";
  Sizes sizes;
  std::int64_t threads = 0;  ///< 0: LibTorch's own choice
  std::string policy;        ///< the file that an audited way follows
  std::string audit;         ///< the file to write it to: the worker audits, and trains nothing
  bool is_grouped = false;   ///< it is one of several, see Note [Workers in a group]
  std::int64_t bucket_bytes = 0;  ///< of these
};

// Note [Workers]
//   Each way to train or to predict runs in a process of its own, in either language, so that none
//   profits or suffers from what another has loaded, allocated or switched on. A worker reads one
//   command a line and answers with one line:
//
//     (at first)   ready parameters=7703497 libtorch=2.15.0 first_call=0.012 (0: it trains)
//     run 20       ran seconds=0.512 processor=0.498 loss=0.693 first=0.701 peak=1048576
//     profile 20   profiled products=0.61 casts=0.12 … (the C++ one: see OpProfile)
//     count 0      counted aten::linear=13 … (of a loss and its gradients; count 1: of a step)
//     (a failure)  error what went wrong
//     (--audit)    audited
//
//   Other lines are passed over. It ends with its input. Before it takes the time of a run it makes
//   two steps (or calls), to warm the caches that others have used in between. "peak" is the most
//   memory taken up since the start, in bytes: of a GPU what tensors hold, on a CPU by how much the
//   process has grown. Between runs unused memory of a GPU is given back, for there are others.

/// Makes the libraries load and set up what they do on first use, so that it is not counted as a
/// model's memory.
inline void use_once(const WorkerOptions& options, at::Device device) {
  Way way = options.way;
  way.launch = "eager";
  way.variant = "plain";
  if (way.optimizer == "muon") way.optimizer = "fused";  // its layers are not for Muon
  if (way.casts == "audited") way.casts = "torch";
  auto model = find_model("checkerboard").make({{"side", 4}, {"channels", 4}});
  if (options.predicts) {
    Predictor(std::move(model), way, device).run(1);
  } else {
    Trainer(std::move(model), way, device).run(1);
  }
}

/// Answers what comes in, until the input ends.
template <class Runner>
void answer(Runner& runner, at::Device device, const support::PeakMemory& memory,
            std::int64_t bytes_before) {
  std::string command;
  std::int64_t steps = 0;
  while (std::cin >> command >> steps) {
    runner.run(2);
    if (command == "profile") {
      const OpProfile profile;
      runner.run(steps);
      std::cout << "profiled";
      const auto shares = profile.shares();
      for (std::size_t kind = 0; kind < shares.size(); ++kind) {
        std::cout << support::format(" %s=%.4f", kOpKinds[kind], shares[kind]);
      }
      std::cout << std::endl;
      continue;
    }
    if constexpr (requires { runner.count_ops(true); }) {
      if (command == "count") {
        std::cout << "counted";
        for (const auto& [name, count] : runner.count_ops(steps > 0)) {
          std::cout << ' ' << name << '=' << count;
        }
        std::cout << std::endl;
        continue;
      }
    }
    const RunResult result = runner.run(steps);
    const std::int64_t peak =
        device.is_cpu() ? process_memory("VmHWM") - bytes_before : memory.bytes();
    std::cout << support::format("ran seconds=%.9g processor=%.9g loss=%.9g first=%.9g peak=%lld",
                                 result.seconds, result.processor, result.loss, result.first_loss,
                                 static_cast<long long>(peak))
              << std::endl;
    if (!device.is_cpu()) support::empty_device_cache();
  }
}

/// Serves as a worker until the input ends. Returns the program's exit code.
inline int serve(const WorkerOptions& options) {
  const auto fail = [](std::string reason) {
    std::replace(reason.begin(), reason.end(), '\n', ' ');
    std::cout << "error " << reason << std::endl;
    return 1;
  };
  try {
    if (options.threads > 0) torch::set_num_threads(static_cast<int>(options.threads));
    const at::Device device(options.device);
    if (options.way.is_tf32()) {
      TORCH_CHECK(device.is_cuda(), "TF32 is for CUDA devices");
      at::globalContext().setFloat32MatmulPrecision("high");
    }
    use_once(options, device);
    const auto make = [&] { return find_model(options.model).make(options.sizes); };
    if (!options.audit.empty()) {
      Trainer trainer(make(), options.way, device);
      torchamp::save_policy(trainer.audit(), options.audit);
      std::cout << "audited" << std::endl;
      return 0;
    }
    const std::int64_t before = process_memory("VmRSS");
    const support::PeakMemory memory(device);
    const auto ready = [](std::int64_t parameters, double first_call) {
      std::cout << support::format("ready parameters=%lld libtorch=%s first_call=%.9g",
                                   static_cast<long long>(parameters), TORCH_VERSION, first_call)
                << std::endl;
    };
    if (options.predicts) {
      Predictor predictor(make(), options.way, device);
      ready(predictor.parameter_count(), predictor.first_call());
      answer(predictor, device, memory, before);
    } else {
      Trainer trainer(make(), options.way, device, options.policy);
      ready(trainer.parameter_count(), 0.);
      answer(trainer, device, memory, before);
    }
    return 0;
  } catch (const c10::Error& error) {
    return fail(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return fail(error.what());
  }
}
