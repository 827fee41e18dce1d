// SPDX-License-Identifier: BSD-3-Clause
// Compiled, but not linked: what takes the headers of CUDA and NCCL. A build for a CPU leaves
// graphs out for want of a library to link with.
#undef TORCHAMP_CUDA_GRAPHS
#define TORCHAMP_CUDA_GRAPHS 1
#include <torchamp/cuda_graph.h>
#include <torchamp/distributed/nccl.h>

template class std::unique_ptr<torchamp::detail::CudaDeviceGraph>;

[[maybe_unused]] static void use(c10d::ProcessGroup& group) {
  torchamp::add_nccl(group);
}
