// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/torch.h>
#include <torchamp/recompute.h>

#include <cmath>
#include <cstdint>
#include <vector>

/// The sizes of a Gpt.
struct GptSizes {
  std::int64_t layers = 4, width = 256, heads = 4;
  std::int64_t length = 128;  ///< how many letters it looks back
  std::int64_t letters = 256;
};

/// What Python's nn.Linear does, in one op: C++'s forward() adds the bias in a pass of its own.
inline torch::Tensor project(const torch::nn::Linear& layer, const torch::Tensor& x) {
  return torch::linear(x, layer->weight, layer->bias);
}

/// The keys and values of the letters so far, [batch, heads, letters, width / heads]; undefined
/// where there are none.
struct GptCache {
  torch::Tensor keys, values;
};

/// Attention to what came before, then two linear layers, each added to what came in.
struct GptBlockImpl : torch::nn::Module {
  explicit GptBlockImpl(const GptSizes& sizes) : heads(sizes.heads) {
    using namespace torch::nn;
    norm1 = register_module("norm1", LayerNorm(LayerNormOptions({sizes.width})));
    attention = register_module("attention", Linear(sizes.width, 3 * sizes.width));
    output = register_module("output", Linear(sizes.width, sizes.width));
    norm2 = register_module("norm2", LayerNorm(LayerNormOptions({sizes.width})));
    up = register_module("up", Linear(sizes.width, 4 * sizes.width));
    down = register_module("down", Linear(4 * sizes.width, sizes.width));
  }

  /// x [batch, length, width]
  torch::Tensor forward(const torch::Tensor& x) {
    GptCache none;
    return forward_after(x, none);
  }

  /// The same for letters that follow those of `cache`, to which they are added. One letter, unless
  /// `cache` is empty.
  torch::Tensor forward_after(const torch::Tensor& x, GptCache& cache) {
    const auto split = [&](const torch::Tensor& t) {  // [batch, heads, length, width / heads]
      return t.view({t.size(0), t.size(1), heads, -1}).transpose(1, 2);
    };
    const auto parts = project(attention, norm1->forward(x)).chunk(3, -1);
    const bool is_first = !cache.keys.defined();
    TORCH_CHECK_VALUE(is_first || x.size(1) == 1, "GptBlock: ", x.size(1),
                      " letters after others. Pass one at a time.");
    const auto join = [&](const torch::Tensor& before, const torch::Tensor& now) {
      return is_first ? split(now) : torch::cat({before, split(now)}, 2);
    };
    cache = {join(cache.keys, parts[1]), join(cache.values, parts[2])};
    const auto attended = torch::scaled_dot_product_attention(
        split(parts[0]), cache.keys, cache.values, {}, 0., /*is_causal=*/is_first);
    const auto y = x + project(output, attended.transpose(1, 2).reshape(x.sizes()));
    return y + project(down, torch::gelu(project(up, norm2->forward(y))));
  }

  std::int64_t heads;
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  torch::nn::Linear attention{nullptr}, output{nullptr}, up{nullptr}, down{nullptr};
};
TORCH_MODULE(GptBlock);

/// A transformer that tells, for each letter of a text, which one may come next.
struct GptImpl : torch::nn::Module {
  explicit GptImpl(const GptSizes& gpt_sizes) : sizes(gpt_sizes) {
    using namespace torch::nn;
    words = register_module("words", Embedding(sizes.letters, sizes.width));
    positions = register_module("positions", Embedding(sizes.length, sizes.width));
    for (std::int64_t i = 0; i < sizes.layers; ++i) blocks->push_back(GptBlock(sizes));
    register_module("blocks", blocks);
    norm = register_module("norm", LayerNorm(LayerNormOptions({sizes.width})));
    head = register_module("head", Linear(LinearOptions(sizes.width, sizes.letters).bias(false)));
    reset_parameters();
  }

  /// Start weights as GPT-2's: small, and smaller where layers are added up.
  void reset_parameters() {
    const torch::NoGradGuard no_grad;
    for (auto& item : named_parameters()) {
      if (item.value().dim() < 2) continue;  // norms and biases
      const bool added_up =
          item.key().ends_with("output.weight") || item.key().ends_with("down.weight");
      item.value().normal_(
          0., added_up ? 0.02 / std::sqrt(2. * static_cast<double>(sizes.layers)) : 0.02);
    }
  }

  /// Letters [batch, length]; returns the logits of the next ones [batch, length, letters].
  torch::Tensor forward(const torch::Tensor& text) {
    const auto places = torch::arange(text.size(1), text.options());
    auto x = words->forward(text) + positions->forward(places);
    x = recomputes ? torchamp::checkpoint_sequential(blocks, x) : blocks->forward(x);
    return project(head, norm->forward(x));
  }

  /// The same for letters that follow those of `caches`, one for each block, to which they are
  /// added; at first empty. One letter, unless they are empty. For inference: nothing is
  /// recomputed.
  torch::Tensor forward_after(const torch::Tensor& text, std::vector<GptCache>& caches) {
    caches.resize(blocks->size());
    const std::int64_t before = caches.front().keys.defined() ? caches.front().keys.size(2) : 0;
    const auto places = torch::arange(before, before + text.size(1), text.options());
    auto x = words->forward(text) + positions->forward(places);
    for (std::size_t i = 0; i < caches.size(); ++i) {
      x = blocks->ptr<GptBlockImpl>(i)->forward_after(x, caches[i]);
    }
    return project(head, norm->forward(x));
  }

  GptSizes sizes;
  bool recomputes = false;  ///< backward computes most activations again: slower, in less memory
  torch::nn::Embedding words{nullptr}, positions{nullptr};
  torch::nn::Sequential blocks;
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Gpt);

/// The mean cross entropy of each next letter; `text` is [batch, length + 1].
inline torch::Tensor loss_of(GptImpl& model, const torch::Tensor& text) {
  const std::int64_t length = text.size(1) - 1;
  const torch::Tensor logits = model.forward(text.narrow(1, 0, length));
  return torch::nn::functional::cross_entropy(logits.flatten(0, 1),
                                              text.narrow(1, 1, length).flatten());
}
