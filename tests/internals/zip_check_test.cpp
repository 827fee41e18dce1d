// SPDX-License-Identifier: BSD-3-Clause
#include "torchamp/detail/extras/io/zip_check.h"

#include <caffe2/serialize/in_memory_adapter.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "support/expect_error.h"

namespace {

std::string little_endian(std::uint64_t value, int width) {
  std::string bytes;
  for (int i = 0; i < width; ++i) {
    bytes += static_cast<char>(value & 0xff);
    value >>= 8;
  }
  return bytes;
}

struct Stored {
  std::string name, data;
  bool has_crc = true;
};

/// A zip file of uncompressed records, with what a test wants wrong in it.
struct Zip {
  std::vector<Stored> records{{"a/one", "first"}, {"a/two", "second"}};
  std::string before_first = {}, before_second = {}, before_directory = {}, before_end = {};
  int count_on_this_disk = 2, count = 2;
  bool has_wide_end = false;
  int wide_count_on_this_disk = 2, wide_count = 2;

  std::string bytes() const {
    std::string all, directory;
    for (const Stored& record : records) {
      all += &record == records.data() ? before_first : before_second;
      torchamp::detail::Crc32 crc;
      crc.add(record.data.data(), record.data.size());
      const std::string size = little_endian(record.data.size(), 4);
      const std::string common = little_endian(0, 8) +  // flags, method, time
                                 little_endian(record.has_crc ? crc.value() : 0, 4) + size + size +
                                 little_endian(record.name.size(), 2) + little_endian(0, 2);
      directory += little_endian(0x02014b50, 4) + little_endian(20, 2) + little_endian(20, 2) +
                   common + little_endian(0, 10) + little_endian(all.size(), 4) + record.name;
      all +=
          little_endian(0x04034b50, 4) + little_endian(20, 2) + common + record.name + record.data;
    }
    all += before_directory;
    const std::size_t start = all.size();
    all += directory + before_end;
    if (has_wide_end) {
      const std::size_t wide_end = all.size();
      all += little_endian(0x06064b50, 4) + little_endian(44, 8) + little_endian(45, 2) +
             little_endian(45, 2) + little_endian(0, 8) +
             little_endian(static_cast<std::uint64_t>(wide_count_on_this_disk), 8) +
             little_endian(static_cast<std::uint64_t>(wide_count), 8) +
             little_endian(directory.size(), 8) + little_endian(start, 8);
      all += little_endian(0x07064b50, 4) + little_endian(0, 4) + little_endian(wide_end, 8) +
             little_endian(1, 4);
    }
    return all + little_endian(0x06054b50, 4) + little_endian(0, 4) +
           little_endian(static_cast<std::uint64_t>(count_on_this_disk), 2) +
           little_endian(static_cast<std::uint64_t>(count), 2) +
           little_endian(directory.size(), 4) + little_endian(start, 4) + little_endian(0, 2);
  }
};

void check(const Zip& zip) {
  const std::string bytes = zip.bytes();
  torchamp::detail::ZipCheck::check(
      std::make_shared<caffe2::serialize::MemoryReadAdapter>(bytes.data(), bytes.size()));
}

TEST(ZipCheck, AcceptsAFileAsItWasWritten) {
  EXPECT_NO_THROW(check({}));
  EXPECT_NO_THROW(check({.has_wide_end = true}));
  EXPECT_NO_THROW(check({.count_on_this_disk = 0xffff, .count = 0xffff, .has_wide_end = true}));
}

TEST(ZipCheck, DetectsCountsOfRecordsThatDisagree) {
  const char* const error = "it is damaged: its end.";
  EXPECT_ERROR(check({.count_on_this_disk = 1}), error);
  EXPECT_ERROR(check({.count = 1}), error);
  EXPECT_ERROR(check({.count_on_this_disk = 1, .count = 1, .has_wide_end = true}), error);
  EXPECT_ERROR(check({.has_wide_end = true, .wide_count_on_this_disk = 1}), error);
  EXPECT_ERROR(check({.has_wide_end = true, .wide_count = 1}), error);
  const char* const directory = "it is damaged: the size of its directory.";
  EXPECT_ERROR(check({.count_on_this_disk = 1, .count = 1}), directory);
  EXPECT_ERROR(check({.count_on_this_disk = 0, .count = 0}), directory);
}

TEST(ZipCheck, DetectsAGapAnywhere) {
  EXPECT_ERROR(check({.before_first = "four"}), "it is damaged: the place of a record.");
  EXPECT_ERROR(check({.before_second = "four"}), "it is damaged: the size of a record.");
  EXPECT_ERROR(check({.before_directory = "four"}), "it is damaged: the size of a record.");
  EXPECT_ERROR(check({.before_end = "four"}), "it is damaged: the place of its directory.");
  EXPECT_ERROR(check({.before_end = "four", .has_wide_end = true}),
               "it is damaged: the place of its directory.");
}

TEST(ZipCheck, AcceptsMissingCrcsOnlyIfNoRecordHasOne) {
  EXPECT_NO_THROW(check({.records = {{"a/one", "first", false}, {"a/two", "second", false}}}));
  EXPECT_ERROR(check({.records = {{"a/one", "first", false}, {"a/two", "second"}}}),
               "it is damaged: 'a/one' in it is not as written.");
  EXPECT_ERROR(check({.records = {{"a/one", "first"}, {"a/two", "second", false}}}),
               "it is damaged: 'a/two' in it is not as written.");
}

}  // namespace
