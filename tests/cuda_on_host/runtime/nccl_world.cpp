// SPDX-License-Identifier: BSD-3-Clause
#include "nccl_world.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>

namespace stand_in {

namespace {

constexpr int most_processes = 64;

/// Where the processes of a communicator meet. Its first bytes are an id's.
struct Meeting {
  struct Member {
    pid_t process;
    int file, device;
  };
  Member members[most_processes];
  std::atomic<int> came, mapped;
};

/// In the bytes of an id: whose file the meeting is.
struct Place {
  pid_t process;
  int file;
};

void* map(int file, std::size_t size) {
  void* const memory =
      mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  return memory == MAP_FAILED ? nullptr : memory;
}

int new_file(const char* name, std::size_t size) {
  const int file = memfd_create(name, MFD_CLOEXEC);
  return file >= 0 && ftruncate(file, static_cast<off_t>(size)) == 0 ? file : -1;
}

/// A file that another process holds.
int open_file_of(pid_t process, int file) {
  const std::string path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(file);
  return open(path.c_str(), O_RDWR | O_CLOEXEC);
}

void* map_file_of(pid_t process, int file, std::size_t size) {
  const int opened = open_file_of(process, file);
  if (opened < 0) return nullptr;
  void* const memory = map(opened, size);
  close(opened);
  return memory;
}

template <class Done>
bool wait_for(const Done& done) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (!done()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

template <class T>
T combine(T a, T b, ncclRedOp_t reduction) {
  switch (reduction) {
    case ncclProd:
      return static_cast<T>(a * b);
    case ncclMax:
      return std::max(a, b);
    case ncclMin:
      return std::min(a, b);
    default:
      return static_cast<T>(a + b);
  }
}

/// A 16-bit type, whose sums are rounded one by one.
template <class T, float (*widen)(T), T (*round)(float)>
struct Narrow {
  T value;
  friend Narrow operator+(Narrow a, Narrow b) { return {round(widen(a.value) + widen(b.value))}; }
  friend Narrow operator*(Narrow a, Narrow b) { return {round(widen(a.value) * widen(b.value))}; }
  friend Narrow operator/(Narrow a, int by) {
    return {round(widen(a.value) / static_cast<float>(by))};
  }
  friend bool operator<(Narrow a, Narrow b) { return widen(a.value) < widen(b.value); }
};
using Half = Narrow<__half, &__half2float, &__float2half>;
using BFloat16 = Narrow<__nv_bfloat16, &__bfloat162float, &__float2bfloat16>;

/// to[i]: the `given[rank][i]` of all ranks, combined in their order.
template <class T>
void reduce(const std::vector<const char*>& given, std::size_t count, ncclRedOp_t reduction,
            char* to) {
  const auto at = [](const char* from, std::size_t i) {
    T value;
    std::memcpy(&value, from + i * sizeof(T), sizeof(T));
    return value;
  };
  for (std::size_t i = 0; i < count; ++i) {
    T result = at(given[0], i);
    for (std::size_t rank = 1; rank < given.size(); ++rank)
      result = combine(result, at(given[rank], i), reduction);
    if (reduction == ncclAvg) result = static_cast<T>(result / static_cast<int>(given.size()));
    std::memcpy(to + i * sizeof(T), &result, sizeof(T));
  }
}

void reduce(const std::vector<const char*>& given, std::size_t count, ncclDataType_t type,
            ncclRedOp_t reduction, char* to) {
  switch (type) {
    case ncclInt8:
      return reduce<std::int8_t>(given, count, reduction, to);
    case ncclUint8:
      return reduce<std::uint8_t>(given, count, reduction, to);
    case ncclInt32:
      return reduce<std::int32_t>(given, count, reduction, to);
    case ncclUint32:
      return reduce<std::uint32_t>(given, count, reduction, to);
    case ncclInt64:
      return reduce<std::int64_t>(given, count, reduction, to);
    case ncclUint64:
      return reduce<std::uint64_t>(given, count, reduction, to);
    case ncclFloat16:
      return reduce<Half>(given, count, reduction, to);
    case ncclBfloat16:
      return reduce<BFloat16>(given, count, reduction, to);
    case ncclFloat32:
      return reduce<float>(given, count, reduction, to);
    case ncclFloat64:
      return reduce<double>(given, count, reduction, to);
    default:
      std::fprintf(stderr, "stand-in for NCCL: sums of data type %d are left out\n", type);
      std::abort();
  }
}

}  // namespace

std::size_t bytes_of(ncclDataType_t type) {
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

ncclUniqueId World::new_id() {
  ncclUniqueId id{};
  const Place place{getpid(), new_file("nccl_meeting", sizeof(Meeting))};  // held until the end
  std::memcpy(id.internal, &place, sizeof(place));
  return id;
}

std::shared_ptr<World> World::join(const ncclUniqueId& id, int size, int rank, int device,
                                   ncclResult_t& error) {
  error = ncclInvalidArgument;
  if (size > most_processes || rank < 0 || rank >= size) return nullptr;
  error = ncclSystemError;
  Place place;
  std::memcpy(&place, id.internal, sizeof(place));
  auto* const meeting =
      static_cast<Meeting*>(map_file_of(place.process, place.file, sizeof(Meeting)));
  if (!meeting) return nullptr;
  const std::shared_ptr<World> world(new World(size, rank));
  const int file = new_file("nccl", file_bytes);
  meeting->members[rank] = {getpid(), file, device};
  ++meeting->came;
  bool all = file >= 0 && wait_for([&] { return meeting->came >= size; });
  for (int i = 0; all && i < size; ++i) {
    const Meeting::Member& member = meeting->members[i];
    world->members_[static_cast<std::size_t>(i)] =
        map_file_of(member.process, member.file, file_bytes);
    all = world->members_[static_cast<std::size_t>(i)] != nullptr;
    for (int j = 0; all && j < i; ++j) {
      if (meeting->members[j].device == member.device) error = ncclInvalidUsage;  // as NCCL's
    }
  }
  ++meeting->mapped;
  all = all && wait_for([&] { return meeting->mapped >= size; });
  close(file);
  munmap(meeting, sizeof(Meeting));
  if (!all || error == ncclInvalidUsage) return nullptr;
  error = ncclSuccess;
  return world;
}

World::~World() {
  for (void* const member : members_) {
    if (member) munmap(member, file_bytes);
  }
}

bool World::exchange(std::uint64_t number, bool& has_given, const Part& part) {
  if (is_aborted_ || error_ != ncclSuccess) return true;
  if (!has_given) {
    for (int i = 0; i < size(); ++i) {
      if (page(i).read < number) return false;
    }
    give(part);
    if (error_ != ncclSuccess) return true;
    page(rank_).shape = part.shape;
    page(rank_).given = number + 1;
    has_given = true;
  }
  for (int i = 0; i < size(); ++i) {
    if (page(i).given < number + 1) return false;
  }
  return true;
}

void World::give(const Part& part) {
  const Shape& shape = part.shape;
  std::size_t size_given = 0;
  if (shape.collective == Collective::pairs) {
    for (int process = 0; process < size(); ++process) {
      page(rank_).begin[process] = size_given;
      for (const Transfer& send : part.sends) {
        if (send.process == process) size_given += send.bytes;
      }
    }
    page(rank_).begin[size()] = size_given;
  } else if (shape.collective != Collective::broadcast || shape.root == rank_) {
    size_given = shape.count * bytes_of(shape.type);
    if (shape.collective == Collective::reduce_scatter)
      size_given *= static_cast<std::size_t>(size());
  }
  if (size_given > file_bytes - page_bytes) {
    error_ = ncclInternalError;
    return;
  }
  if (shape.collective != Collective::pairs) {
    if (size_given > 0) std::memcpy(bytes(rank_), part.from, size_given);
    return;
  }
  char* to = bytes(rank_);
  for (int process = 0; process < size(); ++process) {
    for (const Transfer& send : part.sends) {
      if (send.process != process) continue;
      std::memcpy(to, send.memory, send.bytes);
      to += send.bytes;
    }
  }
}

void World::receive_pairs(const Part& part) {
  std::vector<std::size_t> taken(members_.size());
  for (const Transfer& one : part.receives) {
    const Page& giver = page(one.process);
    std::size_t& at = taken[static_cast<std::size_t>(one.process)];
    if (giver.begin[rank_] + at + one.bytes > giver.begin[rank_ + 1]) {
      error_ = ncclInvalidUsage;  // it has sent less
      return;
    }
    std::memcpy(one.memory, bytes(one.process) + giver.begin[rank_] + at, one.bytes);
    at += one.bytes;
  }
}

void World::receive(std::uint64_t number, const Part& part) {
  if (is_aborted_ || error_ != ncclSuccess) return;
  const Shape& shape = part.shape;
  std::vector<const char*> given;
  for (int i = 0; i < size(); ++i) {
    if (!(page(i).shape == shape)) error_ = ncclInvalidUsage;  // NCCL would hang, or worse
    given.push_back(bytes(i));
  }
  const std::size_t each = shape.count * bytes_of(shape.type);
  char* const result = static_cast<char*>(part.to);
  if (error_ == ncclSuccess) {
    switch (shape.collective) {
      case Collective::reduce:
        if (rank_ != shape.root) break;
        [[fallthrough]];
      case Collective::all_reduce:
        reduce(given, shape.count, shape.type, shape.reduction, result);
        break;
      case Collective::broadcast:
        std::memcpy(result, given[static_cast<std::size_t>(shape.root)], each);
        break;
      case Collective::all_gather:
        for (std::size_t i = 0; i < given.size(); ++i)
          std::memcpy(result + i * each, given[i], each);
        break;
      case Collective::reduce_scatter:
        for (const char*& one : given) one += static_cast<std::size_t>(rank_) * each;
        reduce(given, shape.count, shape.type, shape.reduction, result);
        break;
      case Collective::pairs:
        receive_pairs(part);
        break;
    }
  }
  page(rank_).read = number + 1;
}

}  // namespace stand_in
