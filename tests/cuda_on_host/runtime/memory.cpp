// SPDX-License-Identifier: BSD-3-Clause
// Memory of the devices and pinned memory of the host.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "state.h"

namespace stand_in {

namespace {

// Note [Two mappings]
// The addresses of device memory are reserved without any access, so that the host's touching it is
// a segmentation fault, as with a GPU. The runtime works on a second mapping of as many bytes.

constexpr std::size_t device_bytes = std::size_t{16} << 30;  // that a device says it has
constexpr std::size_t arena_bytes = std::size_t{64} << 30;   // of addresses, never all used
constexpr std::size_t page = 4096;

std::size_t whole_pages(std::size_t size) {
  return (size + page - 1) / page * page;
}

struct Memory {
  char* devices;  // without access
  char* aliases;
  std::size_t used = 0;
  std::multimap<std::size_t, char*> free;  // by size
  std::map<char*, Block> blocks;
  std::size_t in_use[max_devices] = {};

  Memory() {
    const int file = memfd_create("cuda_on_host", MFD_CLOEXEC);
    void* const none =
        mmap(nullptr, arena_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    void* const both = ftruncate(file, off_t{arena_bytes}) != 0
                           ? MAP_FAILED
                           : mmap(nullptr, arena_bytes, PROT_READ | PROT_WRITE,
                                  MAP_SHARED | MAP_NORESERVE, file, 0);
    if (none == MAP_FAILED || both == MAP_FAILED) std::abort();
    devices = static_cast<char*>(none);
    aliases = static_cast<char*>(both);
  }
};

Memory& memory() {
  static Memory* const value = new Memory();
  return *value;
}

/// What new memory holds: NaNs, unless CUDA_ON_HOST_FILL names another byte.
int fill() {
  static const int value = [] {
    const char* const text = std::getenv("CUDA_ON_HOST_FILL");
    return text ? static_cast<int>(std::strtol(text, nullptr, 0)) : 0xFF;
  }();
  return value;
}

/// What is still to be done may use the memory: cudaFree() waits, too.
void wait_before_freeing(int device) {
  wait_device(device);
}

cudaError_t allocate_host(void** result, std::size_t size, const char* where) {
  const Lock lock;
  if (const cudaError_t error = unsafe(where)) return error;
  ++counts().host_allocations;
  size = whole_pages(size ? size : 1);
  void* const p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) return fail(cudaErrorMemoryAllocation, where);
  char* const begin = static_cast<char*>(p);
  memory().blocks[begin] = {begin, size, current_device(), cudaMemoryTypeHost};
  *result = p;
  return cudaSuccess;
}

}  // namespace

const Block* block_of(const void* p) {
  char* const at = static_cast<char*>(const_cast<void*>(p));
  auto next = memory().blocks.upper_bound(at);
  if (next == memory().blocks.begin()) return nullptr;
  const Block& block = std::prev(next)->second;
  return at < block.begin + block.size ? &block : nullptr;
}

bool is_device_memory(const void* p) {
  const char* const at = static_cast<const char*>(p);
  return at >= memory().devices && at < memory().devices + arena_bytes;
}

char* alias(const void* p) {
  char* const at = static_cast<char*>(const_cast<void*>(p));
  return is_device_memory(p) ? memory().aliases + (at - memory().devices) : at;
}

bool is_within_a_block(const void* p, std::size_t size) {
  if (!is_device_memory(p)) return true;
  const Block* const block = block_of(p);
  return block && static_cast<const char*>(p) + size <= block->begin + block->size;
}

char* allocate_device_memory(std::size_t size) {
  Memory& all = memory();
  size = whole_pages(size);
  const int device = current_device();
  if (all.in_use[device] + size > device_bytes) return nullptr;
  char* begin = nullptr;
  if (const auto found = all.free.find(size); found != all.free.end()) {
    begin = found->second;
    all.free.erase(found);
  } else if (all.used + size <= arena_bytes) {
    begin = all.devices + all.used;
    all.used += size;
  } else {
    return nullptr;
  }
  all.in_use[device] += size;
  all.blocks[begin] = {begin, size, device, cudaMemoryTypeDevice};
  if (fill() != 0) std::memset(alias(begin), fill(), size);
  return begin;
}

}  // namespace stand_in

using namespace stand_in;

extern "C" {

void* stand_in_alias(const void* p) {
  const Lock lock;
  return alias(p);
}

void stand_in_fill(void* memory, std::size_t size, void* handle) {
  const Lock lock;
  Stream* const stream = stream_of(static_cast<cudaStream_t>(handle));
  if (fill() == 0 || !stream || (stream->capture && stream->capture->is_invalid)) return;
  give(stream, "fill", Kind::unseen, [=] { std::memset(alias(memory), fill(), size); });
}

cudaError_t cudaMalloc(void** result, std::size_t size) {
  const Lock lock;
  *result = nullptr;
  if (const cudaError_t error = unsafe("cudaMalloc")) return error;
  use_device(current_device());
  if (size == 0) return cudaSuccess;
  ++counts().allocations;
  log("cudaMalloc " + std::to_string(size));
  *result = allocate_device_memory(size);
  return *result ? cudaSuccess : fail(cudaErrorMemoryAllocation, "cudaMalloc");
}

cudaError_t cudaFree(void* p) {
  const Lock lock;
  use_device(current_device());
  if (!p) return cudaSuccess;
  if (const cudaError_t error = unsafe("cudaFree")) return error;
  Memory& all = memory();
  const auto found = all.blocks.find(static_cast<char*>(p));
  if (found == all.blocks.end() || found->second.type != cudaMemoryTypeDevice)
    return fail(cudaErrorInvalidValue, "cudaFree");
  const Block block = found->second;
  wait_before_freeing(block.device);
  all.in_use[block.device] -= block.size;
  all.blocks.erase(found);
  all.free.emplace(block.size, block.begin);
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** p, std::size_t size, unsigned) {
  return allocate_host(p, size, "cudaHostAlloc");
}
cudaError_t cudaMallocHost(void** p, std::size_t size) {
  return allocate_host(p, size, "cudaMallocHost");
}

cudaError_t cudaFreeHost(void* p) {
  const Lock lock;
  if (!p) return cudaSuccess;
  if (const cudaError_t error = unsafe("cudaFreeHost")) return error;
  auto& blocks = memory().blocks;
  const auto found = blocks.find(static_cast<char*>(p));
  if (found == blocks.end() || found->second.type != cudaMemoryTypeHost)
    return fail(cudaErrorInvalidValue, "cudaFreeHost");
  for (int device = 0; device < device_count(); ++device) wait_before_freeing(device);
  munmap(p, found->second.size);
  blocks.erase(found);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* p, std::size_t size, unsigned) {
  const Lock lock;
  char* const begin = static_cast<char*>(p);
  memory().blocks[begin] = {begin, size, current_device(), cudaMemoryTypeHost};
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* p) {
  const Lock lock;
  memory().blocks.erase(static_cast<char*>(p));
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* result, const void* p) {
  const Lock lock;
  *result = {};
  const Block* const block = block_of(p);
  result->type = block ? block->type : cudaMemoryTypeUnregistered;
  result->device = block ? block->device : cudaInvalidDeviceId;
  if (block) result->devicePointer = const_cast<void*>(p);
  if (result->type != cudaMemoryTypeDevice) result->hostPointer = const_cast<void*>(p);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  const Lock lock;
  use_device(current_device());
  *total = device_bytes;
  *free = device_bytes - memory().in_use[current_device()];
  return cudaSuccess;
}
}
