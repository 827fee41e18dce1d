// SPDX-License-Identifier: BSD-3-Clause
// Streams and events: what is done in which order, and who waits for it.
#include <algorithm>
#include <cstdlib>
#include <memory>

#include "state.h"

namespace stand_in {

namespace {

struct Order {
  std::set<Stream*> streams;
  std::set<Event*> events;
  Stream* legacy[max_devices] = {};
  bool is_late = std::getenv("CUDA_ON_HOST_LATE") != nullptr;
  int waiting = 0;  ///< items that other processes may keep waiting
};

Order& order() {
  static Order* const value = new Order();
  return *value;
}

Stream* legacy_stream(int device) {
  Stream*& stream = order().legacy[device];
  if (!stream) {
    stream = new Stream{.device = device, .flags = cudaStreamDefault, .priority = 0};
    stream->is_legacy = true;
  }
  return stream;
}

/// The legacy stream and the others that block wait for one another.
void wait_for_other_streams(Stream* stream) {
  if (stream->is_legacy) {
    for (Stream* other : order().streams) {
      if (other->device == stream->device && !(other->flags & cudaStreamNonBlocking))
        give_wait(stream, other, other->given);
    }
  } else if (!(stream->flags & cudaStreamNonBlocking)) {
    Stream* const legacy = legacy_stream(stream->device);
    give_wait(stream, legacy, legacy->given);
  }
}

void give_item(Stream* stream, Item item) {
  stream->items.push_back(std::move(item));
  ++stream->given;
  if (!order().is_late) finish(stream, stream->given);
}

cudaError_t create_stream(cudaStream_t* result, unsigned flags, int priority) {
  const Lock lock;
  use_device(current_device());
  auto* const stream = new Stream{.device = current_device(), .flags = flags, .priority = priority};
  order().streams.insert(stream);
  *result = reinterpret_cast<cudaStream_t>(stream);
  return cudaSuccess;
}

cudaError_t create_event(cudaEvent_t* result, unsigned flags) {
  const Lock lock;
  use_device(current_device());
  auto* const event = new Event{.device = current_device(), .flags = flags};
  order().events.insert(event);
  *result = reinterpret_cast<cudaEvent_t>(event);
  return cudaSuccess;
}

/// The error of asking for an event whose work is in a capture.
cudaError_t check_asked(const Event* event, const char* where) {
  if (!event) return fail(cudaErrorInvalidResourceHandle, where);
  if (event->capture == 0) return unsafe(where);
  if (Capture* const capture = capture_with(event->capture))
    return invalidate(capture, cudaErrorCapturedEvent, where);
  return fail(cudaErrorCapturedEvent, where);
}

/// The error of asking for a stream that captures.
cudaError_t check_asked(const Stream* stream, const char* where) {
  if (!stream) return fail(cudaErrorInvalidResourceHandle, where);
  if (stream->capture) return invalidate(stream->capture, cudaErrorStreamCaptureUnsupported, where);
  if (stream->is_legacy) {
    if (Capture* const capture = capture_with_blocking_stream(stream->device))
      return invalidate(capture, cudaErrorStreamCaptureImplicit, where);
  }
  return unsafe(where);
}

cudaError_t record(cudaEvent_t event_handle, cudaStream_t stream_handle, unsigned flags) {
  const Lock lock;
  Event* const event = event_of(event_handle);
  Stream* const stream = stream_of(stream_handle);
  if (!event || !stream || event->device != stream->device)
    return fail(cudaErrorInvalidResourceHandle, "cudaEventRecord");
  event->is_recorded = true;
  event->queries = 0;
  if (stream->capture && !(flags & cudaEventRecordExternal)) {
    event->capture = stream->capture->id;
    event->last_nodes = stream->last_nodes;
  } else {
    event->capture = 0;
    event->last_nodes.clear();
    event->stream = stream;
    event->at = stream->given;
  }
  return cudaSuccess;
}

/// A stream's waiting for an event that was recorded in a capture.
cudaError_t join_capture(Stream* stream, const Event* event) {
  const char* const where = "cudaStreamWaitEvent";
  Capture* const capture = capture_with(event->capture);
  if (!capture) return fail(cudaErrorCapturedEvent, where);
  if (stream->is_legacy) return invalidate(capture, cudaErrorStreamCaptureImplicit, where);
  if (stream->capture && stream->capture != capture) {
    stream->capture->is_invalid = true;
    return invalidate(capture, cudaErrorStreamCaptureMerge, where);
  }
  if (!stream->capture) {
    stream->capture = capture;
    stream->last_nodes.clear();
    capture->members.insert(stream);
  }
  stream->last_nodes.insert(stream->last_nodes.end(), event->last_nodes.begin(),
                            event->last_nodes.end());
  return cudaSuccess;
}

}  // namespace

Stream* stream_of(cudaStream_t handle) {
  if (!handle || handle == cudaStreamLegacy || handle == cudaStreamPerThread)
    return legacy_stream(current_device());
  auto* const stream = reinterpret_cast<Stream*>(handle);
  for (Stream* legacy : order().legacy) {
    if (stream == legacy) return stream;
  }
  return order().streams.count(stream) != 0 ? stream : nullptr;
}

Event* event_of(cudaEvent_t handle) {
  auto* const event = reinterpret_cast<Event*>(handle);
  return order().events.count(event) != 0 ? event : nullptr;
}

cudaError_t give(Stream* stream, const std::string& what, Kind kind, Work work) {
  if (kind == Kind::kernel && stream->device != current_device())
    return fail(cudaErrorInvalidResourceHandle, what + ": its stream is of another device");
  use_device(stream->device);
  if (stream->is_legacy) {
    if (Capture* const capture = capture_with_blocking_stream(stream->device))
      return invalidate(capture, cudaErrorStreamCaptureImplicit, what);
  }
  if (stream->capture) {
    if (stream->capture->is_invalid) return fail(cudaErrorStreamCaptureInvalidated, what);
    add_node(stream, what, std::move(work), kind != Kind::unseen);
    return cudaSuccess;
  }
  if (kind != Kind::unseen) log(what + " on " + std::to_string(stream->device));
  wait_for_other_streams(stream);
  give_item(stream, {.work = std::move(work)});
  return cudaSuccess;
}

void give_wait(Stream* stream, Stream* awaited, uint64_t until) {
  if (awaited->done < until) give_item(stream, {.awaited = awaited, .until = until});
}

bool finish(Stream* stream, uint64_t until) {
  while (stream->done < until && !stream->items.empty()) {
    const Item& first = stream->items.front();
    if (first.awaited ? !finish(first.awaited, first.until) : first.is_ready && !first.is_ready())
      return false;
    const Item item = std::move(stream->items.front());
    stream->items.pop_front();
    if (item.is_ready) --order().waiting;
    if (item.work) item.work();
    ++stream->done;
  }
  return true;
}

void wait(Stream* stream, uint64_t until) {
  while (!finish(stream, until)) Lock::pass();
}

void wait(Stream* stream) {
  wait_for_other_streams(stream);
  wait(stream, stream->given);
}

void wait_device(int device) {
  const std::set<Stream*> streams = order().streams;  // others may come meanwhile
  for (Stream* stream : streams) {
    if (stream->device == device) wait(stream, stream->given);
  }
  wait(legacy_stream(device), legacy_stream(device)->given);
}

}  // namespace stand_in

using namespace stand_in;

extern "C" {

void stand_in_late(bool on) {
  const Lock lock;
  for (int device = 0; device < device_count(); ++device) wait_device(device);
  order().is_late = on;
}

bool stand_in_is_late() {
  const Lock lock;
  return order().is_late || order().waiting > 0;
}

void stand_in_finish(void* stream) {
  const Lock lock;
  wait(stream_of(static_cast<cudaStream_t>(stream)));
}

void stand_in_submit(void* handle, void (*work)(void*), void* data, void (*done)(void*)) {
  const std::shared_ptr<void> held(data, done);
  const Lock lock;
  Stream* const stream = stream_of(static_cast<cudaStream_t>(handle));
  if (stream && !(stream->capture && stream->capture->is_invalid))
    give(stream, "values", Kind::unseen, [held, work] { work(held.get()); });
}

void stand_in_submit_when(void* handle, bool (*is_ready)(void*), void (*work)(void*), void* data,
                          void (*done)(void*)) {
  const std::shared_ptr<void> held(data, done);
  const Lock lock;
  Stream* const stream = stream_of(static_cast<cudaStream_t>(handle));
  if (!stream || stream->capture) return;
  wait_for_other_streams(stream);
  ++order().waiting;
  give_item(stream, {.work = [held, work] { work(held.get()); },
                     .is_ready = [held, is_ready] { return is_ready(held.get()); }});
}

// ---- Streams -----------------------------------------------------------------------------------

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return create_stream(stream, cudaStreamDefault, 0);
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return create_stream(stream, flags, 0);
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  return create_stream(stream, flags, priority);
}

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  const Lock lock;
  Stream* const stream = stream_of(handle);
  if (!stream || stream->is_legacy)
    return fail(cudaErrorInvalidResourceHandle, "cudaStreamDestroy");
  if (stream->capture) {
    stream->capture->is_invalid = true;
    stream->capture->members.erase(stream);
    stream->capture = nullptr;
  }
  wait(stream, stream->given);
  stream->is_destroyed = true;
  order().streams.erase(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  const Lock lock;
  const Stream* const stream = stream_of(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle, "cudaStreamGetPriority");
  *priority = stream->priority;
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  const Lock lock;
  ++counts().queries;
  Stream* const stream = stream_of(handle);
  if (const cudaError_t error = check_asked(stream, "cudaStreamQuery")) return error;
  if (stream->done == stream->given) return cudaSuccess;
  wait_for_other_streams(stream);
  finish(stream, stream->given);  // for the next one that asks
  return cudaErrorNotReady;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  const Lock lock;
  ++counts().waits;
  log("cudaStreamSynchronize");
  use_device(current_device());
  Stream* const stream = stream_of(handle);
  if (const cudaError_t error = check_asked(stream, "cudaStreamSynchronize")) return error;
  wait(stream);
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  const Lock lock;
  ++counts().waits;
  log("cudaDeviceSynchronize");
  const int device = current_device();
  use_device(device);
  for (Capture* capture : captures()) {
    const bool is_here = std::any_of(capture->members.begin(), capture->members.end(),
                                     [&](const Stream* s) { return s->device == device; });
    if (is_here)
      return invalidate(capture, cudaErrorStreamCaptureUnsupported, "cudaDeviceSynchronize");
  }
  if (const cudaError_t error = unsafe("cudaDeviceSynchronize")) return error;
  wait_device(device);
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t event_handle, unsigned) {
  const Lock lock;
  Stream* const stream = stream_of(stream_handle);
  const Event* const event = event_of(event_handle);
  if (!stream || !event) return fail(cudaErrorInvalidResourceHandle, "cudaStreamWaitEvent");
  if (event->capture != 0) return join_capture(stream, event);
  if (!event->is_recorded) return cudaSuccess;
  if (stream->capture)
    return invalidate(stream->capture, cudaErrorStreamCaptureIsolation, "cudaStreamWaitEvent");
  give_wait(stream, event->stream, event->at);
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
  const Lock lock;
  Stream* const stream = stream_of(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle, "cudaLaunchHostFunc");
  return give(stream, "host function", Kind::copy, [=] { function(data); });
}

cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t function, void* data,
                                  unsigned) {
  const Lock lock;
  Stream* const stream = stream_of(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle, "cudaStreamAddCallback");
  if (stream->capture) {
    return invalidate(stream->capture, cudaErrorStreamCaptureUnsupported, "cudaStreamAddCallback");
  }
  return give(stream, "callback", Kind::copy, [=] { function(handle, cudaSuccess, data); });
}

// ---- Events ------------------------------------------------------------------------------------

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return create_event(event, cudaEventDefault);
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return create_event(event, flags);
}

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  const Lock lock;
  Event* const event = event_of(handle);
  if (!event) return fail(cudaErrorInvalidResourceHandle, "cudaEventDestroy");
  order().events.erase(event);
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return record(event, stream, cudaEventRecordDefault);
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  return record(event, stream, flags);
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  const Lock lock;
  ++counts().queries;
  Event* const event = event_of(handle);
  if (const cudaError_t error = check_asked(event, "cudaEventQuery")) return error;
  if (!event->is_recorded || event->stream->done >= event->at) return cudaSuccess;
  if (++event->queries < 3) return cudaErrorNotReady;
  // Time passes for who asks again and again.
  return finish(event->stream, event->at) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  const Lock lock;
  ++counts().waits;
  log("cudaEventSynchronize");
  const Event* const event = event_of(handle);
  if (const cudaError_t error = check_asked(event, "cudaEventSynchronize")) return error;
  if (event->is_recorded) wait(event->stream, event->at);
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  const Lock lock;
  for (cudaEvent_t handle : {from, to}) {
    const Event* const event = event_of(handle);
    if (!event || !event->is_recorded || event->flags & cudaEventDisableTiming)
      return fail(cudaErrorInvalidResourceHandle, "cudaEventElapsedTime");
    if (event->stream && event->stream->done < event->at) return cudaErrorNotReady;
  }
  *milliseconds = 0;  // nothing here takes a GPU's time
  return cudaSuccess;
}
}
