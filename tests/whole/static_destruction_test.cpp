// SPDX-License-Identifier: BSD-3-Clause
// What a static object's destructor may still do: it runs after the statics that were made later
// are gone. Each case is a child process.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/nn/modules.h>
#include <torch/optim.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <iostream>
#include <memory>
#include <optional>
#include <sstream>
#include <string>

#include "torchamp/labs/cast_recorder.h"
#include "torchamp/master_weights.h"
#include "torchamp/policy_text.h"
#include "torchamp/torchamp.h"

namespace {

using torchamp::AutocastGuard;
using torchamp::Policy;

/// Trains a little without torchamp. LibTorch has its own statics, made at their first use.
void use_libtorch() {
  torch::nn::Linear model(2, 2);
  torch::optim::Adam optimizer(model->parameters());
  at::autocast::set_autocast_enabled(at::kCPU, true);
  (void)at::ones({2, 2}).mm(at::ones({2, 2})).softmax(0);
  model(at::ones({2, 2})).sum().backward();
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::clear_cache();
  optimizer.step();
}

/// Made after LibTorch's statics and before torchamp's, so destroyed between them.
struct Last {
  std::function<void()>* what = nullptr;  // not owned: nothing of it may be gone
  Last() { use_libtorch(); }
  Last(const Last&) = delete;
  Last& operator=(const Last&) = delete;
  ~Last() {
    if (what == nullptr) return;
    try {
      (*what)();
      std::cerr << "at the end: done\n";
      _exit(0);
    } catch (const std::exception& error) {
      std::cerr << "at the end: " << error.what() << '\n';
      _exit(1);
    }
  }
};
Last last;

/// Runs `what` and ends the process, which runs it again in a static object's destructor.
[[noreturn]] void run_twice(std::function<void()> what) {
  what();
  last.what = new std::function<void()>(std::move(what));
  std::exit(1);
}

class StaticDestruction : public ::testing::Test {
 protected:
  void SetUp() override { ::testing::FLAGS_gtest_death_test_style = "threadsafe"; }
};

void expect_dtype(const at::Tensor& tensor, at::ScalarType dtype) {
  TORCH_CHECK(tensor.scalar_type() == dtype, tensor.scalar_type(), " instead of ", dtype);
}

void use_a_guard() {
  const at::Tensor x = at::ones({2, 2}), lower = at::ones({2, 2}, at::kBFloat16);
  const AutocastGuard guard(at::kCPU);
  expect_dtype(x.mm(x), at::kBFloat16);
  expect_dtype(lower + lower, at::kFloat);
  expect_dtype(lower.softmax(0), at::kFloat);
  const AutocastGuard other(at::kCPU, {.policy = Policy::torch().fp32({"mm", "relu"})});
  expect_dtype(x.mm(x), at::kFloat);
  expect_dtype(lower + lower, at::kBFloat16);
}

TEST_F(StaticDestruction, CanMakeAGuard) {
  EXPECT_EXIT(run_twice(&use_a_guard), ::testing::ExitedWithCode(0), "at the end: done");
}

TEST_F(StaticDestruction, CanMakeAGuardUnderAnEnvironmentVariable) {
  EXPECT_EXIT(
      {
        setenv("TORCHAMP_POLICY", "torch", 1);
        run_twice([] {
          const AutocastGuard guard(at::kCPU);
          expect_dtype(at::ones({2}, at::kBFloat16) + 1, at::kBFloat16);
        });
      },
      ::testing::ExitedWithCode(0), "at the end: done");
}

TEST_F(StaticDestruction, CanPrintSaveAndReadAPolicy) {
  EXPECT_EXIT(run_twice([] {
                std::ostringstream out;
                out << Policy::standard().fp32({"relu"});
                TORCH_CHECK(out.str().find("softmax.int") != std::string::npos, out.str());
                const std::string text = to_text(Policy::torch().fp32(torchamp::ops::norm));
                TORCH_CHECK(to_text(torchamp::parse_policy(text)) == text, text);
                TORCH_CHECK(Policy::standard().lookup("softmax", at::kCPU) == torchamp::Cast::fp32);
              }),
              ::testing::ExitedWithCode(0), "at the end: done");
}

// Gradients are made by hand: by then the main thread's queue of LibTorch's engine is gone.
TEST_F(StaticDestruction, CanTrain) {
  EXPECT_EXIT(run_twice([] {
                torch::nn::Linear model(2, 2);
                torchamp::FusedAdam optimizer(model->parameters(), 0.1);
                torchamp::GradScaler scaler({.init_scale = 8.});
                {
                  const AutocastGuard guard(at::kCPU);
                  const at::Tensor loss = model(at::ones({2, 2})).sum();
                  TORCH_CHECK(scaler.scale(loss).equal(loss * 8.));
                }
                for (at::Tensor& p : model->parameters()) p.mutable_grad() = at::full_like(p, 8.);
                scaler.step(optimizer);
                scaler.update();
                TORCH_CHECK(scaler.get_scale() == 8.);
              }),
              ::testing::ExitedWithCode(0), "at the end: done");
}

void record_casts() {
  const torchamp::CastRecorder recorder;
  const AutocastGuard guard(at::kCPU);
  expect_dtype(at::ones({2, 2}).mm(at::ones({2, 2})), at::kBFloat16);
  TORCH_CHECK(recorder.report().total().casts == 2, "casts: ", recorder.report());
}

TEST_F(StaticDestruction, CannotRecordCastsAgainAndSaysSo) {
  EXPECT_EXIT(run_twice(&record_casts), ::testing::ExitedWithCode(1),
              "at the end: CastRecorder: cannot record in the destructor of a static object");
}

TEST_F(StaticDestruction, EndsACastRecorderThatIsStaticItself) {
  EXPECT_EXIT(
      {
        static std::optional<torchamp::CastRecorder> recorder;
        recorder.emplace();
        record_casts();
        std::exit(0);
      },
      ::testing::ExitedWithCode(0), "");
  EXPECT_EXIT(
      {
        auto* const kept = new std::optional<torchamp::CastRecorder>;
        run_twice([kept] { *kept ? kept->reset() : void(kept->emplace()); });
      },
      ::testing::ExitedWithCode(0), "at the end: done");
}

TEST_F(StaticDestruction, CanMakeMasterWeights) {
  EXPECT_EXIT(run_twice([] {
                const auto model = std::make_shared<torch::nn::SequentialImpl>(
                    torch::nn::Linear(2, 2),
                    torch::nn::LayerNorm(torch::nn::LayerNormOptions({2})));
                torchamp::MasterWeights masters(model);
                TORCH_CHECK(!masters.parameters().empty());
              }),
              ::testing::ExitedWithCode(0), "at the end: done");
}

}  // namespace
