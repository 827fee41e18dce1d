// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

/// While this lives, the host has memory for so many more tensors.
class HostAllocationLimit final : public c10::Allocator {
 public:
  explicit HostAllocationLimit(std::int64_t more) : left_(more) { c10::SetCPUAllocator(this); }
  ~HostAllocationLimit() override { c10::SetCPUAllocator(unlimited_); }
  HostAllocationLimit(const HostAllocationLimit&) = delete;
  HostAllocationLimit& operator=(const HostAllocationLimit&) = delete;

  c10::DataPtr allocate(std::size_t bytes) override {
    TORCH_CHECK_WITH(OutOfMemoryError, left_-- > 0, "the host: out of memory, by a limit");
    return unlimited_->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return unlimited_->raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    unlimited_->copy_data(to, from, bytes);
  }

 private:
  c10::Allocator* const unlimited_ = c10::GetCPUAllocator();
  std::atomic<std::int64_t> left_;
};
