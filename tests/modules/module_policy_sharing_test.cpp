// SPDX-License-Identifier: BSD-3-Clause
// Modules that several Sequentials call, or that a Sequential calls under no name; clones; and the
// devices that policies are made ready for.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>
#include <torch/nn/modules.h>
#include <torch/nn/modules/container/sequential.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "support/devices.h"
#include "support/expect_error.h"
#include "support/policies.h"
#include "torchamp/autocast.h"
#include "torchamp/labs/fp8.h"
#include "torchamp/labs/module_policy.h"

namespace {

namespace nn = torch::nn;
using Names = std::vector<std::string>;
using torchamp::AutocastGuard;
using torchamp::ModulePolicies;
using torchamp::Policy;
using torchamp::WithPolicy;

Policy tanh_in_fp32() {
  return Policy::standard().fp32({"tanh"});
}

/// The dtype that `module` gives for a bf16 input in a region.
template <class Module>
at::ScalarType dtype_of(Module& module) {
  const AutocastGuard autocast(at::kCPU);
  return module->forward(at::ones({2, 4}, at::kBFloat16)).scalar_type();
}

/// a and b, which both call `shared`; b calls its own ReLU after it.
template <class Shared = nn::ReLU>
struct TiedImpl : nn::Module {
  Shared shared;
  nn::Sequential a = register_module("a", nn::Sequential(shared));
  nn::Sequential b = register_module("b", nn::Sequential(shared, nn::Identity()));
};

TEST(ModulePolicies, RefuseTwoPoliciesForAModuleThatTwoSequentialsCall) {
  TiedImpl tied;
  EXPECT_ERROR((ModulePolicies{{"a", relu_in_fp32()}, {"b", tanh_in_fp32()}}.apply_to(tied)),
               "ModulePolicies::apply_to: the Sequentials 'a', which fits 'a', and 'b', which fits "
               "'b', both call the module 'a.0', but have different policies. Set one for 'a.0'");
  EXPECT_EQ(dtype_of(tied.a), at::kBFloat16);
  EXPECT_EQ(dtype_of(tied.b), at::kBFloat16);
  TiedImpl<WithPolicy<nn::ReLU>> with;
  EXPECT_ERROR((ModulePolicies{{"a", relu_in_fp32()}, {"b", tanh_in_fp32()}}.apply_to(with)),
               "both call the module 'a.0'");
  EXPECT_EQ(dtype_of(with.a), at::kBFloat16);
}

TEST(ModulePolicies, MayMeetInASharedModuleIfTheyAreTheSame) {
  TiedImpl tied;
  const Policy policy = relu_in_fp32();
  const Names all{"a", "a.0", "b", "b.1"};
  EXPECT_EQ((ModulePolicies{{"a", policy}, {"b", policy}}.apply_to(tied)), all);
  EXPECT_EQ(dtype_of(tied.b), at::kFloat);
  EXPECT_EQ((ModulePolicies{{"a", relu_in_fp32()}, {"b", relu_in_fp32()}}.apply_to(tied)), all);
  EXPECT_EQ((ModulePolicies{{"a.0", relu_in_fp32()}, {"b.0", relu_in_fp32()}}.apply_to(tied)),
            Names{"a.0"});
  EXPECT_ERROR((ModulePolicies{{"a.0", relu_in_fp32()}, {"b.0", tanh_in_fp32()}}.apply_to(tied)),
               "one module is registered as 'a.0'");
}

TEST(ModulePolicies, OfASharedModuleWinOverPoliciesOfItsSequentials) {
  TiedImpl tied;
  ModulePolicies{{"a", tanh_in_fp32()}, {"b", Policy::torch()}, {"b.0", relu_in_fp32()}}.apply_to(
      tied);
  EXPECT_EQ(dtype_of(tied.a), at::kFloat);
  EXPECT_EQ(dtype_of(tied.b), at::kFloat);
}

TEST(ModulePolicies, AreDifferentIfAnyPartOfThemIs) {
  const auto may_meet = [](const Policy& one, const Policy& other) {
    TiedImpl tied;
    try {
      ModulePolicies{{"a", one}, {"b", other}}.apply_to(tied);
      return true;
    } catch (const c10::Error&) {
      return false;
    }
  };
  const auto when = [](const torchamp::OpCall&) { return true; };
  const Policy base = relu_in_fp32(), conditional = Policy::standard().fp32({"relu"}, {{}, when});
  EXPECT_TRUE(may_meet(base, relu_in_fp32()));
  EXPECT_TRUE(may_meet(conditional, conditional));
  EXPECT_FALSE(may_meet(conditional, Policy::standard().fp32({"relu"}, {{}, when})));
  EXPECT_FALSE(may_meet(conditional, base));
  EXPECT_FALSE(may_meet(base, conditional));
  EXPECT_FALSE(may_meet(base, Policy::torch().fp32({"relu"})));
  EXPECT_FALSE(may_meet(base, Policy::standard().unchanged({"relu"})));
  EXPECT_FALSE(may_meet(base, Policy::standard().fp32({"tanh"})));
  EXPECT_FALSE(may_meet(base, Policy::standard().fp32({"relu"}, {.dtype = at::kHalf})));
  EXPECT_FALSE(may_meet(base, relu_in_fp32().fp32({"tanh"})));
  EXPECT_FALSE(may_meet(Policy::standard().fp32(torchamp::ops::softmax),
                        Policy::standard().fp32(torchamp::ops::loss)));
  const Policy fp8 = torchamp::fp8(Policy::standard(), torchamp::ops::dense);
  EXPECT_TRUE(may_meet(fp8, torchamp::fp8(Policy::standard(), torchamp::ops::dense)));
  EXPECT_FALSE(may_meet(fp8, torchamp::fp8(Policy::standard(), torchamp::ops::dense,
                                           {.recipe = torchamp::Fp8Recipe::rowwise})));
  EXPECT_FALSE(may_meet(fp8, Policy::standard().fp32(torchamp::ops::dense)));
}

TEST(ModulePolicies, OfASequentialInASequentialHoldIfItIsCalledDirectly) {
  struct OuterImpl : nn::Module {
    struct InnerImpl : nn::SequentialImpl {
      using SequentialImpl::SequentialImpl;
      at::Tensor forward(at::Tensor x) { return SequentialImpl::forward(std::move(x)); }
    };
    std::shared_ptr<InnerImpl> inner =
        register_module("inner", std::make_shared<InnerImpl>(nn::ReLU()));
    nn::Sequential outer = register_module("outer", nn::Sequential());
    OuterImpl() { outer->push_back(inner); }
  };
  for (const char* name : {"inner", "outer", "outer.0"}) {
    OuterImpl model;
    ModulePolicies{{name, relu_in_fp32()}}.apply_to(model);
    EXPECT_EQ(dtype_of(model.inner), at::kFloat) << name;
    EXPECT_EQ(dtype_of(model.outer), at::kFloat) << name;
  }
}

TEST(ModulePolicies, RefuseASequentialOfWhichAModuleWasReplaced) {
  struct WithEncoder : nn::Module {
    nn::Sequential encoder = register_module("encoder", nn::Sequential(nn::ReLU(), nn::Tanh()));
  };
  WithEncoder net;
  net.encoder->replace_module("0", WithPolicy<nn::Sigmoid>());
  const char* text =
      "ModulePolicies::apply_to: the Sequential 'encoder' calls a torch::nn::ReLUImpl (its entry "
      "0) that is not registered with it. Was it replaced with replace_module? A Sequential still "
      "calls the old module: make a new Sequential.";
  EXPECT_ERROR((ModulePolicies{{"encoder", relu_in_fp32()}}.apply_to(net)), text);
  EXPECT_ERROR((ModulePolicies{{"encoder.0", relu_in_fp32()}}.apply_to(net)), text);
  EXPECT_ERROR(ModulePolicies().apply_to(net), text);
  EXPECT_EQ(dtype_of(net.encoder), at::kBFloat16);
}

TEST(ModulePolicies, HoldInAForwardWithDefaultArgumentsToo) {
  struct ScaledImpl : nn::Module {
    at::Tensor forward(const at::Tensor& x, double by = 1) { return (x * by).relu(); }
  };
  TORCH_MODULE(Scaled);
  WithPolicy<Scaled> model;
  ModulePolicies{{"", relu_in_fp32()}}.apply_to(*model);
  EXPECT_EQ(dtype_of(model), at::kFloat);
}

TEST(ModulePolicies, GoWithACopyOfAnEntry) {
  nn::Sequential model{nn::ReLU()};
  ModulePolicies{{"0", relu_in_fp32()}}.apply_to(*model);
  std::vector<nn::AnyModule> copies(model->begin(), model->end());
  const AutocastGuard autocast(at::kCPU);
  EXPECT_EQ(copies[0].forward<at::Tensor>(at::ones({2}, at::kBFloat16)).scalar_type(), at::kFloat);
}

TEST(ModulePolicies, OfAWithPolicyAreNotHandedDownAndPatternsDoNotReachTheModelItself) {
  WithPolicy<nn::Sequential> model(nn::ReLU{}, nn::Tanh{});
  EXPECT_EQ((ModulePolicies{{"", relu_in_fp32()}}.apply_to(*model)), Names{""});
  EXPECT_EQ((ModulePolicies{{"**", relu_in_fp32()}}.apply_to(*model)), (Names{"0", "1"}));
  struct ListedImpl : nn::Module {
    nn::ModuleDict layers = register_module("layers", nn::ModuleDict());
    ListedImpl() {
      layers->update(std::vector<std::pair<std::string, std::shared_ptr<nn::Module>>>{
          {"relu", WithPolicy<nn::ReLU>().ptr()}});
    }
  };
  ListedImpl listed;
  EXPECT_EQ((ModulePolicies{{"**", relu_in_fp32()}}.apply_to(listed)), Names{"layers.relu"});
}

TEST(ModulePolicies, LeaveAClonesEntriesAsTheyWereMade) {
  nn::Sequential model(nn::Linear(4, 4), nn::ReLU());
  const ModulePolicies policies{{"1", relu_in_fp32()}};
  policies.apply_to(*model);
  const auto clone = std::dynamic_pointer_cast<nn::SequentialImpl>(model->clone());
  ASSERT_NE(clone, nullptr);
  EXPECT_NO_THROW((void)clone->at<nn::ReLUImpl>(1));
  EXPECT_EQ(clone->at<nn::LinearImpl>(0).weight.sizes(), (std::vector<std::int64_t>{4, 4}));
  EXPECT_NE(&clone->at<nn::ReLUImpl>(1), model->ptr(1).get());
  EXPECT_EQ(dtype_of(clone), at::kBFloat16);
  EXPECT_EQ(policies.apply_to(*clone), Names{"1"});
  EXPECT_EQ(dtype_of(clone), at::kFloat);
  EXPECT_EQ(dtype_of(model), at::kFloat);
}

TEST(ModulePolicies, RegisterNothingInTheMiddleOfAForward) {
  const auto has_kernel = [](const char* op, c10::DispatchKey key) {
    return c10::Dispatcher::singleton().findSchemaOrThrow(op, "").hasKernelForDispatchKey(key);
  };
  ASSERT_FALSE(has_kernel("aten::hardswish", c10::DispatchKey::AutocastCPU));
  nn::Sequential without_parameters{nn::ReLU()};
  ModulePolicies{{"0", Policy::standard().fp32({"hardswish"})}}.apply_to(*without_parameters);
  EXPECT_TRUE(has_kernel("aten::hardswish", c10::DispatchKey::AutocastCPU));
  EXPECT_EQ(has_kernel("aten::hardswish", c10::DispatchKey::AutocastCUDA), at::hasCUDA());
  EXPECT_FALSE(has_kernel("aten::hardswish", c10::DispatchKey::AutocastXLA));

  struct ElsewhereImpl : nn::Module {  // on a device without autocast
    at::Tensor buffer = register_buffer("buffer", at::zeros({3}, at::kMeta));
    WithPolicy<nn::ReLU> relu = register_module("relu", WithPolicy<nn::ReLU>());
  };
  ElsewhereImpl elsewhere;
  ModulePolicies{{"relu", relu_in_fp32()}}.apply_to(elsewhere);
}

}  // namespace
