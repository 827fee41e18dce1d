// SPDX-License-Identifier: BSD-3-Clause
// Each rule of the stand-in for CUDA's runtime is seen to bite.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "cuda_on_host/stand_in.h"

// What nvcc's code calls; no header declares it.
extern "C" void __cudaRegisterFunction(void**, const char*, char*, const char*, int, uint3*, uint3*,
                                       dim3*, dim3*, int*);

namespace {

/// Frees what the test made, and leaves no error behind.
class CudaOnHost : public ::testing::Test {
 protected:
  void SetUp() override {
    cudaSetDevice(0);
    cudaGetLastError();
  }
  void TearDown() override {
    stand_in_late(false);
    for (cudaStream_t stream : streams_) cudaStreamDestroy(stream);
    for (cudaEvent_t event : events_) cudaEventDestroy(event);
    for (void* memory : memory_) cudaFree(memory);
    for (void* memory : pinned_) cudaFreeHost(memory);
    cudaSetDevice(0);
    cudaGetLastError();
  }

  cudaStream_t stream(unsigned flags = cudaStreamNonBlocking) {
    streams_.emplace_back();
    EXPECT_EQ(cudaStreamCreateWithFlags(&streams_.back(), flags), cudaSuccess);
    return streams_.back();
  }
  cudaEvent_t event() {
    events_.emplace_back();
    EXPECT_EQ(cudaEventCreate(&events_.back()), cudaSuccess);
    return events_.back();
  }
  char* on_device(std::size_t size) {
    memory_.emplace_back();
    EXPECT_EQ(cudaMalloc(&memory_.back(), size), cudaSuccess);
    return static_cast<char*>(memory_.back());
  }
  char* pinned(std::size_t size) {
    pinned_.emplace_back();
    EXPECT_EQ(cudaMallocHost(&pinned_.back(), size), cudaSuccess);
    return static_cast<char*>(pinned_.back());
  }

 private:
  std::vector<cudaStream_t> streams_;
  std::vector<cudaEvent_t> events_;
  std::vector<void*> memory_, pinned_;
};

StandInCounts counts() {
  StandInCounts result;
  stand_in_counts(&result);
  return result;
}

/// A kernel by its name, as a library's code registers it.
cudaError_t launch(dim3 grid, dim3 block, std::size_t shared, cudaStream_t stream) {
  static const char function = 0;
  static const bool registered = [] {
    __cudaRegisterFunction(nullptr, &function, nullptr, "_Z4testv", -1, nullptr, nullptr, nullptr,
                           nullptr, nullptr);
    return true;
  }();
  EXPECT_TRUE(registered);
  return cudaLaunchKernel(&function, grid, block, nullptr, shared, stream);
}

// ---- Memory ------------------------------------------------------------------------------------

using CudaOnHostDeathTest = CudaOnHost;
TEST_F(CudaOnHostDeathTest, TheHostMustNotTouchDeviceMemory) {
  const char* const memory = on_device(16);
  EXPECT_EXIT((void)*static_cast<const volatile char*>(memory), ::testing::KilledBySignal(SIGSEGV),
              "");
}

TEST_F(CudaOnHost, NewDeviceMemoryHoldsNaNs) {
  float value = 0;
  EXPECT_EQ(cudaMemcpy(&value, on_device(4), 4, cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_NE(value, value);
}

TEST_F(CudaOnHost, CopiesAndMemsetsStayWithinABlock) {
  char* const memory = on_device(4096);
  std::vector<char> host(8192);
  EXPECT_EQ(cudaMemcpy(memory, host.data(), 4096, cudaMemcpyHostToDevice), cudaSuccess);
  EXPECT_EQ(cudaMemcpy(memory, host.data(), 4097, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(host.data(), memory + 1, 4096, cudaMemcpyDeviceToHost),
            cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemset(memory + 4000, 0, 97), cudaErrorInvalidValue);
}

TEST_F(CudaOnHost, ACopySaysFromWhereToWhere) {
  char* const memory = on_device(16);
  char host[16] = {};
  EXPECT_EQ(cudaMemcpy(memory, host, 16, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(host, memory, 16, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(memory, host, 16, cudaMemcpyDefault), cudaSuccess);
}

TEST_F(CudaOnHost, FreesOnlyWhatWasAllocatedAndOnce) {
  void* memory = nullptr;
  ASSERT_EQ(cudaMalloc(&memory, 16), cudaSuccess);
  EXPECT_EQ(cudaFree(static_cast<char*>(memory) + 1), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFree(memory), cudaSuccess);
  EXPECT_EQ(cudaFree(memory), cudaErrorInvalidValue);
}

TEST_F(CudaOnHost, ADeviceRunsOutOfMemory) {
  std::size_t free = 0, total = 0;
  ASSERT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  void* memory = nullptr;
  EXPECT_EQ(cudaMalloc(&memory, total + 1), cudaErrorMemoryAllocation);
  EXPECT_EQ(memory, nullptr);
}

TEST_F(CudaOnHost, KnowsPinnedMemory) {
  cudaPointerAttributes found;
  char* const memory = pinned(16);
  ASSERT_EQ(cudaPointerGetAttributes(&found, memory + 3), cudaSuccess);
  EXPECT_EQ(found.type, cudaMemoryTypeHost);
  char pageable = 0;
  ASSERT_EQ(cudaPointerGetAttributes(&found, &pageable), cudaSuccess);
  EXPECT_EQ(found.type, cudaMemoryTypeUnregistered);
  cudaSetDevice(1);
  ASSERT_EQ(cudaPointerGetAttributes(&found, on_device(1)), cudaSuccess);
  EXPECT_EQ(std::pair(found.type, found.device), std::pair(cudaMemoryTypeDevice, 1));
}

// ---- Launches ----------------------------------------------------------------------------------

TEST_F(CudaOnHost, KernelsKeepToTheLaunchLimits) {
  EXPECT_EQ(launch(1, 1024, 0, nullptr), cudaSuccess);
  EXPECT_EQ(launch(1, 1025, 0, nullptr), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch(1, dim3(2, 2, 65), 0, nullptr), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch(0, 1, 0, nullptr), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch(dim3(1, 65536), 1, 0, nullptr), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch(0x7FFFFFFF, 1, 0, nullptr), cudaSuccess);
  EXPECT_EQ(launch(1, 1, 48 << 10, nullptr), cudaSuccess);
  EXPECT_EQ(launch(1, 1, (48 << 10) + 1, nullptr), cudaErrorInvalidValue);
}

TEST_F(CudaOnHost, AnUnknownKernelIsNotLaunched) {
  const char unknown = 0;
  EXPECT_EQ(cudaLaunchKernel(&unknown, 1, 1, nullptr, 0, nullptr), cudaErrorInvalidDeviceFunction);
}

TEST_F(CudaOnHost, AKernelTakesAStreamOfItsDevice) {
  const cudaStream_t of_0 = stream();
  EXPECT_EQ(launch(1, 1, 0, of_0), cudaSuccess);
  cudaSetDevice(1);
  EXPECT_EQ(launch(1, 1, 0, of_0), cudaErrorInvalidResourceHandle);
}

TEST_F(CudaOnHost, CountsAndNamesLaunches) {
  const StandInCounts before = counts();
  stand_in_log(true);
  launch(1, 1, 0, nullptr);
  stand_in_launch("a library's", nullptr);
  EXPECT_EQ(counts().kernels - before.kernels, 2U);
  EXPECT_STREQ(stand_in_launches(), "test()\na library's\n");
  stand_in_log(false);
  EXPECT_STREQ(stand_in_launches(), "");
}

TEST_F(CudaOnHost, AnErrorIsStoredUntilItIsRead) {
  EXPECT_EQ(launch(0, 1, 0, nullptr), cudaErrorInvalidConfiguration);
  EXPECT_EQ(cudaPeekAtLastError(), cudaErrorInvalidConfiguration);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidConfiguration);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST_F(CudaOnHost, ThereAreTwoDevices) {
  int count = 0;
  ASSERT_EQ(cudaGetDeviceCount(&count), cudaSuccess);
  EXPECT_EQ(count, 2);
  EXPECT_EQ(cudaSetDevice(2), cudaErrorInvalidDevice);
}

// ---- Streams and events ------------------------------------------------------------------------

TEST_F(CudaOnHost, AnEventIsRecordedInAStreamOfItsDevice) {
  const cudaEvent_t of_0 = event();
  cudaSetDevice(1);
  EXPECT_EQ(cudaEventRecord(of_0, stream()), cudaErrorInvalidResourceHandle);
}

TEST_F(CudaOnHost, HandlesThatAreGoneAreNotTaken) {
  cudaStream_t gone = nullptr;
  ASSERT_EQ(cudaStreamCreate(&gone), cudaSuccess);
  ASSERT_EQ(cudaStreamDestroy(gone), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(gone), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(launch(1, 1, 0, gone), cudaErrorInvalidResourceHandle);
  cudaEvent_t event = nullptr;
  ASSERT_EQ(cudaEventCreate(&event), cudaSuccess);
  ASSERT_EQ(cudaEventDestroy(event), cudaSuccess);
  EXPECT_EQ(cudaEventRecord(event, nullptr), cudaErrorInvalidResourceHandle);
}

/// A pinned byte on the host that a stream copies from the device, late.
struct LateCopy {
  char *device, *host;
  cudaStream_t stream;

  void start(char value) const {
    cudaMemset(device, value, 1);
    cudaDeviceSynchronize();
    cudaMemcpyAsync(host, device, 1, cudaMemcpyDeviceToHost, stream);
  }
};

TEST_F(CudaOnHost, LateWorkIsDoneWhenTheHostWaits) {
  stand_in_late(true);
  const LateCopy copy{on_device(1), pinned(1), stream()};
  copy.start(1);
  EXPECT_EQ(*copy.host, 0) << "read too early";
  EXPECT_EQ(cudaStreamQuery(copy.stream), cudaErrorNotReady);
  cudaStreamSynchronize(copy.stream);
  EXPECT_EQ(*copy.host, 1);
  copy.start(2);
  cudaDeviceSynchronize();
  EXPECT_EQ(*copy.host, 2);
  copy.start(3);
  const cudaEvent_t after = event();
  cudaEventRecord(after, copy.stream);
  EXPECT_EQ(cudaEventQuery(after), cudaErrorNotReady);
  cudaEventSynchronize(after);
  EXPECT_EQ(*copy.host, 3);
}

TEST_F(CudaOnHost, AStreamWithoutAnEventDoesNotSeeAnothersLateWork) {
  stand_in_late(true);
  for (const bool ordered : {false, true}) {
    char* const memory = on_device(1);
    cudaMemset(memory, 1, 1);
    cudaDeviceSynchronize();
    const cudaStream_t writer = stream();
    const LateCopy copy{memory, pinned(1), stream()};
    cudaMemsetAsync(memory, 2, 1, writer);
    if (ordered) {
      const cudaEvent_t written = event();
      cudaEventRecord(written, writer);
      cudaStreamWaitEvent(copy.stream, written, 0);
    }
    cudaMemcpyAsync(copy.host, memory, 1, cudaMemcpyDeviceToHost, copy.stream);
    cudaStreamSynchronize(copy.stream);
    EXPECT_EQ(*copy.host, ordered ? 2 : 1);
  }
}

TEST_F(CudaOnHost, TheLegacyStreamWaitsForBlockingStreamsOnly) {
  stand_in_late(true);
  for (const unsigned flags : {cudaStreamDefault, cudaStreamNonBlocking}) {
    char* const memory = on_device(1);
    cudaMemset(memory, 1, 1);
    cudaDeviceSynchronize();
    cudaMemsetAsync(memory, 2, 1, stream(flags));
    char host = 0;
    cudaMemcpy(&host, memory, 1, cudaMemcpyDeviceToHost);
    EXPECT_EQ(host, flags == cudaStreamDefault ? 2 : 1);
  }
}

TEST_F(CudaOnHost, PageableMemoryIsReadBeforeACopyReturnsAndPinnedMemoryLater) {
  stand_in_late(true);
  const auto copied = [&](char* host) {
    char* const memory = on_device(1);
    const cudaStream_t copies = stream();
    *host = 1;
    cudaMemcpyAsync(memory, host, 1, cudaMemcpyHostToDevice, copies);
    *host = 2;
    cudaStreamSynchronize(copies);
    char result = 0;
    cudaMemcpy(&result, memory, 1, cudaMemcpyDeviceToHost);
    return result;
  };
  char pageable = 0;
  EXPECT_EQ(copied(&pageable), 1);
  EXPECT_EQ(copied(pinned(1)), 2);
}

// ---- Captures ----------------------------------------------------------------------------------

struct GraphOf {
  cudaGraph_t graph = nullptr;
  ~GraphOf() {
    if (graph) cudaGraphDestroy(graph);
  }
};

cudaError_t begin(cudaStream_t stream,
                  cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal) {
  return cudaStreamBeginCapture(stream, mode);
}
cudaError_t end(cudaStream_t stream) {
  GraphOf result;
  const cudaError_t error = cudaStreamEndCapture(stream, &result.graph);
  EXPECT_EQ(result.graph != nullptr, error == cudaSuccess);
  return error;
}

TEST_F(CudaOnHost, AGraphDoesAgainWhatWasCaptured) {
  const cudaStream_t s = stream();
  char* const memory = on_device(2);
  cudaMemset(memory, 1, 1);
  cudaMemset(memory + 1, 2, 1);
  ASSERT_EQ(begin(s), cudaSuccess);
  cudaMemcpyAsync(memory, memory + 1, 1, cudaMemcpyDeviceToDevice, s);
  cudaMemsetAsync(memory + 1, 3, 1, s);
  launch(1, 1, 0, s);
  GraphOf captured;
  ASSERT_EQ(cudaStreamEndCapture(s, &captured.graph), cudaSuccess);
  cudaGraphExec_t program = nullptr;
  ASSERT_EQ(cudaGraphInstantiate(&program, captured.graph, 0), cudaSuccess);
  char host[2] = {};
  const auto contents = [&] {
    cudaMemcpy(host, memory, 2, cudaMemcpyDeviceToHost);
    return std::pair<int, int>(host[0], host[1]);
  };
  EXPECT_EQ(contents(), std::pair(1, 2)) << "done in the capture";
  const StandInCounts before = counts();
  cudaGraphLaunch(program, s);
  EXPECT_EQ(contents(), std::pair(2, 3));
  cudaGraphLaunch(program, s);
  EXPECT_EQ(contents(), std::pair(3, 3));
  EXPECT_EQ(counts().graph_launches - before.graph_launches, 2U);
  EXPECT_EQ(counts().replayed_nodes - before.replayed_nodes, 6U);
  EXPECT_EQ(counts().kernels, before.kernels);
  EXPECT_EQ(cudaGraphExecDestroy(program), cudaSuccess);
}

TEST_F(CudaOnHost, ACaptureRefusesWhatWaits) {
  const cudaStream_t s = stream();
  const auto refuses = [&](auto call, cudaError_t expected) {
    ASSERT_EQ(begin(s), cudaSuccess);
    launch(1, 1, 0, s);
    EXPECT_EQ(call(), expected);
    EXPECT_EQ(launch(1, 1, 0, s), cudaErrorStreamCaptureInvalidated);
    EXPECT_EQ(end(s), cudaErrorStreamCaptureInvalidated);
    EXPECT_EQ(end(s), cudaErrorIllegalState);
  };
  const cudaError_t unsupported = cudaErrorStreamCaptureUnsupported;
  refuses([&] { return cudaStreamSynchronize(s); }, unsupported);
  refuses([&] { return cudaStreamQuery(s); }, unsupported);
  refuses([&] { return cudaDeviceSynchronize(); }, unsupported);
  const cudaEvent_t e = event();
  refuses(
      [&] {
        cudaEventRecord(e, s);
        return cudaEventSynchronize(e);
      },
      cudaErrorCapturedEvent);
  void* memory = nullptr;
  refuses([&] { return cudaMalloc(&memory, 16); }, unsupported);
  refuses([&] { return cudaMallocHost(&memory, 16); }, unsupported);
  char* const device = on_device(1);
  char host = 0;
  refuses([&] { return cudaMemcpy(&host, device, 1, cudaMemcpyDeviceToHost); }, unsupported);
}

TEST_F(CudaOnHost, OneCaptureForbidsUnsafeCallsToThreadsByTheirModes) {
  const cudaStream_t s = stream();
  const auto elsewhere = [&](cudaStreamCaptureMode mode, cudaStreamCaptureMode of_thread) {
    EXPECT_EQ(begin(s, mode), cudaSuccess);
    cudaError_t error = cudaSuccess;
    std::thread([&] {
      cudaThreadExchangeStreamCaptureMode(&of_thread);
      void* memory = nullptr;
      error = cudaMallocHost(&memory, 16);
      if (!error) cudaFreeHost(memory);
    }).join();
    end(s);
    return error;
  };
  const auto global = cudaStreamCaptureModeGlobal, local = cudaStreamCaptureModeThreadLocal,
             relaxed = cudaStreamCaptureModeRelaxed;
  EXPECT_EQ(elsewhere(global, global), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(elsewhere(global, local), cudaSuccess);
  EXPECT_EQ(elsewhere(local, global), cudaSuccess);
  EXPECT_EQ(elsewhere(relaxed, global), cudaSuccess);
  ASSERT_EQ(begin(s, relaxed), cudaSuccess);
  on_device(16);  // this thread's own
  EXPECT_EQ(end(s), cudaSuccess);
}

TEST_F(CudaOnHost, AnotherStreamJoinsACaptureByEventsAndMustComeBack) {
  const cudaStream_t s = stream(), side = stream();
  for (const bool comes_back : {false, true}) {
    const cudaEvent_t fork = event(), join = event();
    ASSERT_EQ(begin(s), cudaSuccess);
    launch(1, 1, 0, s);
    cudaEventRecord(fork, s);
    ASSERT_EQ(cudaStreamWaitEvent(side, fork, 0), cudaSuccess);
    EXPECT_TRUE(stand_in_captures(side));
    launch(1, 1, 0, side);
    if (comes_back) {
      cudaEventRecord(join, side);
      cudaStreamWaitEvent(s, join, 0);
    }
    EXPECT_EQ(end(s), comes_back ? cudaSuccess : cudaErrorStreamCaptureUnjoined);
    EXPECT_FALSE(stand_in_captures(side));
    EXPECT_EQ(cudaStreamWaitEvent(side, fork, 0), cudaErrorCapturedEvent) << "its capture is over";
  }
}

TEST_F(CudaOnHost, ACaptureDependsOnNothingOutside) {
  const cudaStream_t s = stream();
  const cudaEvent_t outside = event();
  cudaEventRecord(outside, nullptr);
  ASSERT_EQ(begin(s), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(s, outside, 0), cudaErrorStreamCaptureIsolation);
  EXPECT_EQ(end(s), cudaErrorStreamCaptureInvalidated);
}

TEST_F(CudaOnHost, TheLegacyStreamWouldBreakACaptureOfABlockingStream) {
  const cudaStream_t blocking = stream(cudaStreamDefault), other = stream();
  ASSERT_EQ(begin(blocking), cudaSuccess);
  EXPECT_EQ(launch(1, 1, 0, nullptr), cudaErrorStreamCaptureImplicit);
  EXPECT_EQ(end(blocking), cudaErrorStreamCaptureInvalidated);
  ASSERT_EQ(begin(other), cudaSuccess);
  EXPECT_EQ(launch(1, 1, 0, nullptr), cudaSuccess);
  EXPECT_EQ(end(other), cudaSuccess);
}

TEST_F(CudaOnHost, TwoCapturesDoNotMerge) {
  const cudaStream_t a = stream(), b = stream();
  const cudaEvent_t of_a = event();
  ASSERT_EQ(begin(a), cudaSuccess);
  ASSERT_EQ(begin(b), cudaSuccess);
  launch(1, 1, 0, a);
  cudaEventRecord(of_a, a);
  EXPECT_EQ(cudaStreamWaitEvent(b, of_a, 0), cudaErrorStreamCaptureMerge);
  EXPECT_EQ(end(a), cudaErrorStreamCaptureInvalidated);
  EXPECT_EQ(end(b), cudaErrorStreamCaptureInvalidated);
}

TEST_F(CudaOnHost, ACaptureEndsWhereAndByWhomItBegan) {
  const cudaStream_t s = stream(), side = stream();
  EXPECT_EQ(begin(nullptr), cudaErrorStreamCaptureUnsupported) << "the legacy stream";
  EXPECT_EQ(end(s), cudaErrorIllegalState);
  ASSERT_EQ(begin(s), cudaSuccess);
  EXPECT_EQ(begin(s), cudaErrorIllegalState);
  const cudaEvent_t fork = event();
  cudaEventRecord(fork, s);
  cudaStreamWaitEvent(side, fork, 0);
  EXPECT_EQ(end(side), cudaErrorStreamCaptureUnmatched);
  EXPECT_EQ(end(s), cudaErrorStreamCaptureInvalidated);
  ASSERT_EQ(begin(s), cudaSuccess);
  std::thread([&] { EXPECT_EQ(end(s), cudaErrorStreamCaptureWrongThread); }).join();
  EXPECT_EQ(end(s), cudaErrorStreamCaptureInvalidated);
}

}  // namespace
