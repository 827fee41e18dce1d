// SPDX-License-Identifier: BSD-3-Clause
// NCCL between processes of this machine; in a world of one, each collective is a copy.
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "cuda_on_host/stand_in.h"
#include "nccl_world.h"

using namespace stand_in;

namespace {

struct Communicator {
  int size, rank, device;
  std::shared_ptr<World> world;  ///< of several processes
};

Communicator& of(ncclComm_t comm) {
  return *reinterpret_cast<Communicator*>(comm);
}

ncclResult_t make(ncclComm_t* result, int size, const ncclUniqueId& id, int rank) {
  int device = 0;
  cudaGetDevice(&device);
  std::shared_ptr<World> world;
  ncclResult_t error = ncclSuccess;
  if (size > 1) world = World::join(id, size, rank, device, error);
  if (error == ncclSuccess) {
    *result = reinterpret_cast<ncclComm_t>(new Communicator{size, rank, device, std::move(world)});
  }
  return error;
}

/// What a stream is given.
struct Exchange {
  std::shared_ptr<World> world;
  std::uint64_t number;
  Part part;
  bool has_given = false;
};

ncclResult_t run(const char* name, Part part, const Communicator& comm, cudaStream_t stream) {
  if (comm.world && stand_in_captures(stream)) return ncclInvalidUsage;  // is left out
  if (stand_in_launch(name, stream)) return ncclUnhandledCudaError;
  part.from = stand_in_alias(part.from);
  part.to = stand_in_alias(part.to);
  for (std::vector<Transfer>* transfers : {&part.sends, &part.receives}) {
    for (Transfer& one : *transfers) one.memory = stand_in_alias(one.memory);
  }
  const auto end = [](void* data) { delete static_cast<Exchange*>(data); };
  if (!comm.world) {
    if (!part.sends.empty()) part.from = part.sends[0].memory, part.to = part.receives[0].memory;
    if (part.from == part.to) return ncclSuccess;
    stand_in_submit(
        stream,
        [](void* data) {
          const Part& only = static_cast<Exchange*>(data)->part;
          std::memcpy(only.to, only.from,
                      only.sends.empty() ? only.shape.count * bytes_of(only.shape.type)
                                         : only.sends[0].bytes);
        },
        new Exchange{nullptr, 0, std::move(part)}, end);
    return ncclSuccess;
  }
  stand_in_submit_when(
      stream,
      [](void* data) {
        auto& one = *static_cast<Exchange*>(data);
        return one.world->exchange(one.number, one.has_given, one.part);
      },
      [](void* data) {
        auto& one = *static_cast<Exchange*>(data);
        one.world->receive(one.number, one.part);
      },
      new Exchange{comm.world, comm.world->next_exchange(), std::move(part)}, end);
  return ncclSuccess;
}

ncclResult_t run(const char* name, const Shape& shape, const void* from, void* to, ncclComm_t comm,
                 cudaStream_t stream) {
  return run(name, {shape, from, to}, of(comm), stream);
}

// Sends and receives of a group are one exchange, in which all processes of the communicator take
// part, as c10d's calls have it.
struct Group {
  int depth = 0;
  Communicator* comm = nullptr;
  cudaStream_t stream = nullptr;
  std::vector<Transfer> sends, receives;
};
thread_local Group group;

ncclResult_t end_group() {
  if (--group.depth > 0 || !group.comm) return ncclSuccess;
  const Group done = std::exchange(group, {});
  return run(
      "ncclSendRecv",
      {{Collective::pairs, ncclInt8, ncclSum, 0, 0}, nullptr, nullptr, done.sends, done.receives},
      *done.comm, done.stream);
}

ncclResult_t add(bool sends, void* memory, size_t count, ncclDataType_t type, int peer,
                 ncclComm_t comm, cudaStream_t stream) {
  if (peer < 0 || peer >= of(comm).size) return ncclInvalidArgument;
  if (group.comm && group.comm != &of(comm)) return ncclInvalidUsage;  // is left out
  ++group.depth;
  group.comm = &of(comm);
  group.stream = stream;
  (sends ? group.sends : group.receives).push_back({peer, memory, count * bytes_of(type)});
  return end_group();
}

}  // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  *id = World::new_id();
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t result) {
  return result == ncclSuccess        ? "no error"
         : result == ncclInvalidUsage ? "invalid usage"
                                      : "an error of the stand-in for NCCL";
}
const char* ncclGetLastError(ncclComm_t) {
  return "two processes with one device, other arguments than another process's, or a process "
         "that did not come";
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) {
  return make(comm, size, id, rank);
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t*) {
  return make(comm, size, id, rank);
}
ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int size, int rank, int, ncclUniqueId* ids,
                                      ncclConfig_t*) {
  return make(comm, size, ids[0], rank);
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  delete &of(comm);
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (!comm) return ncclSuccess;
  if (of(comm).world) of(comm).world->abort();
  return ncclCommDestroy(comm);
}
ncclResult_t ncclCommFinalize(ncclComm_t) {
  return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  if (!comm) return ncclInvalidArgument;
  *error = of(comm).world ? of(comm).world->error() : ncclSuccess;
  return ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t comm, int* size) {
  *size = of(comm).size;
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  *rank = of(comm).rank;
  return ncclSuccess;
}
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  *device = of(comm).device;
  return ncclSuccess;
}
ncclResult_t ncclGroupStart() {
  ++group.depth;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  return end_group();
}
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t*, void*, ncclDataType_t, ncclScalarResidence_t,
                                      ncclComm_t) {
  return ncclInvalidUsage;  // would have to scale
}

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type,
                           ncclRedOp_t reduction, ncclComm_t comm, cudaStream_t stream) {
  return run("ncclAllReduce", {Collective::all_reduce, type, reduction, 0, count}, from, to, comm,
             stream);
}
ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  return run("ncclBroadcast", {Collective::broadcast, type, ncclSum, root, count}, from, to, comm,
             stream);
}
ncclResult_t ncclBcast(void* buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                       cudaStream_t stream) {
  return run("ncclBcast", {Collective::broadcast, type, ncclSum, root, count}, buffer, buffer, comm,
             stream);
}
ncclResult_t ncclReduce(const void* from, void* to, size_t count, ncclDataType_t type,
                        ncclRedOp_t reduction, int root, ncclComm_t comm, cudaStream_t stream) {
  return run("ncclReduce", {Collective::reduce, type, reduction, root, count}, from, to, comm,
             stream);
}
ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  return run("ncclAllGather", {Collective::all_gather, type, ncclSum, 0, count}, from, to, comm,
             stream);
}
ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type,
                               ncclRedOp_t reduction, ncclComm_t comm, cudaStream_t stream) {
  return run("ncclReduceScatter", {Collective::reduce_scatter, type, reduction, 0, count}, from, to,
             comm, stream);
}
ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return add(true, const_cast<void*>(from), count, type, peer, comm, stream);
}
ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return add(false, to, count, type, peer, comm, stream);
}
ncclResult_t ncclAlltoAll(const void* from, void* to, size_t count, ncclDataType_t type,
                          ncclComm_t comm, cudaStream_t stream) {
  ncclGroupStart();
  for (int peer = 0; peer < of(comm).size; ++peer) {
    const size_t offset = static_cast<size_t>(peer) * count * bytes_of(type);
    ncclSend(static_cast<const char*>(from) + offset, count, type, peer, comm, stream);
    ncclRecv(static_cast<char*>(to) + offset, count, type, peer, comm, stream);
  }
  return ncclGroupEnd();
}
}
