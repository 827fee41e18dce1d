// SPDX-License-Identifier: BSD-3-Clause
// The files of POSIX and of Windows, as AtomicFile and FileReader use them.
#pragma once

#ifdef _WIN32
#include <c10/util/win32-headers.h>

#include <chrono>
#else
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#ifdef __linux__
#include <sys/xattr.h>
#endif
#include <unistd.h>

#include <cerrno>
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <system_error>
#include <utility>

#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

// Note [Files of two systems]
// Both classes have the same members. On POSIX a writer locks its file, and renames it while it is
// open. Windows renames closed files only. So there a file that is being written cannot be opened
// by others, and a file that was written a moment ago may be about to be renamed.

#ifdef _WIN32

inline std::error_code last_error() {
  return {static_cast<int>(::GetLastError()), std::system_category()};
}

/// What was at a path before its file is replaced. ReplaceFileW keeps its access rights.
struct ReplacedFile {
  explicit ReplacedFile(const std::filesystem::path& path) {
    std::error_code none;
    exists = std::filesystem::exists(path, none);
    is_file = std::filesystem::is_regular_file(path, none);
  }
  bool exists = false, is_file = false;
};

class OpenFile {
 public:
  OpenFile() = default;
  OpenFile(OpenFile&& other) noexcept
      : handle_(std::exchange(other.handle_, INVALID_HANDLE_VALUE)) {}
  OpenFile& operator=(OpenFile&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~OpenFile() { close(); }

  static OpenFile to_read(const std::filesystem::path& path) {
    return OpenFile(::CreateFileW(path.c_str(), GENERIC_READ,
                                  FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE, nullptr,
                                  OPEN_EXISTING, FILE_ATTRIBUTE_NORMAL, nullptr));
  }
  static OpenFile to_write(const std::filesystem::path& path, const ReplacedFile&) {
    return OpenFile(::CreateFileW(path.c_str(), GENERIC_WRITE, /*dwShareMode=*/0, nullptr,
                                  CREATE_NEW, FILE_ATTRIBUTE_NORMAL, nullptr));
  }
  static bool is_taken(const std::error_code& error) { return error.value() == ERROR_FILE_EXISTS; }

  bool is_open() const { return handle_ != INVALID_HANDLE_VALUE; }
  bool lock() const { return true; }

  /// Its size; unset for what is no file.
  std::optional<uint64_t> size() const {
    LARGE_INTEGER bytes{};
    if (::GetFileType(handle_) != FILE_TYPE_DISK || ::GetFileSizeEx(handle_, &bytes) == 0) {
      return std::nullopt;
    }
    return static_cast<uint64_t>(bytes.QuadPart);
  }

  /// Returns the number of bytes read, fewer than `size` at the end or after an error.
  std::size_t read(uint64_t position, void* to, std::size_t size) const {
    auto* next = static_cast<char*>(to);
    std::size_t left = size;
    while (left > 0) {
      OVERLAPPED place{};
      place.Offset = static_cast<DWORD>(position);
      place.OffsetHigh = static_cast<DWORD>(position >> 32);
      DWORD count = 0;
      if (::ReadFile(handle_, next, part_of(left), &count, &place) == 0 || count == 0) break;
      next += count;
      position += count;
      left -= count;
    }
    return size - left;
  }
  /// False after an error, which is `last_error()`.
  bool write(const void* data, std::size_t size) const {
    const auto* next = static_cast<const char*>(data);
    while (size > 0) {
      DWORD count = 0;
      if (::WriteFile(handle_, next, part_of(size), &count, nullptr) == 0) return false;
      next += count;
      size -= count;
    }
    return true;
  }
  std::error_code flush() const {
    return ::FlushFileBuffers(handle_) == 0 ? last_error() : std::error_code();
  }

  void take_access(const ReplacedFile&) const {}

  /// Renames the file at `from`, which this is, to `to`.
  std::error_code replace(const std::filesystem::path& from, const std::filesystem::path& to) {
    close();
    const bool replaced = ::ReplaceFileW(to.c_str(), from.c_str(), nullptr,
                                         REPLACEFILE_IGNORE_MERGE_ERRORS, nullptr, nullptr) != 0;
    const DWORD flags = MOVEFILE_REPLACE_EXISTING | MOVEFILE_WRITE_THROUGH;
    if (replaced || ::MoveFileExW(from.c_str(), to.c_str(), flags) != 0) return {};
    return last_error();
  }
  static void flush_folder(const std::filesystem::path&) {}

  static void remove(const std::filesystem::path& path) { (void)::DeleteFileW(path.c_str()); }

  /// Removes the file of a killed process: a file that no process has open and no process is about
  /// to rename.
  static void remove_if_left(const std::filesystem::path& path) {
    std::error_code error;
    const auto written = std::filesystem::last_write_time(path, error);
    const auto now = std::filesystem::file_time_type::clock::now();
    if (!error && now - written > std::chrono::hours(1)) remove(path);
  }

 private:
  explicit OpenFile(HANDLE handle) : handle_(handle) {}
  static DWORD part_of(std::size_t size) {
    return static_cast<DWORD>(std::min<std::size_t>(size, std::size_t{1} << 30));
  }
  void close() {
    if (is_open()) ::CloseHandle(std::exchange(handle_, INVALID_HANDLE_VALUE));
  }

  HANDLE handle_ = INVALID_HANDLE_VALUE;
};

#else

inline std::error_code last_error() {
  return {errno, std::generic_category()};
}

#ifdef __linux__
inline constexpr const char* access_list_name = "system.posix_acl_access";
#endif

/// What was at a path before its file is replaced.
struct ReplacedFile {
  explicit ReplacedFile(const std::filesystem::path& path)
      : exists(::stat(path.c_str(), &status) == 0), is_file(exists && S_ISREG(status.st_mode)) {
#ifdef __linux__
    const ssize_t size = ::getxattr(path.c_str(), access_list_name, nullptr, 0);
    if (size <= 0) return;
    access_list.resize(static_cast<std::size_t>(size));
    if (::getxattr(path.c_str(), access_list_name, access_list.data(), access_list.size()) !=
        size) {
      access_list.assign(1, '\0');  // no list that a file takes
    }
#endif
  }
  struct stat status {};
  bool exists, is_file;
  std::string access_list{};  ///< of POSIX, in the kernel's form; empty if the mode says all
};

class OpenFile {
 public:
  OpenFile() = default;
  OpenFile(OpenFile&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  OpenFile& operator=(OpenFile&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~OpenFile() {
    if (number_ >= 0) ::close(number_);
  }

  static OpenFile to_read(const std::filesystem::path& path) {
    return OpenFile(  // without waiting: a pipe may have no writer
        ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  }
  /// Creates the file. If it will replace another file, only its writer can access it.
  static OpenFile to_write(const std::filesystem::path& path, const ReplacedFile& replaced) {
    const mode_t mode = replaced.exists ? S_IRUSR | S_IWUSR : 0666;
    return OpenFile(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode));
  }
  static bool is_taken(const std::error_code& error) { return error.value() == EEXIST; }

  bool is_open() const { return number_ >= 0; }

  /// False if another writer has found the new file unlocked, and has removed it or is about to.
  bool lock() const {
    struct stat status {};
    if (::flock(number_, LOCK_EX | LOCK_NB) != 0) return errno != EWOULDBLOCK;
    return ::fstat(number_, &status) != 0 || status.st_nlink != 0;
  }

  /// Its size; unset for what is no file.
  std::optional<uint64_t> size() const {
    struct stat status {};
    if (::fstat(number_, &status) != 0 || !S_ISREG(status.st_mode)) return std::nullopt;
    return static_cast<uint64_t>(status.st_size);
  }

  /// Returns the number of bytes read, fewer than `size` at the end or after an error.
  std::size_t read(uint64_t position, void* to, std::size_t size) const {
    auto* next = static_cast<char*>(to);
    std::size_t left = size;
    while (left > 0) {
      const ssize_t count = ::pread(number_, next, left, static_cast<off_t>(position));
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) break;
      next += count;
      position += static_cast<uint64_t>(count);
      left -= static_cast<std::size_t>(count);
    }
    return size - left;
  }
  /// False after an error, which is `last_error()`.
  bool write(const void* data, std::size_t size) const {
    const auto* next = static_cast<const char*>(data);
    while (size > 0) {
      const ssize_t count = ::write(number_, next, size);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) return false;
      next += count;
      size -= static_cast<std::size_t>(count);
    }
    return true;
  }
  std::error_code flush() const { return ::fsync(number_) != 0 ? last_error() : std::error_code(); }

  /// Gives the file the mode and the owner of the file that it replaces. No user may get more
  /// rights to the new file than to the old file, so the mode is set last. If the system does not
  /// permit the old owner or group, members of the old group count as others, and members of the
  /// new group get the group's rights: so group and others get only the rights that both had. With
  /// an access list, the group bits of the mode are not rights of the group but the maximum of the
  /// list: without the list, only the owner gets rights.
  void take_access(const ReplacedFile& replaced) const {
    mode_t mode = replaced.status.st_mode & 0777;
    [[maybe_unused]] const int owner = ::fchown(number_, replaced.status.st_uid, gid_t(-1));
    const bool has_group = ::fchown(number_, uid_t(-1), replaced.status.st_gid) == 0;
    if (!has_group) {
      const auto both = static_cast<mode_t>((mode >> 3) & mode & 7);
      mode = static_cast<mode_t>((mode & 0700) | (both << 3) | both);
    }
#ifdef __linux__
    const std::string& list = replaced.access_list;
    if (list.empty()) {
      (void)::fremovexattr(number_, access_list_name);  // from the folder's default
    } else if (!has_group ||
               ::fsetxattr(number_, access_list_name, list.data(), list.size(), 0) != 0) {
      (void)::fremovexattr(number_, access_list_name);
      mode &= 0700;
    }
#endif
    (void)::fchmod(number_, mode);
  }

  /// Renames the file at `from`, which this is, to `to`.
  std::error_code replace(const std::filesystem::path& from, const std::filesystem::path& to) {
    return ::rename(from.c_str(), to.c_str()) != 0 ? last_error() : std::error_code();
  }
  /// Without flushable folders, new names reach the disk later.
  static void flush_folder(const std::filesystem::path& path) {
    const OpenFile folder(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (folder.is_open()) (void)::fsync(folder.number_);
  }

  static void remove(const std::filesystem::path& path) {
    ::unlink(path.c_str());
  }

  /// Removes the file of a killed process: a file that no process has locked.
  static void remove_if_left(const std::filesystem::path& path) {
    const OpenFile file(::open(path.c_str(), O_RDWR | O_CLOEXEC));
    if (file.is_open() && ::flock(file.number_, LOCK_EX | LOCK_NB) == 0) remove(path);
  }

 private:
  explicit OpenFile(int number) : number_(number) {}

  int number_ = -1;
};

#endif

}  // namespace TORCHAMP_NAMESPACE::detail
