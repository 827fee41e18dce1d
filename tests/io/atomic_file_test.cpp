// SPDX-License-Identifier: BSD-3-Clause
#include "torchamp/detail/io/atomic_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "support/disk_calls.h"
#include "support/expect_error.h"
#include "support/temporary_folder.h"

namespace {

using ::testing::ElementsAre;

/// What the program asks of the disk from here on, and which call of it fails until the end.
struct Disk {
  explicit Disk(const std::string& failing = "") {
    DiskCalls::made.clear();
    DiskCalls::failing = failing;
  }
  ~Disk() { DiskCalls::failing.clear(); }
};

void replace(const std::filesystem::path& path, const std::string& bytes) {
  torchamp::detail::AtomicFile file(path, "save");
  file.write(bytes.data(), bytes.size());
  file.commit();
}

TEST(AtomicFile, FlushesTheFileBeforeItIsRenamedAndTheFolderAfterwards) {
  const TemporaryFolder folder;
  replace(folder / "file", "old");
  const Disk disk;
  replace(folder / "file", "new");
  EXPECT_THAT(DiskCalls::made, ElementsAre("fsync of the file", "rename", "fsync of the folder"));
  EXPECT_EQ(content_of(folder / "file"), "new");
}

TEST(AtomicFile, LeavesTheOldFileWhereTheNewOneDoesNotReachTheDisk) {
  const TemporaryFolder folder;
  replace(folder / "file", "old");
  {
    const Disk disk("fsync of the file");
    EXPECT_ERROR(replace(folder / "file", "new"), "save: cannot write '");
    EXPECT_THAT(DiskCalls::made, ElementsAre("fsync of the file"));
  }
  {
    const Disk disk("rename");
    EXPECT_ERROR(replace(folder / "file", "new"), "save: cannot replace '");
  }
  EXPECT_EQ(content_of(folder / "file"), "old");
  EXPECT_EQ(folder.files(), 1);
}

TEST(AtomicFile, GoesOnWhereFoldersCannotBeFlushed) {
  const TemporaryFolder folder;
  const Disk disk("fsync of the folder");
  replace(folder / "file", "new");
  EXPECT_EQ(content_of(folder / "file"), "new");
}

}  // namespace
