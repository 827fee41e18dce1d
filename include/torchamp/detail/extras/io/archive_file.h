// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <caffe2/serialize/inline_container.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <istream>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "torchamp/detail/core/base/checksum.h"
#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/extras/io/open_file.h"
#include "torchamp/detail/extras/io/zip_check.h"
#include "torchamp/detail/extras/shared/rng_state.h"

namespace TORCHAMP_NAMESPACE::detail {

// Note [Atomic files]
// A file is written under another name in the same folder, flushed to the disk, and renamed
// atomically; then the folder is flushed. Whenever the process or the machine stops, a complete
// file remains, the old or the new one. A killed process may leave an unfinished file; the next
// writer detects and removes it. The new file gets the mode, access list and owner of the old file;
// before that only its writer can access it. See Note [Files of two systems].

/// A file that replaces `path` at commit(), and is removed without commit().
class AtomicFile {
 public:
  /// `call` is the public function that errors name.
  AtomicFile(std::filesystem::path path, const char* call)
      : path_(end_of_links(std::move(path), call)), call_(call), replaced_(path_) {
    TORCH_CHECK(!replaced_.exists || replaced_.is_file, call_, ": '", path_.string(),
                "' exists and is not a file. Pass another path.");
    std::random_device random;
    std::error_code error;
    for (int attempt = 0; attempt < 100 && !file_.is_open(); ++attempt) {
      partial_ = path_.parent_path() / partial_prefix();
      partial_ += std::to_string(random());
      file_ = OpenFile::to_write(partial_, replaced_);
      if (!file_.is_open()) error = last_error();
      if (!file_.is_open() && !OpenFile::is_taken(error)) break;
      if (file_.is_open() && !file_.lock()) file_ = OpenFile();
    }
    if (!file_.is_open()) fail("create", partial_, error);
  }

  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  ~AtomicFile() {
    file_ = OpenFile();  // Windows removes closed files only
    if (!committed_) OpenFile::remove(partial_);
  }

  /// Writes all data. Errors are thrown by commit(): LibTorch's writer, which calls this, ends the
  /// process if its output throws or writes too little.
  std::size_t write(const void* data, std::size_t size) {
    if (!error_ && !file_.write(data, size)) error_ = last_error();
    return size;
  }

  void commit() {
    if (replaced_.exists) file_.take_access(replaced_);
    if (!error_) error_ = file_.flush();
    if (error_) fail("write", partial_, error_);
    const std::error_code error = file_.replace(partial_, path_);
    if (error) fail("replace", path_, error);
    committed_ = true;
    OpenFile::flush_folder(folder());
    remove_leftovers();
  }

 private:
  /// The beginning of the names of unfinished files. A long name is cut, so that a number fits:
  /// systems allow 255 bytes (Windows: 255 of its characters). Two files may then share the
  /// unfinished names; each writer locks its own unfinished file.
  std::filesystem::path partial_prefix() const {
    constexpr std::size_t longest = 235;
    std::filesystem::path::string_type name = path_.filename().native();
    if (name.size() > longest) {
      const auto is_within_character = [&](std::size_t at) { return (name[at] & 0xC0) == 0x80; };
      std::size_t end = longest;
      while (sizeof(name[0]) == 1 && end > 0 && is_within_character(end)) --end;
      name.resize(end);
    }
    return std::filesystem::path(std::move(name)) += ".partial-";
  }

  static std::filesystem::path end_of_links(std::filesystem::path path, const char* call) {
    std::error_code no_link;
    for (int links = 0; std::filesystem::is_symlink(path, no_link); ++links) {
      TORCH_CHECK(links < 40, call, ": cannot replace '", path.string(),
                  "': ", std::make_error_code(std::errc::too_many_symbolic_link_levels).message(),
                  ". The old file is unchanged.");
      path = path.parent_path() / std::filesystem::read_symlink(path);
    }
    return path;
  }

  std::filesystem::path folder() const {
    const std::filesystem::path parent = path_.parent_path();
    return parent.empty() ? std::filesystem::path(".") : parent;
  }

  void remove_leftovers() const {
    const std::string prefix = partial_prefix().string();
    std::error_code error;
    std::filesystem::directory_iterator entry(folder(), error);
    // Not a range-based loop, whose next entry throws: the new file is there already.
    for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
      const std::string name = entry->path().filename().string();
      if (!name.starts_with(prefix) || name.size() == prefix.size()) continue;
      if (name.find_first_not_of("0123456789", prefix.size()) != std::string::npos) continue;
      OpenFile::remove_if_left(entry->path());
    }
  }

  [[noreturn]] void fail(const char* what, const std::filesystem::path& path,
                         const std::error_code& why) const {
    std::error_code error;
    TORCH_CHECK(std::filesystem::exists(folder(), error) || error, call_, ": there is no folder '",
                folder().string(), "'. Create it first.");
    TORCH_CHECK(false, call_, ": cannot ", what, " '", path.string(), "': ", why.message(),
                ". The old file is unchanged.");
  }

  std::filesystem::path path_, partial_;
  const char* call_;
  ReplacedFile replaced_;
  OpenFile file_;
  std::error_code error_;  // the first one
  bool committed_ = false;
};

/// Replaces a file by these bytes, completely or not at all. `call` begins error messages.
inline void replace_file(const char* call, const std::string& path, std::string_view bytes) {
  AtomicFile file(path, call);
  file.write(bytes.data(), bytes.size());
  file.commit();
}

// LibTorch reads archives through these, partly from C: they return too little instead of throwing.

/// An open file: the same file at each read, even if its name is replaced.
class FileReader final : public caffe2::serialize::ReadAdapterInterface {
 public:
  /// Throws if there is no such file.
  explicit FileReader(const std::filesystem::path& path) : file_(OpenFile::to_read(path)) {
    TORCH_CHECK(file_.is_open(), "it cannot be opened: ", last_error().message(), '.');
    const auto size = file_.size();
    TORCH_CHECK(size, "it is not a file.");
    size_ = static_cast<std::size_t>(*size);
  }
  std::size_t size() const override { return size_; }
  std::size_t read(uint64_t position, void* to, std::size_t size, const char* = "") const override {
    return file_.read(position, to, size);
  }

 private:
  OpenFile file_;
  std::size_t size_ = 0;
};

/// A stream from its first byte to its last, even if the stream throws exceptions at errors.
class StreamReader final : public caffe2::serialize::ReadAdapterInterface {
 public:
  explicit StreamReader(std::istream& in) : buffer_(in.rdbuf()) {
    TORCH_CHECK(buffer_, "the stream has no buffer.");
    const std::streamoff size = buffer_->pubseekoff(0, std::ios::end, std::ios::in);
    TORCH_CHECK(size >= 0, in.fail() ? "the stream has failed; its file may not be there."
                                     : "the stream cannot be read twice.");
    size_ = static_cast<std::size_t>(size);
  }
  std::size_t size() const override { return size_; }
  std::size_t read(uint64_t position, void* to, std::size_t size, const char* = "") const override {
    try {
      const auto place = static_cast<std::streamoff>(position);
      if (buffer_->pubseekpos(place, std::ios::in) != std::streampos(place)) return 0;
      return static_cast<std::size_t>(
          buffer_->sgetn(static_cast<char*>(to), static_cast<std::streamsize>(size)));
    } catch (...) {
      return 0;
    }
  }

 private:
  std::streambuf* buffer_;
  std::size_t size_ = 0;
};

// Note [Sealed archives]
// A zip file may end with a comment, whose length is in the two bytes before it. The comment of a
// sealed archive is "torchamp-checksum:" and the checksum of all bytes before, in 16 hexadecimal
// digits. All zip readers accept it.

inline constexpr std::string_view seal_name = "torchamp-checksum:";
inline constexpr std::size_t seal_size = seal_name.size() + 16;

inline std::string hexadecimal(uint64_t value) {
  std::string text(16, '0');
  for (std::size_t i = text.size(); i-- > 0; value >>= 4) text[i] = "0123456789abcdef"[value & 15];
  return text;
}

/// Passes an archive's data to write(data, size), and seals it.
template <class Write>
class SealedWriter {
 public:
  explicit SealedWriter(Write write) : write_(std::move(write)) {}

  void add(const void* data, std::size_t size) {
    const std::string_view bytes(static_cast<const char*>(data), size);
    if (size < 2) {
      last_ += bytes;
      if (last_.size() <= 2) return;
      put(last_.substr(0, last_.size() - 2));
      last_.erase(0, last_.size() - 2);
      return;
    }
    put(last_);
    put(bytes.substr(0, size - 2));
    last_ = bytes.substr(size - 2);
  }

  void finish() {
    TORCH_INTERNAL_ASSERT(last_ == std::string_view("\0\0", 2), "LibTorch wrote a comment");
    last_ = {static_cast<char>(seal_size), '\0'};
    put(last_ += seal_name);
    const std::string sum = hexadecimal(sum_.value());
    write_(sum.data(), sum.size());
  }

 private:
  void put(std::string_view bytes) {
    sum_.add(bytes.data(), bytes.size());
    write_(bytes.data(), bytes.size());
  }

  Write write_;
  Checksum sum_;
  std::string last_;  // two bytes: the length of the comment that LibTorch does not write
};

inline bool is_sealed(const ArchiveBytes& archive) {
  const std::size_t size = archive->size();
  return size >= seal_size && read_bytes(archive, size - seal_size, seal_name.size()) == seal_name;
}

/// Throws if a LibTorch archive was altered. Checks its seal or, without a seal, the CRCs of the
/// format, see Note [Damaged zip files]. Reads the whole archive.
inline void check_archive(const ArchiveBytes& archive) {
  if (!is_sealed(archive)) return ZipCheck::check(archive);
  const uint64_t end = archive->size() - 16;
  TORCH_CHECK(read_bytes(archive, end, 16) == hexadecimal(sum_of<Checksum>(archive, 0, end)),
              "it is damaged: its bytes have changed since it was written.");
}

// Note [Devices in archives]
// LibTorch loads a tensor to the device from which it was saved, which this machine may lack. The
// pickle of an archive has that device's name with each storage, as a string: 'X', the length in
// four bytes, the text. Another such string (for example a key "cuda:1") is mistaken for a device,
// which is harmless: the tensors are then loaded through the host.

/// Whether a text names a device with an index that this process lacks.
inline bool is_missing_device(std::string_view text) {
  if (text.find(':') == std::string_view::npos) return false;
  try {
    return !device_is_here(at::Device(std::string(text)));
  } catch (const c10::Error&) {
    return false;  // another text
  }
}

/// The device for loading an archive's tensors. Unset: their saved devices. If one of these is
/// missing, the CPU. See Note [Devices in archives].
inline std::optional<at::Device> device_for(const ArchiveBytes& archive) {
  caffe2::serialize::PyTorchStreamReader reader(archive);
  if (!reader.hasRecord("data.pkl")) return std::nullopt;
  const auto [data, size] = reader.getRecord("data.pkl");
  const std::string_view pickle(static_cast<const char*>(data.get()), size);
  for (std::size_t at = pickle.find('X'); at != pickle.npos; at = pickle.find('X', at + 1)) {
    const std::string_view after = pickle.substr(at + 1);
    if (after.size() < 4 || after.substr(1, 3) != std::string_view("\0\0\0", 3)) continue;
    const auto length = static_cast<unsigned char>(after[0]);
    if (is_missing_device(after.substr(4, length))) return at::Device(at::kCPU);
  }
  return std::nullopt;
}

/// An error's text without LibTorch's backtrace.
inline const char* reason_of(const std::exception& error) {
  const auto* const own = dynamic_cast<const c10::Error*>(&error);
  return own ? own->what_without_backtrace() : error.what();
}

/// Names for an error's text, separated by commas: the first of them if they are many.
template <class Names>
std::string list_of(const Names& names) {
  constexpr std::size_t most = 20;
  std::string list;
  std::size_t count = 0;
  for (const auto& name : names) {
    if (count++ < most) (list += list.empty() ? "" : ", ").append(shorten(name));
  }
  if (count > most) list += ", and " + std::to_string(count - most) + " more";
  return list;
}

}  // namespace TORCHAMP_NAMESPACE::detail
