// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/script.h>
#include <torch/torch.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

/// A script's parameters and buffers by name, and what C++ computes with them, eagerly: the ops
/// that the modules of script_benchmark.py call.
class ScriptTwin {
 public:
  explicit ScriptTwin(const torch::jit::Module& script, bool trains) : trains_(trains) {
    for (const auto& item : script.named_parameters()) tensors_[item.name] = item.value;
    for (const auto& item : script.named_buffers()) tensors_[item.name] = item.value;
  }

  /// Tokens and segments [batch, length] to logits [batch, length, 2].
  at::Tensor bert(const at::Tensor& tokens, const at::Tensor& segments) const {
    const at::Tensor places = torch::arange(tokens.size(1), tokens.options());
    at::Tensor x = torch::embedding(at("words.weight"), tokens) +
                   torch::embedding(at("positions.weight"), places) +
                   torch::embedding(at("segments.weight"), segments);
    x = layer_norm("norm", x);
    for (const char* layer : {"layers.0.", "layers.1."}) x = bert_layer(layer, x);
    return linear("head", x);
  }

  /// Images [batch, 3, side, side] to logits [batch, 10].
  at::Tensor resnet(const at::Tensor& images) const {
    at::Tensor x = torch::relu(batch_norm("norm", conv("stem", images, 1)));
    for (int i = 0; i < 4; ++i) {
      const std::string block = "blocks." + std::to_string(i) + ".";
      const std::int64_t stride = i == 0 ? 1 : 2;
      at::Tensor y = batch_norm(block + "norm1", conv(block + "conv1", x, stride));
      y = batch_norm(block + "norm2", conv(block + "conv2", torch::relu(y), 1));
      const at::Tensor shortcut =
          i == 0 ? x : batch_norm(block + "shortcut.1", conv(block + "shortcut.0", x, stride));
      x = torch::relu(y + shortcut);
    }
    return linear("head", x.mean({2, 3}));
  }

  /// The script that C++ compiles by itself.
  at::Tensor small(const at::Tensor& images) const {
    return linear("head", torch::relu(conv("stem", images, 1)).mean({2, 3}));
  }

 private:
  const at::Tensor& at(const std::string& name) const { return tensors_.at(name); }

  at::Tensor linear(const std::string& name, const at::Tensor& x) const {
    return torch::linear(x, at(name + ".weight"), at(name + ".bias"));
  }
  at::Tensor layer_norm(const std::string& name, const at::Tensor& x) const {
    return torch::layer_norm(x, {x.size(-1)}, at(name + ".weight"), at(name + ".bias"), 1e-12);
  }
  at::Tensor conv(const std::string& name, const at::Tensor& x, std::int64_t stride) const {
    const at::Tensor& weight = at(name + ".weight");
    return torch::conv2d(x, weight, {}, stride, weight.size(2) / 2);
  }
  at::Tensor batch_norm(const std::string& name, const at::Tensor& x) const {
    return torch::batch_norm(x, at(name + ".weight"), at(name + ".bias"),
                             at(name + ".running_mean"), at(name + ".running_var"), trains_, 0.1,
                             1e-5, true);
  }
  at::Tensor bert_layer(const std::string& name, const at::Tensor& x) const {
    const auto split = [](const at::Tensor& t) {  // [batch, heads, length, width / heads]
      return t.view({t.size(0), t.size(1), 2, -1}).transpose(1, 2);
    };
    const at::Tensor attended = torch::scaled_dot_product_attention(
        split(linear(name + "query", x)), split(linear(name + "key", x)),
        split(linear(name + "value", x)));
    const at::Tensor joined = attended.transpose(1, 2).reshape(x.sizes());
    const at::Tensor y = layer_norm(name + "norm1", x + linear(name + "output", joined));
    return layer_norm(name + "norm2",
                      y + linear(name + "down", torch::gelu(linear(name + "up", y))));
  }

  std::map<std::string, at::Tensor> tensors_;
  bool trains_;
};
