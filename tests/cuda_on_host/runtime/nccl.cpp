// SPDX-License-Identifier: BSD-3-Clause
// NCCL for a world of one process, where each collective is a copy.
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstring>

#include "cuda_on_host/stand_in.h"

namespace {

struct Communicator {
  int size, rank;
};

size_t bytes_of(ncclDataType_t type) {
  switch (type) {
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
    default:
      return 1;
  }
}

ncclResult_t make(ncclComm_t* result, int size, int rank) {
  if (size != 1) return ncclInvalidArgument;
  *result = reinterpret_cast<ncclComm_t>(new Communicator{size, rank});
  return ncclSuccess;
}

ncclResult_t copy(const char* name, const void* from, void* to, size_t count, ncclDataType_t type,
                  cudaStream_t stream) {
  if (stand_in_launch(name, stream)) return ncclUnhandledCudaError;
  if (from == to) return ncclSuccess;
  struct Copy {
    const void* from;
    void* to;
    size_t size;
  };
  stand_in_submit(
      stream,
      [](void* data) {
        const Copy& c = *static_cast<Copy*>(data);
        std::memcpy(stand_in_alias(c.to), stand_in_alias(c.from), c.size);
      },
      new Copy{from, to, count * bytes_of(type)},
      [](void* data) { delete static_cast<Copy*>(data); });
  return ncclSuccess;
}

}  // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  *id = {};
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t result) {
  return result == ncclSuccess ? "no error" : "an error of the stand-in for NCCL";
}
const char* ncclGetLastError(ncclComm_t) {
  return "worlds of one process only";
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId, int rank) {
  return make(comm, size, rank);
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId, int rank,
                                    ncclConfig_t*) {
  return make(comm, size, rank);
}
ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int size, int rank, int, ncclUniqueId*,
                                      ncclConfig_t*) {
  return make(comm, size, rank);
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  delete reinterpret_cast<Communicator*>(comm);
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  return ncclCommDestroy(comm);
}
ncclResult_t ncclCommFinalize(ncclComm_t) {
  return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
  *error = ncclSuccess;
  return ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t comm, int* size) {
  *size = reinterpret_cast<const Communicator*>(comm)->size;
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  *rank = reinterpret_cast<const Communicator*>(comm)->rank;
  return ncclSuccess;
}
ncclResult_t ncclGroupStart() {
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  return ncclSuccess;
}
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t*, void*, ncclDataType_t, ncclScalarResidence_t,
                                      ncclComm_t) {
  return ncclInvalidUsage;  // would have to scale
}

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type,
                           ncclRedOp_t, ncclComm_t, cudaStream_t stream) {
  return copy("ncclAllReduce", from, to, count, type, stream);
}
ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int,
                           ncclComm_t, cudaStream_t stream) {
  return copy("ncclBroadcast", from, to, count, type, stream);
}
ncclResult_t ncclBcast(void* buffer, size_t count, ncclDataType_t type, int, ncclComm_t,
                       cudaStream_t stream) {
  return copy("ncclBcast", buffer, buffer, count, type, stream);
}
ncclResult_t ncclReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t,
                        int, ncclComm_t, cudaStream_t stream) {
  return copy("ncclReduce", from, to, count, type, stream);
}
ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type,
                           ncclComm_t, cudaStream_t stream) {
  return copy("ncclAllGather", from, to, count, type, stream);
}
ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type,
                               ncclRedOp_t, ncclComm_t, cudaStream_t stream) {
  return copy("ncclReduceScatter", from, to, count, type, stream);
}
}
