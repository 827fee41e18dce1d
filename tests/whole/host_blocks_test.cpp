// SPDX-License-Identifier: BSD-3-Clause
// LibTorch's allocator of CPU memory once keep_host_memory() was called.
#include "torchamp/detail/host_blocks.h"

#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#include "torchamp/host_memory.h"

namespace {

using torchamp::detail::BlockSizes;
using torchamp::detail::FreeBlocks;

at::Tensor bytes(int64_t count) {
  return torch::empty({count}, at::kByte);
}

class HostBlocksTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!torchamp::keep_host_memory()) GTEST_SKIP() << "malloc is not glibc's";
  }
};

TEST(BlockSizes, HoldWhatIsAskedForAndAtMostAQuarterMore) {
  std::size_t before = 0;
  for (std::size_t size = 1; size <= BlockSizes::largest; ++size) {
    const std::size_t size_class = BlockSizes::class_of(size);
    ASSERT_TRUE(size_class == before || size_class == before + 1) << size;
    before = size_class;
    const std::size_t room = BlockSizes::bytes_of(size_class);
    ASSERT_GE(room, size);
    ASSERT_LE(room, std::max(BlockSizes::smallest, size + size / 4)) << size;
  }
  EXPECT_EQ(before, BlockSizes::count - 1);
  EXPECT_EQ(BlockSizes::class_of(BlockSizes::largest + 1), BlockSizes::none);
  EXPECT_EQ(BlockSizes::class_of(std::numeric_limits<std::size_t>::max()), BlockSizes::none);
}

TEST_F(HostBlocksTest, GiveAThreadTheBlockThatItFreedLast) {
  for (const int64_t size : {1, 64, 65, 1000, 70000, 1 << 20}) {
    const void* const first = bytes(size).const_data_ptr();
    EXPECT_EQ(bytes(size).const_data_ptr(), first) << size;
  }
}

TEST_F(HostBlocksTest, OverlapNoOtherAndAreAligned) {
  std::vector<at::Tensor> all;
  for (int round = 0; round < 4; ++round) {
    for (int64_t size = 1; size <= 3 << 20; size += 1 + size / 5) {
      all.push_back(bytes(size));
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(all.back().const_data_ptr()) % 64, 0u);
    }
    for (std::size_t i = 0; i < all.size(); ++i) all[i].fill_(static_cast<int64_t>(i % 251));
    for (std::size_t i = 0; i < all.size(); ++i) {
      EXPECT_TRUE(all[i].eq(static_cast<int64_t>(i % 251)).all().item<bool>()) << i;
    }
    for (std::size_t i = 0; i < all.size(); ++i) all.erase(all.begin() + static_cast<int64_t>(i));
  }
}

TEST_F(HostBlocksTest, MayBeFreedByAnotherThreadWhichKeepsALimitedNumber) {
  const std::size_t before = mallinfo2().uordblks;
  std::size_t kept = 0;
  std::thread([&] {
    for (int i = 0; i < 200; ++i) {
      std::vector<at::Tensor> made;  // by a thread that ends before they do
      std::thread([&] { made.push_back(bytes(1 << 20).fill_(i)); }).join();
      EXPECT_EQ(made[0][12345].item<int>(), i);
    }
    kept = mallinfo2().uordblks - before;
  }).join();
  EXPECT_GT(kept, FreeBlocks::most_bytes / 2);
  EXPECT_LT(kept, FreeBlocks::most_bytes + (4 << 20));
  EXPECT_LT(mallinfo2().uordblks, before + (4 << 20)) << "after the thread has ended";
}

TEST_F(HostBlocksTest, MayBeFreedWhileAThreadEnds) {
  std::thread([] {
    static thread_local at::Tensor last;  // destroyed behind the blocks, which are needed later
    last = torch::ones({100});
    bytes(1000);
  }).join();
}

TEST_F(HostBlocksTest, CanBeTakenAndGivenBackWithoutATensor) {
  c10::Allocator& allocator = *c10::GetCPUAllocator();
  for (const std::size_t size : {std::size_t{1}, std::size_t{500}, std::size_t{5} << 20}) {
    void* const memory = allocator.raw_allocate(size);
    std::memset(memory, 1, size);
    c10::DataPtr copy = allocator.clone(memory, size);
    EXPECT_EQ(std::memcmp(copy.get(), memory, size), 0);
    allocator.raw_deallocate(memory);
  }
  EXPECT_EQ(allocator.raw_allocate(0), nullptr);
  allocator.raw_deallocate(nullptr);
}

TEST_F(HostBlocksTest, AreNeverSmallerThanASizeThatIsOutOfRange) {
  c10::Allocator& allocator = *c10::GetCPUAllocator();
  for (const std::size_t less : {0, 1, 63, 64, 65, 1000}) {
    EXPECT_THROW(allocator.allocate(std::numeric_limits<std::size_t>::max() - less), c10::Error);
  }
  EXPECT_THROW(bytes(int64_t{1} << 60), c10::Error);
}

/// Adds up what LibTorch's profiler is told.
struct Reports final : c10::MemoryReportingInfoBase {
  void reportMemoryUsage(void*, int64_t size, std::size_t, std::size_t, c10::Device) override {
    if (size > 0) taken += size;
    if (size < 0) freed -= size;
  }
  void reportOutOfMemory(int64_t size, std::size_t, std::size_t, c10::Device) override {
    refused += size;
  }
  bool memoryProfilingEnabled() const override { return true; }

  int64_t taken = 0, freed = 0, refused = 0;
};

TEST_F(HostBlocksTest, AreReportedToTheProfilerWithTheSizesAskedFor) {
  bytes(1000);
  const auto reports = std::make_shared<Reports>();
  {
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, reports);
    for (int i = 0; i < 3; ++i) bytes(1000);
    bytes(3 << 20);
    EXPECT_THROW(bytes(int64_t{1} << 60), c10::Error);
  }
  EXPECT_EQ(reports->taken, 3000 + (3 << 20));
  EXPECT_EQ(reports->freed, reports->taken);
  EXPECT_EQ(reports->refused, int64_t{1} << 60);
}

TEST_F(HostBlocksTest, LeaveAnAllocatorOfTheProgramsOwn) {
  struct Own final : c10::Allocator {
    c10::DataPtr allocate(std::size_t size) override {
      return c10::GetDefaultCPUAllocator()->allocate(size);
    }
    void copy_data(void* to, const void* from, std::size_t size) const override {
      default_copy_data(to, from, size);
    }
  };
  c10::Allocator* const ours = c10::GetCPUAllocator();
  static Own own;
  c10::SetCPUAllocator(&own);
  EXPECT_TRUE(torchamp::keep_host_memory());
  EXPECT_EQ(c10::GetCPUAllocator(), &own);
  c10::SetCPUAllocator(ours);
}

}  // namespace
