// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <random>
#include <string>
#include <system_error>
#include <utility>

#include "torchamp/version.h"

namespace torchamp::detail {

// Note [Atomic files]
// A file is written under another name in the same folder, flushed to the disk, and renamed, which
// the system does at once; then the folder is flushed. Whenever the process or the machine stops,
// the old file or the new one is there, whole. A process that is killed leaves the other file
// behind. Whoever writes holds a lock on it; so the next writer can tell what is left over and
// remove it. The new file gets mode and owner of the old one; before, it is its writer's alone.

/// An open file descriptor.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor() {
    if (number_ >= 0) ::close(number_);
  }
  int number() const { return number_; }
  bool is_open() const { return number_ >= 0; }

 private:
  int number_ = -1;
};

/// A file that takes the place of `path` at commit(), and vanishes without.
class AtomicFile {
 public:
  /// `call` is the public function that errors name.
  AtomicFile(std::filesystem::path path, const char* call) : path_(std::move(path)), call_(call) {
    std::error_code no_link;
    for (int links = 0; std::filesystem::is_symlink(path_, no_link); ++links) {
      errno = ELOOP;
      if (links == 40) fail("replace", path_);
      path_ = path_.parent_path() / std::filesystem::read_symlink(path_);
    }
    replaces_ = ::stat(path_.c_str(), &before_) == 0;
    TORCH_CHECK(!replaces_ || S_ISREG(before_.st_mode), call_, ": '", path_.string(),
                "' is there and is no file. Give another path.");
    const mode_t mode = replaces_ ? S_IRUSR | S_IWUSR : 0666;
    std::random_device random;
    for (int attempt = 0; attempt < 100 && !file_.is_open(); ++attempt) {
      partial_ = path_;
      partial_ += marker + std::to_string(random());
      file_ = Descriptor(::open(partial_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode));
      if (!file_.is_open() && errno != EEXIST) break;
      if (file_.is_open() && is_taken_for_left_over()) file_ = Descriptor();
    }
    if (!file_.is_open()) fail("create", partial_);
  }

  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  ~AtomicFile() {
    if (!committed_) ::unlink(partial_.c_str());
  }

  /// Writes all of it. An error is for commit() to throw: LibTorch's writer, which calls this, ends
  /// the process where its output throws or takes too little.
  std::size_t write(const void* data, std::size_t size) {
    const char* next = static_cast<const char*>(data);
    for (std::size_t left = size; left > 0 && error_ == 0;) {
      const ssize_t count = ::write(file_.number(), next, left);
      if (count < 0) {
        if (errno != EINTR) error_ = errno;
        continue;
      }
      next += count;
      left -= static_cast<std::size_t>(count);
    }
    return size;
  }

  void commit() {
    if (replaces_) keep_access();
    if (error_ == 0 && ::fsync(file_.number()) != 0) error_ = errno;
    if (error_ != 0) {
      errno = error_;
      fail("write", partial_);
    }
    if (::rename(partial_.c_str(), path_.c_str()) != 0) fail("replace", path_);
    committed_ = true;
    const Descriptor folder(::open(this->folder().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    // Where folders cannot be flushed, the new name reaches the disk when the system sees fit.
    if (folder.is_open()) (void)::fsync(folder.number());
    remove_leftovers();
  }

 private:
  static constexpr const char* marker = ".partial-";

  /// Locks the file. True if another writer, which looked before it was locked, is about to remove
  /// it or has done so.
  bool is_taken_for_left_over() const {
    struct stat status {};
    if (::flock(file_.number(), LOCK_EX | LOCK_NB) != 0) return errno == EWOULDBLOCK;
    return ::fstat(file_.number(), &status) == 0 && status.st_nlink == 0;
  }

  /// Nobody may do more with the new file than with the old one, which is why its mode comes last.
  /// The system may not allow to keep the owner. Nor the group: its members then become others, and
  /// those of another one take their place, so both get only what both had.
  void keep_access() const {
    mode_t mode = before_.st_mode & 0777;
    [[maybe_unused]] const int owner = ::fchown(file_.number(), before_.st_uid, gid_t(-1));
    if (::fchown(file_.number(), uid_t(-1), before_.st_gid) != 0) {
      const mode_t both = (mode >> 3) & mode & 7;
      mode = (mode & 0700) | (both << 3) | both;
    }
    (void)::fchmod(file_.number(), mode);
  }

  std::filesystem::path folder() const {
    const std::filesystem::path parent = path_.parent_path();
    return parent.empty() ? std::filesystem::path(".") : parent;
  }

  /// What killed processes left, which nobody has a lock on.
  void remove_leftovers() const {
    const std::string prefix = path_.filename().string() + marker;
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(folder(), error)) {
      const std::string name = entry.path().filename().string();
      if (!name.starts_with(prefix) || name.size() == prefix.size()) continue;
      if (name.find_first_not_of("0123456789", prefix.size()) != std::string::npos) continue;
      const Descriptor file(::open(entry.path().c_str(), O_RDWR | O_CLOEXEC));
      if (file.is_open() && ::flock(file.number(), LOCK_EX | LOCK_NB) == 0) {
        ::unlink(entry.path().c_str());
      }
    }
  }

  [[noreturn]] void fail(const char* what, const std::filesystem::path& path) const {
    const int number = errno;
    std::error_code error;
    TORCH_CHECK(std::filesystem::exists(folder(), error) || error, call_, ": there is no folder '",
                folder().string(), "'. Create it before.");
    TORCH_CHECK(false, call_, ": cannot ", what, " '", path.string(), "': ", std::strerror(number),
                ". The file that was there before is untouched.");
  }

  std::filesystem::path path_, partial_;
  const char* call_;
  Descriptor file_;
  int error_ = 0;          // the first one
  bool replaces_ = false;  // a file that was there at construction
  struct stat before_ {};  // what it was
  bool committed_ = false;
};

}  // namespace torchamp::detail
