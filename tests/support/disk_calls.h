// SPDX-License-Identifier: BSD-3-Clause
// Replaces the C library's fsync, rename and open by its own functions, for the whole program; of
// files to be made anew alone that open.
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <mutex>
#include <string>
#include <vector>

/// What the program asks of the disk.
struct DiskCalls {
  /// So far: "open", "fsync of the file", "rename", "fsync of the folder".
  static inline std::vector<std::string> made;
  static inline std::mutex mutex;  // writers may be in several threads
  /// The one that does nothing and fails: with which error, and how often.
  static inline std::string failing;
  static inline int error = EIO;
  static inline int failures = 1'000'000;
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
    if (failing == what && failures-- > 0) {
      errno = error;
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

extern "C" [[gnu::weak]] int open(const char* path, int flags, ...) {
  static int calls = 0;
  mode_t mode = 0;
  if ((flags & (O_CREAT | O_TMPFILE)) != 0) {
    va_list more;
    va_start(more, flags);
    mode = va_arg(more, mode_t);
    va_end(more);
  }
  const auto call = [=] { return syscall(SYS_openat, AT_FDCWD, path, flags, mode); };
  if ((flags & O_EXCL) == 0) return static_cast<int>(call());
  return DiskCalls::make("open", ++calls, "open", call);
}
