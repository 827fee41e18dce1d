// SPDX-License-Identifier: BSD-3-Clause
#include "checkerboard/target.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "support/temporary_folder.h"

namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

TEST(Grid, HoldsTheCoordinatesOfEachPixel) {
  const auto coordinates = grid(5, 4);
  ASSERT_EQ(coordinates.sizes(), (std::vector<std::int64_t>{1, 2, 4, 5}));
  for (int y = 0; y < 4; ++y) {
    for (int x = 0; x < 5; ++x) {
      EXPECT_FLOAT_EQ(coordinates[0][0][y][x].item<float>(), static_cast<float>(x) / 5.F);
      EXPECT_FLOAT_EQ(coordinates[0][1][y][x].item<float>(), static_cast<float>(y) / 4.F);
    }
  }
}

TEST(Checker, IsABoardOfEightByEightFields) {
  const auto board = checker(64, 64, 8.);
  ASSERT_EQ(board.sizes(), (std::vector<std::int64_t>{1, 1, 64, 64}));
  const auto is_light = [](int i) { return std::fmod(static_cast<float>(i) / 16.F, 1.F) > 0.5F; };
  for (int y = 0; y < 64; ++y) {
    for (int x = 0; x < 64; ++x) {
      ASSERT_EQ(board[0][0][y][x].item<float>(), is_light(x) != is_light(y) ? 1.F : 0.F);
    }
  }
}

TEST(ToImage, ReversesToTensor) {
  for (const int channels : {1, 3}) {
    drawing::Image image(3, 2, channels);
    for (std::size_t i = 0; i < image.pixels.size(); ++i) {
      image.pixels[i] = static_cast<std::uint8_t>(i * 14);
    }
    const auto values = to_tensor(image);
    EXPECT_EQ(values.sizes(), (std::vector<std::int64_t>{1, channels, 2, 3}));
    EXPECT_FLOAT_EQ(values[0][channels - 1][1][2].item<float>(),
                    static_cast<float>(image.at(2, 1, channels - 1)) / 255.F);
    EXPECT_EQ(to_image(values).pixels, image.pixels);
  }
  const auto outside = torch::tensor({-1.F, 2.F}).view({1, 1, 1, 2});
  EXPECT_THAT(to_image(outside).pixels, testing::ElementsAre(0, 255));
}

TEST(Target, RefusesFilesThatAreNoPicture) {
  EXPECT_THAT([] { Target("/no/such.png"); },
              ThrowsMessage<support::UsageError>(HasSubstr("--image: cannot read '/no/such.png'")));
}

#if defined(EXAMPLES_HAVE_LIBPNG)

TEST(Target, ShrinksAPictureAndKeepsItsShape) {
  const support::TemporaryFolder folder("target-test");
  const std::string file = (folder.path() / "picture.png").string();
  drawing::Image picture(40, 10, 3);
  for (int y = 0; y < 10; ++y) {
    for (int x = 20; x < 40; ++x) picture.at(x, y, 1) = 255;
  }
  drawing::write_png(file, picture);
  const Target target(file);
  EXPECT_FALSE(target.is_board());
  EXPECT_EQ(target.at_size(100).sizes(), (std::vector<std::int64_t>{1, 3, 10, 40}));
  const auto small = target.at_size(8);
  ASSERT_EQ(small.sizes(), (std::vector<std::int64_t>{1, 3, 2, 8}));
  EXPECT_EQ(small[0][1][0][3].item<float>(), 0.F);
  EXPECT_EQ(small[0][1][1][4].item<float>(), 1.F);
  EXPECT_EQ(target.at_size(2).size(2), 1);  // never no pixel at all

  drawing::write_png(file, drawing::Image(3, 5, 1));
  EXPECT_THAT([&] { Target{file}; },
              ThrowsMessage<support::UsageError>(HasSubstr("has fewer than 16 pixels")));
}

#endif

}  // namespace
