// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <type_traits>
#include <utility>

#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

using NodePtr = decltype(torch::autograd::Edge::function);

/// Makes a node of the autograd graph. LibTorch counts references to nodes with c10::intrusive_ptr,
/// in older versions with std::shared_ptr.
template <class T, class Pointer = NodePtr, class... Args>
Pointer make_node(Args&&... args) {
  auto* const node = new T(std::forward<Args>(args)...);
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    return Pointer(node, [](auto* unused) { deleteNode(unused); });
  } else {  // (a pointer to T would be one more type to compile)
    return Pointer::unsafe_steal_from_new(node);
  }
}

}  // namespace TORCHAMP_NAMESPACE::detail
