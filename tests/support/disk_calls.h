// SPDX-License-Identifier: BSD-3-Clause
// Puts functions of its own in place of the C library's fsync and rename, for the whole program.
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <mutex>
#include <string>
#include <vector>

/// What the program asks of the disk.
struct DiskCalls {
  /// So far: "fsync of the file", "rename", "fsync of the folder".
  static inline std::vector<std::string> made;
  static inline std::mutex mutex;  // writers may be in several threads
  /// The one that does nothing and fails.
  static inline std::string failing;
  /// Where the process is killed: "before fsync 2".
  static inline std::string killed_at;

  /// `call`, which is the `number`th one of the function `name`.
  template <class Call>
  static int make(const std::string& name, int number, const std::string& what, Call call) {
    const std::string point = " " + name + " " + std::to_string(number);
    if (killed_at == "before" + point) raise(SIGKILL);
    {
      const std::scoped_lock lock(mutex);
      made.push_back(what);
    }
    if (failing == what) {
      errno = EIO;
      return -1;
    }
    const int result = static_cast<int>(call());
    if (killed_at == "after" + point) raise(SIGKILL);
    return result;
  }
};

extern "C" [[gnu::weak]] int fsync(int file) {
  static int calls = 0;
  struct stat status {};
  fstat(file, &status);
  return DiskCalls::make("fsync", ++calls,
                         S_ISDIR(status.st_mode) ? "fsync of the folder" : "fsync of the file",
                         [=] { return syscall(SYS_fsync, file); });
}

extern "C" [[gnu::weak]] int rename(const char* from, const char* to) noexcept {
  static int calls = 0;
  return DiskCalls::make("rename", ++calls, "rename",
                         [=] { return syscall(SYS_renameat, AT_FDCWD, from, AT_FDCWD, to); });
}
