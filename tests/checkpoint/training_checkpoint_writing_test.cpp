// SPDX-License-Identifier: BSD-3-Clause
// How the file of a TrainingCheckpoint comes to be, whenever its writing ends.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>

#include "support/expect_error.h"
#include "support/linux_only.h"
#include "support/temporary_folder.h"
#include "torchamp/training_checkpoint.h"

#ifdef __linux__
#include <sys/resource.h>
#include <sys/xattr.h>

#include "support/disk_calls.h"
#include "support/processes.h"
#endif

namespace {

namespace fs = std::filesystem;
using at::Tensor;
using torchamp::TrainingCheckpoint;

TEST(TrainingCheckpoint, DetectsAFileThatIsCutShortOrChanged) {
  const TemporaryFolder folder;
  const fs::path path = folder / "run.pt";
  Tensor tensor = at::zeros({1000});
  TrainingCheckpoint checkpoint(path);
  checkpoint.add("tensor", tensor);
  checkpoint.save();
  const auto size = fs::file_size(path);
  std::string whole(size, '\0');
  std::ifstream(path, std::ios::binary).read(whole.data(), static_cast<std::streamsize>(size));
  for (const std::size_t part : {size / 4, size / 2, size - 1}) {
    std::ofstream(path, std::ios::binary) << whole.substr(0, part);
    EXPECT_ERROR((void)checkpoint.load(), "is damaged");
  }
}

TEST(TrainingCheckpoint, FollowsALinkAndHasTheRightsOfOtherNewFiles) {
  const TemporaryFolder folder;
  int step = 1;
  fs::create_symlink(folder / "real.pt", folder / "link.pt");
  TrainingCheckpoint checkpoint(folder / "link.pt");
  checkpoint.add("step", step);
  checkpoint.save();
  checkpoint.save();
  EXPECT_TRUE(fs::is_symlink(folder / "link.pt"));
  EXPECT_TRUE(fs::is_regular_file(folder / "real.pt"));
  std::ofstream(folder / "other") << "x";
  EXPECT_EQ(fs::status(folder / "real.pt").permissions(),
            fs::status(folder / "other").permissions());
  EXPECT_ERROR(TrainingCheckpoint(folder / "none/run.pt").save(), "there is no folder '");
}

#ifdef __linux__

/// A checkpoint whose file holds a step and a tensor full of it.
struct Numbered {
  explicit Numbered(const fs::path& path) : checkpoint(path) {
    checkpoint.add("step", step).add("tensor", tensor);
  }
  void save(std::int64_t number) {
    step = number;
    tensor = at::full({20000}, static_cast<double>(number), at::kDouble);
    checkpoint.save();
  }
  /// The step, after a look at whether the file is whole.
  std::int64_t load() {
    EXPECT_TRUE(checkpoint.load());
    EXPECT_TRUE(at::equal(tensor, at::full({20000}, static_cast<double>(step), at::kDouble)));
    return step;
  }
  std::int64_t step = 0;
  Tensor tensor = at::zeros({20000}, at::kDouble);
  TrainingCheckpoint checkpoint;
};

// The kernel kills a process that writes beyond its limit of file size, at that very byte.
TEST(TrainingCheckpoint, LeavesTheOldFileWholeWhereverItsWritingIsKilled) {
  SKIP_UNDER_AN_EMULATOR();
  const TemporaryFolder folder;
  Numbered numbered(folder / "run.pt");
  if (const auto role = child_role()) {
    const rlimit no_core{0, 0}, limit{std::stoul(*role), std::stoul(*role)};
    setrlimit(RLIMIT_CORE, &no_core);
    setrlimit(RLIMIT_FSIZE, &limit);
    numbered.save(2);
    return;
  }
  // Of what such a process writes: this one has used more devices, perhaps, and writes their
  // states.
  EXPECT_EQ(ChildProcess("1000000000", folder.environment()).wait(), 0);
  const auto whole = fs::file_size(folder / "run.pt");
  const auto size = static_cast<double>(whole);
  numbered.save(1);
  for (const double part : {0., 0.01, 0.5, 0.999}) {
    const auto bytes = static_cast<std::size_t>(size * part);
    EXPECT_EQ(ChildProcess(std::to_string(bytes), folder.environment()).wait(), -SIGXFSZ);
    EXPECT_EQ(numbered.load(), 1);
    EXPECT_EQ(folder.files(), 2) << "the file and what the killed process has left";
    numbered.save(1);
    EXPECT_EQ(folder.files(), 1);
  }
  EXPECT_EQ(ChildProcess(std::to_string(whole), folder.environment()).wait(), 0);
  EXPECT_EQ(numbered.load(), 2);
}

TEST(TrainingCheckpoint, IsTheOldFileUntilItsNameIsTheNewOnes) {
  const TemporaryFolder folder;
  Numbered numbered(folder / "run.pt");
  if (const auto role = child_role()) {
    DiskCalls::killed_at = *role;
    numbered.save(2);
    return;
  }
  for (const auto& [point, found] : {std::pair{"before fsync 1", 1},
                                     {"after fsync 1", 1},
                                     {"before rename 1", 1},
                                     {"after rename 1", 2},
                                     {"before fsync 2", 2},
                                     {"after fsync 2", 2}}) {
    numbered.save(1);
    EXPECT_EQ(ChildProcess(point, folder.environment()).wait(), -SIGKILL) << point;
    EXPECT_EQ(numbered.load(), found) << point;
  }
  numbered.save(3);
  EXPECT_EQ(folder.files(), 1);
}

TEST(TrainingCheckpoint, IsWholeWheneverTheProcessIsKilled) {
  const TemporaryFolder folder;
  Numbered numbered(folder / "run.pt");
  if (child_role()) {
    for (std::int64_t number = numbered.load() + 1;; ++number) numbered.save(number);
  }
  numbered.save(0);
  std::int64_t latest = 0;
  for (int kill = 0; kill < 6; ++kill) {
    ChildProcess writer("writer", folder.environment());
    const auto started = fs::last_write_time(folder / "run.pt");
    for (int tries = 0; fs::last_write_time(folder / "run.pt") == started && tries < 12000;
         ++tries) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    std::this_thread::sleep_for(std::chrono::microseconds(1700 * kill));
    writer.kill();
    EXPECT_EQ(writer.wait(), -SIGKILL);
    const std::int64_t step = numbered.load();
    EXPECT_GT(step, latest);
    latest = step;
  }
}

constexpr const char* access_list = "system.posix_acl_access";

/// An access list in the kernel's form: rights of the owner, of the user 12345, of the group, the
/// most that the two have, and of others.
std::string list_with_another_user() {
  std::string list{2, 0, 0, 0};
  const auto add = [&list](char kind, char rights, std::uint32_t user) {
    list.append({kind, 0, rights, 0});
    for (int byte = 0; byte < 4; ++byte, user >>= 8) list += static_cast<char>(user & 0xff);
  };
  constexpr std::uint32_t nobody = ~std::uint32_t{0};
  add(1, 6, nobody);
  add(2, 6, 12345);
  add(4, 0, nobody);
  add(16, 6, nobody);
  add(32, 0, nobody);
  return list;
}

/// The access list of a file; empty if it has none.
std::string list_of(const fs::path& path) {
  std::string list(1000, '\0');
  const ssize_t size = getxattr(path.c_str(), access_list, list.data(), list.size());
  list.resize(size < 0 ? 0 : static_cast<std::size_t>(size));
  return list;
}

TEST(TrainingCheckpoint, KeepsTheAccessListOfTheFile) {
  const TemporaryFolder folder;
  const fs::path path = folder / "run.pt";
  Numbered numbered(path);
  numbered.save(1);
  const std::string list = list_with_another_user();
  if (setxattr(path.c_str(), access_list, list.data(), list.size(), 0) != 0) {
    GTEST_SKIP() << "the file system has no access lists";
  }
  numbered.save(2);
  EXPECT_EQ(list_of(path), list) << "the group has no rights, though the mode's bits show 6";
  EXPECT_EQ(numbered.load(), 2);
}

TEST(TrainingCheckpoint, GivesNobodyTheRightsThatANewFileHasFromTheFolder) {
  const TemporaryFolder folder;
  const fs::path path = folder / "run.pt";
  Numbered numbered(path);
  numbered.save(1);
  fs::permissions(path, fs::perms(0660));
  const std::string list = list_with_another_user();
  if (setxattr(path.parent_path().c_str(), "system.posix_acl_default", list.data(), list.size(),
               0) != 0) {
    GTEST_SKIP() << "the file system has no access lists";
  }
  numbered.save(2);
  EXPECT_EQ(list_of(path), "");
  EXPECT_EQ(fs::status(path).permissions(), fs::perms(0660));
}

TEST(TrainingCheckpoint, LeavesTheOldFileAndNothingElseOnAFullDisk) {
  const TemporaryFolder folder;
  Numbered numbered(folder / "run.pt");
  if (child_role()) {
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{5000, 5000};
    setrlimit(RLIMIT_FSIZE, &limit);
    EXPECT_ERROR(numbered.save(2), "TrainingCheckpoint::save: cannot write");
    return;
  }
  numbered.save(1);
  EXPECT_EQ(ChildProcess("writer", folder.environment()).wait(), 0);
  EXPECT_EQ(numbered.load(), 1);
  EXPECT_EQ(folder.files(), 1);
}

#else

TEST(TrainingCheckpoint, IsWrittenAsAWhole) {
  SKIP_WITHOUT_LINUX();
}

#endif

}  // namespace
