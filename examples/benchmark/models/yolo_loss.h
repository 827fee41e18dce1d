// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/torch.h>

#include <array>
#include <numbers>
#include <vector>

/// How well boxes cover each other: 1 for equal ones. Complete IoU (Zheng et al. 2020): less for
/// centres apart and for different shapes. Boxes [n, 4] as centre, width and height; returns [n].
inline at::Tensor complete_iou(const at::Tensor& a, const at::Tensor& b) {
  constexpr double eps = 1e-7;
  // In fp32. Not prod(1), whose backward reads the device to look for zeros.
  const auto area = [](const at::Tensor& extent) {
    return extent.select(1, 0).to(torch::kFloat) * extent.select(1, 1);
  };
  const auto half = [](const at::Tensor& box) { return box.slice(1, 2, 4) / 2; };
  const at::Tensor a_low = a.slice(1, 0, 2) - half(a), a_high = a.slice(1, 0, 2) + half(a);
  const at::Tensor b_low = b.slice(1, 0, 2) - half(b), b_high = b.slice(1, 0, 2) + half(b);
  const at::Tensor common =
      area((torch::minimum(a_high, b_high) - torch::maximum(a_low, b_low)).clamp_min(0));
  const at::Tensor all = area(a.slice(1, 2, 4)) + area(b.slice(1, 2, 4)) - common + eps;
  const at::Tensor iou = common / all;
  const at::Tensor hull = torch::maximum(a_high, b_high) - torch::minimum(a_low, b_low);
  const at::Tensor diagonal = hull.square().sum(1) + eps;
  const at::Tensor distance = (a.slice(1, 0, 2) - b.slice(1, 0, 2)).square().sum(1);
  const auto angle = [](const at::Tensor& box) {
    return torch::atan(box.select(1, 2) / (box.select(1, 3) + eps));
  };
  const at::Tensor shape =
      (angle(b) - angle(a)).square() * (4. / (std::numbers::pi * std::numbers::pi));
  at::Tensor weight;
  {
    const torch::NoGradGuard no_grad;
    weight = shape / (shape - iou + (1. + eps));
  }
  return iou - (distance / diagonal + shape * weight);
}

/// Box, object and class terms over the three scales, weighted as in YOLOv5. For `batch` see
/// Yolo::make_batch.
inline at::Tensor yolo_loss(const std::vector<at::Tensor>& outputs,
                            const std::vector<at::Tensor>& batch) {
  constexpr std::array<double, 3> balance{4., 1., 0.4};
  const at::Tensor& classes = batch.back();
  at::Tensor box_loss, object_loss, class_loss;
  const auto accumulate = [](at::Tensor& sum, const at::Tensor& term) {
    sum = sum.defined() ? sum + term : term;
  };
  for (std::size_t scale = 0; scale < 3; ++scale) {
    const at::Tensor& output = outputs[scale];
    const auto place = batch[1 + 2 * scale].unbind(0);
    const c10::List<std::optional<at::Tensor>> index({place[0], place[1], place[2], place[3]});
    const at::Tensor found = output.index(index);  // [objects, 5 + classes]
    const at::Tensor centre = found.slice(1, 0, 2).sigmoid() * 2 - 0.5;
    const at::Tensor extent = (found.slice(1, 2, 4).sigmoid() * 2).square();
    const at::Tensor iou = complete_iou(torch::cat({centre, extent}, 1), batch[2 + 2 * scale]);
    accumulate(box_loss, torch::rsub(iou, 1.).mean());  // `1. - iou` would be three ops
    const at::Tensor wanted = torch::zeros(output.sizes().slice(0, 4), output.options());
    wanted.index_put_(index, iou.detach().clamp_min(0).to(wanted.scalar_type()));
    accumulate(object_loss, torch::binary_cross_entropy_with_logits(output.select(4, 4), wanted) *
                                balance[scale]);
    accumulate(class_loss, torch::binary_cross_entropy_with_logits(found.slice(1, 5), classes));
  }
  const auto images = static_cast<double>(batch[0].size(0));
  return (box_loss * 0.05 + object_loss * 1.0 + class_loss * 0.5) * images;
}
