// SPDX-License-Identifier: BSD-3-Clause
#include "support/gzip.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <string>

#include "support/temporary_folder.h"

namespace support {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

TEST(Gzip, UnpacksAFileAndRefusesACutOne) {
  const TemporaryFolder folder("gzip-test");
  const auto packed = folder.path() / "a.gz", plain = folder.path() / "a";
  std::string text;
  for (int i = 0; i < 100'000; ++i) text += std::to_string(i * 7919 % 10007);
  gzFile file = gzopen(packed.c_str(), "wb");
  ASSERT_GT(gzwrite(file, text.data(), static_cast<unsigned>(text.size())), 0);
  ASSERT_EQ(gzclose(file), Z_OK);

  unpack_gzip(packed, plain);
  std::ifstream in(plain, std::ios::binary);
  EXPECT_TRUE(text == std::string(std::istreambuf_iterator<char>(in), {}));

  std::filesystem::resize_file(packed, std::filesystem::file_size(packed) / 2);
  EXPECT_THAT([&] { unpack_gzip(packed, plain); },
              ThrowsMessage<std::runtime_error>(HasSubstr("cannot unpack '" + packed.string())));
  EXPECT_THAT([&] { unpack_gzip(folder.path() / "absent.gz", plain); },
              ThrowsMessage<std::runtime_error>(HasSubstr("cannot open")));
}

TEST(TemporaryFolder, IsGoneAtTheEnd) {
  std::filesystem::path path;
  {
    const TemporaryFolder folder("gzip-test");
    path = folder.path();
    std::ofstream(path / "file") << "text";
    EXPECT_TRUE(std::filesystem::exists(path / "file"));
  }
  EXPECT_FALSE(std::filesystem::exists(path));
}

}  // namespace
}  // namespace support
