// SPDX-License-Identifier: BSD-3-Clause
// Products of 16-bit operands that a CPU computes in fp32: their values, in every form.
#include "torchamp/cpu_products.h"

#include <gtest/gtest.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "support/expect_error.h"
#include "support/memory_meter.h"
#include "support/warnings.h"
#include "torchamp/autocast.h"
#include "torchamp/master_weights.h"
#include "torchamp/recompute.h"

namespace {

using at::Tensor;
using torchamp::AutocastGuard;
using torchamp::CpuProducts;
using Tensors = std::vector<Tensor>;

/// Has products computed as given until the end of the scope.
class Products {
 public:
  explicit Products(CpuProducts products) {
    torchamp::set_cpu_products(products);
    for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16}) {
      const AutocastGuard decides(at::kCPU, dtype);
    }
  }
  Products(const Products&) = delete;
  Products& operator=(const Products&) = delete;
  ~Products() { torchamp::set_cpu_products(CpuProducts::fastest); }
};

/// The unit roundoff of a 16-bit format.
double roundoff(at::ScalarType dtype) {
  return dtype == at::kHalf ? std::ldexp(1., -11) : std::ldexp(1., -8);
}

/// Expects a tensor to equal a result in fp64, within `roundings` of the tensor's format. Sums in
/// fp32 lose up to a millionth of the largest element.
void expect_close(const Tensor& is, const Tensor& exact, double roundings,
                  const std::string& what) {
  ASSERT_EQ(is.sizes(), exact.sizes()) << what;
  if (is.numel() == 0) return;
  const Tensor wide = exact.to(at::kDouble);
  const Tensor limit =
      wide.abs() * (roundings * roundoff(is.scalar_type())) + wide.abs().max() * 4e-6 + 1e-7;
  const Tensor excess = (is.to(at::kDouble) - wide).abs() - limit;
  EXPECT_LE(excess.max().item<double>(), 0.) << what;
}

/// A product of some operands.
struct Form {
  std::string name;
  std::function<Tensor(const Tensors&)> compute;
  std::vector<std::vector<int64_t>> shapes;
};

Form conv(const std::string& name, std::vector<int64_t> input, std::vector<int64_t> weight,
          bool transposed, int64_t groups, int64_t stride = 1) {
  const auto dims = input.size() - 2;
  const int64_t channels = transposed ? weight[1] * groups : weight[0];
  return {name,
          [=](const Tensors& of) {
            const std::vector<int64_t> strides(dims, stride), ones(dims, 1), zeros(dims, 0);
            return at::convolution(of[0], of[1], of[2], strides, ones, ones, transposed, zeros,
                                   groups);
          },
          {std::move(input), std::move(weight), {channels}}};
}

std::vector<Form> forms() {
  const auto mm = [](const Tensors& of) { return at::mm(of[0], of[1]); };
  return {
      {"mm", mm, {{5, 7}, {7, 6}}},
      {"mm of transposed operands",
       [](const Tensors& of) { return at::mm(of[0].t(), of[1].t()); },
       {{7, 5}, {6, 7}}},
      {"mm of slices",
       [](const Tensors& of) { return at::mm(of[0].slice(1, 0, 14, 2), of[1].slice(0, 3, 10)); },
       {{5, 14}, {12, 6}}},
      {"mm of repeated rows",
       [](const Tensors& of) {
         return at::mm(of[0].expand({5, 7}), of[1]);
       },
       {{1, 7}, {7, 6}}},
      {"mm of a row", mm, {{1, 7}, {7, 6}}},
      {"mm of a column", mm, {{5, 7}, {7, 1}}},
      {"mm without elements", mm, {{5, 0}, {0, 6}}},
      {"mm without rows", mm, {{0, 7}, {7, 6}}},
      {"addmm",
       [](const Tensors& of) { return at::addmm(of[2], of[0], of[1], 0.5, 2); },
       {{5, 7}, {7, 6}, {6}}},
      {"addmm_",
       [](const Tensors& of) { return of[2].clone().addmm_(of[0], of[1]); },
       {{5, 7}, {7, 6}, {5, 6}}},
      {"_addmm_activation",
       [](const Tensors& of) { return at::_addmm_activation(of[2], of[0], of[1]).detach(); },
       {{5, 7}, {7, 6}, {6}}},
      {"bmm", [](const Tensors& of) { return at::bmm(of[0], of[1]); }, {{3, 5, 7}, {3, 7, 6}}},
      {"bmm of a repeated matrix",
       [](const Tensors& of) {
         return at::bmm(of[0], of[1].expand({3, 7, 6}));
       },
       {{3, 5, 7}, {7, 6}}},
      {"matmul",
       [](const Tensors& of) { return at::matmul(of[0], of[1]); },
       {{2, 3, 5, 7}, {7, 6}}},
      {"baddbmm",
       [](const Tensors& of) { return at::baddbmm(of[2], of[0], of[1], 3, 0.5); },
       {{3, 5, 7}, {3, 7, 6}, {3, 5, 6}}},
      {"baddbmm_",
       [](const Tensors& of) { return of[2].clone().baddbmm_(of[0], of[1]); },
       {{3, 5, 7}, {3, 7, 6}, {3, 5, 6}}},
      {"addbmm",
       [](const Tensors& of) { return at::addbmm(of[2], of[0], of[1]); },
       {{3, 5, 7}, {3, 7, 6}, {5, 6}}},
      {"addbmm_",
       [](const Tensors& of) { return of[2].clone().addbmm_(of[0], of[1]); },
       {{3, 5, 7}, {3, 7, 6}, {5, 6}}},
      {"linear",
       [](const Tensors& of) { return at::linear(of[0], of[1], of[2]); },
       {{4, 7}, {6, 7}, {6}}},
      {"mv", [](const Tensors& of) { return at::mv(of[0], of[1]); }, {{5, 7}, {7}}},
      {"dot", [](const Tensors& of) { return at::dot(of[0], of[1]); }, {{7}, {7}}},
      conv("conv1d", {2, 4, 9}, {6, 4, 3}, false, 1),
      conv("conv2d", {2, 4, 9, 8}, {6, 4, 3, 3}, false, 1, 2),
      conv("conv2d of groups", {2, 4, 9, 8}, {6, 2, 3, 3}, false, 2),
      conv("conv2d of channels apart", {2, 4, 9, 8}, {4, 1, 3, 3}, false, 4),
      conv("conv3d", {1, 4, 5, 6, 4}, {6, 4, 3, 3, 3}, false, 1),
      conv("conv_transpose1d", {2, 4, 9}, {4, 6, 3}, true, 1, 2),
      conv("conv_transpose2d", {2, 4, 9, 8}, {4, 6, 3, 3}, true, 1, 2),
      conv("conv_transpose2d of groups", {2, 4, 9, 8}, {4, 3, 3, 3}, true, 2),
      conv("conv_transpose3d", {1, 4, 5, 6, 4}, {4, 6, 3, 3, 3}, true, 1),
      {"conv2d in channels_last",
       [](const Tensors& of) {
         return at::conv2d(of[0].contiguous(at::MemoryFormat::ChannelsLast), of[1], {}, 1, 1);
       },
       {{2, 4, 9, 8}, {6, 4, 3, 3}}},
      {"_convolution",
       [](const Tensors& of) {
         return at::_convolution(of[0], of[1], {}, {1, 1}, {1, 1}, {1, 1}, false, {0, 0}, 1, false,
                                 false, true, true)
             .detach();
       },
       {{2, 4, 9, 8}, {6, 4, 3, 3}}},
  };
}

class Values : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  Values() { torch::manual_seed(1); }

  /// Operands, rounded to the dtype.
  Tensors operands(const Form& form) const {
    Tensors made;
    for (const auto& shape : form.shapes) made.push_back(at::randn(shape).to(GetParam()));
    return made;
  }
};
INSTANTIATE_TEST_SUITE_P(Dtypes, Values, ::testing::Values(at::kBFloat16, at::kHalf),
                         [](const auto& dtype) { return std::string(c10::toString(dtype.param)); });

Tensors leaves(const Tensors& of, at::ScalarType dtype) {
  Tensors made;
  for (const Tensor& tensor : of) made.push_back(tensor.to(dtype, false, true).requires_grad_());
  return made;
}

/// The result, the gradients for a gradient of the result, and the gradients of the gradients' sum.
struct Derived {
  Tensor result;
  Tensors gradients, second;
};
Derived derived(const Form& form, const Tensors& of, at::ScalarType dtype, const Tensor& weights) {
  const Tensors inputs = leaves(of, dtype);
  Derived all{form.compute(inputs), {}, {}};
  if (!all.result.requires_grad()) return all;
  const Tensor weight = weights.to(dtype).requires_grad_();
  all.gradients = torch::autograd::grad({all.result}, inputs, {weight}, true, true, true);
  if (all.result.numel() == 0) return all;
  Tensor sum;
  for (const Tensor& gradient : all.gradients) {
    if (!gradient.defined()) continue;
    const Tensor part = (gradient * gradient.detach()).sum(at::kDouble);
    sum = sum.defined() ? sum + part : part;
  }
  Tensors all_inputs = inputs;
  all_inputs.push_back(weight);
  all.second = torch::autograd::grad({sum}, all_inputs, {}, true, false, true);
  return all;
}

TEST_P(Values, EqualTheProductsInFp64WithinOneRoundingForwardAndBackward) {
  const Products in_fp32(CpuProducts::fp32);
  for (const Form& form : forms()) {
    const Tensors of = operands(form);
    const Tensor weights = at::randn(form.compute(of).sizes()).to(GetParam());
    const Derived is = derived(form, of, GetParam(), weights);
    const Derived exact = derived(form, of, at::kDouble, weights);
    EXPECT_EQ(is.result.scalar_type(), GetParam()) << form.name;
    expect_close(is.result, exact.result, 1., form.name);
    for (std::size_t i = 0; i < is.gradients.size(); ++i) {
      EXPECT_EQ(is.gradients[i].scalar_type(), GetParam()) << form.name;
      // Autograd sums the gradients of repeated elements, which may nearly cancel out.
      if (form.name.find("repeated") != std::string::npos) continue;
      // alpha and beta scale a gradient after its product is rounded.
      const double roundings = form.name.find("add") != std::string::npos ? 2. : 1.;
      expect_close(is.gradients[i], exact.gradients[i], roundings, form.name + ", gradient");
    }
  }
}

TEST_P(Values, AgreeWithLibTorchsKernelsInAllDerivatives) {
  for (const Form& form : forms()) {
    const Tensors of = operands(form);
    const Tensor weights = at::randn(form.compute(of).sizes()).to(GetParam());
    std::optional<Derived> is, libtorchs;
    {
      const Products in_fp32(CpuProducts::fp32);
      is = derived(form, of, GetParam(), weights);
    }
    {
      const Products of_libtorch(CpuProducts::libtorch);
      libtorchs = derived(form, of, GetParam(), weights);
    }
    // A result, and what follows from it, is rounded more often by LibTorch, as in addbmm.
    const auto expect_agree = [&](const Tensor& some, const Tensor& others, const char* what) {
      ASSERT_EQ(some.defined(), others.defined()) << form.name << what;
      if (!some.defined() || some.numel() == 0) return;
      const double largest = others.to(at::kDouble).abs().max().item<double>();
      const double apart =
          (some.to(at::kDouble) - others.to(at::kDouble)).abs().max().item<double>();
      EXPECT_LE(apart, 8 * roundoff(GetParam()) * largest + 1e-6) << form.name << what;
    };
    expect_agree(is->result, libtorchs->result, ", result");
    for (std::size_t i = 0; i < is->gradients.size(); ++i) {
      expect_agree(is->gradients[i], libtorchs->gradients[i], ", gradient");
    }
    for (std::size_t i = 0; i < is->second.size(); ++i) {
      expect_agree(is->second[i], libtorchs->second[i], ", second derivative");
    }
  }
}

TEST_P(Values, OfAttentionsGradientAgreeWithFp32) {
  const Products in_fp32(CpuProducts::fp32);
  Tensors of;
  for (int i = 0; i < 3; ++i) of.push_back(at::randn({2, 2, 16, 8}).to(GetParam()));
  const auto gradients = [&](at::ScalarType dtype) {
    const Tensors inputs = leaves(of, dtype);
    const Tensor y = at::scaled_dot_product_attention(inputs[0], inputs[1], inputs[2]);
    return torch::autograd::grad({y}, inputs, {at::ones_like(y)});
  };
  const auto is = gradients(GetParam()), exact = gradients(at::kFloat);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(is[i].scalar_type(), GetParam());
    EXPECT_TRUE(at::allclose(is[i].to(at::kFloat), exact[i], 0.05, 0.05)) << i;
  }
}

TEST_P(Values, OfATransposedOperandKeepTheStridesThatLibTorchGives) {
  const Products in_fp32(CpuProducts::fp32);
  const Tensor image =
      at::randn({2, 4, 9, 8}).to(GetParam()).contiguous(at::MemoryFormat::ChannelsLast);
  const Tensor weight = at::randn({6, 4, 3, 3}).to(GetParam());
  EXPECT_TRUE(at::conv2d(image, weight).is_contiguous(at::MemoryFormat::ChannelsLast));
  const Tensor matrix = at::randn({5, 7}).to(GetParam());
  EXPECT_TRUE(at::mm(matrix, at::randn({6, 7}).to(GetParam()).t()).is_contiguous());
}

TEST_P(Values, AreWrittenToAnOutArgumentAsLibTorchDoes) {
  const Products in_fp32(CpuProducts::fp32);
  const Tensor left = at::randn({5, 7}).to(GetParam()), right = at::randn({7, 6}).to(GetParam());
  const Tensor bias = at::randn({6}).to(GetParam());
  const Tensor product = at::mm(left, right);
  Tensor column_major = at::empty({6, 5}, GetParam()).t();
  EXPECT_TRUE(at::mm_out(column_major, left, right).is_same(column_major));
  EXPECT_EQ(column_major.strides(), at::IntArrayRef({1, 5})) << "memory of the caller's";
  EXPECT_TRUE(at::equal(column_major, product));

  Tensor empty = at::empty({0}, GetParam());
  at::addmm_out(empty, bias, left, right);
  EXPECT_TRUE(at::equal(empty, at::addmm(bias, left, right)));

  Tensor small = at::empty({2}, GetParam());
  const CollectedWarnings warnings;
  at::mm_out(small, left, right);
  EXPECT_NE(warnings.text().find("resized"), std::string::npos) << warnings.text();
  EXPECT_TRUE(at::equal(small, product));

  Tensor wide = at::empty({5, 6});
  EXPECT_ANY_THROW(at::mm_out(wide, left, right)) << "an out argument in fp32";
  Tensor in_place = product.clone();
  EXPECT_TRUE(in_place.addmm_(left, right).is_same(in_place));
  Tensor repeated = bias.expand({5, 6});
  EXPECT_ANY_THROW(repeated.addmm_(left, right)) << "elements that share memory";
  const Tensor batch = at::randn({3, 5, 7}).to(GetParam()),
               others = at::randn({3, 7, 6}).to(GetParam());
  Tensor out = at::empty({0}, GetParam());
  EXPECT_TRUE(at::equal(at::bmm_out(out, batch, others), at::bmm(batch, others)));
}

TEST_P(Values, OfInfinityNanAndOverflowEqualAGpus) {
  const Products in_fp32(CpuProducts::fp32);
  const double infinity = std::numeric_limits<double>::infinity();
  const Tensor large = at::full({2, 2}, GetParam() == at::kHalf ? 6e4 : 3e38).to(GetParam());
  EXPECT_TRUE(at::mm(large, large).isinf().all().item<bool>());
  Tensor odd = at::ones({2, 2}, GetParam());
  odd[0][0] = infinity;
  odd[1][1] = std::numeric_limits<double>::quiet_NaN();
  const Tensor product = at::mm(odd, at::ones({2, 3}, GetParam()));
  EXPECT_TRUE(product[0].isinf().all().item<bool>());
  EXPECT_TRUE(product[1].isnan().all().item<bool>());
  // A sum may exceed fp16 on its way to a result that does not.
  const Tensor there_and_back = at::tensor(std::vector<double>{6e4, 6e4, -6e4, -6e4})
                                    .view({1, 4})
                                    .to(GetParam())
                                    .expand({2, 4});
  EXPECT_EQ(at::mm(there_and_back, at::ones({4, 2}, GetParam())).abs().max().item<double>(), 0.);
  // Not read if beta is 0.
  const Tensor nans = at::full({2, 3}, std::nan("")).to(GetParam());
  const Tensor ones = at::ones({2, 3}, GetParam());
  EXPECT_FALSE(at::addmm(nans, at::ones({2, 2}, GetParam()), ones, 0).isnan().any().item<bool>());
}

TEST_P(Values, InOtherAndInMixedDtypesStayLibTorchs) {
  std::vector<Tensors> of;
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kComplexFloat, at::kLong}) {
    of.push_back({at::randint(-9, 9, {5, 7}).to(dtype), at::randint(-9, 9, {7, 6}).to(dtype)});
  }
  Tensors before;
  for (const Tensors& operands : of) before.push_back(at::mm(operands[0], operands[1]));
  const Products in_fp32(CpuProducts::fp32);
  for (std::size_t i = 0; i < of.size(); ++i) {
    EXPECT_TRUE(at::equal(at::mm(of[i][0], of[i][1]), before[i])) << of[i][0].scalar_type();
  }
  const Tensor narrow = at::ones({5, 7}, GetParam()), wide = at::ones({7, 6});
  EXPECT_ERROR((void)at::mm(narrow, wide), "same dtype");
  EXPECT_ERROR((void)at::mm(narrow, narrow), "cannot be multiplied");
  EXPECT_ANY_THROW((void)at::conv2d(at::ones({1, 1, 4, 4}, GetParam()), at::ones({1, 1, 2, 2})));
}

TEST_P(Values, InScriptsAndInInferenceModeEqualEagerOnes) {
  const Products in_fp32(CpuProducts::fp32);
  const Tensor left = at::randn({5, 7}).to(GetParam()), right = at::randn({7, 6}).to(GetParam());
  const Tensor product = at::mm(left, right);
  const auto script = torch::jit::compile("def f(a, b):\n  return torch.mm(a, b)\n");
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(at::equal(script->run_method("f", left, right).toTensor(), product));
  }
  const c10::InferenceMode inference;
  EXPECT_TRUE(at::equal(at::mm(left, right), product));
  EXPECT_TRUE(at::equal(at::mm(left.clone(), right.clone()), product));
}

// ---- Whole models -------------------------------------------------------------------------------

TEST_P(Values, OfRecurrentLayersAgreeWithFp32ForwardAndBackward) {
  const Products in_fp32(CpuProducts::fp32);
  torch::nn::LSTM lstm(torch::nn::LSTMOptions(6, 5).num_layers(2).bidirectional(true));
  torch::nn::GRU gru(torch::nn::GRUOptions(6, 5));
  const auto run = [&](auto& layer, std::optional<at::ScalarType> dtype) {
    layer->zero_grad();
    torch::manual_seed(3);
    const Tensor input = at::randn({7, 2, 6}).requires_grad_();
    Tensor output;
    {
      const AutocastGuard guard(at::kCPU, {.dtype = GetParam(), .enabled = dtype.has_value()});
      output = std::get<0>(layer->forward(input));
    }
    output.to(at::kFloat).square().sum().backward();
    Tensors all{output.detach(), input.grad()};
    for (const Tensor& parameter : layer->parameters()) all.push_back(parameter.grad().clone());
    return all;
  };
  const auto expect_near = [](const Tensors& some, const Tensors& others) {
    for (std::size_t i = 0; i < some.size(); ++i) {
      EXPECT_TRUE(at::allclose(some[i].to(at::kFloat), others[i], 0.05, 0.05)) << i;
    }
  };
  EXPECT_EQ(run(lstm, GetParam())[0].scalar_type(), GetParam());
  expect_near(run(lstm, GetParam()), run(lstm, {}));
  expect_near(run(gru, GetParam()), run(gru, {}));
}

TEST_P(Values, OfRecomputedLayersGiveTheGradientsOfStoredOnes) {
  const Products in_fp32(CpuProducts::fp32);
  using namespace torch::nn;
  Sequential net(Linear(6, 8), ReLU(), Linear(8, 8), Tanh(), Unflatten(UnflattenOptions(1, {2, 4})),
                 Conv1d(Conv1dOptions(2, 3, 3)));
  const Tensor input = at::randn({5, 6});
  const auto gradients = [&](bool is_recomputed) {
    net->zero_grad();
    const Tensor x = input.clone().requires_grad_();
    Tensor output;
    {
      const AutocastGuard guard(at::kCPU, GetParam());
      output = is_recomputed ? torchamp::checkpoint_sequential(net, x) : net->forward(x);
    }
    output.to(at::kFloat).square().sum().backward();
    Tensors all{output.detach(), x.grad()};
    for (const Tensor& parameter : net->parameters()) all.push_back(parameter.grad().clone());
    return all;
  };
  const Tensors stored = gradients(false), recomputed = gradients(true);
  EXPECT_EQ(recomputed[0].scalar_type(), GetParam());
  for (std::size_t i = 0; i < stored.size(); ++i) {
    EXPECT_TRUE(at::equal(recomputed[i], stored[i])) << i;
  }
}

TEST_P(Values, OfAModelIn16BitsNeedNoGuard) {
  const auto model = std::make_shared<torch::nn::SequentialImpl>(torch::nn::Linear(7, 6));
  torchamp::set_cpu_products(CpuProducts::fp32);
  const torchamp::MasterWeights masters(model, {.dtype = GetParam()});
  const Tensor left = at::randn({3, 5, 7}).to(GetParam()),
               right = at::randn({3, 7, 6}).to(GetParam());
  const Tensor bias = at::randn({5, 6}).to(GetParam());
  const Tensor exact =
      at::addbmm(bias.to(at::kDouble), left.to(at::kDouble), right.to(at::kDouble));
  // LibTorch's addbmm rounds after each matrix.
  expect_close(at::addbmm(bias, left, right), exact, 1., "addbmm");
  torchamp::set_cpu_products(CpuProducts::fastest);
}

TEST_P(Values, OfAStackLeaveHalfOfTheMemoryToBackward) {
  const Products in_fp32(CpuProducts::fp32);
  torch::nn::Sequential net;
  for (int i = 0; i < 6; ++i) {
    net->push_back(torch::nn::Linear(64, 64));
    net->push_back(torch::nn::ReLU());
  }
  const Tensor input = at::randn({2048, 64});
  const auto kept = [&](bool enabled) {
    const MemoryMeter meter;
    Tensor loss;
    {
      const AutocastGuard guard(at::kCPU, {.dtype = GetParam(), .enabled = enabled});
      loss = net->forward(input).sum();
    }
    const std::int64_t bytes = meter.bytes();
    loss.backward();
    return bytes;
  };
  (void)kept(true);  // what is allocated once
  EXPECT_LE(static_cast<double>(kept(true)), 0.6 * static_cast<double>(kept(false)));
}

}  // namespace
