// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <chrono>
#include <map>
#include <string>
#include <vector>

#include "support/processes.h"
#include "torchamp/distributed/checkpoint.h"
#include "torchamp/distributed/data_parallel.h"
#include "torchamp/distributed/process_group.h"

/// The running test's body in several processes, which meet at a store in this one, as torchrun's
/// do.
class Launch {
 public:
  explicit Launch(int processes, std::map<std::string, std::string> environment = {}) {
    c10d::TCPStoreOptions options;
    options.isServer = true;
    options.waitWorkers = false;
    options.useLibUV = torchamp::detail::store_by_libuv;
    options.masterListenFd = torchamp::detail::loopback_socket(0);
    sockaddr_in address{};
    socklen_t size = sizeof address;
    getsockname(*options.masterListenFd, reinterpret_cast<sockaddr*>(&address), &size);
    options.port = ntohs(address.sin_port);
    store_ = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
    environment.insert({{"TORCHELASTIC_USE_AGENT_STORE", "True"},
                        {"MASTER_ADDR", "127.0.0.1"},
                        {"MASTER_PORT", std::to_string(options.port)},
                        {"WORLD_SIZE", std::to_string(processes)}});
    for (int rank = 0; rank < processes; ++rank) {
      environment["RANK"] = environment["LOCAL_RANK"] = std::to_string(rank);
      ranks_.emplace_back("rank", environment);
    }
  }
  ChildProcess& rank(int number) { return ranks_[static_cast<std::size_t>(number)]; }
  void expect_success() {
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      EXPECT_EQ(ranks_[rank].wait(), 0) << "rank " << rank;
    }
  }

 private:
  c10::intrusive_ptr<c10d::TCPStore> store_;
  std::vector<ChildProcess> ranks_;
};

/// First line of a body for several processes: true in the process that has started and awaited
/// them.
inline bool ran_in_processes(int count) {
  if (child_role()) return false;
  Launch(count).expect_success();
  return true;
}

inline torchamp::ProcessGroupPtr make_group(
    std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
  return torchamp::make_process_group({.timeout = timeout});
}

/// The value of each process.
inline std::vector<at::Tensor> gathered(const torchamp::ProcessGroupPtr& group,
                                        const at::Tensor& value) {
  return torchamp::detail::gather_all("test", group, value);
}

/// A port of the loopback network that nobody listens on.
inline int free_port() {
  const int probe = torchamp::detail::loopback_socket(0);
  sockaddr_in address{};
  socklen_t size = sizeof address;
  getsockname(probe, reinterpret_cast<sockaddr*>(&address), &size);
  close(probe);
  return ntohs(address.sin_port);
}

/// Expects the same values on every process.
inline void expect_same_everywhere(const torchamp::ProcessGroupPtr& group,
                                   const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor value = tensor.detach().contiguous();
    for (const at::Tensor& other : gathered(group, value)) {
      EXPECT_TRUE(at::equal(other, value));
    }
  }
}
