// SPDX-License-Identifier: BSD-3-Clause
// cuDNN's recurrent layers and the fused cells. Without dropout between layers.
#include <torch/csrc/autograd/autograd.h>

#include "op.h"

namespace mirror {

using at::Tensor;

namespace {

enum Mode { relu = 0, tanh = 1, lstm = 2, gru = 3 };  // cuDNN's numbers

/// A call of _cudnn_rnn or of its backward, whose arguments have the same names.
struct Layers {
  Tensor input, hx, cx;
  std::vector<Tensor> weights;
  std::vector<std::vector<int64_t>> given_sizes;  ///< of the weights
  std::vector<int64_t> batch_sizes;
  int64_t mode, layers;
  bool has_bias, batch_first, train, bidirectional;

  explicit Layers(const Arguments& a)
      : input(a.in_fp32("input")),
        hx(a.in_fp32("hx")),
        cx(a.in_fp32("cx")),
        weights(a.tensors("weight")),
        batch_sizes(a.ints("batch_sizes")),
        mode(a.integer("mode")),
        layers(a.integer("num_layers")),
        has_bias(a.integer("weight_stride0") >= 4),
        batch_first(a.flag("batch_first")),
        train(a.flag("train")),
        bidirectional(a.flag("bidirectional")) {
    TORCH_CHECK(!train || a.number("dropout") == 0 || layers == 1,
                "dropout between recurrent layers is not mirrored");
    for (Tensor& weight : weights) {
      if (is_narrow(weight.scalar_type())) weight = weight.to(at::kFloat);
    }
    // The weights that autocast casts are columns of cuDNN's buffer.
    const int64_t of_gates[] = {1, 1, 4, 3};
    const int64_t rows = of_gates[mode] * a.integer("hidden_size");
    const auto in_a_layer = static_cast<std::size_t>(a.integer("weight_stride0"));
    for (std::size_t i = 0; i < weights.size(); ++i) {
      given_sizes.push_back(weights[i].sizes().vec());
      const std::size_t place = i % in_a_layer;
      if (place < 4) weights[i] = weights[i].reshape({rows, -1});
      if (place == 2 || place == 3) weights[i] = weights[i].squeeze(1);
    }
  }

  /// The sequence and the last states.
  std::vector<Tensor> run() const {
    std::vector<Tensor> states{hx};
    if (cx.defined()) states.push_back(cx);
    if (batch_sizes.empty()) {
      return call(
          [&](auto op, const auto& state) {
            return op(input, state, weights, has_bias, layers, 0., train, bidirectional,
                      batch_first);
          },
          states);
    }
    const Tensor sizes = at::tensor(batch_sizes, at::kLong);
    return call(
        [&](auto op, const auto& state) {
          return op(input, sizes, state, weights, has_bias, layers, 0., train, bidirectional);
        },
        states);
  }

 private:
  template <class Run>
  std::vector<Tensor> call(const Run& run, const std::vector<Tensor>& states) const {
    const auto list = [](const auto& results) {
      return std::apply([](const auto&... t) { return std::vector<Tensor>{t...}; }, results);
    };
    const auto one = [&](auto op) { return list(run(op, states[0])); };
    switch (mode) {
      case lstm:
        return list(run([](const auto&... a) { return at::lstm(a...); }, at::TensorList(states)));
      case gru:
        return one([](const auto&... a) { return at::gru(a...); });
      case tanh:
        return one([](const auto&... a) { return at::rnn_tanh(a...); });
      default:
        return one([](const auto&... a) { return at::rnn_relu(a...); });
    }
  }
};

Results forward(const Arguments& a) {
  const std::vector<Tensor> results = Layers(a).run();
  return {results[0], results[1], results.size() > 2 ? results[2] : Tensor(), Tensor(), Tensor()};
}

Results backward(const Arguments& a) {
  const PlainCalls with_grad(true);
  Layers layers(a);
  std::vector<Tensor> leaves;
  const auto make_leaf = [&](Tensor& tensor) {
    tensor = tensor.detach().clone().requires_grad_();
    leaves.push_back(tensor);
  };
  layers.train = true;
  make_leaf(layers.input);
  make_leaf(layers.hx);
  if (layers.cx.defined()) make_leaf(layers.cx);
  const std::size_t first_weight = leaves.size();
  for (Tensor& weight : layers.weights) make_leaf(weight);

  const std::vector<Tensor> results = layers.run();
  std::vector<Tensor> outputs, gradients;
  const char* const names[] = {"grad_output", "grad_hy", "grad_cy"};
  for (std::size_t i = 0; i < results.size(); ++i) {
    const Tensor gradient = a.in_fp32(names[i]);
    if (!gradient.defined()) continue;
    outputs.push_back(results[i]);
    gradients.push_back(gradient);
  }
  std::vector<Tensor> of_leaves = torch::autograd::grad(
      outputs, leaves, gradients, /*retain_graph=*/std::nullopt, false, /*allow_unused=*/true);
  for (std::size_t i = 0; i < of_leaves.size(); ++i)
    of_leaves[i] =
        of_leaves[i].defined() ? of_leaves[i].detach() : at::zeros_like(leaves[i]).detach();
  std::vector<Tensor> of_weights;
  for (std::size_t i = 0; i < layers.weights.size(); ++i)
    of_weights.push_back(of_leaves[first_weight + i].reshape(layers.given_sizes[i]));
  return {of_leaves[0], of_leaves[1], first_weight > 2 ? of_leaves[2] : Tensor(),
          c10::List<Tensor>(of_weights)};
}

Tensor plus(const Tensor& a, const Tensor& b) {
  return b.defined() ? a + b : a;
}
Tensor or_zeros(const Tensor& tensor, const Tensor& like) {
  return tensor.defined() ? tensor : at::zeros_like(like);
}

/// The workspace is the gates after their functions, for the backward below.
Results lstm_cell(const Arguments& a) {
  const Tensor all =
      plus(plus(a.in_fp32("input_gates") + a.in_fp32("hidden_gates"), a.in_fp32("input_bias")),
           a.in_fp32("hidden_bias"));
  const std::vector<Tensor> g = all.chunk(4, 1);
  const Tensor in = g[0].sigmoid(), forget = g[1].sigmoid(), cell = g[2].tanh(),
               out = g[3].sigmoid();
  const Tensor cy = forget * a.in_fp32("cx") + in * cell;
  return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};
}

Results lstm_cell_backward(const Arguments& a) {
  const Tensor cx = a.in_fp32("cx"), tanh_of_cell = a.in_fp32("cy").tanh();
  const std::vector<Tensor> gates = a.in_fp32("workspace").chunk(4, 1);
  const Tensor in = gates[0], forget = gates[1], cell = gates[2], out = gates[3];
  const Tensor of_hy = or_zeros(a.in_fp32("grad_hy"), cx);
  const Tensor of_cy =
      or_zeros(a.in_fp32("grad_cy"), cx) + of_hy * out * (1 - tanh_of_cell * tanh_of_cell);
  const Tensor of_gates =
      at::cat({of_cy * cell * in * (1 - in), of_cy * cx * forget * (1 - forget),
               of_cy * in * (1 - cell * cell), of_hy * tanh_of_cell * out * (1 - out)},
              1);
  return {of_gates, of_cy * forget, a.flag("has_bias") ? of_gates.sum(0) : Tensor()};
}

Results gru_cell(const Arguments& a) {
  const std::vector<Tensor> x = plus(a.in_fp32("input_gates"), a.in_fp32("input_bias")).chunk(3, 1);
  const std::vector<Tensor> h =
      plus(a.in_fp32("hidden_gates"), a.in_fp32("hidden_bias")).chunk(3, 1);
  const Tensor hx = a.in_fp32("hx");
  const Tensor reset = (x[0] + h[0]).sigmoid(), update = (x[1] + h[1]).sigmoid(),
               fresh = (x[2] + reset * h[2]).tanh();
  return {fresh + update * (hx - fresh), at::cat({reset, update, fresh, hx, h[2]}, 1)};
}

Results gru_cell_backward(const Arguments& a) {
  const Tensor grad = a.in_fp32("grad_hy");
  const std::vector<Tensor> w = a.in_fp32("workspace").chunk(5, 1);
  const Tensor reset = w[0], update = w[1], fresh = w[2], hx = w[3], hidden = w[4];
  const Tensor of_update = grad * (hx - fresh) * update * (1 - update);
  const Tensor of_fresh = grad * (1 - update) * (1 - fresh * fresh);
  const Tensor of_reset = of_fresh * hidden * reset * (1 - reset);
  const Tensor of_x = at::cat({of_reset, of_update, of_fresh}, 1);
  const Tensor of_h = at::cat({of_reset, of_update, of_fresh * reset}, 1);
  const bool biased = a.flag("has_bias");
  return {of_x, of_h, grad * update, biased ? of_x.sum(0) : Tensor(),
          biased ? of_h.sum(0) : Tensor()};
}

}  // namespace

Substitutes recurrent_layers() {
  return {{"_cudnn_rnn", forward},
          {"_cudnn_rnn_backward", backward},
          {"_thnn_fused_lstm_cell", lstm_cell},
          {"_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward},
          {"_thnn_fused_gru_cell", gru_cell},
          {"_thnn_fused_gru_cell_backward", gru_cell_backward}};
}

}  // namespace mirror
