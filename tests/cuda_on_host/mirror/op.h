// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "values.h"

namespace mirror {

/// A call's arguments by their names in the op's schema, on the CPU.
class Arguments {
 public:
  Arguments(const c10::FunctionSchema& schema, const torch::jit::Stack& values)
      : schema_(schema), values_(values) {}

  const c10::IValue& operator[](const std::string& name) const;
  at::Tensor tensor(const std::string& name) const;  ///< undefined for None
  at::Tensor in_fp32(const std::string& name) const;
  std::vector<at::Tensor> tensors(const std::string& name) const;
  std::vector<int64_t> ints(const std::string& name) const;  ///< empty for None
  int64_t integer(const std::string& name) const { return (*this)[name].toInt(); }
  double number(const std::string& name) const { return (*this)[name].toDouble(); }
  bool flag(const std::string& name) const { return (*this)[name].toBool(); }

 private:
  const c10::FunctionSchema& schema_;
  const torch::jit::Stack& values_;
};

using Results = std::vector<c10::IValue>;
/// What an op without a CPU kernel, or with one of another meaning, gives.
using Substitute = std::function<Results(const Arguments&)>;
/// By the op's name with its overload, or nullptr.
const Substitute* substitute_for(const std::string& name);
using Substitutes = std::vector<std::pair<std::string, Substitute>>;
Substitutes convolutions_and_norms();
Substitutes products();
Substitutes attention();
Substitutes recurrent_layers();
Substitutes checks();

/// An op whose CUDA kernel is mirrored.
struct Op {
  c10::OperatorHandle handle;
  c10::SafeKernelFunction original;  ///< the CUDA kernel's host code
  std::string name;
  const Substitute* substitute = nullptr;
  bool in_fp32 = false;     ///< what is narrow is computed in fp32 and rounded once
  bool is_random = false;   ///< draws from a generator
  int generator = -1;       ///< the argument, if it is one
  bool reads_back = false;  ///< the host code looks at values: results' shapes, numbers
  std::vector<std::size_t> written = {};  ///< arguments

  const c10::FunctionSchema& schema() const { return handle.schema(); }
  std::size_t arguments() const { return schema().arguments().size(); }
};

/// The seed of what one call draws: from the CUDA generator's seed and position.
struct Draw {
  const void *captured_seed = nullptr, *captured_position = nullptr;  ///< in memory of the device
  uint64_t seed = 0, position = 0;

  uint64_t value() const;
};

/// The call of one op, to be computed by the CPU: now, late, or at each launch of a graph. It knows
/// addresses alone and keeps no CUDA tensor alive.
class Call {
 public:
  explicit Call(const Op& op) : op_(op) {}

  /// What the op writes to, as it is: nested calls of the CUDA kernel may change it.
  void keep_written();
  void compute() noexcept;

  torch::jit::Stack arguments;
  std::vector<c10::IValue> outputs;  ///< the memory of the CUDA kernel's results
  std::optional<Draw> draw;
  torch::jit::Stack results;  ///< the CPU's

  struct Kept {
    char* memory;
    std::size_t size;
    std::vector<char> bytes;
  };
  std::vector<Kept> written;

 private:
  torch::jit::Stack run(bool in_fp32);
  torch::jit::Stack run_plainly(torch::jit::Stack stack) const;
  void restore_written() const;
  void store_written(const torch::jit::Stack& used, const torch::jit::Stack& given) const;

  const Op& op_;
};

/// Has memory filled in the order of its stream when it is freed, from now on: that of all devices,
/// once the allocator is there.
void fill_freed_memory();

/// Says once for each op that its outputs have no values.
void no_values(const std::string& op, const std::string& why);

}  // namespace mirror
