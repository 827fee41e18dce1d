// SPDX-License-Identifier: BSD-3-Clause
// error: the function returns a type that may hide tensors
#include <torchamp/recompute.h>

#include <string>
#include <unordered_map>
#include <utility>

using Outputs = std::unordered_map<std::string, at::Tensor>;

void of_an_unordered_map(const at::Tensor& x) {
  torchamp::checkpoint(
      [](const at::Tensor& t) {
        return std::pair{1, Outputs{{"exp", t.exp()}}};
      },
      x);
}
