// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <utility>
#include <vector>

#include "simulated_device/counts.h"
#include "simulated_device/graph.h"
#include "simulated_device/streams.h"

// Note [The simulated accelerator]
// Two devices, sim:0 and sim:1, that LibTorch takes for an accelerator (c10::kPrivateUse1) in every
// test binary that links it. They compute by the CPU's kernels and misuse of them is found: memory
// faults when the host touches it outside of kernels and copies (memory.h), work is ordered by
// streams and events alone (streams.h), kernels refuse what CUDA's refuse (kernel.h,
// checked_kernels.cpp), a capturing stream refuses what a graph cannot hold (streams.h), and what
// is launched, copied and waited for is counted (counts.h). Graphs record its work and do it again
// (graph.h). There are no sparse tensors.
// LibTorch knows one accelerator in a process. Where there is a CUDA device, that is the one; with
// CUDA_VISIBLE_DEVICES set to nothing, it is this one.

namespace simulated {

inline const c10::Device sim0(c10::kPrivateUse1, 0), sim1(c10::kPrivateUse1, 1);

inline at::TensorOptions on(c10::Device device, at::ScalarType dtype = at::kFloat) {
  return at::TensorOptions(device).dtype(dtype);
}

/// Whether it is there; see Note [The simulated accelerator].
bool available();

/// Takes ATen's kernel that unscales from the simulated accelerator for as long as it lives: not
/// every device has one.
class WithoutUnscaleKernel {
 public:
  WithoutUnscaleKernel();
  ~WithoutUnscaleKernel();
  WithoutUnscaleKernel(const WithoutUnscaleKernel&) = delete;
  WithoutUnscaleKernel& operator=(const WithoutUnscaleKernel&) = delete;
};

/// Gives the simulated accelerator, for as long as it lives, the kernel that unscales which MPS had
/// before LibTorch 2.13: see Note [MPS's kernels].
class UnscaleKernelOfOldMps {
 public:
  UnscaleKernelOfOldMps();
  ~UnscaleKernelOfOldMps();
  UnscaleKernelOfOldMps(const UnscaleKernelOfOldMps&) = delete;
  UnscaleKernelOfOldMps& operator=(const UnscaleKernelOfOldMps&) = delete;
};

/// Moves a tensor's contents, keys and device; whoever holds the tensor sees it. Not a leaf of a
/// graph that is still needed.
void move_in_place(at::Tensor& tensor, c10::Device device);

}  // namespace simulated

/// module.to(device), even if LibTorch rejects it: for the simulated accelerator.
template <class M>
M to_device(M module, c10::Device device) {
  if (device.type() != c10::kPrivateUse1) {
    module->to(device);
    return module;
  }
  for (at::Tensor& t : module->parameters()) simulated::move_in_place(t, device);
  for (at::Tensor& t : module->buffers()) simulated::move_in_place(t, device);
  return module;
}
