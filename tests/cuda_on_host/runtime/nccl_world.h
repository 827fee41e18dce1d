// SPDX-License-Identifier: BSD-3-Clause
// What the processes of an NCCL communicator share.
#pragma once

#include <nccl.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace stand_in {

enum class Collective : int { all_reduce, broadcast, reduce, all_gather, reduce_scatter, pairs };

/// What all processes have to agree on.
struct Shape {
  Collective collective;
  ncclDataType_t type;
  ncclRedOp_t reduction;
  int root;
  std::size_t count;
  bool operator==(const Shape&) const = default;
};

std::size_t bytes_of(ncclDataType_t type);

/// Of Collective::pairs: what goes to a process, or comes from it.
struct Transfer {
  int process;
  void* memory;
  std::size_t bytes;
};

/// One process's part in an exchange. Memory: where the runtime may touch it.
struct Part {
  Shape shape;
  const void* from;
  void* to;
  std::vector<Transfer> sends = {}, receives = {};  ///< instead of those, for pairs
};

// Note [Exchanges between processes]
// Each process has a file in memory that the others map: a page that says what it has exchanged,
// and the bytes that it gives. A communicator's exchanges are numbered. A process gives its bytes
// for one when its stream comes to it and all have read those of the one before; it goes on when
// all have given theirs. So a process that never comes keeps the others waiting, as with NCCL.

/// A communicator of several processes.
class World {
 public:
  /// nullptr, with `error`, if the others do not come within a minute or have the same device.
  static std::shared_ptr<World> join(const ncclUniqueId& id, int size, int rank, int device,
                                     ncclResult_t& error);
  static ncclUniqueId new_id();
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  int size() const { return static_cast<int>(members_.size()); }
  int rank() const { return rank_; }
  std::uint64_t next_exchange() { return exchanges_++; }
  /// Whatever waits goes on, with values that mean nothing.
  void abort() { is_aborted_ = true; }
  ncclResult_t error() const { return error_; }

  /// Gives this process's bytes if it is time to, and says whether all have given theirs.
  bool exchange(std::uint64_t number, bool& has_given, const Part& part);
  /// Reads what all have given.
  void receive(std::uint64_t number, const Part& part);

 private:
  static constexpr int max_processes = 64;
  struct Page {
    std::atomic<std::uint64_t> given, read;  ///< how many exchanges
    Shape shape;
    std::size_t begin[max_processes + 1];  ///< of pairs: the place of each process's bytes
  };
  static constexpr std::size_t page_bytes = 4096;
  static constexpr std::size_t file_bytes = std::size_t{2} << 30;  // never all used

  void give(const Part& part);
  void receive_pairs(const Part& part);

  World(int size, int rank) : members_(static_cast<std::size_t>(size)), rank_(rank) {}
  Page& page(int rank) const {
    return *static_cast<Page*>(members_[static_cast<std::size_t>(rank)]);
  }
  char* bytes(int rank) const {
    return static_cast<char*>(members_[static_cast<std::size_t>(rank)]) + page_bytes;
  }

  std::vector<void*> members_;
  int rank_;
  std::uint64_t exchanges_ = 0;
  std::atomic<bool> is_aborted_ = false;
  std::atomic<ncclResult_t> error_ = ncclSuccess;
};

}  // namespace stand_in
