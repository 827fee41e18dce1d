// SPDX-License-Identifier: BSD-3-Clause
// The process's state, its log and its errors.
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "state.h"

namespace stand_in {

namespace {

// Never destroyed: LibTorch calls until the process's very end.
template <class T>
T& immortal() {
  static T* const value = new T();
  return *value;
}

struct Logs {
  bool keeps_launches = false;
  std::string launches;
};

thread_local int device_of_thread = 0;
thread_local int locks_of_thread = 0;
thread_local cudaError_t last_error = cudaSuccess;
bool in_use[max_devices];

struct Named {
  cudaError_t error;
  const char* name;
  const char* text;
};
#define NAMED(error, text) \
  { error, #error, text }
const Named errors[] = {
    NAMED(cudaSuccess, "no error"),
    NAMED(cudaErrorInvalidValue, "invalid argument"),
    NAMED(cudaErrorMemoryAllocation, "out of memory"),
    NAMED(cudaErrorInvalidConfiguration, "invalid configuration argument"),
    NAMED(cudaErrorMissingConfiguration, "__global__ function call is not configured"),
    NAMED(cudaErrorInvalidDeviceFunction, "invalid device function"),
    NAMED(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    NAMED(cudaErrorInvalidDevice, "invalid device ordinal"),
    NAMED(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    NAMED(cudaErrorIllegalState, "the operation cannot be performed in the present state"),
    NAMED(cudaErrorSymbolNotFound, "named symbol not found"),
    NAMED(cudaErrorNotReady, "device not ready"),
    NAMED(cudaErrorNotSupported, "operation not supported"),
    NAMED(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"),
    NAMED(cudaErrorStreamCaptureInvalidated,
          "operation failed due to a previous error during capture"),
    NAMED(cudaErrorStreamCaptureMerge,
          "operation would result in a merge of separate capture sequences"),
    NAMED(cudaErrorStreamCaptureUnmatched, "capture was not ended in the same stream as it began"),
    NAMED(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work"),
    NAMED(cudaErrorStreamCaptureIsolation,
          "dependency created on uncaptured work in another stream"),
    NAMED(cudaErrorStreamCaptureImplicit,
          "operation would make the legacy stream depend on a capturing blocking stream"),
    NAMED(cudaErrorCapturedEvent,
          "operation not permitted on an event last recorded in a capturing stream"),
    NAMED(cudaErrorStreamCaptureWrongThread,
          "attempt to terminate a thread-local capture sequence from another thread"),
};
#undef NAMED

const Named* find(cudaError_t error) {
  for (const Named& e : errors) {
    if (e.error == error) return &e;
  }
  return nullptr;
}

}  // namespace

// A program's parts that the stand-in leaves out must not be chosen: cuDNN's graph API.
__attribute__((constructor)) void choose_parts() {
  setenv("TORCH_CUDNN_V8_API_DISABLED", "1", 1);
}

Lock::Lock() {
  immortal<std::recursive_mutex>().lock();
  ++locks_of_thread;
}
Lock::~Lock() {
  --locks_of_thread;
  immortal<std::recursive_mutex>().unlock();
}
void Lock::pass() {
  auto& mutex = immortal<std::recursive_mutex>();
  for (int i = 0; i < locks_of_thread; ++i) mutex.unlock();
  std::this_thread::sleep_for(std::chrono::microseconds(50));
  for (int i = 0; i < locks_of_thread; ++i) mutex.lock();
}

StandInCounts& counts() {
  return immortal<StandInCounts>();
}

void log(const std::string& line) {
  static FILE* const file = [] {
    const char* const path = std::getenv("CUDA_ON_HOST_LOG");
    return path ? std::fopen(path, "a") : nullptr;
  }();
  if (!file) return;
  std::fprintf(file, "%s\n", line.c_str());
  std::fflush(file);
}

void log_launch(const std::string& name) {
  Logs& logs = immortal<Logs>();
  if (logs.keeps_launches) logs.launches += name + "\n";
}

int current_device() {
  return device_of_thread;
}
void use_device(int device) {
  in_use[device] = true;
}
bool is_in_use(int device) {
  return in_use[device];
}

cudaError_t fail(cudaError_t error, const std::string& where) {
  last_error = error;
  log("error " + std::to_string(error) + " in " + where);
  return error;
}

}  // namespace stand_in

using namespace stand_in;

extern "C" {

void stand_in_counts(StandInCounts* result) {
  const Lock lock;
  *result = counts();
}

void stand_in_log(bool on) {
  const Lock lock;
  immortal<Logs>() = {on, ""};
}

const char* stand_in_launches() {
  const Lock lock;
  thread_local std::string result;
  result = immortal<Logs>().launches;
  return result.c_str();
}

/// What a stub of stubs.cmake says of itself.
void stand_in_missing(const char* name) {
  log(std::string("not in the stand-in: ") + name);
}

bool stand_in_is_in_use(int device) {
  const Lock lock;
  return is_in_use(device);
}

cudaError_t cudaGetDevice(int* device) {
  *device = device_of_thread;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  const Lock lock;
  if (device < 0 || device >= device_count()) return fail(cudaErrorInvalidDevice, "cudaSetDevice");
  device_of_thread = device;
  use_device(device);
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError() {
  return last_error;
}

const char* cudaGetErrorString(cudaError_t error) {
  const Named* const found = find(error);
  return found ? found->text : "unrecognized error code";
}

const char* cudaGetErrorName(cudaError_t error) {
  const Named* const found = find(error);
  return found ? found->name : "unrecognized error code";
}
}
