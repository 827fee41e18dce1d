// SPDX-License-Identifier: BSD-3-Clause
#include "support/drawing/png_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "support/drawing/png_stored.h"
#include "support/temporary_folder.h"

namespace drawing {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

Image pattern(int width, int height, int channels) {
  Image image(width, height, channels);
  for (std::size_t i = 0; i < image.pixels.size(); ++i) {
    image.pixels[i] = static_cast<std::uint8_t>(i * 37 + i / 7);
  }
  return image;
}

#if defined(EXAMPLES_HAVE_LIBPNG)

TEST(Png, GivesBackWhatWasWritten) {
  const support::TemporaryFolder folder("png-test");
  for (const int channels : {1, 3}) {
    const Image written = pattern(31, 17, channels);
    write_png(folder.path() / "a.png", written);
    const Image read = read_png(folder.path() / "a.png");
    EXPECT_EQ(read.width, 31);
    EXPECT_EQ(read.height, 17);
    EXPECT_EQ(read.channels, channels);
    EXPECT_EQ(read.pixels, written.pixels);
  }
}

TEST(Png, ReadsWhatTheWriterWithoutALibraryWrites) {
  const support::TemporaryFolder folder("png-test");
  for (const int channels : {1, 3}) {
    const Image written = pattern(200, 150, channels);  // in RGB more than one stored block
    ASSERT_TRUE(write_png_stored(folder.path() / "a.png", written));
    EXPECT_EQ(read_png(folder.path() / "a.png").pixels, written.pixels);
  }
}

/// Writes samples in a format of libpng's own.
void write_as(const std::filesystem::path& path, png_uint_32 format, png_uint_32 width,
              const void* samples, const void* colours = nullptr, png_uint_32 colour_count = 0) {
  detail::PngState state;
  state.width = width;
  state.height = 1;
  state.format = format;
  state.colormap_entries = colour_count;
  ASSERT_TRUE(png_image_write_to_file(&state, path.c_str(), 0, samples, 0, colours))
      << state.message;
}

TEST(Png, LaysTransparentPartsOverWhite) {
  const support::TemporaryFolder folder("png-test");
  const png_byte rgba[] = {10, 20, 30, 255, 10, 20, 30, 0};
  write_as(folder.path() / "a.png", PNG_FORMAT_RGBA, 2, rgba);
  EXPECT_THAT(read_png(folder.path() / "a.png").pixels,
              testing::ElementsAre(10, 20, 30, 255, 255, 255));
}

TEST(Png, ReadsPalettes) {
  const support::TemporaryFolder folder("png-test");
  const png_byte palette[] = {200, 10, 20, 30, 40, 250};
  const png_byte indices[] = {1, 0, 1};
  write_as(folder.path() / "a.png", PNG_FORMAT_RGB_COLORMAP, 3, indices, palette, 2);
  EXPECT_THAT(read_png(folder.path() / "a.png").pixels,
              testing::ElementsAre(30, 40, 250, 200, 10, 20, 30, 40, 250));
}

/// Writes one row of samples with libpng's plain interface, which leaves all to the caller.
void write_raw(const std::filesystem::path& path, int depth, int interlace, int side,
               const std::vector<png_byte>& row) {
  std::FILE* file = std::fopen(path.c_str(), "wb");
  ASSERT_NE(file, nullptr);
  png_structp png = png_create_write_struct(PNG_LIBPNG_VER_STRING, nullptr, nullptr, nullptr);
  png_infop info = png_create_info_struct(png);
  png_init_io(png, file);
  const auto size = static_cast<png_uint_32>(side);
  png_set_IHDR(png, info, size, size, depth, PNG_COLOR_TYPE_GRAY, interlace,
               PNG_COMPRESSION_TYPE_DEFAULT, PNG_FILTER_TYPE_DEFAULT);
  png_write_info(png, info);
  const int passes = png_set_interlace_handling(png);
  for (int i = 0; i < passes * side; ++i) png_write_row(png, row.data());
  png_write_end(png, info);
  png_destroy_write_struct(&png, &info);
  std::fclose(file);
}

TEST(Png, ReadsSixteenBitsASample) {
  const support::TemporaryFolder folder("png-test");
  write_raw(folder.path() / "a.png", 16, PNG_INTERLACE_NONE, 2, {0x80, 0x80, 0xFF, 0xFF});
  EXPECT_THAT(read_png(folder.path() / "a.png").pixels, testing::ElementsAre(128, 255, 128, 255));
}

TEST(Png, ReadsInterlacedFiles) {
  const support::TemporaryFolder folder("png-test");
  std::vector<png_byte> row(9);
  for (std::size_t i = 0; i < row.size(); ++i) row[i] = static_cast<png_byte>(i * 28);
  write_raw(folder.path() / "a.png", 8, PNG_INTERLACE_ADAM7, 9, row);
  const Image image = read_png(folder.path() / "a.png");
  for (int y = 0; y < 9; ++y) {
    for (int x = 0; x < 9; ++x) EXPECT_EQ(image.at(x, y, 0), x * 28);
  }
}

TEST(Png, SaysWhyAFileCannotBeRead) {
  const support::TemporaryFolder folder("png-test");
  const auto reading = [&](const char* name) {
    return [path = folder.path() / name] { read_png(path); };
  };
  EXPECT_THAT(reading("absent.png"), ThrowsMessage<PngError>(HasSubstr("No such file")));
  EXPECT_THAT(reading(""), ThrowsMessage<PngError>(HasSubstr("it is a directory")));
  std::ofstream(folder.path() / "text.png") << "This is a text, and no picture.";
  EXPECT_THAT(reading("text.png"), ThrowsMessage<PngError>(HasSubstr("PNG")));
  write_png(folder.path() / "cut.png", pattern(64, 64, 3));
  std::filesystem::resize_file(folder.path() / "cut.png",
                               std::filesystem::file_size(folder.path() / "cut.png") / 2);
  EXPECT_THAT(reading("cut.png"), ThrowsMessage<PngError>(HasSubstr("cut.png': ")));
}

#else

TEST(Png, SaysThatItCannotReadWithoutLibpng) {
  EXPECT_THAT([] { read_png("a.png"); }, ThrowsMessage<PngError>(HasSubstr("libpng-dev")));
}

#endif

TEST(Png, SaysWhyAFileCannotBeWritten) {
  EXPECT_THAT([] { write_png("/no/such/folder/a.png", pattern(2, 2, 1)); },
              ThrowsMessage<PngError>(HasSubstr("cannot write '/no/such/folder/a.png'")));
}

}  // namespace
}  // namespace drawing
