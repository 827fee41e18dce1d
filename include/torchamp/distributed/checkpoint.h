// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Extra. save_together and load_together: one checkpoint file for several processes.

// Not in the umbrella header: it needs LibTorch's distributed part.
#if !__has_include(<torch/csrc/distributed/c10d/ProcessGroup.hpp>)
#error \
    "torchamp/distributed/checkpoint.h: this LibTorch was built without its distributed part (c10d)."
#endif

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <vector>

#include "torchamp/detail/extras/distributed/collective.h"
#include "torchamp/training_checkpoint.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

namespace detail {

/// Runs `body` on this process and returns the results of all processes. If `body` throws on any
/// process, this throws on all: there the error of `body`, on the others an error that names the
/// process.
template <class Body>
std::vector<int64_t> all_or_none(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                 const char* call, Body body) {
  constexpr int64_t failed = -1;
  std::exception_ptr error;
  int64_t number = failed;
  try {
    number = body();
  } catch (...) {
    error = std::current_exception();
  }
  std::vector<int64_t> numbers = gather_numbers(call, group, number);
  if (error) std::rethrow_exception(error);
  const auto bad = std::ranges::find(numbers, failed);
  TORCH_CHECK(bad == numbers.end(), call, ": process ", bad - numbers.begin(),
              " has failed; see its error.");
  return numbers;
}

}  // namespace detail

/// Saves `checkpoint` for all processes of `group`, which call this together. Process 0 writes one
/// file, which includes each process's own part (random states, and objects of add_local()). All
/// processes wait until it is written. Synchronises. An error on any process is an error on all,
/// and the old file stays.
inline void save_together(const TrainingCheckpoint& checkpoint,
                          const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  at::Tensor part;
  const auto sizes = detail::all_or_none(group, "save_together", [&] {
    part = checkpoint.local_part();
    return part.numel();
  });
  const int64_t longest = *std::ranges::max_element(sizes);
  at::Tensor padded = at::zeros({longest}, at::kByte);
  padded.narrow(0, 0, part.numel()).copy_(part);
  std::vector<at::Tensor> parts = detail::gather_all("save_together", group, padded);
  detail::all_or_none(group, "save_together", [&] {
    if (group->getRank() != 0) return 0;
    for (std::size_t rank = 0; rank < parts.size(); ++rank) {
      parts[rank] = parts[rank].narrow(0, 0, sizes[rank]).clone();
    }
    checkpoint.save(parts);
    return 0;
  });
}

/// Loads `checkpoint` on all processes of `group`, which call this together. Each process reads the
/// shared part of the file and its own part. Returns false if there is no file. All processes must
/// be able to read the file. The number of processes must be the same as when the file was written;
/// with another number, call TrainingCheckpoint::load_shared() on each process. On CPUs the resumed
/// run is bitwise identical. An error on any process is an error on all; processes that have
/// already read the file keep its contents.
[[nodiscard]] inline bool load_together(TrainingCheckpoint& checkpoint,
                                        const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  const auto loaded = detail::all_or_none(group, "load_together", [&] {
    return checkpoint.load(group->getRank(), group->getSize()) ? 1 : 0;
  });
  TORCH_CHECK(std::ranges::count(loaded, loaded[0]) == std::ssize(loaded),
              "load_together: some processes see the file '", checkpoint.path().string(),
              "', and some do not. Put it where all can read it.");
  if (loaded[0] == 0) return false;
  const auto ids = detail::gather_numbers("load_together", group, checkpoint.file_id());
  TORCH_CHECK(std::ranges::count(ids, ids[0]) == std::ssize(ids), "load_together: '",
              checkpoint.path().string(),
              "' is another file on some processes. Put it where all can read it.");
  return true;
}

}  // namespace TORCHAMP_NAMESPACE
