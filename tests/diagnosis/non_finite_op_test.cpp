// SPDX-License-Identifier: BSD-3-Clause
#include <torchamp/non_finite_op.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/autocast.h>
#include <torchamp/grad_scaler.h>
#include <torchamp/recompute.h>

#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "support/devices.h"
#include "support/expect_error.h"
#include "support/non_finite.h"

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using torchamp::first_non_finite_op;

namespace {

class NonFiniteOpOn : public ::testing::TestWithParam<at::DeviceType> {
 protected:
  void SetUp() override { SKIP_WITHOUT(GetParam()); }
  at::TensorOptions options() const { return at::TensorOptions(GetParam()); }
};

}  // namespace

TEST_P(NonFiniteOpOn, NamesTheOpOfTheForwardPass) {
  const auto found = first_non_finite_op([&] {
    const at::Tensor x = torch::ones({3}, options());
    const at::Tensor y = torch::log(x - 1) * 2;
    y.sum();
  });
  ASSERT_TRUE(found);
  EXPECT_EQ(found->op, "aten::log");
  EXPECT_FALSE(found->in_backward);
  EXPECT_TRUE(found->inputs_were_finite);
  EXPECT_EQ(found->infs, 3);
  EXPECT_EQ(found->nans, 0);
  EXPECT_EQ(found->dtype, at::kFloat);
  EXPECT_THAT(found->inputs, ElementsAre("Float [3] up to 0"));
  EXPECT_EQ(found->ops_before, 2);
  std::ostringstream text;
  text << *found;
  EXPECT_EQ(text.str(),
            "aten::log made 3 inf, 0 NaN in Float, of Float [3] up to 0 (after 2 ops)\n");
}

TEST_P(NonFiniteOpOn, NamesTheOpOfTheBackwardPassItsForwardOpAndItsParameters) {
  torch::nn::Sequential model(torch::nn::Linear(3, 2), torch::nn::Tanh(), torch::nn::Linear(2, 1));
  to_device(model, GetParam());
  const at::Tensor input = torch::tensor({{1.F, 2.F, 1e38F}}).to(GetParam()) * 1e-3;
  torchamp::GradScaler scaler;
  // Only the gradient of the first weight, input times a scaled number, is too large.
  {
    const torch::NoGradGuard no_grad;
    model->named_parameters()["0.weight"].fill_(1e-36);
    model->named_parameters()["2.weight"].fill_(1.);
  }
  const auto found = first_non_finite_op(
      [&] { scaler.scale(model->forward(input).sum()).backward(); }, model.ptr().get());
  ASSERT_TRUE(found);
  EXPECT_TRUE(found->in_backward);
  EXPECT_EQ(found->op, "aten::mm");
  EXPECT_EQ(found->node, "AddmmBackward0");
  EXPECT_EQ(found->forward_op, "aten::addmm");
  EXPECT_THAT(found->parameters, ElementsAre("0.bias", "0.weight"));
  std::ostringstream text;
  text << *found;
  EXPECT_THAT(text.str(),
              HasSubstr("aten::mm in backward (AddmmBackward0, of aten::addmm on 0.bias, "
                        "0.weight) made "));
}

TEST_P(NonFiniteOpOn, DetectsAnOverflowOfACastUnderAutocast) {
  torch::nn::Linear model(2, 1);
  to_device(model, GetParam());
  const at::Tensor input = torch::full({1, 2}, 1e5F, options());
  const auto found = first_non_finite_op(
      [&] {
        const torchamp::AutocastGuard autocast(GetParam(), torch::kHalf);
        model(input);
      },
      model.ptr().get());
  ASSERT_TRUE(found);
  EXPECT_EQ(found->op, "aten::addmm");
  EXPECT_THAT(found->inputs, ::testing::Contains("Float [1, 2] up to 100000"));
  EXPECT_THAT(found->parameters, ElementsAre("bias", "weight"));
}

TEST_P(NonFiniteOpOn, DoesNotBlameMasksAndUninitialisedMemory) {
  EXPECT_FALSE(first_non_finite_op([&] {
    const at::Tensor scores = torch::randn({2, 4}, options().requires_grad(true));
    const at::Tensor mask = torch::full({2, 4}, -kInf, options()).triu(2);
    const at::Tensor filled = scores.masked_fill(torch::ones({2, 4}, options()) > 2, -kInf);
    torch::softmax(scores + mask, -1).sum().backward();
    torch::softmax(filled.detach() + mask, -1).sum();
    at::Tensor memory = torch::empty({1000}, options());
    memory.fill_(std::numeric_limits<float>::quiet_NaN());
    memory.normal_();
    (memory * 2).sum();
    torch::dropout(memory, 0.5, true);
    torch::batch_norm(torch::randn({4, 3}, options()), {}, {}, {}, {}, true, 0.1, 1e-5, false);
  }));
}

TEST_P(NonFiniteOpOn, DoesNotBlameNewMemoryThatHoldsNaNs) {
  struct FilledWithNaN {
    FilledWithNaN() { at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true); }
    ~FilledWithNaN() { at::globalContext().setDeterministicAlgorithms(before, false); }
    bool before = at::globalContext().deterministicAlgorithms();
  } const filled;
  ASSERT_TRUE(at::globalContext().deterministicFillUninitializedMemory());
  ASSERT_TRUE(torch::empty({4}, options()).isnan().all().item<bool>());
  EXPECT_FALSE(first_non_finite_op([&] {
    const at::Tensor memory = torch::empty({4}, options());
    (memory * 2).sum();
    (torch::empty_like(memory) + memory.new_empty({4})).sum();
  }));
}

TEST_P(NonFiniteOpOn, DoesNotBlameAnOpForWhatItOverwrites) {
  const at::Tensor old = torch::full({4}, kInf, options()), ones = torch::ones({4}, options());
  torch::nn::Linear model(2, 2);
  to_device(model, GetParam());
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  for (at::Tensor& parameter : model->parameters()) {
    parameter.mutable_grad() = torch::full_like(parameter, kInf);
  }
  const auto fill = [&] { old.fill_(kInf); };
  for (const auto& overwrite : std::vector<std::function<void()>>{
           [&] { old.zero_(); }, [&] { old.fill_(2); }, [&] { old.copy_(ones); },
           [&] { old.normal_(); }, [&] { at::exp_out(const_cast<at::Tensor&>(old), ones); },
           [&] { at::_foreach_zero_(std::vector<at::Tensor>{old}); },
           [&] {
             optimizer.zero_grad(/*set_to_none=*/false);
             model(torch::ones({1, 2}, options())).sum().backward();
           }}) {
    fill();
    EXPECT_FALSE(first_non_finite_op(overwrite));
  }
  fill();
  const auto found = first_non_finite_op([&] {
    at::Tensor again = torch::full({4}, kInf, options());
    at::exp_out(again, ones * 100);
  });
  ASSERT_TRUE(found);
  EXPECT_EQ(found->op, "aten::exp.out");
}

TEST_P(NonFiniteOpOn, DoesNotBlameAnOpThatLooksAtAShapeOnly) {
  const at::Tensor old = torch::full({4}, kInf, options()), ones = torch::ones({4}, options());
  for (const auto& look : std::vector<std::function<void()>>{
           [&] { torch::zeros_like(old); }, [&] { torch::full_like(old, 2); },
           [&] { torch::rand_like(old); }, [&] { old.new_zeros({2}); },
           [&] { old.new_full({2}, 3); }, [&] { ones.expand_as(old); },
           [&] { ones.clone().resize_as_(old); }}) {
    EXPECT_FALSE(first_non_finite_op(look));
  }
  const auto found = first_non_finite_op([&] { torch::ones_like(old).div(0); });
  ASSERT_TRUE(found);
  EXPECT_EQ(found->op, "aten::div.Scalar");
}

TEST(NonFiniteOp, LooksAtTheValuesOfSparseTensors) {
  const at::Tensor dense = torch::eye(3);
  for (const at::Tensor& sparse : {dense.to_sparse(), dense.to_sparse_csr()}) {
    const auto found = first_non_finite_op([&] { (sparse * 1e38 * 1e38).to_dense(); });
    ASSERT_TRUE(found) << sparse.layout();
    EXPECT_EQ(found->op, "aten::mul.Scalar");
    EXPECT_EQ(found->infs, 3);
    EXPECT_THAT(found->inputs, ::testing::Contains("Float [3, 3] up to 1e+38"));
  }
  EXPECT_FALSE(first_non_finite_op([] { torch::full({2}, kInf).to_sparse().to_dense(); }))
      << "a mask";
}

TEST(NonFiniteOp, PassesOverTensorsThatHaveNoKernelsWithoutAWord) {
#if TORCHAMP_LIBTORCH >= 208
  const at::Tensor four_bits = torch::zeros({4}, at::kByte).view(at::ScalarType::Float4_e2m1fn_x2);
#else
  const at::Tensor four_bits = torch::zeros({4}, at::kByte);
#endif
  const at::Tensor nested = at::_nested_tensor_from_tensor_list(
      std::vector<at::Tensor>{torch::ones({2, 3}), torch::ones({4, 3})});
  ::testing::internal::CaptureStderr();
  const auto found = first_non_finite_op([&] {
    four_bits.view({2, 2});
    (nested * 2).relu();
    torch::ones({2}).div(0);
  });
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              ::testing::Not(HasSubstr("RecordFunction")));
  ASSERT_TRUE(found);
  EXPECT_EQ(found->op, "aten::div.Scalar");
}

TEST_P(NonFiniteOpOn, DetectsAnOpThatReturnsNothing) {
  const auto found = first_non_finite_op([&] {
    const std::vector<at::Tensor> list{torch::ones({2}, options())};
    at::_foreach_div_(list, 0.);
  });
  ASSERT_TRUE(found);
  EXPECT_EQ(found->op, "aten::_foreach_div_.Scalar");
  EXPECT_EQ(found->infs, 2);
}

TEST_P(NonFiniteOpOn, GoesOnAfterDtypesThatHaveFewKernels) {
  for (const at::ScalarType dtype : {at::kFloat8_e4m3fn, at::kFloat8_e5m2, at::kComplexHalf}) {
    const auto found = first_non_finite_op([&] {
      const at::Tensor x = torch::ones({2}, options()), few = x.to(dtype);
      few.to(dtype == at::kComplexHalf ? at::kComplexFloat : at::kFloat);
      x.div(0);
    });
    ASSERT_TRUE(found) << dtype;
    EXPECT_EQ(found->op, "aten::div.Scalar") << dtype;
  }
}

TEST_P(NonFiniteOpOn, NamesTheForwardOpOfARecomputation) {
  const at::Tensor w = torch::ones({2}, options()).requires_grad_();
  const auto found = first_non_finite_op([&] {
    torchamp::checkpoint([](const at::Tensor& t) { return (t - 1).sqrt(); }, w).sum().backward();
  });
  ASSERT_TRUE(found);
  EXPECT_TRUE(found->in_backward);
  EXPECT_EQ(found->forward_op, "aten::sqrt");
}

TEST_P(NonFiniteOpOn, NamesNoForwardOpThatRanBeforeTheSearch) {
  struct Scale : torch::nn::Module {
    explicit Scale(const at::Tensor& by) : factor(register_parameter("factor", by)) {}
    at::Tensor factor;
  } model(torch::full({2}, 1e30, options()));
  const at::Tensor x = torch::ones({2}, options()).requires_grad_();
  for (const bool on_another_thread : {false, true}) {
    at::Tensor y;
    const auto forward = [&] { y = x * model.factor; };
    on_another_thread ? std::thread(forward).join() : forward();
    const auto found = first_non_finite_op(
        [&] {
          (void)x.exp();  // which has to do with nothing
          y.backward(torch::full({2}, 1e20, options()));
        },
        &model);
    ASSERT_TRUE(found);
    EXPECT_TRUE(found->in_backward);
    EXPECT_EQ(found->node, "MulBackward0");
    EXPECT_EQ(found->forward_op, "");
    EXPECT_THAT(found->parameters, ::testing::IsEmpty());
  }
}

TEST_P(NonFiniteOpOn, SaysSoIfTheDataWasNotFinite) {
  const at::Tensor data = torch::tensor({1.F, kInf}).to(GetParam());
  const auto found = first_non_finite_op([&] { (data * 2).sum(); });
  ASSERT_TRUE(found);
  EXPECT_THAT(found->op, HasSubstr("aten::mul."));
  EXPECT_FALSE(found->inputs_were_finite);
  std::ostringstream text;
  text << *found;
  EXPECT_THAT(text.str(), HasSubstr(" was given infs or NaNs, of Float [2] with 1 inf, 0 NaN ("));
}

TEST_P(NonFiniteOpOn, MarksTheInputThatWasNotFinite) {
  torch::nn::Linear model(3, 2);
  to_device(model, GetParam());
  {
    const torch::NoGradGuard no_grad;
    model->weight.fill_(0.5);
    model->weight[0][1] = kInf;
    model->weight[1][0] = -kInf;
    model->weight[1][2] = std::numeric_limits<float>::quiet_NaN();
    model->bias.fill_(4);
  }
  const auto found = first_non_finite_op([&] { model(torch::full({1, 3}, 2., options())); }, model);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->op, "aten::t");
  EXPECT_THAT(found->inputs, ElementsAre("Float [2, 3] of weight with 2 inf, 1 NaN"));
  const auto among_others = first_non_finite_op([&] {
    const at::Tensor mask = torch::full({2, 3}, -kInf, options());
    torch::where(mask < 0, model->weight, mask);
  });
  ASSERT_TRUE(among_others);
  EXPECT_THAT(among_others->inputs, ElementsAre("Float [2, 3] with 2 inf, 1 NaN", "Float [2, 3]"));
}

TEST_P(NonFiniteOpOn, NamesAParameterOnceAndThroughItsViews) {
  torch::nn::Linear model(2, 2);
  to_device(model, GetParam());
  const auto found = first_non_finite_op(
      [&] { torch::addcdiv(model->weight.t(), model->weight, torch::zeros({}, options())); },
      model);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->op, "aten::addcdiv");
  EXPECT_THAT(found->parameters, ElementsAre("weight"));
}

TEST_P(NonFiniteOpOn, LooksAtComplexNumbers) {
  const auto found = first_non_finite_op(
      [&] { torch::zeros({2}, options().dtype(torch::kComplexFloat)).reciprocal(); });
  ASSERT_TRUE(found);
  EXPECT_EQ(found->op, "aten::reciprocal");
}

TEST_P(NonFiniteOpOn, RemembersAMaskOfWhichAPartWasOverwritten) {
  EXPECT_FALSE(first_non_finite_op([&] {
    const at::Tensor mask = torch::full({2, 2}, -kInf, options());
    mask[0].zero_();
    (void)(mask + 1);
  }));
}

TEST_P(NonFiniteOpOn, NamesParametersAfterAModuleOrAnOptimizerInAnyForm) {
  torch::nn::Linear model(2, 1);
  to_device(model, GetParam());
  const auto names = [&](const auto& owner) {
    const auto found = first_non_finite_op([&] { model->weight.fmod(0.); }, owner);
    return found ? found->parameters : std::vector<std::string>{"none found"};
  };
  const torch::optim::SGD optimizer(model->parameters(), 0.1);
  EXPECT_THAT(names(*model), ElementsAre("weight"));
  EXPECT_THAT(names(model), ElementsAre("weight"));
  EXPECT_THAT(names(model.ptr()), ElementsAre("weight"));
  EXPECT_THAT(names(model.get()), ElementsAre("weight"));
  EXPECT_THAT(names(optimizer), ElementsAre("group 0, parameter 0"));
  EXPECT_THAT(names(&optimizer), ElementsAre("group 0, parameter 0"));
  EXPECT_THAT(names(nullptr), ElementsAre());
  const char* const error = "first_non_finite_op: was given a null pointer";
  EXPECT_ERROR(names(torch::nn::Linear{nullptr}), error);
  EXPECT_ERROR(names(static_cast<torch::nn::Module*>(nullptr)), error);
  EXPECT_ERROR(names(std::shared_ptr<torch::nn::Module>()), error);
}

TEST_P(NonFiniteOpOn, PassesOverAMaskFromBeforeTheRunToTheFaultBehindIt) {
  const at::Tensor mask = torch::full({4, 4}, -kInf, options()).triu(1);
  const at::Tensor keys = torch::randn({4, 4}, options());
  const at::Tensor w = torch::randn({4, 4}, options()).requires_grad_();
  const auto attend = [&](const at::Tensor& values) {
    const at::Tensor scores = torch::mm(w, keys) + mask.expand({4, 4}).contiguous();
    return torch::mm(torch::softmax(scores, -1), values);
  };
  EXPECT_FALSE(first_non_finite_op([&] { attend(keys); }));
  EXPECT_FALSE(first_non_finite_op([&] { attend(keys).sum().backward(); }));
  EXPECT_FALSE(first_non_finite_op([&] {
    const at::Tensor logged = (torch::mm(w, keys) + mask).detach().clone();
    attend(keys).sum().backward();
  }));
  const auto found = first_non_finite_op([&] { attend(keys.div(0.)).sum().backward(); });
  ASSERT_TRUE(found);
  EXPECT_EQ(found->op, "aten::div.Scalar");
  const auto behind = first_non_finite_op(
      [&] { (attend(keys).abs().add(1.).log() * 1e38 * 1e38).sum().backward(); });
  ASSERT_TRUE(behind);
  EXPECT_EQ(behind->op, "aten::mul.Scalar");
  EXPECT_TRUE(behind->inputs_were_finite);
}

TEST_P(NonFiniteOpOn, NamesWhatMadeNaNsOfARowThatIsMaskedAltogether) {
  const at::Tensor w = torch::randn({2, 4}, options()).requires_grad_();
  const at::Tensor given = torch::full({2, 4}, -kInf, options());
  const auto from_outside =
      first_non_finite_op([&] { torch::softmax(w + given, -1).sum().backward(); });
  ASSERT_TRUE(from_outside);
  EXPECT_EQ(from_outside->op, "aten::add.Tensor");
  EXPECT_FALSE(from_outside->inputs_were_finite);
  EXPECT_THAT(from_outside->inputs, ::testing::Contains("Float [2, 4] with 8 inf, 0 NaN"));
  const auto made = first_non_finite_op([&] {
    const at::Tensor mask = torch::full({2, 4}, -kInf, options());
    torch::softmax(w + mask, -1).sum().backward();
  });
  ASSERT_TRUE(made);
  EXPECT_THAT(made->op, HasSubstr("softmax"));
  EXPECT_TRUE(made->inputs_were_finite);
  EXPECT_EQ(made->nans, 8);
}

TEST_P(NonFiniteOpOn, DoesNotBlameDataThatTheProgramMakesFinite) {
  const at::Tensor data = torch::tensor({1.F, std::numeric_limits<float>::quiet_NaN()});
  const at::Tensor x = data.to(GetParam());
  const at::Tensor w = torch::ones({2}, options()).requires_grad_();
  EXPECT_FALSE(first_non_finite_op([&] { (torch::nan_to_num(x) * w).sum().backward(); }));
  const auto found = first_non_finite_op([&] {
    const at::Tensor y = x * w;
    y.nan_to_num().sum().backward();
  });
  ASSERT_TRUE(found) << "the gradient of w is 0 times NaN";
  EXPECT_EQ(found->op, "aten::mul.Tensor");
  EXPECT_FALSE(found->inputs_were_finite);
}

TEST(NonFiniteOp, PassesOverTheMaskThatAttentionMakesOfBools) {
  const at::Tensor allowed = torch::ones({4, 4}, at::kBool).tril();
  const at::Tensor q = torch::randn({1, 2, 4, 8}).requires_grad_();
  const at::Tensor k = torch::randn({1, 2, 4, 8}).requires_grad_();
  const auto attend = [&](double scale) {
    return at::scaled_dot_product_attention(q, k, k * scale, allowed).sum();
  };
  EXPECT_FALSE(first_non_finite_op([&] { attend(1.).backward(); }));
  const auto found = first_non_finite_op([&] { (attend(1.) * 0.).log().backward(); });
  ASSERT_TRUE(found);
  EXPECT_EQ(found->op, "aten::log");
}

TEST(NonFiniteOp, RefusesAnEmptyFunction) {
  EXPECT_ERROR(first_non_finite_op(nullptr), "first_non_finite_op: the function is empty");
}

TEST_P(NonFiniteOpOn, FindsNothingIfAllIsFinite) {
  const at::Tensor w = torch::ones({2}, options().requires_grad(true));
  EXPECT_FALSE(first_non_finite_op([&] { (w * w).sum().backward(); }));
  EXPECT_TRUE(w.grad().defined());
}

TEST(NonFiniteOp, LetsErrorsThroughAndWorksAfterThem) {
  EXPECT_ERROR(first_non_finite_op([] {
                 torch::ones({1}).log();
                 torch::ones({2}).add(torch::ones({3}));
               }),
               "must match");
  EXPECT_TRUE(first_non_finite_op([] { torch::zeros({1}).log(); }));
}

TEST(NonFiniteOp, SearchesOneAfterAnotherInSeveralThreads) {
  std::vector<std::thread> threads;
  std::vector<std::string> ops(4);
  for (std::size_t i = 0; i < ops.size(); ++i) {
    threads.emplace_back([&, i] {
      for (int n = 0; n < 20; ++n) {
        const auto found = first_non_finite_op(
            [&] { i % 2 ? torch::zeros({1}).log() : torch::zeros({1}).reciprocal(); });
        ops[i] = found ? found->op : "";
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(ops, ElementsAre("aten::reciprocal", "aten::log", "aten::reciprocal", "aten::log"));
}

TEST(NonFiniteOp, SearchesWithinASearch) {
  std::optional<torchamp::NonFiniteOp> inner;
  const auto outer = first_non_finite_op([&] {
    torch::ones({1}).log();
    inner = first_non_finite_op([] { torch::zeros({1}).log(); });
    torch::ones({1}).log();
  });
  ASSERT_TRUE(inner && outer);
  EXPECT_EQ(inner->op, "aten::log");
  EXPECT_EQ(inner->ops_before, 1);
  EXPECT_GT(outer->ops_before, inner->ops_before);
}

INSTANTIATE_TEST_SUITE_P(Devices, NonFiniteOpOn, all_devices(), device_name);
