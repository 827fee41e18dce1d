// SPDX-License-Identifier: BSD-3-Clause
// What the files of the runtime share. Everything is under one lock.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "cuda_on_host/stand_in.h"

namespace stand_in {

using Work = std::function<void()>;

// ---- The process and the thread ----------------------------------------------------------------

constexpr int max_devices = 8;
int device_count();
/// Of each device; see devices.cpp.
int compute_capability();

struct Lock {
  Lock();
  ~Lock();
  /// Lets others have it for a moment.
  static void pass();
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
};

StandInCounts& counts();
/// With CUDA_ON_HOST_LOG=FILE, a line in it.
void log(const std::string& line);
/// A launch, for stand_in_launches().
void log_launch(const std::string& name);

int current_device();
/// Remembers that the device has a context.
void use_device(int device);
bool is_in_use(int device);
/// What cudaGetLastError() gives. Returns it.
cudaError_t fail(cudaError_t error, const std::string& where);

// ---- Memory ------------------------------------------------------------------------------------

struct Block {
  char* begin;
  std::size_t size;
  int device;
  cudaMemoryType type;
};
/// The block that `memory` lies in, or nullptr.
const Block* block_of(const void* memory);
bool is_device_memory(const void* memory);
/// Where the runtime may touch it.
char* alias(const void* memory);
/// Whether bytes of device memory are in one block; host memory always is.
bool is_within_a_block(const void* memory, std::size_t size);
/// nullptr if there is none left.
char* allocate_device_memory(std::size_t size);

// ---- Streams, events, captures and graphs ------------------------------------------------------

struct Node {
  std::string what;
  Work work;
  std::vector<Node*> after;
  bool is_visible = true;  ///< in cudaGraphGetNodes(); the mirror's work is not
};

struct UserObject {
  void* data;
  cudaHostFn_t destroy;
  unsigned references;
};

struct Graph {
  std::vector<Node*> nodes;  ///< each after those that it waits for
  std::vector<UserObject*> objects;
  int references = 1;
};
void release(Graph* graph);
void release(UserObject* object, unsigned references);

struct Stream;
struct Capture {
  uint64_t id;
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  Stream* origin;
  Graph* graph;
  std::set<Stream*> members;
  bool is_invalid = false;
};

// Note [Early and late work]
// On a GPU, what a stream is given is done some time later. Here it is done at once, or, with
// CUDA_ON_HOST_LATE=1, as late as may be: when the host waits for the stream, for an event after it
// or for the device, or when another stream's work does that waits for it. A program that reads a
// pinned copy too early, forgets an event or gives memory back that another stream still uses then
// sees other values than in order.

struct Item {
  Work work = {};
  Stream* awaited = nullptr;  ///< or, instead of work, a stream that must have done so many items
  uint64_t until = 0;
  std::function<bool()> is_ready = {};  ///< of work with other processes
};

struct Stream {
  int device;
  unsigned flags;
  int priority;
  bool is_legacy = false;
  bool is_destroyed = false;  ///< never deleted, so that stale handles are found
  Capture* capture = nullptr;
  std::vector<Node*> last_nodes = {};  ///< what the next node of the capture comes after
  std::deque<Item> items = {};
  uint64_t given = 0, done = 0;
};

struct Event {
  int device;
  unsigned flags;
  bool is_recorded = false;
  Stream* stream = nullptr;  ///< what it was recorded in
  uint64_t at = 0;           ///< that stream's items before it
  uint64_t capture = 0;      ///< the id of the capture that it was recorded in
  std::vector<Node*> last_nodes = {};
  int queries = 0;
};

/// nullptr if there is no such stream or event (any more).
Stream* stream_of(cudaStream_t handle);
Event* event_of(cudaEvent_t handle);
std::set<Capture*>& captures();
Capture* capture_with(uint64_t id);
/// An error that invalidates the capture.
cudaError_t invalidate(Capture* capture, cudaError_t error, const std::string& where);
/// cudaSuccess, or the error of a call that a capture of this or another thread forbids.
cudaError_t unsafe(const std::string& call);
/// The capture that use of the legacy stream of a device would break, or nullptr.
Capture* capture_with_blocking_stream(int device);

enum class Kind { kernel, copy, unseen };
/// Work for a stream: done, kept for later or, in a capture, made a node.
cudaError_t give(Stream* stream, const std::string& what, Kind kind, Work work);
void give_wait(Stream* stream, Stream* awaited, uint64_t until);
void add_node(Stream* stream, const std::string& what, Work work, bool is_visible);
/// Does the stream's first `until` items, and says whether that was all: other processes may have
/// to do something before.
bool finish(Stream* stream, uint64_t until);
/// The same until all is done.
void wait(Stream* stream, uint64_t until);
void wait(Stream* stream);
void wait_device(int device);

}  // namespace stand_in
