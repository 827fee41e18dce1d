// SPDX-License-Identifier: BSD-3-Clause
#include <torchamp/split_for_muon.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/master_weights.h>

#include <algorithm>
#include <string>
#include <vector>

#include "support/expect_error.h"

namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using torchamp::split_for_muon;

/// A language model, with what such models have; `ties` shares the embedding with the head.
struct LanguageModelImpl : torch::nn::Module {
  explicit LanguageModelImpl(bool ties = false) {
    words = register_module("words", torch::nn::Embedding(10, 4));
    conv = register_module("conv", torch::nn::Conv1d(4, 4, 3));
    layers = register_module("layers", torch::nn::Sequential());
    layers->push_back("first", torch::nn::Linear(4, 8));
    layers->push_back("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})));
    layers->push_back("second", torch::nn::Linear(8, 4));
    head = register_module("head", torch::nn::Linear(4, 10));
    if (ties) head->weight = head->register_parameter("tied", words->weight);
  }
  torch::nn::Embedding words{nullptr};
  torch::nn::Conv1d conv{nullptr};
  torch::nn::Sequential layers{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(LanguageModel);

/// The names of `tensors` in `named`.
template <class Named>
std::vector<std::string> names_of(const std::vector<at::Tensor>& tensors, const Named& named) {
  std::vector<std::string> names;
  for (const at::Tensor& tensor : tensors) {
    const auto found = std::find_if(named.begin(), named.end(),
                                    [&](const auto& item) { return item.second.is_same(tensor); });
    names.push_back(found == named.end() ? "?" : found->first);
  }
  return names;
}
std::vector<std::string> names_of(const std::vector<at::Tensor>& tensors,
                                  const LanguageModel& net) {
  return names_of(tensors, net->named_parameters().pairs());
}

TEST(SplitForMuon, GivesEmbeddingsTheHeadNormsAndBiasesToTheOther) {
  const LanguageModel net;
  const auto split = split_for_muon(net);
  EXPECT_THAT(names_of(split.matrices, net),
              ElementsAre("conv.weight", "layers.first.weight", "layers.second.weight"));
  EXPECT_THAT(names_of(split.others, net),
              ElementsAre("words.weight", "conv.bias", "layers.first.bias", "layers.norm.weight",
                          "layers.norm.bias", "layers.second.bias", "head.weight", "head.bias"));
}

TEST(SplitForMuon, TakesTheNamesOfHeadsInsteadOfTheLastMatrix) {
  const LanguageModel net;
  const auto of_two = split_for_muon(net, {.heads = {"layers.first", "conv.weight"}});
  EXPECT_THAT(names_of(of_two.matrices, net), ElementsAre("layers.second.weight", "head.weight"));
  const auto of_none = split_for_muon(net, {.tied_head = true});
  EXPECT_EQ(of_none.matrices.size(), 4U);
}

TEST(SplitForMuon, GivesAParameterThatAnEmbeddingSharesWithTheHeadOnceAndToTheOther) {
  const LanguageModel net(/*ties=*/true);
  const auto split = split_for_muon(net);
  EXPECT_THAT(names_of(split.matrices, net), ElementsAre("conv.weight", "layers.first.weight",
                                                         "layers.second.weight", "head.weight"));
  EXPECT_EQ(std::count_if(split.others.begin(), split.others.end(),
                          [&](const auto& tensor) { return tensor.is_same(net->words->weight); }),
            1);
}

TEST(SplitForMuon, TakesTheMastersInPlaceOfTheParameters) {
  const LanguageModel net;
  const torchamp::MasterWeights masters(net, {.dtype = at::kBFloat16});
  const auto named = masters.named_parameters();
  const auto split = split_for_muon(net, {.parameters = named});
  EXPECT_THAT(names_of(split.matrices, named),
              ElementsAre("conv.weight", "layers.first.weight", "layers.second.weight"));
  EXPECT_EQ(split.matrices.size() + split.others.size(), named.size());
  for (const at::Tensor& matrix : split.matrices) EXPECT_EQ(matrix.scalar_type(), at::kFloat);
}

TEST(SplitForMuon, TakesAModuleOnTheStackAndOneThatIsAnEmbedding) {
  LanguageModelImpl net;
  EXPECT_EQ(split_for_muon(net).matrices.size(), 3U);
  const torch::nn::EmbeddingBag bag(3, 2);
  EXPECT_THAT(split_for_muon(bag).matrices, IsEmpty());
  EXPECT_EQ(split_for_muon(bag).others.size(), 1U);
}

TEST(SplitForMuon, RefusesNamesThatTheModelLacks) {
  const LanguageModel net;
  EXPECT_ERROR((void)split_for_muon(net, {.heads = {"haed"}}),
               "split_for_muon: the model has no module or parameter 'haed'");
  EXPECT_ERROR((void)split_for_muon(net, {.parameters = {{{"w", at::Tensor()}}}}),
               "split_for_muon: the model has no parameter 'w'");
}

}  // namespace
