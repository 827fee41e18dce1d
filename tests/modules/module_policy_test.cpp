// SPDX-License-Identifier: BSD-3-Clause
#include "torchamp/labs/module_policy.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/serialize.h>

#include <cstddef>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "support/expect_error.h"
#include "support/growth.h"
#include "support/policies.h"
#include "support/raw_autocast.h"
#include "support/temporary_folder.h"
#include "support/thread_state.h"
#include "support/tolerances.h"
#include "torchamp/autocast.h"
#include "torchamp/labs/policy_file.h"

namespace {

namespace nn = torch::nn;
using Names = std::vector<std::string>;
using torchamp::AutocastGuard;
using torchamp::ModulePolicies;
using torchamp::Policy;
using torchamp::WithPolicy;

at::Tensor low(std::initializer_list<std::int64_t> sizes = {2, 4}) {
  return at::ones(sizes, at::kBFloat16);
}

/// Tells the dtype in which relu runs inside it, by itself and under a nested guard.
struct ProbeImpl : nn::Cloneable<ProbeImpl> {
  at::ScalarType seen = at::ScalarType::Undefined;
  at::ScalarType nested = at::ScalarType::Undefined;
  at::Tensor weight;

  ProbeImpl() { reset(); }
  void reset() override { weight = register_parameter("weight", at::ones({4})); }

  at::Tensor forward(at::Tensor x) {
    seen = x.to(at::kBFloat16).relu().scalar_type();
    const AutocastGuard guard(at::kCPU);
    nested = x.to(at::kBFloat16).relu().scalar_type();
    return x * weight;
  }
};
TORCH_MODULE(Probe);

/// encoder.{0,1}, a Sequential of probes; head, a WithPolicy; tail, neither.
struct NetImpl : nn::Cloneable<NetImpl> {
  nn::Sequential encoder;
  WithPolicy<Probe> head{nullptr};
  Probe tail{nullptr};

  NetImpl() { reset(); }
  void reset() override {
    encoder = register_module("encoder", nn::Sequential(Probe(), nn::Linear(4, 4), Probe()));
    head = register_module("head", WithPolicy<Probe>());
    tail = register_module("tail", Probe());
  }

  at::Tensor forward(at::Tensor x) {
    return tail->forward(head->forward(encoder->forward(std::move(x))));
  }

  const ProbeImpl& probe(std::size_t index) { return *encoder[index]->as<Probe>(); }
};
TORCH_MODULE(Net);

TEST(ModulePolicies, HoldDuringTheForwardOfTheNamedModuleOnly) {
  Net net;
  const Names covered =
      ModulePolicies{{"head", relu_in_fp32()}, {"encoder.2", relu_in_fp32()}}.apply_to(*net);
  EXPECT_EQ(covered, (Names{"encoder.2", "head"}));
  const AutocastGuard autocast(at::kCPU);
  const ThreadState before;
  (void)net->forward(low());
  EXPECT_EQ(ThreadState(), before);
  EXPECT_EQ(net->probe(0).seen, at::kBFloat16);
  EXPECT_EQ(net->probe(2).seen, at::kFloat);
  EXPECT_EQ(net->head->seen, at::kFloat);
  EXPECT_EQ(net->tail->seen, at::kBFloat16);
}

TEST(ModulePolicies, AreInheritedByGuardsInside) {
  Net net;
  ModulePolicies{{"head", relu_in_fp32()}}.apply_to(*net);
  {
    const AutocastGuard autocast(at::kCPU);
    (void)net->forward(low());
    EXPECT_EQ(net->head->nested, at::kFloat);
    EXPECT_EQ(net->tail->nested, at::kBFloat16);
  }
  (void)net->forward(low());
  EXPECT_EQ(net->head->nested, at::kFloat);
}

TEST(ModulePolicies, DoNotSwitchAutocastOn) {
  Net net;
  ModulePolicies{{"head", relu_in_fp32()}}.apply_to(*net);
  (void)net->forward(low());
  EXPECT_EQ(net->head->seen, at::kBFloat16);
  const AutocastGuard autocast(at::kCPU);
  const AutocastGuard off(at::kCPU, {.enabled = false});
  (void)net->forward(low());
  EXPECT_EQ(net->head->seen, at::kBFloat16);
}

TEST(ModulePolicies, DoNotHoldIfAutocastIsSwitchedOnByOtherMeansInside) {
  struct RawImpl : nn::Module {
    at::Tensor forward(const at::Tensor& x) {
      const RawAutocast raw(at::kCPU, at::kBFloat16);
      return x.relu();
    }
  };
  WithPolicy<nn::ModuleHolder<RawImpl>> module;
  ModulePolicies{{"", relu_in_fp32()}}.apply_to(*module);
  EXPECT_EQ(module(low()).scalar_type(), at::kBFloat16);
}

TEST(ModulePolicies, OfAnInnerModuleReplacesTheOuterOne) {
  struct OuterImpl : nn::Module {
    WithPolicy<Probe> inner = register_module("inner", WithPolicy<Probe>());
    at::ScalarType before{}, after{};
    at::Tensor forward(at::Tensor x) {
      before = x.relu().scalar_type();
      auto y = inner(x);
      after = x.relu().scalar_type();
      return y;
    }
  };
  TORCH_MODULE(Outer);
  WithPolicy<Outer> outer;
  ModulePolicies{{"", relu_in_fp32()}, {"inner", Policy::torch()}}.apply_to(*outer);
  const AutocastGuard autocast(at::kCPU);
  (void)outer(low());
  EXPECT_EQ(outer->before, at::kFloat);
  EXPECT_EQ(outer->inner->seen, at::kBFloat16);
  EXPECT_EQ(outer->after, at::kFloat);
}

TEST(ModulePolicies, OfASequentialAreItsEntries) {
  Net net;
  const Names covered =
      ModulePolicies{{"encoder", relu_in_fp32()}, {"encoder.2", Policy::standard()}}.apply_to(*net);
  EXPECT_EQ(covered, (Names{"encoder", "encoder.0", "encoder.1", "encoder.2"}));
  const AutocastGuard autocast(at::kCPU);
  (void)net->forward(low());
  EXPECT_EQ(net->probe(0).seen, at::kFloat);
  EXPECT_EQ(net->probe(2).seen, at::kBFloat16);
}

TEST(ModulePolicies, AreReplacedByALaterCallAndTakenAwayByNone) {
  Net net;
  ModulePolicies{{"encoder.*", relu_in_fp32()}, {"head", relu_in_fp32()}}.apply_to(*net);
  EXPECT_EQ((ModulePolicies{{"encoder.0", relu_in_fp32()}}.apply_to(*net)), Names{"encoder.0"});
  const AutocastGuard autocast(at::kCPU);
  (void)net->forward(low());
  EXPECT_EQ(net->probe(0).seen, at::kFloat);
  EXPECT_EQ(net->probe(2).seen, at::kBFloat16);
  EXPECT_EQ(net->head->seen, at::kBFloat16);
  EXPECT_TRUE(ModulePolicies().apply_to(*net).empty());
  (void)net->forward(low());
  EXPECT_EQ(net->probe(0).seen, at::kBFloat16);
  EXPECT_NO_THROW((void)net->encoder->at<ProbeImpl>(0));
}

TEST(ModulePolicies, LeaveNamesParametersAndCheckpointsAlone) {
  struct PlainImpl : nn::Module {
    nn::Sequential encoder =
        register_module("encoder", nn::Sequential(Probe(), nn::Linear(4, 4), Probe()));
    Probe head = register_module("head", Probe());
    Probe tail = register_module("tail", Probe());
  };
  TORCH_MODULE(Plain);
  Plain plain;
  Net net;
  ModulePolicies{{"encoder.*", relu_in_fp32()}, {"head", relu_in_fp32()}}.apply_to(*net);
  EXPECT_EQ(net->named_parameters().keys(), plain->named_parameters().keys());
  EXPECT_EQ(net->named_modules().keys(), plain->named_modules().keys());
  EXPECT_EQ(net->encoder[0], net->encoder->children()[0]);

  std::stringstream saved, loaded_back;
  torch::save(plain, saved);
  torch::load(net, saved);
  torch::save(net, loaded_back);
  Plain again;
  torch::load(again, loaded_back);
  for (const auto& item : plain->named_parameters()) {
    EXPECT_TRUE(net->named_parameters()[item.key()].equal(item.value())) << item.key();
    EXPECT_TRUE(again->named_parameters()[item.key()].equal(item.value())) << item.key();
  }
}

TEST(ModulePolicies, ChangeNoValueOfAModelWithoutAutocast) {
  Net net;
  const auto x = at::randn({2, 4});
  const auto expected = net->forward(x);
  ModulePolicies{{"encoder.*", relu_in_fp32()}, {"head", relu_in_fp32()}}.apply_to(*net);
  EXPECT_TRUE(net->forward(x).equal(expected));
}

TEST(ModulePolicies, HoldOnTheThreadThatRunsForwardOfSeveral) {
  nn::Sequential model{WithPolicy<nn::ReLU>(), nn::Identity()};
  ModulePolicies{{"0", relu_in_fp32()}}.apply_to(*model);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      const AutocastGuard autocast(at::kCPU);
      for (int step = 0; step < 20; ++step) {
        ASSERT_EQ(model->forward(low()).scalar_type(), at::kFloat);
        ASSERT_EQ(low().relu().scalar_type(), at::kBFloat16);
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(ModulePolicies, EndWithAnException) {
  struct ThrowingImpl : nn::Module {
    at::Tensor forward(at::Tensor) { throw std::runtime_error("no"); }
  };
  TORCH_MODULE(Throwing);
  nn::Sequential model{Throwing()};
  WithPolicy<Throwing> single;
  ModulePolicies{{"0", relu_in_fp32()}}.apply_to(*model);
  ModulePolicies{{"", relu_in_fp32()}}.apply_to(*single);
  const AutocastGuard autocast(at::kCPU);
  const ThreadState before;
  EXPECT_THROW(model->forward(low()), std::runtime_error);
  EXPECT_EQ(ThreadState(), before);
  EXPECT_THROW(single(low()), std::runtime_error);
  EXPECT_EQ(ThreadState(), before);
}

TEST(ModulePolicies, HaveToBeAppliedToAClone) {
  Net net;
  const ModulePolicies policies{{"encoder.0", relu_in_fp32()}, {"head", relu_in_fp32()}};
  policies.apply_to(*net);
  Net clone(std::dynamic_pointer_cast<NetImpl>(net->clone()));
  EXPECT_NE(clone->head->weight.data_ptr(), net->head->weight.data_ptr());
  const AutocastGuard autocast(at::kCPU);
  (void)clone->forward(low());
  EXPECT_EQ(clone->probe(0).seen, at::kBFloat16);
  EXPECT_EQ(clone->head->seen, at::kBFloat16);
  EXPECT_EQ(policies.apply_to(*clone), (Names{"encoder.0", "head"}));
  (void)clone->forward(low());
  EXPECT_EQ(clone->probe(0).seen, at::kFloat);
  EXPECT_EQ(clone->head->seen, at::kFloat);
}

TEST(ModulePolicies, YieldToTheEnvironment) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  const auto report = [](const char* value) {
    setenv("TORCHAMP_POLICY", value, 1);
    WithPolicy<nn::ReLU> relu;
    ModulePolicies{{"", relu_in_fp32()}}.apply_to(*relu);
    {
      const RawAutocast raw(at::kCPU, at::kBFloat16);
      std::cerr << "raw " << relu(low()).scalar_type() << ", ";
    }
    const AutocastGuard autocast(at::kCPU);
    std::cerr << "relu " << relu(low()).scalar_type() << '\n';
    std::exit(0);
  };
  EXPECT_EXIT(report(""), ::testing::ExitedWithCode(0), "raw Float, relu Float");
  EXPECT_EXIT(report("standard"), ::testing::ExitedWithCode(0), "raw BFloat16, relu BFloat16");
  EXPECT_EXIT(report("off"), ::testing::ExitedWithCode(0), "raw BFloat16, relu BFloat16");
}

// Names and patterns

TEST(ModulePolicies, PreferANameOverPatterns) {
  Net net;
  ModulePolicies{{"encoder.*", Policy::standard()},
                 {"**.2", Policy::standard()},
                 {"encoder.2", relu_in_fp32()}}
      .apply_to(*net);
  const AutocastGuard autocast(at::kCPU);
  (void)net->forward(low());
  EXPECT_EQ(net->probe(0).seen, at::kBFloat16);
  EXPECT_EQ(net->probe(2).seen, at::kFloat);
}

TEST(ModulePolicies, TakeAWildcardBehindABackslashForItself) {
  struct StarredImpl : nn::Module {
    WithPolicy<Probe> star = register_module("h*", WithPolicy<Probe>());
    WithPolicy<Probe> head = register_module("head", WithPolicy<Probe>());
  };
  StarredImpl model;
  const Policy policy = relu_in_fp32();
  EXPECT_EQ((ModulePolicies{{"h\\*", policy}}.apply_to(model)), (Names{"h*"}));
  EXPECT_EQ((ModulePolicies{{"h*", policy}}.apply_to(model)), (Names{"h*", "head"}));
  EXPECT_EQ((ModulePolicies{{"h\\*", policy}, {"h*", Policy::standard()}}.apply_to(model)),
            (Names{"h*", "head"}));
  EXPECT_EQ(model.star->module_policy()->policy, policy.data());
  EXPECT_NE(model.head->module_policy()->policy, policy.data());
}

TEST(ModulePolicies, ListTheirEntriesInOrder) {
  const ModulePolicies policies{{"head", relu_in_fp32()}, {"encoder.*", Policy::torch()}};
  const auto entries = policies.entries();
  ASSERT_EQ(entries.size(), 2U);
  EXPECT_EQ(entries[0].first, "head");
  EXPECT_EQ(entries[1].first, "encoder.*");
  EXPECT_EQ(entries[1].second.data(), Policy::torch().data());
}

TEST(ModulePolicies, SkipContainersThatAPatternFits) {
  struct ListedImpl : nn::Module {
    nn::ModuleList layers = register_module("layers", nn::ModuleList(WithPolicy<Probe>()));
  };
  ListedImpl listed;
  EXPECT_EQ((ModulePolicies{{"**", relu_in_fp32()}}.apply_to(listed)), Names{"layers.0"});
  EXPECT_ERROR((ModulePolicies{{"layers", relu_in_fp32()}}.apply_to(listed)),
               "'layers' (torch::nn::ModuleListImpl), which fits 'layers', does not accept a "
               "policy");
}

// Errors

/// Whether the model has no policies.
void expect_untouched(Net& net) {
  const AutocastGuard autocast(at::kCPU);
  (void)net->forward(low());
  EXPECT_EQ(net->probe(0).seen, at::kBFloat16);
  EXPECT_EQ(net->head->seen, at::kBFloat16);
  EXPECT_NO_THROW((void)net->encoder->at<ProbeImpl>(0));
}

TEST(ModulePolicies, RefuseAModuleThatTwoPatternsFit) {
  Net net;
  EXPECT_ERROR(
      (ModulePolicies{
          {"head", relu_in_fp32()}, {"encoder.*", relu_in_fp32()}, {"**.2", relu_in_fp32()}}
           .apply_to(*net)),
      "ModulePolicies::apply_to: the module 'encoder.2' fits both 'encoder.*' and '**.2'. "
      "Set a policy for its name, or narrow one of the patterns.");
  expect_untouched(net);
}

TEST(ModulePolicies, RefuseAPatternThatFitsNothing) {
  Net net;
  EXPECT_ERROR((ModulePolicies{{"head", relu_in_fp32()}, {"haed", relu_in_fp32()}}.apply_to(*net)),
               "no module of the model fits 'haed'. The nearest name is 'head'.");
  EXPECT_ERROR((ModulePolicies{{"decoder.*", relu_in_fp32()}}.apply_to(*net)),
               "no module of the model fits 'decoder.*'. The nearest name is 'encoder.0'.");
  torch::nn::ReLU bare;
  EXPECT_ERROR((ModulePolicies{{"head", Policy::torch()}}.apply_to(*bare)),
               "no module of the model fits 'head'. The model has no modules in it");
  expect_untouched(net);
}

TEST(ModulePolicies, RefuseAModuleWhoseForwardTheyCannotReach) {
  Net net;
  const char* text =
      "'tail' ((anonymous namespace)::ProbeImpl), which fits 'tail', does not accept a policy. "
      "Declare it as torchamp::WithPolicy<...>";
  EXPECT_ERROR((ModulePolicies{{"head", relu_in_fp32()}, {"tail", relu_in_fp32()}}.apply_to(*net)),
               text);
  EXPECT_ERROR((ModulePolicies{{"", relu_in_fp32()}}.apply_to(*net)), "'' ((anonymous namespace)");
  EXPECT_ERROR((ModulePolicies{{"*", relu_in_fp32()}}.apply_to(*net)), "'tail' (");
  expect_untouched(net);
}

TEST(ModulePolicies, RefuseTwoPoliciesForAModuleWithTwoNames) {
  struct TiedImpl : nn::Module {
    WithPolicy<Probe> shared;
    TiedImpl() {
      register_module("a", shared);
      register_module("b", shared);
    }
  };
  TiedImpl tied;
  EXPECT_ERROR((ModulePolicies{{"a", relu_in_fp32()}, {"b", Policy::torch()}}.apply_to(tied)),
               "one module is registered as 'a', which fits 'a', and as 'b', which fits 'b'");
  EXPECT_EQ((ModulePolicies{{"b", relu_in_fp32()}}.apply_to(tied)), Names{"a"});
}

TEST(ModulePolicies, RefuseAPatternGivenTwice) {
  ModulePolicies policies{{"head", relu_in_fp32()}};
  EXPECT_ERROR(policies.set("head", Policy::torch()),
               "ModulePolicies::set: 'head' has a policy already.");
}

// WithPolicy

struct SilentImpl : nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x; }
};
TORCH_MODULE(Silent);

TEST(WithPolicy, IsPrintedByTheNameOfAModuleThatDoesNotSayHow) {
  std::ostringstream printed, expected;
  printed << WithPolicy<Silent>();
  expected << Silent();
  EXPECT_EQ(printed.str(), expected.str());
}

TEST(WithPolicy, IsTheModuleInAllOtherRespects) {
  WithPolicy<nn::Linear> made(nn::LinearOptions(4, 3).bias(false));
  nn::Linear plain(nn::LinearOptions(4, 3).bias(false));
  EXPECT_EQ(made->weight.sizes(), plain->weight.sizes());
  EXPECT_FALSE(made->options.bias());
  EXPECT_EQ(made->named_parameters().keys(), plain->named_parameters().keys());
  EXPECT_NE(made.ptr()->as<nn::Linear>(), nullptr);
  std::ostringstream printed, expected;
  printed << made;
  expected << plain;
  EXPECT_EQ(printed.str(), expected.str());
  WithPolicy<nn::Linear> empty{nullptr};
  EXPECT_TRUE(empty.is_empty());
  empty = made;
  EXPECT_EQ(empty(at::ones({2, 4})).sizes(), (std::vector<std::int64_t>{2, 3}));
}

TEST(WithPolicy, GoesIntoASequential) {
  nn::Sequential model(WithPolicy<nn::Linear>(4, 4), nn::ReLU(), WithPolicy<Probe>());
  EXPECT_EQ(model->forward(at::ones({2, 4})).dim(), 2);
  EXPECT_EQ((ModulePolicies{{"?", relu_in_fp32()}}.apply_to(*model)), (Names{"0", "1", "2"}));
  const AutocastGuard autocast(at::kCPU);
  (void)model->forward(at::ones({2, 4}));
  EXPECT_EQ(model[2]->as<Probe>()->seen, at::kFloat);
}

TEST(WithPolicy, KeepsDefaultArgumentsAndOverloads) {
  WithPolicy<nn::LSTM> lstm(4, 3);
  const auto output = lstm->forward(at::ones({2, 1, 4}));
  EXPECT_EQ(std::get<0>(output).size(2), 3);
  EXPECT_EQ(std::get<0>(lstm(at::ones({2, 1, 4}), std::get<1>(output))).size(2), 3);
  WithPolicy<nn::ConvTranspose1d> up(1, 1, 2);
  EXPECT_EQ(up->forward(at::ones({1, 1, 3})).size(2), 4);
  WithPolicy<nn::Sequential> sequential(nn::Linear(4, 3), nn::ReLU());
  EXPECT_EQ(sequential->forward(at::ones({2, 4})).size(1), 3);
  WithPolicy<nn::Sequential> named({{"first", nn::Linear(4, 3)}, {"second", nn::ReLU()}});
  EXPECT_EQ(named->named_parameters().keys(), (Names{"first.weight", "first.bias"}));
}

TEST(WithPolicy, ClonesToItsOwnTypeWithoutThePolicy) {
  WithPolicy<nn::Linear> original(4, 4);
  ModulePolicies{{"", relu_in_fp32()}}.apply_to(*original);
  const auto clone = original->clone();
  auto* typed = dynamic_cast<WithPolicy<nn::Linear>::Impl*>(clone.get());
  ASSERT_NE(typed, nullptr);
  EXPECT_EQ(typed->module_policy(), nullptr);
  EXPECT_NE(original->module_policy(), nullptr);
  EXPECT_TRUE(typed->weight.equal(original->weight));
  EXPECT_NE(typed->weight.data_ptr(), original->weight.data_ptr());
  EXPECT_EQ(typed->weight.data_ptr(), clone->named_parameters()["weight"].data_ptr());
}

TEST(ModulePolicies, FitNamesWithBackslashesAndWildcardsAsTheyAreWritten) {
  torch::nn::Sequential model;
  for (const char* name : {"a*", "ab", "a?b"}) {
    model->push_back(name, torch::nn::Linear(2, 2));
  }
  const Policy torch_policy = Policy::torch();
  const auto named = [&](const std::string& pattern) {
    return ModulePolicies{{pattern, torch_policy}}.apply_to(*model);
  };
  EXPECT_EQ(named("a\\*"), Names{"a*"});
  EXPECT_EQ(named("\\a\\b"), Names{"ab"});
  EXPECT_EQ(named("a?b"), Names{"a?b"}) << "the text itself comes before the pattern";
  EXPECT_EQ(named("a*"), (Names{"a*", "ab", "a?b"}));
  EXPECT_ERROR((ModulePolicies{{"ab", torch_policy}, {"\\ab", torch_policy}}.apply_to(*model)),
               "the module 'ab' fits both 'ab' and '\\ab'");
}

TEST(ModulePolicies, TakeTimeInProportionToTheModules) {
  constexpr std::size_t small = 500, large = 4000;  // 8 times as many; all pairs: 64 times
  const TemporaryFolder folder;
  std::map<std::size_t, torch::nn::Sequential> models;
  const auto path = [&](std::size_t size) { return (folder / std::to_string(size)).string(); };
  for (const std::size_t size : {small, large}) {
    std::ofstream file(path(size));
    file << "policy torch\n";
    for (std::size_t i = 0; i < size; ++i) {
      models[size]->push_back(torch::nn::ReLU());
      file << "module " << i << "\nfp32: mm\n";
    }
  }
  std::map<std::size_t, torchamp::LoadedPolicies> loaded;
  const auto load = [&](std::size_t size) { loaded[size] = torchamp::load_policies(path(size)); };
  EXPECT_LT(growth(load, small, large), 20.);
  const auto apply = [&](std::size_t size) { (void)loaded[size].apply_to(*models[size]); };
  EXPECT_LT(growth(apply, small, large), 20.);
}

}  // namespace
