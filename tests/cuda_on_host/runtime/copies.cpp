// SPDX-License-Identifier: BSD-3-Clause
// Copies and memsets: the only work of the runtime that has an effect on memory.
#include <cstring>
#include <memory>
#include <vector>

#include "state.h"

namespace stand_in {

namespace {

/// Counts a copy and says what it is.
std::string count_copy(const void* to, const void* from, std::size_t size, bool pageable) {
  StandInCounts& all = counts();
  const char* way = nullptr;
  if (is_device_memory(to) && is_device_memory(from)) {
    ++all.on_device;
    if (block_of(to)->device != block_of(from)->device) ++all.between_devices;
    way = "device to device";
  } else if (is_device_memory(to)) {
    ++all.to_device;
    way = "host to device";
  } else if (is_device_memory(from)) {
    ++all.to_host;
    way = "device to host";
  } else {
    ++all.on_host;
    way = "host to host";
  }
  if (pageable) ++all.pageable;
  return std::string("copy ") + way + (pageable ? ", pageable, " : ", ") + std::to_string(size);
}

bool is_pageable(const void* p) {
  return !is_device_memory(p) && !block_of(p);
}

/// Whether memory is what the call says that it is.
bool fits_kind(const void* to, const void* from, cudaMemcpyKind kind) {
  switch (kind) {
    case cudaMemcpyHostToHost:
      return !is_device_memory(to) && !is_device_memory(from);
    case cudaMemcpyHostToDevice:
      return is_device_memory(to) && !is_device_memory(from);
    case cudaMemcpyDeviceToHost:
      return !is_device_memory(to) && is_device_memory(from);
    case cudaMemcpyDeviceToDevice:
      return is_device_memory(to) && is_device_memory(from);
    case cudaMemcpyDefault:
      return true;
  }
  return false;
}

cudaError_t copy(void* to, const void* from, std::size_t size, cudaMemcpyKind kind, Stream* stream,
                 const char* where) {
  if (!stream) return fail(cudaErrorInvalidResourceHandle, where);
  if (size == 0) return cudaSuccess;
  if (!fits_kind(to, from, kind))
    return fail(cudaErrorInvalidValue, std::string(where) + ": memory of another kind");
  if (!is_within_a_block(to, size) || !is_within_a_block(from, size))
    return fail(cudaErrorInvalidValue, std::string(where) + ": beyond a block");
  const bool from_pageable = is_pageable(from), to_pageable = is_pageable(to);
  if (stream->capture) {
    return give(stream, "copy", Kind::copy, [=] { std::memmove(alias(to), alias(from), size); });
  }
  const std::string what = count_copy(to, from, size, from_pageable || to_pageable);
  Work work = [=] { std::memmove(alias(to), alias(from), size); };
  if (from_pageable && stand_in_is_late()) {  // is read, or staged, before the call is over
    const auto staged = std::make_shared<std::vector<char>>(static_cast<const char*>(from),
                                                            static_cast<const char*>(from) + size);
    work = [=] { std::memcpy(alias(to), staged->data(), size); };
  }
  const cudaError_t error = give(stream, what, Kind::copy, std::move(work));
  if (!error && to_pageable) wait(stream);
  return error;
}

cudaError_t copy_and_wait(void* to, const void* from, std::size_t size, cudaMemcpyKind kind,
                          const char* where) {
  if (const cudaError_t error = unsafe(where)) return error;
  Stream* const stream = stream_of(nullptr);
  if (const cudaError_t error = copy(to, from, size, kind, stream, where)) return error;
  ++counts().waits;
  wait(stream);
  return cudaSuccess;
}

cudaError_t set(void* p, int value, std::size_t size, Stream* stream, const char* where) {
  if (!stream) return fail(cudaErrorInvalidResourceHandle, where);
  if (size == 0) return cudaSuccess;
  if (!is_within_a_block(p, size))
    return fail(cudaErrorInvalidValue, std::string(where) + ": beyond a block");
  if (!is_device_memory(p) && !block_of(p)) return fail(cudaErrorInvalidValue, where);
  if (!stream->capture) ++counts().memsets;
  return give(stream, "memset " + std::to_string(size), Kind::copy,
              [=] { std::memset(alias(p), value, size); });
}

}  // namespace

}  // namespace stand_in

using namespace stand_in;

extern "C" {

cudaError_t cudaMemcpy(void* to, const void* from, std::size_t size, cudaMemcpyKind kind) {
  const Lock lock;
  return copy_and_wait(to, from, size, kind, "cudaMemcpy");
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t size, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  const Lock lock;
  return copy(to, from, size, kind, stream_of(stream), "cudaMemcpyAsync");
}

cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, std::size_t size,
                                cudaStream_t stream) {
  const Lock lock;
  return copy(to, from, size, cudaMemcpyDeviceToDevice, stream_of(stream), "cudaMemcpyPeerAsync");
}

cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from,
                              std::size_t from_pitch, std::size_t width, std::size_t height,
                              cudaMemcpyKind kind, cudaStream_t stream) {
  const Lock lock;
  for (std::size_t row = 0; row < height; ++row) {
    const cudaError_t error = copy(static_cast<char*>(to) + row * to_pitch,
                                   static_cast<const char*>(from) + row * from_pitch, width, kind,
                                   stream_of(stream), "cudaMemcpy2DAsync");
    if (error) return error;
  }
  return cudaSuccess;
}

cudaError_t cudaMemset(void* p, int value, std::size_t size) {
  const Lock lock;
  if (const cudaError_t error = unsafe("cudaMemset")) return error;
  return set(p, value, size, stream_of(nullptr), "cudaMemset");
}

cudaError_t cudaMemsetAsync(void* p, int value, std::size_t size, cudaStream_t stream) {
  const Lock lock;
  return set(p, value, size, stream_of(stream), "cudaMemsetAsync");
}
}
