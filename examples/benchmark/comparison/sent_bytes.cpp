// SPDX-License-Identifier: BSD-3-Clause
// A library to preload (LD_PRELOAD): counts the bytes that a process gives to sockets, and notes
// when it does. It asks the kernel itself, in place of libc's functions of the same names.
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace {

struct Entry {
  std::int64_t nanoseconds, bytes;
};

std::atomic<std::int64_t> total{0};
std::atomic<std::size_t> logged{0};
std::atomic<bool> logs{false};
std::array<Entry, 1 << 16> entries;

ssize_t note(int file, ssize_t bytes) {
  struct stat kind;
  if (bytes <= 0 || syscall(SYS_fstat, file, &kind) != 0 || !S_ISSOCK(kind.st_mode)) return bytes;
  total += bytes;
  if (!logs) return bytes;
  const std::size_t at = logged++;
  if (at < entries.size()) {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    entries[at] = {std::chrono::duration_cast<std::chrono::nanoseconds>(now).count(), bytes};
  }
  return bytes;
}

}  // namespace

extern "C" {

/// Bytes since the process's start.
std::int64_t sent_bytes_total() {
  return total;
}

/// Forgets what was noted, and notes from now on, or no longer.
void sent_bytes_log(int on) {
  logged = 0;
  logs = on != 0;
}

/// Entry `at` of what was noted: nanoseconds of the monotonic clock, and bytes. 0: there is none.
int sent_bytes_entry(std::size_t at, std::int64_t* nanoseconds, std::int64_t* bytes) {
  if (at >= logged || at >= entries.size()) return 0;
  *nanoseconds = entries[at].nanoseconds;
  *bytes = entries[at].bytes;
  return 1;
}

ssize_t write(int file, const void* data, std::size_t size) {
  return note(file, syscall(SYS_write, file, data, size));
}
ssize_t writev(int file, const iovec* parts, int count) {
  return note(file, syscall(SYS_writev, file, parts, count));
}
ssize_t sendto(int file, const void* data, std::size_t size, int flags, const sockaddr* to,
               socklen_t length) {
  return note(file, syscall(SYS_sendto, file, data, size, flags, to, length));
}
ssize_t send(int file, const void* data, std::size_t size, int flags) {
  return sendto(file, data, size, flags, nullptr, 0);
}
ssize_t sendmsg(int file, const msghdr* message, int flags) {
  return note(file, syscall(SYS_sendmsg, file, message, flags));
}

}  // extern "C"
