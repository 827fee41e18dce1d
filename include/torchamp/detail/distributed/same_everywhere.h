// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "torchamp/distributed/checkpoint.h"
#include "torchamp/version.h"

namespace torchamp::detail {

/// FNV-1a over numbers.
class Fingerprint {
 public:
  void mix(int64_t number) { hash_ = (hash_ ^ static_cast<uint64_t>(number)) * 0x100000001b3U; }
  int64_t value() const { return static_cast<int64_t>(hash_); }

 private:
  uint64_t hash_ = 0xcbf29ce484222325U;
};

/// What all processes are to give alike.
class SameEverywhere {
 public:
  void add(const char* what, int64_t number) { all_.emplace_back(what, number); }

  /// Throws, on all processes, an error that begins with `call` and names the first of these in
  /// which a process differs from process 0. Collective.
  void check(const char* call, const c10::intrusive_ptr<c10d::ProcessGroup>& group) const {
    at::Tensor own = at::empty({static_cast<int64_t>(all_.size())}, at::kLong);
    for (std::size_t i = 0; i < all_.size(); ++i) {
      own.mutable_data_ptr<int64_t>()[i] = all_[i].second;
    }
    const std::vector<at::Tensor> gathered = gather_all(call, group, own);
    for (std::size_t i = 0; i < all_.size(); ++i) {
      for (std::size_t process = 1; process < gathered.size(); ++process) {
        TORCH_CHECK_VALUE(gathered[process].const_data_ptr<int64_t>()[i] ==
                              gathered[0].const_data_ptr<int64_t>()[i],
                          call, ": process ", process, " has another ", all_[i].first,
                          " than process 0. Give all processes the same.");
      }
    }
  }

 private:
  std::vector<std::pair<const char*, int64_t>> all_;
};

}  // namespace torchamp::detail
