// SPDX-License-Identifier: BSD-3-Clause
#include "torchamp/detail/extras/io/archive_file.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <istream>
#include <sstream>
#include <streambuf>
#include <string>

#include "support/expect_error.h"
#include "torchamp/python_state.h"

namespace {

std::string sealed_in_pieces(const std::string& archive, std::size_t piece) {
  std::string bytes;
  torchamp::detail::SealedWriter writer([&](const void* data, std::size_t size) {
    bytes.append(static_cast<const char*>(data), size);
  });
  for (std::size_t at = 0; at < archive.size(); at += piece) {
    writer.add(archive.data() + at, std::min(piece, archive.size() - at));
  }
  writer.finish();
  return bytes;
}

TEST(SealedWriter, SealsTheSameInPiecesOfAnySize) {
  const std::string archive("an archive that ends without a comment\0\0", 40);
  const std::string whole = sealed_in_pieces(archive, archive.size());
  EXPECT_EQ(whole.substr(0, 38), archive.substr(0, 38));
  EXPECT_EQ(whole.substr(38, 20), std::string("\x22\0torchamp-checksum:", 20));
  EXPECT_EQ(whole.size(), archive.size() + torchamp::detail::seal_size);
  for (const std::size_t piece : {1, 2, 3, 7, 39}) {
    EXPECT_EQ(sealed_in_pieces(archive, piece), whole) << piece;
  }
}

/// Throws what is no std::exception at the read after `reads`.
class FailingBuffer : public std::stringbuf {
 public:
  FailingBuffer(const std::string& bytes, int reads)
      : std::stringbuf(bytes, std::ios::in), reads_(reads) {}

 protected:
  std::streamsize xsgetn(char* to, std::streamsize size) override {
    if (reads_-- == 0) throw 1;
    return std::stringbuf::xsgetn(to, size);
  }

 private:
  int reads_;
};

TEST(StreamReader, MakesAnErrorOfABufferThatThrowsAtAnyRead) {
  const torchamp::GradScalerState state{1024., 2., 0.5, 2000, 7};
  std::ostringstream out;
  torchamp::save_python_state(state, out);
  int reads = 0;
  for (bool failed = true; failed; ++reads) {
    SCOPED_TRACE(reads);
    ASSERT_LT(reads, 1000);
    FailingBuffer buffer(out.str(), reads);
    std::istream in(&buffer);
    try {
      EXPECT_EQ(torchamp::load_python_state(in), state);
      failed = false;
    } catch (const c10::Error& error) {
      EXPECT_EQ(std::string(error.what()).find("torchamp::load_python_state: "), 0U)
          << error.what();
    }
  }
  EXPECT_GT(reads, 10);
}

}  // namespace
