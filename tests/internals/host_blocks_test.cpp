// SPDX-License-Identifier: BSD-3-Clause
// LibTorch's allocator of CPU memory once keep_host_memory() was called.
#include "torchamp/host_memory.h"

#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <pthread.h>
#include <sys/resource.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace {

using torchamp::detail::BlockSizes;
using torchamp::detail::FreeBlocks;
using torchamp::detail::HostBlocks;

at::Tensor bytes(int64_t count) {
  return torch::empty({count}, at::kByte);
}

/// On a thread that has kept no blocks yet, and so has room for them.
void on_new_thread(const std::function<void()>& check) {
  std::thread(check).join();
}

class HostBlocksTest : public testing::Test {
 protected:
  void SetUp() override {
    // Sanitizers, whose malloc is not glibc's, are to see the blocks, too.
    if (!torchamp::keep_host_memory()) HostBlocks::install();
  }
};

/// Where memory is counted, or runs out.
class HostBlocksOfGlibc : public testing::Test {
 protected:
  void SetUp() override {
    if (!torchamp::keep_host_memory()) GTEST_SKIP() << "malloc is not glibc's";
  }
};

TEST(BlockSizes, HoldWhatIsAskedForAndLittleMore) {
  std::size_t before = 0;
  for (std::size_t size = 1; size <= BlockSizes::largest; ++size) {
    const std::size_t size_class = BlockSizes::class_of(size);
    ASSERT_TRUE(size_class == before || size_class == before + 1) << size;
    before = size_class;
    const std::size_t room = BlockSizes::bytes_of(size_class);
    ASSERT_GE(room, size);
    ASSERT_LE(room, size + std::max<std::size_t>(63, size / 4)) << size;
  }
  EXPECT_EQ(before, BlockSizes::count - 1);
  EXPECT_EQ(BlockSizes::class_of(BlockSizes::largest + 1), BlockSizes::none);
  EXPECT_EQ(BlockSizes::class_of(std::numeric_limits<std::size_t>::max()), BlockSizes::none);
}

TEST(BlockSizes, AreFoundAgainFromWhatMallocMakesOfThem) {
  for (std::size_t size_class = 0; size_class < BlockSizes::count; ++size_class) {
    for (std::size_t added = 0; added <= BlockSizes::added; ++added) {
      const std::size_t bytes = BlockSizes::bytes_of(size_class) + added;
      EXPECT_EQ(BlockSizes::class_within(bytes), size_class) << bytes;
    }
  }
  EXPECT_EQ(BlockSizes::class_within(BlockSizes::smallest - 1), BlockSizes::none);
  EXPECT_EQ(BlockSizes::class_within(BlockSizes::largest + BlockSizes::added + 1),
            BlockSizes::none);
  EXPECT_EQ(BlockSizes::class_within(std::numeric_limits<std::size_t>::max()), BlockSizes::none);
}

TEST_F(HostBlocksTest, GiveAThreadTheBlockThatItFreedLast) {
  on_new_thread([] {
    for (const int64_t size : {1, 64, 65, 1000, 70000, 1 << 20}) {
      const void* const first = bytes(size).const_data_ptr();
      EXPECT_EQ(bytes(size).const_data_ptr(), first) << size;
    }
  });
}

TEST_F(HostBlocksTest, AreTakenAgainHoweverMallocRoundsTheirSizes) {
  on_new_thread([] {
    c10::Allocator& allocator = *c10::GetCPUAllocator();
    std::vector<at::Tensor> between;
    for (int64_t size = 1; size <= 20000; size += 1 + size / 64) {
      std::vector<void*> holes;  // which malloc fills again, a little larger than asked for
      for (int64_t i = 0; i < 8; ++i) {
        holes.push_back(std::malloc(static_cast<std::size_t>(size + 16 * i)));
        between.push_back(bytes(size));
      }
      for (void* hole : holes) std::free(hole);
      std::vector<void*> made(16);
      for (void*& memory : made) memory = allocator.raw_allocate(static_cast<std::size_t>(size));
      for (void* memory : made) {
        allocator.raw_deallocate(memory);
        EXPECT_EQ(bytes(size).const_data_ptr(), memory) << size;
      }
    }
  });
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

TEST_F(HostBlocksOfGlibc, MayBeFreedByAnotherThreadWhichKeepsALimitedNumber) {
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

TEST_F(HostBlocksOfGlibc, AreKeptInALimitedNumberHoweverSmallTheyAre) {
  c10::Allocator& allocator = *c10::GetCPUAllocator();
  const std::size_t before = mallinfo2().uordblks;
  std::size_t kept = 0;
  std::thread([&] {
    {
      std::vector<void*> made(600000);
      for (void*& memory : made) memory = allocator.raw_allocate(1);
      for (void* memory : made) allocator.raw_deallocate(memory);
    }
    kept = mallinfo2().uordblks - before;
  }).join();
  EXPECT_GT(kept, FreeBlocks::most_bytes / 2);
  EXPECT_LT(kept, FreeBlocks::most_bytes + (4 << 20));
}

TEST_F(HostBlocksTest, PassBetweenThreadsThatEndBeforeThem) {
  std::vector<at::Tensor> made;
  std::vector<std::thread> threads;
  std::mutex mutex;
  for (int64_t first = 1; first <= 3; ++first) {
    threads.emplace_back([&, first] {
      for (int64_t size = first; size < 100000; size += 1 + size / 8) {
        at::Tensor mine = torch::full({size}, size);
        const std::lock_guard lock(mutex);
        made.push_back(std::move(mine));
        if (made.size() > 20) made.erase(made.begin(), made.begin() + 10);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const at::Tensor& tensor : made) {
    EXPECT_TRUE(tensor.eq(tensor.numel()).all().item<bool>()) << tensor.numel();
  }
}

TEST_F(HostBlocksTest, MayBeFreedWhileAThreadEnds) {
  std::thread([] {
    static thread_local at::Tensor last;  // destroyed behind the blocks, which are needed later
    last = torch::ones({100});
    bytes(1000);
  }).join();
}

TEST_F(HostBlocksOfGlibc, AreGivenBackByAThreadThatFreesItsFirstAtItsVeryEnd) {
  pthread_key_t key{};  // whose values go behind all thread_local variables
  ASSERT_EQ(pthread_key_create(&key, [](void* last) { delete static_cast<at::Tensor*>(last); }), 0);
  const std::size_t before = mallinfo2().uordblks;
  for (int i = 0; i < 20; ++i) {
    auto* const last = new at::Tensor(bytes(1 << 20));
    std::thread([&] { EXPECT_EQ(pthread_setspecific(key, last), 0); }).join();
  }
  EXPECT_LT(mallinfo2().uordblks, before + (4 << 20));
  pthread_key_delete(key);
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

TEST_F(HostBlocksOfGlibc, AreNeverSmallerThanASizeThatIsOutOfRange) {
  c10::Allocator& allocator = *c10::GetCPUAllocator();
  for (const std::size_t less : {0, 1, 63, 64, 65, 1000}) {
    EXPECT_THROW(allocator.allocate(std::numeric_limits<std::size_t>::max() - less), c10::Error);
  }
  EXPECT_THROW(bytes(int64_t{1} << 60), c10::Error);
}

/// LibTorch's own allocator, while this lives.
class WithLibTorchsAllocator {
 public:
  WithLibTorchsAllocator() { c10::SetCPUAllocator(c10::GetDefaultCPUAllocator()); }
  ~WithLibTorchsAllocator() { c10::SetCPUAllocator(ours_); }
  WithLibTorchsAllocator(const WithLibTorchsAllocator&) = delete;
  WithLibTorchsAllocator& operator=(const WithLibTorchsAllocator&) = delete;

 private:
  c10::Allocator* ours_ = c10::GetCPUAllocator();
};

/// Tensors of oneDNN's, whose memory LibTorch frees by the allocator that is set when they go.
std::vector<at::Tensor> opaque_tensors() {
  std::vector<at::Tensor> made;
  for (int64_t size = 1; size < 3 << 20; size += 1 + size / 2) {
    made.push_back(torch::ones({size}).to_mkldnn());
  }
  return made;
}

TEST_F(HostBlocksTest, FreeWhatWasAllocatedBeforeThem) {
  if (!at::hasMKLDNN()) GTEST_SKIP() << "LibTorch was built without oneDNN";
  std::vector<at::Tensor> opaque;
  std::vector<void*> raw;
  {
    const WithLibTorchsAllocator libtorchs;
    opaque = opaque_tensors();
    for (std::size_t size = 1; size < 3 << 20; size += 1 + size / 2) {
      raw.push_back(c10::GetCPUAllocator()->raw_allocate(size));
    }
  }
  opaque.clear();
  for (void* memory : raw) c10::GetCPUAllocator()->raw_deallocate(memory);
  for (const at::Tensor& tensor : opaque_tensors()) {
    EXPECT_TRUE(tensor.to_dense().eq(1).all().item<bool>());
  }
}

TEST_F(HostBlocksTest, CanBeFreedByLibTorchsOwnAllocator) {
  if (!at::hasMKLDNN()) GTEST_SKIP() << "LibTorch was built without oneDNN";
  std::vector<at::Tensor> opaque = opaque_tensors();
  void* const raw = c10::GetCPUAllocator()->raw_allocate(1000);
  const WithLibTorchsAllocator libtorchs;
  opaque.clear();
  c10::GetCPUAllocator()->raw_deallocate(raw);
}

TEST_F(HostBlocksTest, AreNotKeptWhereTheyAreNotAlignedOrTooSmall) {
  c10::Allocator& allocator = *c10::GetCPUAllocator();
  std::vector<void*> foreign;  // of an allocator that the program once had
  for (int i = 0; i < 50; ++i) {
    foreign.push_back(std::malloc(1000));
    foreign.push_back(std::malloc(20));
  }
  for (void* memory : foreign) allocator.raw_deallocate(memory);
  for (int i = 0; i < 100; ++i) {
    const at::Tensor small = bytes(20), other = bytes(900);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(small.const_data_ptr()) % 64, 0u);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(other.const_data_ptr()) % 64, 0u);
  }
}

/// Lets the process have as many pages as it has now, and no more, while this lives.
class NoMorePages {
 public:
  NoMorePages() {
    getrlimit(RLIMIT_AS, &before_);
    rlim_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    rlimit limit = before_;
    limit.rlim_cur = pages * static_cast<rlim_t>(sysconf(_SC_PAGESIZE));
    setrlimit(RLIMIT_AS, &limit);
  }
  ~NoMorePages() { setrlimit(RLIMIT_AS, &before_); }
  NoMorePages(const NoMorePages&) = delete;
  NoMorePages& operator=(const NoMorePages&) = delete;

 private:
  rlimit before_{};
};

TEST_F(HostBlocksOfGlibc, AreGivenBackWhereMemoryRunsOut) {
  std::vector<at::Tensor> neighbours;
  for (int i = 0; i < 64; ++i) neighbours.push_back(bytes(1 << 20));
  std::vector<at::Tensor> others;
  others.reserve(10000);
  const NoMorePages limit;
  EXPECT_THROW(
      {
        while (others.size() < 10000) others.push_back(bytes(1 << 20));
      },
      c10::Error);
  neighbours.resize(neighbours.size() - 30);  // the thread keeps them
  EXPECT_EQ(bytes(8 << 20).numel(), 8 << 20);
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

TEST_F(HostBlocksOfGlibc, AreReportedToTheProfilerWithTheSizesAskedFor) {
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
  HostBlocks::install();
  EXPECT_EQ(c10::GetCPUAllocator(), &own);
  c10::SetCPUAllocator(ours);
}

TEST_F(HostBlocksTest, LeaveLibTorchsAllocatorWhereItFillsNewMemory) {
  for (bool* flag :
       {&FLAGS_caffe2_cpu_allocator_do_zero_fill, &FLAGS_caffe2_cpu_allocator_do_junk_fill}) {
    const WithLibTorchsAllocator libtorchs;
    *flag = true;
    HostBlocks::install();
    *flag = false;
    EXPECT_EQ(c10::GetCPUAllocator(), c10::GetDefaultCPUAllocator());
  }
}

}  // namespace
