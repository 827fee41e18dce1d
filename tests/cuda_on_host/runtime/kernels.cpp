// SPDX-License-Identifier: BSD-3-Clause
// Kernels: known by name, checked and counted. They compute nothing.
#include <cxxabi.h>

#include <cstdlib>
#include <unordered_map>

#include "state.h"

namespace stand_in {

namespace {

constexpr std::size_t shared_by_default = 48 << 10, shared_at_most = 227 << 10;  // of sm_90

struct Kernel {
  std::string mangled, name;
  std::size_t dynamic_shared = shared_by_default;
};

struct Variable {
  std::size_t size = 0;
  char* memory = nullptr;
};

struct Configuration {
  dim3 grid, block;
  std::size_t shared;
  cudaStream_t stream;
};

std::unordered_map<const void*, Kernel>& kernels() {
  static auto* const value = new std::unordered_map<const void*, Kernel>();
  return *value;
}
std::unordered_map<const void*, Variable>& variables() {
  static auto* const value = new std::unordered_map<const void*, Variable>();
  return *value;
}
thread_local std::vector<Configuration> configurations;

Kernel* find_kernel(const void* function) {
  const auto found = kernels().find(function);
  return found == kernels().end() ? nullptr : &found->second;
}

const std::string& name_of(Kernel& kernel) {
  if (kernel.name.empty()) {
    int status = 0;
    char* const text = abi::__cxa_demangle(kernel.mangled.c_str(), nullptr, nullptr, &status);
    kernel.name = status == 0 && text ? text : kernel.mangled;
    std::free(text);
  }
  return kernel.name;
}

bool is_valid(dim3 grid, dim3 block) {
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  const uint64_t blocks = uint64_t{grid.x} * grid.y * grid.z;
  return threads > 0 && blocks > 0 && threads <= 1024 && block.z <= 64 && grid.x <= 0x7FFFFFFF &&
         grid.y <= 65535 && grid.z <= 65535;
}

cudaError_t give_kernel(Stream* stream, const std::string& name) {
  if (!stream) return fail(cudaErrorInvalidResourceHandle, name);
  const bool captures = stream->capture != nullptr;
  const cudaError_t error = give(stream, name, Kind::kernel, [] {});
  if (!error && !captures) {
    ++counts().kernels;
    log_launch(name);
  }
  return error;
}

cudaError_t launch(const void* function, dim3 grid, dim3 block, std::size_t shared,
                   cudaStream_t stream) {
  const Lock lock;
  Kernel* const kernel = find_kernel(function);
  if (!kernel) return fail(cudaErrorInvalidDeviceFunction, "cudaLaunchKernel");
  const std::string& name = name_of(*kernel);
  if (!is_valid(grid, block)) return fail(cudaErrorInvalidConfiguration, name);
  if (shared > kernel->dynamic_shared) return fail(cudaErrorInvalidValue, name);
  return give_kernel(stream_of(stream), name);
}

}  // namespace

}  // namespace stand_in

using namespace stand_in;

extern "C" {

int stand_in_launch(const char* name, void* stream) {
  const Lock lock;
  return give_kernel(stream_of(static_cast<cudaStream_t>(stream)), name);
}

// ---- What nvcc's code calls when a library is loaded -------------------------------------------

void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}

void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*,
                            uint3*, dim3*, dim3*, int*) {
  const Lock lock;
  kernels()[function].mangled = name;
}

void __cudaRegisterVar(void**, char* variable, char*, const char*, int, std::size_t size, int,
                       int) {
  const Lock lock;
  variables()[variable].size = size;
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, std::size_t shared,
                                     cudaStream_t stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, std::size_t* shared, void* stream) {
  if (configurations.empty()) return cudaErrorMissingConfiguration;
  const Configuration last = configurations.back();
  configurations.pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *static_cast<cudaStream_t*>(stream) = last.stream;
  return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  const Lock lock;
  if (!find_kernel(function)) return fail(cudaErrorInvalidDeviceFunction, "__cudaGetKernel");
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

// ---- Launches ----------------------------------------------------------------------------------

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void**,
                               std::size_t shared, cudaStream_t stream) {
  return launch(kernel, grid, block, shared, stream);
}
cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void**,
                             std::size_t shared, cudaStream_t stream) {
  return launch(function, grid, block, shared, stream);
}
cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block, void**,
                                        std::size_t shared, cudaStream_t stream) {
  return launch(function, grid, block, shared, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void**) {
  return launch(function, config->gridDim, config->blockDim, config->dynamicSmemBytes,
                config->stream);
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* result, const void* function) {
  const Lock lock;
  const Kernel* const kernel = find_kernel(function);
  if (!kernel) return fail(cudaErrorInvalidDeviceFunction, "cudaFuncGetAttributes");
  *result = {};
  result->maxThreadsPerBlock = 1024;
  result->numRegs = 32;
  result->ptxVersion = result->binaryVersion = compute_capability();
  result->maxDynamicSharedSizeBytes = static_cast<int>(kernel->dynamic_shared);
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  const Lock lock;
  Kernel* const kernel = find_kernel(function);
  if (!kernel) return fail(cudaErrorInvalidDeviceFunction, "cudaFuncSetAttribute");
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value < 0 || static_cast<std::size_t>(value) > shared_at_most)
    return fail(cudaErrorInvalidValue, "cudaFuncSetAttribute");
  kernel->dynamic_shared = static_cast<std::size_t>(value);
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*,
                                                                   int threads, std::size_t,
                                                                   unsigned) {
  *blocks = threads > 0 ? 2048 / threads : 0;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function,
                                                          int threads, std::size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, shared,
                                                                0);
}

// ---- Variables on the device -------------------------------------------------------------------

cudaError_t cudaGetSymbolAddress(void** result, const void* symbol) {
  const Lock lock;
  Variable& variable = variables()[symbol];
  if (!variable.memory) variable.memory = allocate_device_memory(variable.size ? variable.size : 1);
  *result = variable.memory;
  return *result ? cudaSuccess : fail(cudaErrorMemoryAllocation, "cudaGetSymbolAddress");
}

cudaError_t cudaMemcpyToSymbol(const void* symbol, const void* from, std::size_t size,
                               std::size_t offset, cudaMemcpyKind kind) {
  void* memory = nullptr;
  if (const cudaError_t error = cudaGetSymbolAddress(&memory, symbol)) return error;
  return cudaMemcpy(static_cast<char*>(memory) + offset, from, size, kind);
}
}
