// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <memory>

#include "torchamp/detail/graph/cuda_recorder.h"
#include "torchamp/detail/graph/recorder.h"
#include "torchamp/detail/graph/registered_graph.h"
#include "torchamp/detail/graph/stream_recorder.h"

namespace torchamp::detail {

/// The recorder of `device`. An error where it has no graphs, or has CUDA's and this program was
/// compiled without CUDA's headers.
inline std::unique_ptr<GraphRecorder> make_graph_recorder(c10::Device device) {
  const bool is_cuda = device.is_cuda();
  TORCH_CHECK(is_cuda || has_registered_graphs(device.type()),
              "CudaGraph: the optimizers' parameters are on ", device,
              ", which has no graphs that LibTorch knows of. Move the model to a device that has "
              "some (CUDA, say) before the optimizer is made, or pass {.enabled = false} to run "
              "eagerly.");
  if (is_cuda) check_cuda_graphs();
  return std::make_unique<StreamRecorder>(device,
                                          is_cuda ? &make_cuda_graph : &make_registered_graph);
}

}  // namespace torchamp::detail
