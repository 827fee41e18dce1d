// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/util/Exception.h>
#include <caffe2/serialize/inline_container.h>
#include <caffe2/serialize/read_adapter_interface.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/text.h"

namespace TORCHAMP_NAMESPACE::detail {

/// The integer of these bytes, at most 8, the lowest first.
inline uint64_t little_endian(std::string_view bytes) {
  uint64_t value = 0;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    value |= uint64_t{static_cast<unsigned char>(bytes[i])} << 8 * i;
  }
  return value;
}

/// tables[n][b]: the effect of byte b on a CRC after n more bytes.
using Crc32Tables = std::array<std::array<uint32_t, 256>, 8>;

/// Not constexpr, which would take most of the compile time of this header.
inline Crc32Tables crc32_tables() {
  Crc32Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ ((crc & 1) != 0 ? 0xedb88320U : 0U);
    tables[0][byte] = crc;
  }
  for (std::size_t more = 1; more < tables.size(); ++more) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[more - 1][byte];
      tables[more][byte] = before >> 8 ^ tables[0][before & 0xff];
    }
  }
  return tables;
}

/// The CRC-32 of the zip format, incremental.
class Crc32 {
 public:
  void add(const void* data, std::size_t size) {
    static const Crc32Tables tables = crc32_tables();
    const auto* byte = static_cast<const unsigned char*>(data);
    uint32_t crc = ~crc_;
    for (; size >= 8; size -= 8, byte += 8) {
      crc ^= uint32_t{byte[0]} | uint32_t{byte[1]} << 8 | uint32_t{byte[2]} << 16 |
             uint32_t{byte[3]} << 24;
      crc = tables[7][crc & 0xff] ^ tables[6][crc >> 8 & 0xff] ^ tables[5][crc >> 16 & 0xff] ^
            tables[4][crc >> 24] ^ tables[3][byte[4]] ^ tables[2][byte[5]] ^ tables[1][byte[6]] ^
            tables[0][byte[7]];
    }
    for (; size > 0; --size, ++byte) crc = crc >> 8 ^ tables[0][(crc ^ *byte) & 0xff];
    crc_ = ~crc;
  }
  uint32_t value() const { return crc_; }

 private:
  uint32_t crc_ = 0;
};

using ArchiveBytes = std::shared_ptr<caffe2::serialize::ReadAdapterInterface>;

/// Uses the memory of `part`, if it is given.
inline std::string read_bytes(const ArchiveBytes& from, uint64_t offset, uint64_t size,
                              std::string part = {}) {
  part.resize(size);
  TORCH_CHECK(from->read(offset, part.data(), part.size()) == size,
              "it cannot be read to its end.");
  return part;
}

/// The sum (a Crc32, say) of the bytes from `begin` up to `end`.
template <class Sum>
auto sum_of(const ArchiveBytes& archive, uint64_t begin, uint64_t end) {
  Sum sum;
  std::string part;
  for (; begin < end; begin += part.size()) {
    part = read_bytes(archive, begin, std::min(end - begin, uint64_t{1} << 20), std::move(part));
    sum.add(part.data(), part.size());
  }
  return sum.value();
}

// Note [Damaged zip files]
// LibTorch's archives are zip files, but its reader ignores the CRCs of the records, so it does not
// detect damage in a record. ZipCheck reads the file's structure itself. Records, their headers
// and the directory must follow each other without a gap from the first byte to the last; header
// and directory must agree; and each record must have its CRC. Not checked are padding, comments,
// ineffective bits at the ends of compressed records, and, in files repacked by other tools, fields
// without a meaning here. Python can write 0 for all CRCs of a file: then only the structure is
// checked.

class ZipCheck {
 public:
  /// Throws c10::Error unless the bytes are an unaltered zip file.
  static void check(const ArchiveBytes& archive) {
    ZipCheck zip(archive);
    zip.read_end();
    zip.read_directory();
    zip.check_headers();
    zip.check_records();
  }

 private:
  struct Record {
    std::string name;
    std::string common;  // with the header: version, flags, method, time
    uint16_t made_by, flags, method;
    uint32_t crc;
    uint64_t packed, size, header;
    uint64_t data = 0;
    std::string attributes;
  };

  static constexpr uint32_t end_mark = 0x06054b50, wide_end_mark = 0x06064b50,
                            locator_mark = 0x07064b50, entry_mark = 0x02014b50,
                            header_mark = 0x04034b50, descriptor_mark = 0x08074b50;
  static constexpr uint32_t wide = 0xffffffff;  // the number is elsewhere, with 64 bits
  static constexpr uint16_t has_descriptor = 8;

  explicit ZipCheck(const ArchiveBytes& archive) : archive_(archive), size_(archive->size()) {}

  static void expect(bool right, const char* what) {
    TORCH_CHECK(right, "it is damaged: ", what, '.');
  }

  std::string bytes(uint64_t offset, uint64_t size) const {
    expect(offset <= size_ && size <= size_ - offset, "it ends too early");
    return read_bytes(archive_, offset, size);
  }

  static uint64_t number(std::string_view from, std::size_t at, std::size_t width) {
    expect(at + width <= from.size(), "a field is cut off");
    return little_endian(from.substr(at, width));
  }
  static uint16_t two(std::string_view from, std::size_t at) {
    return static_cast<uint16_t>(number(from, at, 2));
  }
  static uint32_t four(std::string_view from, std::size_t at) {
    return static_cast<uint32_t>(number(from, at, 4));
  }

  /// Finds the directory by the last part of the file.
  void read_end() {
    constexpr uint64_t length = 22, locator_length = 20, wide_length = 56;
    const uint64_t most = std::min<uint64_t>(size_, length + 0xffff);
    const std::string tail = bytes(size_ - most, most);
    std::size_t at = tail.size();
    for (std::size_t comment = 0; comment + length <= tail.size(); ++comment) {
      const std::size_t here = tail.size() - length - comment;
      if (four(tail, here) != end_mark || two(tail, here + 20) != comment) continue;
      at = here;
      break;
    }
    expect(at < tail.size(), "it is no zip file, or is cut off");
    const std::string_view end = std::string_view(tail).substr(at, length);
    uint64_t end_at = size_ - tail.size() + at;
    records_ = two(end, 10);
    directory_size_ = four(end, 12);
    directory_ = four(end, 16);
    expect(four(end, 4) == 0 && two(end, 8) == records_, "its end");

    const std::string locator =
        end_at >= locator_length ? bytes(end_at - locator_length, locator_length) : "";
    if (!locator.empty() && four(locator, 0) == locator_mark) {
      const uint64_t wide_at = number(locator, 8, 8);
      expect(four(locator, 4) == 0 && four(locator, 16) == 1 &&
                 wide_at == end_at - locator_length - wide_length,
             "the place of its end");
      const std::string more = bytes(wide_at, wide_length);
      const uint16_t made_by = two(more, 12);
      const uint64_t records = number(more, 32, 8), size = number(more, 40, 8),
                     start = number(more, 48, 8);
      expect(four(more, 0) == wide_end_mark && number(more, 4, 8) == wide_length - 12 &&
                 (made_by == 0x31e || made_by == 45) && two(more, 14) == 45 &&
                 number(more, 16, 8) == 0 && number(more, 24, 8) == records &&
                 (records_ == 0xffff || records_ == records) &&
                 (directory_size_ == wide || directory_size_ == size) &&
                 (directory_ == wide || directory_ == start),
             "its end");
      records_ = records, directory_size_ = size, directory_ = start;
      end_at = wide_at;
    }
    expect(directory_ <= end_at && directory_size_ == end_at - directory_,
           "the place of its directory");
  }

  void read_directory() {
    const std::string directory = bytes(directory_, directory_size_);
    constexpr std::size_t length = 46;
    expect(records_ > 0 && records_ <= directory.size() / length, "the size of its directory");
    std::size_t at = 0;
    for (uint64_t i = 0; i < records_; ++i) {
      const std::string_view rest = std::string_view(directory).substr(at);
      const std::size_t name = two(rest, 28), extra = two(rest, 30), comment = two(rest, 32);
      expect(four(rest, 0) == entry_mark && two(rest, 34) == 0 && name > 0 &&
                 length + name + extra + comment <= rest.size(),
             "its directory");
      Record record{.name = std::string(rest.substr(length, name)),
                    .common = std::string(rest.substr(6, 10)),
                    .made_by = two(rest, 4),
                    .flags = two(rest, 8),
                    .method = two(rest, 10),
                    .crc = four(rest, 16),
                    .packed = four(rest, 20),
                    .size = four(rest, 24),
                    .header = four(rest, 42),
                    .attributes = std::string(rest.substr(36, 6))};
      widen(record, rest.substr(length + name, extra));
      at += length + name + extra + comment;
      // Fields without a meaning here are equal in all records of LibTorch's.
      const Record& first = all_.empty() ? record : all_.front();
      expect(record.made_by == first.made_by &&
                 (record.made_by != 0 || (record.attributes == first.attributes && comment == 0)),
             "its directory");
      all_.push_back(std::move(record));
    }
    expect(at == directory.size(), "the size of its directory");
  }

  /// Takes the numbers of 64 bits from an extra field.
  static void widen(Record& record, std::string_view extra) {
    while (extra.size() >= 4) {
      const std::size_t size = two(extra, 2);
      expect(size <= extra.size() - 4, "its directory");
      std::string_view field = extra.substr(4, size);
      if (two(extra, 0) == 1) {
        for (uint64_t* value : {&record.size, &record.packed, &record.header}) {
          if (*value != wide) continue;
          *value = number(field, 0, 8);
          field.remove_prefix(8);
        }
      }
      extra.remove_prefix(4 + size);
    }
    expect(extra.empty(), "its directory");
  }

  void check_headers() {
    std::ranges::sort(all_, {}, &Record::header);
    uint64_t next = 0;
    for (std::size_t i = 0; i < all_.size(); ++i) {
      Record& record = all_[i];
      const uint64_t limit = i + 1 < all_.size() ? all_[i + 1].header : directory_;
      expect(record.header == next, "the place of a record");
      constexpr uint64_t length = 30;
      const std::string header = bytes(record.header, length);
      const uint64_t name = two(header, 26), extra = two(header, 28);
      const bool described = (record.flags & has_descriptor) != 0;
      const auto agrees = [&](std::size_t at, uint64_t value) {
        return four(header, at) == value || four(header, at) == wide;
      };
      const bool repeats =
          four(header, 14) == record.crc && agrees(18, record.packed) && agrees(22, record.size);
      const bool left_to_descriptor =
          described && four(header, 14) == 0 && number(header, 18, 8) == 0;
      expect(four(header, 0) == header_mark && header.compare(4, 10, record.common) == 0 &&
                 (repeats || left_to_descriptor) &&
                 bytes(record.header + length, name) == record.name,
             "the header of a record");
      if (record.made_by == 0) check_extra(bytes(record.header + length + name, extra));
      record.data = record.header + length + name + extra;
      expect(record.data <= limit && record.packed <= limit - record.data &&
                 (record.method != 0 || record.packed == record.size),
             "the size of a record");
      check_descriptor(record, described, limit);
      next = limit;
    }
  }

  /// LibTorch's: padding, and sizes of 64 bits.
  static void check_extra(std::string_view extra) {
    while (!extra.empty()) {
      const uint16_t kind = two(extra, 0);
      const std::size_t size = two(extra, 2);
      expect((kind == 0x4246 || kind == 1) && size <= extra.size() - 4, "the header of a record");
      extra.remove_prefix(4 + size);
    }
  }

  /// The trailer of a record: CRC and sizes again.
  void check_descriptor(const Record& record, bool described, uint64_t limit) const {
    const uint64_t end = record.data + record.packed;
    uint64_t left = limit - end;
    expect(described ? left >= 12 && left <= 24 && left % 4 == 0 : left == 0,
           "the size of a record");
    if (!described) return;
    const std::string all = bytes(end, left);
    std::string_view rest = all;
    if (left == 16 || left == 24) {
      expect(four(rest, 0) == descriptor_mark, "the end of a record");
      rest.remove_prefix(4);
    }
    const std::size_t width = (rest.size() - 4) / 2;
    expect(four(rest, 0) == record.crc && number(rest, 4, width) == record.packed &&
               number(rest, 4 + width, width) == record.size,
           "the end of a record");
  }

  void check_records() const {
    const bool without_crc =
        std::ranges::all_of(all_, [](const Record& record) { return record.crc == 0; });
    if (without_crc) return;
    std::optional<caffe2::serialize::PyTorchStreamReader> inflating;
    const auto crc_of = [&](const Record& record) {
      if (record.method == 0) {
        return sum_of<Crc32>(archive_, record.data, record.data + record.size);
      }
      if (!inflating) inflating.emplace(archive_);
      // LibTorch's names omit the folder of all records.
      const auto [data, size] = inflating->getRecord(record.name.substr(record.name.find('/') + 1));
      Crc32 crc;
      crc.add(data.get(), size);
      return crc.value();
    };
    for (const Record& record : all_) {
      bool right = false;
      try {
        right = crc_of(record) == record.crc;
      } catch (const std::exception&) {  // right is false
      }
      TORCH_CHECK(right, "it is damaged: '", shorten(record.name), "' in it is not as written.");
    }
  }

  const ArchiveBytes& archive_;
  uint64_t size_;
  uint64_t records_ = 0, directory_ = 0, directory_size_ = 0;
  std::vector<Record> all_;
};

}  // namespace TORCHAMP_NAMESPACE::detail
