// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Extra. make_process_group: the group of all processes of a run.

// Not in the umbrella header: it needs Gloo's headers.
#if !__has_include(<torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>)
#error \
    "torchamp/distributed/process_group.h: this LibTorch was built without its distributed part (c10d)."
#elif !__has_include(<gloo/rendezvous/store.h>)
#error \
    "torchamp/distributed/process_group.h needs the headers of Gloo, which LibTorch's packages leave out. Install them (apt install libgloo-dev) or add the headers of a Gloo source tree to the include path."
#endif

#include <ATen/Context.h>
#include <c10/util/Exception.h>

#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#ifdef USE_C10D_GLOO
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#else  // LibTorch has Gloo, but defines this only for its own files
#define USE_C10D_GLOO
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#undef USE_C10D_GLOO
#endif
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "torchamp/detail/core/base/devices.h"
#include "torchamp/detail/core/base/system.h"
#include "torchamp/detail/extras/distributed/collective.h"
#include "torchamp/detail/extras/distributed/loopback.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

/// The environment variables that torchrun sets for each process.
struct ProcessEnvironment {
  int rank = 0;                           ///< RANK: this process, from 0
  int world_size = 1;                     ///< WORLD_SIZE: the number of processes
  int local_rank = 0;                     ///< LOCAL_RANK: this process on its machine, for its GPU
  std::string master_addr = "127.0.0.1";  ///< MASTER_ADDR: where the processes meet
  uint16_t master_port = 0;               ///< MASTER_PORT

  /// Reads the variables. If neither RANK nor WORLD_SIZE is set, this is the only process. Throws
  /// if one variable is set and another is missing, or if a value is invalid.
  static ProcessEnvironment read();
};

/// Options of make_process_group(). An aggregate, for designated initialisers.
struct ProcessGroupOptions {
  /// The maximum time that a process waits for another process; then it throws.
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  /// This process, and the address where the processes meet.
  ProcessEnvironment environment = ProcessEnvironment::read();
};

/// Creates the group of all processes that torchrun has started, and waits until all have joined,
/// at most for `timeout`. The group communicates over Gloo, for CPU tensors and, if LibTorch is
/// built for CUDA, for CUDA tensors. For CUDA tensors NCCL is much faster: see add_nccl() in
/// distributed/nccl.h.
///
///     const auto group = torchamp::make_process_group({.timeout = std::chrono::seconds(60)});
///     torchamp::DistributedDataParallel net(model, group);
///
/// Instead of torchrun, you can start the program several times with RANK, WORLD_SIZE, MASTER_ADDR
/// and MASTER_PORT set. Without them the group has one process and uses no network. Gloo uses the
/// interface in GLOO_SOCKET_IFNAME. If MASTER_ADDR is 127.0.0.1 or localhost, all connections use
/// 127.0.0.1 only. Nothing is encrypted or authenticated: use closed networks.
///
/// Sending to a dead process raises SIGPIPE, which would end this process. So, as in Python, this
/// function makes the process ignore SIGPIPE, unless the program has its own handler; the call that
/// sends then throws.
///
/// Errors: missing or invalid variables, and processes that do not join in time.
inline c10::intrusive_ptr<c10d::ProcessGroup> make_process_group(ProcessGroupOptions options = {});

namespace detail {

/// The integer in an environment variable, if set.
inline std::optional<int> integer_variable(const char* name, int low, int high) {
  const char* const text = environment_variable(name);
  if (!text) return std::nullopt;
  int value = 0;
  const char* const end = text + std::strlen(text);
  const auto [stop, error] = std::from_chars(text, end, value);
  TORCH_CHECK_VALUE(error == std::errc{} && stop == end && value >= low && value <= high,
                    "make_process_group: the environment variable ", name, " is '", text,
                    "', not a number from ", low, " to ", high, ".");
  return value;
}

/// Whether torchrun has created the store; then the processes only join it.
inline bool has_agent_store() {
  const char* const text = environment_variable("TORCHELASTIC_USE_AGENT_STORE");
  return text && (std::string_view(text) == "True" || std::string_view(text) == "1");
}

/// Before LibTorch 2.8, libuv's store cannot use a socket that already listens.
inline constexpr bool store_by_libuv = TORCHAMP_LIBTORCH >= 208;

/// The store for the processes' messages; rank 0 or torchrun runs it.
inline c10::intrusive_ptr<c10d::Store> make_store(const ProcessEnvironment& environment,
                                                  std::chrono::milliseconds timeout) {
  if (environment.world_size == 1) return c10::make_intrusive<c10d::HashStore>();
  c10d::TCPStoreOptions options;
  options.port = environment.master_port;
  options.timeout = timeout;
  options.waitWorkers = false;  // creating the group waits for all anyway
  options.useLibUV = store_by_libuv;
  options.isServer = environment.rank == 0 && !has_agent_store();
  std::string host = environment.master_addr;
  if (is_loopback(host)) {
    host = "127.0.0.1";
    if (options.isServer) options.masterListenFd = loopback_socket(environment.master_port);
  }
  const auto store = collective("make_process_group",
                                [&] { return c10::make_intrusive<c10d::TCPStore>(host, options); });
  const char* const attempt = environment_variable(
      "TORCHELASTIC_RESTART_COUNT");  // distinguishes the keys from keys before a restart
  return c10::make_intrusive<c10d::PrefixStore>(
      std::string("torchamp/") + (attempt ? attempt : "0"), store);
}

inline std::shared_ptr<::gloo::transport::Device> gloo_device(const std::string& master_addr) {
  using c10d::ProcessGroupGloo;
  if (const char* const name = environment_variable("GLOO_SOCKET_IFNAME")) {
    return ProcessGroupGloo::createDeviceForInterface(name);
  }
  return is_loopback(master_addr) ? ProcessGroupGloo::createDeviceForHostname("127.0.0.1")
                                  : ProcessGroupGloo::createDefaultDevice();
}

}  // namespace detail

inline ProcessEnvironment ProcessEnvironment::read() {
  constexpr int most = 1 << 20;
  ProcessEnvironment result;
  const auto rank = detail::integer_variable("RANK", 0, most);
  const auto world_size = detail::integer_variable("WORLD_SIZE", 1, most);
  if (!rank && !world_size) return result;
  TORCH_CHECK_VALUE(rank && world_size, "make_process_group: the environment variable ",
                    rank ? "WORLD_SIZE" : "RANK",
                    " is not set, but the other one is. Start the program with torchrun, or set "
                    "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.");
  TORCH_CHECK_VALUE(*rank < *world_size, "make_process_group: RANK is ", *rank,
                    " and WORLD_SIZE is ", *world_size, ". Ranks count from 0.");
  result.rank = *rank;
  result.world_size = *world_size;
  result.local_rank = detail::integer_variable("LOCAL_RANK", 0, most).value_or(*rank);
  if (const char* const address = detail::environment_variable("MASTER_ADDR"))
    result.master_addr = address;
  const auto port = detail::integer_variable("MASTER_PORT", 1, 65535);
  TORCH_CHECK_VALUE(
      port || *world_size == 1,
      "make_process_group: the environment variable MASTER_PORT is not set. Start the "
      "program with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.");
  if (port) result.master_port = static_cast<uint16_t>(*port);
  return result;
}

inline c10::intrusive_ptr<c10d::ProcessGroup> make_process_group(ProcessGroupOptions options) {
  using c10d::ProcessGroup;
  const ProcessEnvironment& environment = options.environment;
  detail::ignore_broken_pipes();
  const auto gloo_options = c10d::ProcessGroupGloo::Options::create(options.timeout);
  const auto store = detail::make_store(environment, options.timeout);
  gloo_options->devices.push_back(detail::gloo_device(environment.master_addr));
  const auto gloo = detail::collective("make_process_group", [&] {
    return c10::make_intrusive<c10d::ProcessGroupGloo>(
        c10::make_intrusive<c10d::PrefixStore>("gloo", store), environment.rank,
        environment.world_size, gloo_options);
  });

  auto group = c10::make_intrusive<ProcessGroup>(store, environment.rank, environment.world_size);
  group->setDefaultBackend(ProcessGroup::BackendType::GLOO);
  group->setBackend(at::kCPU, ProcessGroup::BackendType::GLOO, gloo);
  if (at::hasCUDA()) group->setBackend(at::kCUDA, ProcessGroup::BackendType::GLOO, gloo);
  return group;
}

}  // namespace TORCHAMP_NAMESPACE
