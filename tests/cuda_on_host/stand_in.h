// SPDX-License-Identifier: BSD-3-Clause
// What the stand-in's parts and its tests ask of its runtime. See README.md in this folder.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

/// What has been done since the process started, on all devices and threads together.
struct StandInCounts {
  uint64_t kernels;         ///< launches, including cuBLAS, cuDNN and NCCL
  uint64_t captured_nodes;  ///< kernels, copies, memsets and host functions put into graphs
  uint64_t graph_launches;
  uint64_t replayed_nodes;                          ///< by graph launches; they count nowhere else
  uint64_t to_device, to_host, on_device, on_host;  ///< copies, by destination
  uint64_t between_devices;                         ///< of those on devices
  uint64_t pageable;                                ///< of all, those with pageable host memory
  uint64_t memsets;
  uint64_t waits;             ///< times that the host waited for a stream, an event or a device
  uint64_t queries;           ///< of streams and events
  uint64_t allocations;       ///< cudaMalloc
  uint64_t host_allocations;  ///< of pinned memory
  uint64_t refused;           ///< calls that invalidated a capture
};
void stand_in_counts(StandInCounts* counts);

/// Whether launches are written down from now on, and forgets those that are.
void stand_in_log(bool on);
/// The launches written down, a line each; valid until the next call of this thread.
const char* stand_in_launches();

/// Where the runtime, and only it, may touch device memory; host memory is where it is.
void* stand_in_alias(const void* memory);
/// Fills device memory that nobody has any more as new memory is filled, in the stream's order or
/// at each launch of the graph that it captures into.
void stand_in_fill(void* memory, std::size_t size, void* stream);
/// Whether `stream` captures validly.
bool stand_in_captures(void* stream);
/// Has `work(data)` done in the stream's order: now, when the stream is waited for, or each time
/// that the graph is launched which it captures into. Calls `done(data)` when no more is to come.
void stand_in_submit(void* stream, void (*work)(void*), void* data, void (*done)(void*));
/// The same for work with other processes, which is done as soon as `is_ready(data)` when the
/// stream comes to it. Not in captures.
void stand_in_submit_when(void* stream, bool (*is_ready)(void*), void (*work)(void*), void* data,
                          void (*done)(void*));
/// A library's kernel: it is counted, and rejected like other kernels. Returns CUDA's error code.
int stand_in_launch(const char* name, void* stream);
/// 0, or the error of a call that captures forbid.
int stand_in_unsafe(const char* call);
/// Whether anything has been done on the device.
bool stand_in_is_in_use(int device);
/// Does what the stream has been given.
void stand_in_finish(void* stream);

/// Whether work waits until somebody waits for it, from now on; otherwise it is done at once. See
/// Note [Early and late work].
void stand_in_late(bool on);
/// Whether work may be done later: then, or because of other processes.
bool stand_in_is_late();
}
