// SPDX-License-Identifier: BSD-3-Clause
#include "torchamp/detail/extras/io/archive_file.h"

#include "support/linux_only.h"

#ifdef __linux__

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

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
    DiskCalls::error = EIO;
    DiskCalls::failures = 1'000'000;
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
  EXPECT_THAT(DiskCalls::made,
              ElementsAre("open", "fsync of the file", "rename", "fsync of the folder"));
  EXPECT_EQ(content_of(folder / "file"), "new");
}

TEST(AtomicFile, LeavesTheOldFileIfTheNewOneDoesNotReachTheDisk) {
  const TemporaryFolder folder;
  replace(folder / "file", "old");
  {
    const Disk disk("fsync of the file");
    EXPECT_ERROR(replace(folder / "file", "new"), "save: cannot write '");
    EXPECT_THAT(DiskCalls::made, ElementsAre("open", "fsync of the file"));
  }
  {
    const Disk disk("rename");
    EXPECT_ERROR(replace(folder / "file", "new"), "save: cannot replace '");
  }
  EXPECT_EQ(content_of(folder / "file"), "old");
  EXPECT_EQ(folder.files(), 1);
}

TEST(AtomicFile, GoesOnIfFoldersCannotBeFlushed) {
  const TemporaryFolder folder;
  const Disk disk("fsync of the folder");
  replace(folder / "file", "new");
  EXPECT_EQ(content_of(folder / "file"), "new");
}

TEST(AtomicFile, FollowsLinksFromTheFolderThatTheyLieIn) {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder / "inner");
  std::filesystem::create_symlink("inner/second", folder / "first");
  std::filesystem::create_symlink("file", folder / "inner/second");
  for (const char* const bytes : {"old", "new"}) {
    replace(folder / "first", bytes);
    EXPECT_EQ(content_of(folder / "inner/file"), bytes);
  }
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "first"));
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "inner/second"));
}

TEST(AtomicFile, TakesAnotherNameThanThatOfAFileThatIsThere) {
  const TemporaryFolder folder;
  const Disk disk("open");
  DiskCalls::error = EEXIST;
  DiskCalls::failures = 2;
  replace(folder / "file", "new");
  EXPECT_THAT(DiskCalls::made, ElementsAre("open", "open", "open", "fsync of the file", "rename",
                                           "fsync of the folder"));
  EXPECT_EQ(content_of(folder / "file"), "new");
}

TEST(AtomicFile, TriesNoOtherNameIfItCannotBeCreated) {
  const TemporaryFolder folder;
  const Disk disk("open");
  EXPECT_ERROR(replace(folder / "file", "new"), "save: cannot create '");
  EXPECT_THAT(DiskCalls::made, ElementsAre("open"));
}

TEST(AtomicFile, KeepsModeAndOwnerOfTheFileThatItReplaces) {
  const TemporaryFolder folder;
  const std::filesystem::path path = folder / "file";
  const mode_t mask = ::umask(022);
  replace(path, "new");
  struct stat made {};
  ASSERT_EQ(::stat(path.c_str(), &made), 0);
  EXPECT_EQ(made.st_mode & 0777, 0644U);
  const bool may_give_away = ::geteuid() == 0;
  if (may_give_away) {
    ASSERT_EQ(::chown(path.c_str(), 1234, 5678), 0);
  }
  for (const mode_t mode : {0600U, 0640U, 0400U, 0666U}) {
    ASSERT_EQ(::chmod(path.c_str(), mode), 0);
    {
      torchamp::detail::AtomicFile file(path, "save");
      for (const auto& entry : std::filesystem::directory_iterator(path.parent_path())) {
        if (entry.path() == path) continue;
        EXPECT_EQ(static_cast<mode_t>(entry.status().permissions()), 0600U)
            << "while it is written";
      }
      file.write("newer", 5);
      file.commit();
    }
    struct stat kept {};
    ASSERT_EQ(::stat(path.c_str(), &kept), 0);
    EXPECT_EQ(kept.st_mode & 0777, mode);
    EXPECT_EQ(kept.st_uid, may_give_away ? 1234 : made.st_uid);
    EXPECT_EQ(kept.st_gid, may_give_away ? 5678 : made.st_gid);
  }
  ::umask(mask);
}

}  // namespace

#else

TEST(AtomicFile, AsksTheDiskForAllThatItMust) {
  SKIP_WITHOUT_LINUX();
}

#endif
