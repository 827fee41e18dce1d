// SPDX-License-Identifier: BSD-3-Clause
// What an audit and a policy file refuse, and that nothing is changed then.
#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/labs/policy_file.h>
#include <torchamp/labs/precision_audit.h>
#include <torchamp/master_weights.h>
#include <torchamp/torchamp.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/audited_net.h"
#include "support/expect_error.h"
#include "support/temporary_folder.h"
#include "support/thread_state.h"

using torchamp::AuditedPolicy;
using torchamp::AuditRow;
using torchamp::ModulePolicies;
using torchamp::Policy;
using torchamp::PrecisionAudit;

namespace {

namespace nn = torch::nn;

/// Expects at its end that a model and its surroundings are as they were at its begin.
class AllAsBefore {
 public:
  explicit AllAsBefore(nn::Module& model) : model_(model), values_(state_of(model)) {
    for (const at::Tensor& parameter : model.parameters()) {
      memory_.push_back(parameter.data_ptr());
      gradients_.push_back(parameter.grad());
      wanted_.push_back(parameter.requires_grad());
    }
    torch::manual_seed(7);
  }
  ~AllAsBefore() {
    expect_same(state_of(model_), values_);
    const auto parameters = model_.parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      EXPECT_EQ(parameters[i].data_ptr(), memory_[i]) << i;
      EXPECT_TRUE(parameters[i].grad().is_same(gradients_[i])) << i;
      EXPECT_EQ(parameters[i].requires_grad(), wanted_[i]) << i;
    }
    const at::Tensor random = torch::rand({3});
    torch::manual_seed(7);
    EXPECT_TRUE(at::equal(random, torch::rand({3})));
    EXPECT_EQ(ThreadState(), thread_);
    EXPECT_FALSE(at::hasCallbacks());
    EXPECT_TRUE(model_.is_training());
  }

 private:
  nn::Module& model_;
  std::vector<at::Tensor> values_, gradients_;
  std::vector<void*> memory_;
  std::vector<bool> wanted_;
  ThreadState thread_;
};

}  // namespace

TEST(PrecisionAudit, NamesTheLineOfAPolicyFileThatCannotBeRead) {
  const TemporaryFolder folder;
  const auto load = [&](const std::string& text) {
    std::ofstream(folder / "policy") << text;
    return torchamp::load_policies(folder / "policy");
  };
  EXPECT_ERROR(load("policy torch\nmodule a\nfp32: mm\nmodule b\nfp64: mm\n"),
               "line 5: there is no rule 'fp64'");
  EXPECT_ERROR(load("policy torch\nmodule a\nmodule a\n"), "policy' has two lines 'module a'");
  EXPECT_ERROR(load("policy torch\nmodule\n"), "'module' without a name");
  EXPECT_ERROR(
      load("# for b\nmodule b\nfp32: mm\n"),
      "policy': there is no policy before the line 'module b'. The text must begin with 'policy "
      "standard' or 'policy torch', which holds for all ops.");
  EXPECT_ERROR(load("# nothing\n"), "the text is empty");
  EXPECT_ERROR(torchamp::load_policies(folder / "none"), "cannot read");
}

TEST(PrecisionAudit, SaysThatAStepHasRegisteredWhatCannotBeTakenBack) {
  for (const bool is_buffer : {false, true}) {
    Net model = net();
    const auto step = step_of(model);
    bool registers = true;
    PrecisionAudit audit(model, {.dtype = at::kBFloat16});
    const auto run = [&] {
      audit.run(
          [&] {
            if (std::exchange(registers, false)) {
              is_buffer ? model->register_buffer("late", torch::ones({2}))
                        : model->register_parameter("late", torch::ones({2}));
            }
            step();
          },
          1);
    };
    EXPECT_ERROR(run(), "the step has registered 'late' in the model. Run it once before");
    EXPECT_NO_THROW(run());
  }
}

TEST(PrecisionAudit, RefusesAStepThatIsNoneAndChangesNothing) {
  Net model = net();
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  const auto step = step_of(model);
  const auto state = state_of(*model);
  torch::manual_seed(7);
  const at::Tensor expected = torch::rand({3});
  torch::manual_seed(7);
  PrecisionAudit audit(model, {.dtype = at::kBFloat16});
  audit.run(step, 1);
  const auto rows = audit.rows();
  int64_t size = 4, count = 0;
  at::Generator own = at::make_generator<at::CPUGeneratorImpl>(1);
  const auto loss = [&](const at::Tensor& x) { return model(x).square().mean(); };
  struct Case {
    std::function<void()> step;
    std::string error;
  };
  const Case cases[] = {
      {[&] {
         (void)loss(torch::randn({4, 8}));
       },
       "has not called backward()"},
      {[&] {
         step();
         optimizer.step();
       },
       "has changed the parameter 'first.weight'"},
      {[&] {
         loss(torch::ones({++size, 8})).backward();
       },
       "not deterministic"},
      {[&] {
         loss(torch::randn({4, 8}, own)).backward();
       },
       "not deterministic"},
      {[&] {
         (void)torch::ones({count++ < 2 ? 4 : 5}).requires_grad_().exp();
         loss(torch::ones({4, 8})).backward();
       },
       "not the same each time"},
      {[] { TORCH_CHECK(false, "by the step"); }, "by the step"},
      {nullptr, "the step is empty"},
  };
  for (const Case& one : cases) {
    SCOPED_TRACE(one.error);
    EXPECT_ERROR(audit.run(one.step, 2), one.error);
    EXPECT_EQ(audit.rows(), rows);
    expect_same(state_of(*model), state);
    EXPECT_FALSE(model->first->weight.grad().defined());
    EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  }
  EXPECT_TRUE(at::equal(torch::rand({3}), expected));
  EXPECT_ERROR(audit.run(step, 0), "n is 0");
  EXPECT_ERROR(audit.policy({.error_budget = -1.}), "the error budget is -1");
}

TEST(PrecisionAudit, NamesTheGradientThatIsNotFiniteAndTheFrozenModel) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  Net model = net();
  double factor = 1.;
  const auto step = [&] { (model(torch::ones({4, 8})).square().mean() * factor).backward(); };
  PrecisionAudit audit(model, {.dtype = at::kBFloat16});
  audit.run(step, 1);
  const auto rows = audit.rows();
  const auto expect_refusals = [&](const std::string& error) {
    SCOPED_TRACE(error);
    const AllAsBefore as_before(*model);
    EXPECT_ERROR(audit.run(step, 1), "PrecisionAudit::run: " + error);
    EXPECT_ERROR(audit.policy(), "PrecisionAudit::policy: " + error);
    EXPECT_EQ(audit.rows(), rows);
  };
  factor = infinity;
  expect_refusals("the step's gradient of 'first.weight' holds a");
  factor = std::numeric_limits<double>::quiet_NaN();
  expect_refusals("the step's gradient of 'first.weight' holds a NaN in fp32 already");
  factor = 1.;
  for (const at::Tensor& parameter : model->parameters()) parameter.set_requires_grad(false);
  expect_refusals("no parameter of the model requires grad");
  model->last->bias.set_requires_grad(true);
  EXPECT_ERROR(audit.run([] { torch::ones({2}).requires_grad_().exp().sum().backward(); }, 1),
               "the step gives no parameter of the model a gradient");
}

TEST(PrecisionAudit, SaysThatGradientsAreOffOrThatThereIsNothingToCast) {
  Net model = net();
  const auto step = step_of(model);
  PrecisionAudit audit(model, {.dtype = at::kBFloat16});
  audit.run(step, 1);
  {
    const at::NoGradGuard no_grad;
    const char* const error =
        ": grad mode is off on this thread (NoGradGuard, InferenceMode), and an audit measures "
        "errors by gradients. Call it outside that scope.";
    EXPECT_ERROR(audit.run(step, 1), std::string("PrecisionAudit::run") + error);
    EXPECT_ERROR(audit.policy(), std::string("PrecisionAudit::policy") + error);
    const c10::InferenceMode inference;
    EXPECT_ERROR(audit.run(step, 1), error);
  }
  model->to(at::kDouble);
  EXPECT_ERROR(audit.run(
                   [&] {
                     model(torch::ones({4, 8}, at::kDouble)).sum().backward();
                   },
                   1),
               "calls no op that can be cast, on the device of the model's parameters. (Tensors in "
               "fp64 are never cast: audit the model in fp32.)");
}

TEST(PrecisionAudit, KeepsToFiniteGradientsIfPolicyTorchsOverflow) {
  Net model = net([](const at::Tensor& y) { return y * 1e6; });  // more than fp16 holds
  PrecisionAudit audit(model, {.dtype = at::kHalf});
  const at::Tensor x = torch::randn({16, 8});
  audit.run([&] { (model(x).square().mean() * 1e-9).backward(); }, 1);
  for (const AuditedPolicy& chosen :
       {audit.policy(), audit.policy({.error_budget = std::numeric_limits<double>::infinity()})}) {
    EXPECT_FALSE(std::isfinite(chosen.torch_error)) << chosen;
    EXPECT_TRUE(std::isfinite(chosen.error)) << chosen;
  }
  EXPECT_EQ(audit.policy().budget, torchamp::AuditBudget::most_by_default);
}

TEST(PrecisionAudit, RefusesModelsAndTimesThatItCannotUse) {
  const TemporaryFolder folder;
  Net model = net();
  EXPECT_ERROR(PrecisionAudit(model, {.dtype = at::kFloat}), "the dtype is Float");
  nn::Sequential empty(nn::ReLU{});
  EXPECT_ERROR(PrecisionAudit{empty}, "no parameter on a device with autocast");
  PrecisionAudit audit(model, {.dtype = at::kBFloat16});
  EXPECT_ERROR(audit.policy(), "nothing has been measured");
  at::Tensor& weight = model->first->weight;
  EXPECT_ERROR(audit.run([&] { weight.view({-1})[0].backward(); }, 1), "no op that can be cast");
  audit.run(step_of(model), 1);
  const auto rows = audit.rows();
  const auto read = [&](const std::string& text) {
    std::ofstream(folder / "csv") << text;
    audit.read_times(folder / "csv");
  };
  const std::string csv = audit.to_csv(), head = csv.substr(0, csv.find('\n') + 1);
  EXPECT_ERROR(read("what\n"), "line 1 is not");
  EXPECT_ERROR(read(head + "a,b\n"), "line 2 has 2 fields");
  EXPECT_ERROR(read(head + "a,b,0,0,0,0,0,0,0,0,0,1,x,1,\n"), "'x' is no time");
  EXPECT_ERROR(read(head + "a,b,0,0,0,0,0,0,0,0,0,1,1,1,\n"), "another model or another step");
  EXPECT_ERROR(read(csv + "a,b,0,0,0,0,0,0,0,0,0,1,1,1,\n"), "another model or another step");
  EXPECT_ERROR(read(csv + csv.substr(head.size())), "is the second one");
  EXPECT_EQ(audit.rows(), rows);
  read(csv);
  EXPECT_EQ(audit.rows(), rows);
}

TEST(PrecisionAudit, NamesTheWeightsThatAreNotInFp32AndTheRemedy) {
  Net model = net();
  const auto step = step_of(model);
  PrecisionAudit early(model, {.dtype = at::kBFloat16});
  early.run(step, 1);
  const torchamp::MasterWeights masters(model, {.dtype = at::kBFloat16});
  PrecisionAudit audit(model, {.dtype = at::kBFloat16});
  const AllAsBefore as_before(*model);
  EXPECT_ERROR(audit.run(step, 1),
               "PrecisionAudit::run: the parameter 'first.weight' is in BFloat16, and errors are "
               "measured against a step in fp32. Audit the model before MasterWeights or to() "
               "casts it to 16 bits, or audit a copy after to(torch::kFloat).");
  EXPECT_ERROR(early.policy(), "PrecisionAudit::policy: the parameter 'first.weight' is in BFl");
}

TEST(PrecisionAudit, PutsBackWhateverAStepDoesToTheModel) {
  Net model = net();
  const auto loss = [&](at::ScalarType dtype = at::kFloat) {
    return model(torch::ones({4, 8}, dtype)).square().mean();
  };
  const std::string changed = "the step has changed the parameter 'first.";
  struct Case {
    std::function<void()> step;
    std::string error;
  };
  const Case cases[] = {
      {[&] {
         model->to(at::kDouble);
         loss(at::kDouble).backward();
       },
       changed + "weight'"},
      {[&] {
         model->first->weight.set_data(torch::ones({16, 8}));
         loss().backward();
       },
       changed + "weight'"},
      {[&] {
         model->first->bias.set_data(torch::ones({1}));
         loss().backward();
       },
       changed + "bias'"},
      {[&] {
         at::Tensor y = loss();
         y.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("hook"); });
         y.backward();
       },
       "hook"},
      {[&] {
         model->eval();
         model->first->weight.set_requires_grad(false);
         loss().backward();
       },
       ""},
  };
  for (const Case& one : cases) {
    SCOPED_TRACE(one.error);
    const AllAsBefore as_before(*model);
    PrecisionAudit audit(model, {.dtype = at::kBFloat16});
    if (one.error.empty()) {
      audit.run(one.step, 1);
      (void)audit.policy();
    } else {
      try {
        audit.run(one.step, 1);
        ADD_FAILURE() << "no error";
      } catch (const std::exception& error) {
        EXPECT_THAT(error.what(), testing::HasSubstr(one.error));
      }
    }
  }
}

TEST(PrecisionAudit, PutsBackPoliciesIfTheStepThrowsLater) {
  Net model = net();
  ModulePolicies{{"last", Policy::standard()}}.apply_to(*model);
  int left = 100;
  PrecisionAudit audit(model, {.dtype = at::kBFloat16});
  audit.run(
      [&] {
        TORCH_CHECK(--left > 0, "by the step");
        model(torch::ones({4, 8})).square().mean().backward();
      },
      1);
  const AllAsBefore as_before(*model);
  for (left = 1; left < 5; ++left) {
    const int runs = left;
    EXPECT_ERROR(audit.policy(), "by the step");
    left = runs;
    ASSERT_NE(model->last->module_policy(), nullptr);
    EXPECT_NE(model->last->module_policy()->policy, nullptr);
  }
}

TEST(PrecisionAudit, TakesModelsWithBuffersOfAnyKindAndSparseGradients) {
  struct Model : nn::Module {
    nn::Embedding words =
        register_module("words", nn::Embedding(nn::EmbeddingOptions(10, 4).sparse(true)));
    nn::Linear last = register_module("last", nn::Linear(4, 2));
    at::Tensor wave = register_parameter("wave", torch::ones({2}, at::kComplexFloat));
    at::Tensor sparse = register_buffer("sparse", torch::eye(3).to_sparse());
  };
  const auto model = std::make_shared<Model>();
  model->register_buffer("narrow", torch::ones({4}).to(at::kFloat8_e4m3fn));
  model->register_buffer("expanded", torch::zeros({1}).expand({4}));
  model->register_buffer("empty", torch::empty({0}, at::kBool));
  PrecisionAudit audit(*model, {.dtype = at::kBFloat16});
  audit.run(
      [&] {
        model->sparse.zero_();
        const at::Tensor y = model->last(model->words(torch::tensor({1, 2, 2})));
        (y * at::real(model->wave * model->wave)).square().sum().backward();
      },
      1);
  for (const AuditRow& row : audit.rows()) {  // a cast's backward takes no sparse gradients
    const bool is_sparse = row.problem.find("its gradient is sparse") != std::string::npos;
    EXPECT_EQ(is_sparse, row.op == "embedding") << row.op << ": " << row.problem;
  }
  const AuditedPolicy chosen = audit.policy();
  EXPECT_GT(chosen.torch_error, 0.);
  EXPECT_TRUE(at::equal(model->sparse.to_dense(), torch::eye(3)));
}

TEST(PrecisionAudit, RefusesLimitsAndTimesThatAreNoNumbers) {
  const TemporaryFolder folder;
  Net model = net();
  PrecisionAudit audit(model, {.dtype = at::kBFloat16});
  audit.run(step_of(model), 1);
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_ERROR(audit.policy({.error_budget = nan}), "the error budget is nan");
  EXPECT_ERROR(audit.policy({.gradient_loss_limit = nan}), "the gradient_loss_limit is nan");
  EXPECT_ERROR(audit.policy({.gradient_loss_limit = -1.}), "the gradient_loss_limit is -1");
  const auto rows = audit.rows();
  const std::string csv = audit.to_csv(), head = csv.substr(0, csv.find('\n') + 1);
  for (const char* const time : {"nan", "inf", "1e999", "-1", ""}) {
    std::ofstream(folder / "csv") << head << "a,b,0,0,0,0,0,0,0,0,0,1," << time << ",1,\n";
    EXPECT_ERROR(audit.read_times(folder / "csv"), "is no time in microseconds");
    EXPECT_EQ(audit.rows(), rows);
  }
}

TEST(PolicyFile, KeepsAReasonOfSeveralLinesInItsComment) {
  const TemporaryFolder folder;
  AuditedPolicy chosen;
  chosen.decisions = {{"", "addmm", true, "fast\nfp32: mm"}};
  torchamp::save_policy(chosen, folder / "policy");
  const auto loaded = torchamp::load_policies(folder / "policy");
  EXPECT_EQ(loaded.policy.lookup("addmm", at::kCPU), torchamp::Cast::lower_precision);
  EXPECT_EQ(loaded.policy.lookup("mm", at::kCPU), Policy::torch().lookup("mm", at::kCPU));
}

TEST(PolicyFile, OfAnotherModelLeavesAllModulesUnchanged) {
  const TemporaryFolder folder;
  Net model = net();
  std::ofstream(folder / "policy") << "policy torch\nmodule last\nfp32: addmm\nmodule head\n";
  EXPECT_ERROR(torchamp::load_policies(folder / "policy").apply_to(*model),
               "LoadedPolicies::apply_to: what torchamp::load_policies read in '" +
                   (folder / "policy").string() +
                   "' does not fit the model: ModulePolicies::apply_to: no module of the model "
                   "fits 'head'. The nearest");
  EXPECT_EQ(model->last->module_policy(), nullptr);
}

TEST(PolicyFile, NamesNoModuleThatCouldNotBeReadBack) {
  const TemporaryFolder folder;
  AuditedPolicy chosen;
  for (const char* const name : {"q#1", "a b"}) {
    chosen.decisions = {{name, "addmm", true, "fast"}};
    EXPECT_ERROR(torchamp::save_policy(chosen, folder / "odd"), "cannot name the module '");
    EXPECT_FALSE(std::filesystem::exists(folder / "odd"));
  }
}
