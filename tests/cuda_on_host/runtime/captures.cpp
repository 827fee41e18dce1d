// SPDX-License-Identifier: BSD-3-Clause
// Captures of streams into graphs, by the rules of CUDA's manual.
#include <algorithm>

#include "state.h"

namespace stand_in {

namespace {

thread_local cudaStreamCaptureMode mode_of_thread = cudaStreamCaptureModeGlobal;
uint64_t next_id = 1;

/// All that the nodes come after, and they themselves.
std::set<const Node*> reached_from(const std::vector<Node*>& nodes) {
  std::set<const Node*> result;
  std::vector<const Node*> open(nodes.begin(), nodes.end());
  while (!open.empty()) {
    const Node* const node = open.back();
    open.pop_back();
    if (result.insert(node).second) open.insert(open.end(), node->after.begin(), node->after.end());
  }
  return result;
}

/// Whether each stream's work in the capture has been joined into the stream that began the
/// capture.
bool is_joined(const Capture& capture) {
  const std::set<const Node*> joined = reached_from(capture.origin->last_nodes);
  for (const Stream* stream : capture.members) {
    for (const Node* node : stream->last_nodes) {
      if (joined.count(node) == 0) return false;
    }
  }
  return true;
}

cudaError_t error_at_end(const Capture& capture) {
  if (capture.is_invalid) return cudaErrorStreamCaptureInvalidated;
  return is_joined(capture) ? cudaSuccess : cudaErrorStreamCaptureUnjoined;
}

}  // namespace

std::set<Capture*>& captures() {
  static auto* const value = new std::set<Capture*>();
  return *value;
}

Capture* capture_with(uint64_t id) {
  for (Capture* capture : captures()) {
    if (capture->id == id) return capture;
  }
  return nullptr;
}

cudaError_t invalidate(Capture* capture, cudaError_t error, const std::string& where) {
  capture->is_invalid = true;
  ++counts().refused;
  return fail(error, where);
}

cudaError_t unsafe(const std::string& call) {
  if (mode_of_thread == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  for (Capture* capture : captures()) {
    const bool is_own = capture->thread == std::this_thread::get_id();
    const bool forbids = is_own ? capture->mode != cudaStreamCaptureModeRelaxed
                                : capture->mode == cudaStreamCaptureModeGlobal &&
                                      mode_of_thread == cudaStreamCaptureModeGlobal;
    if (forbids) return invalidate(capture, cudaErrorStreamCaptureUnsupported, call);
  }
  return cudaSuccess;
}

Capture* capture_with_blocking_stream(int device) {
  for (Capture* capture : captures()) {
    for (const Stream* stream : capture->members) {
      if (stream->device == device && !(stream->flags & cudaStreamNonBlocking)) return capture;
    }
  }
  return nullptr;
}

void add_node(Stream* stream, const std::string& what, Work work, bool is_visible) {
  auto* const node = new Node{what, std::move(work), stream->last_nodes, is_visible};
  stream->capture->graph->nodes.push_back(node);
  stream->last_nodes = {node};
  if (is_visible) {
    ++counts().captured_nodes;
    log("captured " + what);
  }
}

}  // namespace stand_in

using namespace stand_in;

extern "C" {

bool stand_in_captures(void* handle) {
  const Lock lock;
  const Stream* const stream = stream_of(static_cast<cudaStream_t>(handle));
  return stream && stream->capture && !stream->capture->is_invalid;
}

int stand_in_unsafe(const char* call) {
  const Lock lock;
  return unsafe(call);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, mode_of_thread);
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  const Lock lock;
  Stream* const stream = stream_of(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle, "cudaStreamBeginCapture");
  if (stream->is_legacy) return fail(cudaErrorStreamCaptureUnsupported, "cudaStreamBeginCapture");
  if (stream->capture) return fail(cudaErrorIllegalState, "cudaStreamBeginCapture");
  auto* const capture = new Capture{.id = next_id++,
                                    .mode = mode,
                                    .thread = std::this_thread::get_id(),
                                    .origin = stream,
                                    .graph = new Graph(),
                                    .members = {stream}};
  captures().insert(capture);
  stream->capture = capture;
  stream->last_nodes.clear();
  log("cudaStreamBeginCapture");
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* result) {
  const Lock lock;
  const char* const where = "cudaStreamEndCapture";
  *result = nullptr;
  Stream* const stream = stream_of(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle, where);
  Capture* const capture = stream->capture;
  if (!capture) return fail(cudaErrorIllegalState, where);
  if (capture->origin != stream) return invalidate(capture, cudaErrorStreamCaptureUnmatched, where);
  if (capture->mode != cudaStreamCaptureModeRelaxed &&
      capture->thread != std::this_thread::get_id())
    return invalidate(capture, cudaErrorStreamCaptureWrongThread, where);

  const cudaError_t error = error_at_end(*capture);
  for (Stream* member : capture->members) {
    member->capture = nullptr;
    member->last_nodes.clear();
  }
  captures().erase(capture);
  Graph* const graph = capture->graph;
  delete capture;
  if (error) {
    release(graph);
    return fail(error, where);
  }
  *result = reinterpret_cast<cudaGraph_t>(graph);
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  const Lock lock;
  const Stream* const stream = stream_of(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle, "cudaStreamIsCapturing");
  if (stream->is_legacy && capture_with_blocking_stream(stream->device))
    return fail(cudaErrorStreamCaptureImplicit, "cudaStreamIsCapturing");
  *status = !stream->capture              ? cudaStreamCaptureStatusNone
            : stream->capture->is_invalid ? cudaStreamCaptureStatusInvalidated
                                          : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                     std::size_t* node_count) {
  const Lock lock;
  if (const cudaError_t error = cudaStreamIsCapturing(handle, status)) return error;
  if (node_count) *node_count = 0;
  if (*status != cudaStreamCaptureStatusActive) return cudaSuccess;
  Stream* const stream = stream_of(handle);
  if (id) *id = stream->capture->id;
  if (graph) *graph = reinterpret_cast<cudaGraph_t>(stream->capture->graph);
  if (nodes) *nodes = reinterpret_cast<const cudaGraphNode_t*>(stream->last_nodes.data());
  if (edges) *edges = nullptr;
  if (node_count) *node_count = stream->last_nodes.size();
  return cudaSuccess;
}

cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t handle, cudaGraphNode_t* nodes,
                                                const cudaGraphEdgeData*, std::size_t count,
                                                unsigned flags) {
  const Lock lock;
  Stream* const stream = stream_of(handle);
  if (!stream || !stream->capture)
    return fail(cudaErrorIllegalState, "cudaStreamUpdateCaptureDependencies");
  if (flags == cudaStreamSetCaptureDependencies) stream->last_nodes.clear();
  for (std::size_t i = 0; i < count; ++i)
    stream->last_nodes.push_back(reinterpret_cast<Node*>(nodes[i]));
  return cudaSuccess;
}
}
