// SPDX-License-Identifier: BSD-3-Clause
// One file that several threads write.
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "support/temporary_folder.h"
#include "torchamp/detail/extras/io/archive_file.h"

namespace {

TEST(TrainingCheckpointFiles, IsWrittenBySeveralThreadsAtOnce) {
  const TemporaryFolder folder;
  std::atomic<int> errors = 0;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&] {
      for (int i = 0; i < 100; ++i) {
        try {
          torchamp::detail::AtomicFile file(folder / "run.pt", "test");
          file.write("x", 1);
          file.commit();
        } catch (const c10::Error&) {
          ++errors;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(errors, 0);
  EXPECT_EQ(folder.files(), 1);
}

}  // namespace
