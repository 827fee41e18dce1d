// SPDX-License-Identifier: BSD-3-Clause
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <limits>
#include <string>
#include <vector>

#include "support/drawing/bar_chart.h"
#include "support/drawing/canvas.h"
#include "support/drawing/histogram.h"
#include "support/drawing/plot.h"
#include "support/drawing/text.h"
#include "support/drawing/ticks.h"

namespace drawing {
namespace {

using testing::ElementsAre;

TEST(Canvas, CutsOffWhatLiesOutside) {
  Canvas canvas(8, 6, palette::paper);
  canvas.fill({-5, -5, 100, 8}, palette::blue);
  canvas.stroke({{{-20., 5.}, {40., 5.}}}, 1., palette::ink);
  canvas.draw(Image(4, 4, 1), {6, 2, 8, 8});
  canvas.frame({-3, -3, 30, 30}, palette::ink);
  EXPECT_EQ(canvas.image().at(0, 0, 2), palette::blue.b);
  EXPECT_EQ(canvas.image().at(0, 3, 0), palette::paper.r);
  EXPECT_EQ(canvas.image().at(7, 3, 0), 0);
}

TEST(Canvas, AntialiasesLines) {
  Canvas canvas(5, 5, {255, 255, 255});
  canvas.stroke({{{-3., 2.5}, {8., 2.5}}}, 2., {0, 0, 0});  // covers row 2 and half of 1 and 3
  for (int x = 0; x < 5; ++x) {
    EXPECT_EQ(canvas.image().at(x, 2, 0), 0);
    EXPECT_NEAR(canvas.image().at(x, 1, 0), 128, 1);
    EXPECT_NEAR(canvas.image().at(x, 3, 0), 128, 1);
    EXPECT_EQ(canvas.image().at(x, 0, 0), 255);
  }
}

TEST(Canvas, DrawsGreyAndColourImagesAsBlocks) {
  Image grey(2, 1, 1), colour(1, 1, 3);
  grey.pixels = {10, 200};
  colour.pixels = {1, 2, 3};
  Canvas canvas(8, 2, palette::paper);
  canvas.draw(grey, {0, 0, 4, 2});
  canvas.draw(colour, {4, 0, 4, 2});
  EXPECT_EQ(canvas.image().at(1, 1, 2), 10);
  EXPECT_EQ(canvas.image().at(2, 0, 1), 200);
  EXPECT_EQ(canvas.image().at(7, 1, 2), 3);
}

TEST(Font, HasEveryPrintableCharacterWithinItsLine) {
  for (char code = ' '; code <= '~'; ++code) {
    const Glyph& glyph = find_glyph(code);
    ASSERT_EQ(glyph.code, code);
    EXPECT_EQ(trace(glyph).empty(), code == ' ');
    for (const Polyline& line : trace(glyph)) {
      EXPECT_GE(line.size(), 2U) << code;
      for (const Point& p : line) {
        EXPECT_TRUE(p.x >= -0.6 && p.x <= glyph.width + 0.6) << code << ' ' << p.x;
        EXPECT_TRUE(p.y >= -4. && p.y <= 16.) << code << ' ' << p.y;
      }
    }
  }
  EXPECT_EQ(find_glyph('\xE9').code, '?');
}

/// The columns of a canvas that something was drawn in.
std::pair<int, int> inked_columns(const Canvas& canvas) {
  int first = canvas.width(), last = -1;
  for (int y = 0; y < canvas.height(); ++y) {
    for (int x = 0; x < canvas.width(); ++x) {
      if (canvas.image().at(x, y, 0) < 200) first = std::min(first, x), last = std::max(last, x);
    }
  }
  return {first, last};
}

TEST(Text, StandsWhereItIsAligned) {
  const double width = text_width("Hello");
  const std::pair<Align, double> cases[] = {
      {Align::left, 20.}, {Align::centre, 20. + width / 2.}, {Align::right, 20. + width}};
  for (const auto& [align, x] : cases) {
    Canvas canvas(120, 40, palette::paper);
    draw_text(canvas, x, 30, "Hello", {.align = align});
    const auto [first, last] = inked_columns(canvas);
    EXPECT_NEAR(first, 20., 1.);
    EXPECT_NEAR(last, 20. + width, 1.5);
  }
}

// ---- Plots --------------------------------------------------------------------------------------

std::vector<std::string> labels(const std::vector<Tick>& ticks) {
  std::vector<std::string> result;
  for (const Tick& tick : ticks) {
    if (tick.is_major()) result.push_back(tick.label);
  }
  return result;
}

TEST(Ticks, AreRoundNumbers) {
  EXPECT_THAT(labels(linear_ticks(1., 500., 8)),
              ElementsAre("50", "100", "150", "200", "250", "300", "350", "400", "450", "500"));
  EXPECT_THAT(labels(linear_ticks(-0.1, 0.11, 4)),
              ElementsAre("-0.1", "-0.05", "0", "0.05", "0.1"));
  EXPECT_THAT(labels(linear_ticks(-3., 50., 3)), ElementsAre("0", "20", "40"));
  EXPECT_THAT(labels(log_ticks(0.04, 2.)), ElementsAre("0.05", "0.1", "0.2", "0.5", "1", "2"));
  EXPECT_THAT(labels(log_ticks(1e-5, 1.)),
              ElementsAre("1e-05", "0.0001", "0.001", "0.01", "0.1", "1"));
  EXPECT_THAT(labels(log_ticks(0.6, 0.8)), ElementsAre("0.6", "0.7", "0.8"));
}

TEST(RunningMedian, DropsSpikes) {
  EXPECT_THAT(running_median({1., 2., 90., 4., 5.}, 3), ElementsAre(2., 2., 4., 5., 5.));
  EXPECT_THAT(running_median({3., 1.}, 5), ElementsAre(3., 1.));
  EXPECT_TRUE(running_median({}, 5).empty());
}

TEST(LinePlot, DrawsWhatCanBeShown) {
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  for (const bool log_y : {false, true}) {
    for (const std::vector<double>& values :
         {std::vector<double>{}, {1.}, {nan, nan}, {2., 2., 2.}, {1., nan, 0., -1., 1e30}}) {
      LinePlot plot{.title = "A title", .x_label = "x", .y_label = "y"};
      plot.log_y = log_y;
      plot.series = {{.label = "values", .color = palette::blue, .values = values}};
      Canvas canvas(400, 300, palette::paper);
      plot.draw(canvas, {0, 0, 400, 300});
      EXPECT_LT(inked_columns(canvas).first, 100);
    }
  }
}

TEST(Histogram, DrawsBarsInProportionOverTheMarkedParts) {
  constexpr Color marked{200, 250, 200};
  Canvas canvas(316, 242, palette::paper);  // leaves 200 x 100 pixels for two bars
  Histogram{.first = -1., .values = {1., 2.}, .spans = {{"", -1., 0., marked}}}.draw(
      canvas, {0, 0, 316, 242});
  const auto color_at = [&](int x, int y) {
    const Image& image = canvas.image();
    return Color{image.at(x, y, 0), image.at(x, y, 1), image.at(x, y, 2)};
  };
  EXPECT_EQ(color_at(142, 160), palette::blue);
  EXPECT_EQ(color_at(142, 124), marked);
  EXPECT_EQ(color_at(242, 90), palette::blue);
  EXPECT_EQ(color_at(242, 80), palette::paper);
}

/// How many pixels of `color` are in `rect`.
int count_pixels(const Canvas& canvas, Rect rect, Color color) {
  int count = 0;
  for (int y = rect.y; y < std::min(rect.bottom(), canvas.height()); ++y) {
    for (int x = rect.x; x < std::min(rect.right(), canvas.width()); ++x) {
      const Color pixel{canvas.image().at(x, y, 0), canvas.image().at(x, y, 1),
                        canvas.image().at(x, y, 2)};
      count += pixel == color ? 1 : 0;
    }
  }
  return count;
}

TEST(LinePlot, KeepsTheNumberBelowTheEndOfAnAxisWithinItsArea) {
  LinePlot plot{.series = {{.values = {1., 2.}}}, .x_ticks = {"1", "10000000000"}};
  const auto ink_beside = [&](int width) {
    Canvas canvas(400, 200, palette::paper);
    plot.draw(canvas, {0, 0, width, 200});
    return count_pixels(canvas, {width, 0, 400 - width, 200}, palette::ink);
  };
  EXPECT_EQ(ink_beside(300), 0);
}

TEST(BarChart, ShowsTheNumberOfEachBarRightOfAllBarsAndWhatIsBeyondTheMarkInItsOwnColour) {
  const auto chart = [](double value) {
    return BarChart{.title = "Time",
                    .series = {{"one", palette::blue}},
                    .mark = "fp32",
                    .beyond = "slower",
                    .columns = {"of fp32"},
                    .groups = {{"UNet", "", {{0, value, {"0.50"}}}}}}
        .draw();
  };
  const auto orange = [](const Canvas& canvas) {
    return count_pixels(canvas, {0, 0, canvas.width(), canvas.height()}, palette::orange);
  };
  EXPECT_EQ(orange(chart(0.5)), 0);
  EXPECT_GT(orange(chart(1.5)), 1000);
  const Canvas slow = chart(1.5);
  int last_bar = 0, first_number = slow.width();
  for (int x = 0; x < slow.width(); ++x) {
    const Rect column{x, 300, 1, 20};  // of the only row of bars
    if (count_pixels(slow, column, palette::orange) > 0) last_bar = x;
  }
  for (int x = slow.width() - 1; x > last_bar; --x) {
    if (count_pixels(slow, {x, 300, 1, 20}, palette::ink) > 0) first_number = x;
  }
  EXPECT_GT(last_bar, slow.width() / 2);
  EXPECT_GT(first_number, last_bar + 10);
  EXPECT_LT(first_number, slow.width());
}

TEST(BarChart, SaysInPlaceOfABarWhyThereIsNone) {
  const Canvas chart = BarChart{.series = {{"one", palette::blue}},
                                .mark = "fp32",
                                .columns = {"of fp32"},
                                .groups = {{"UNet", "", {{0, -1., {"wrong loss"}}}}}}
                           .draw();
  EXPECT_GT(count_pixels(chart, {0, 0, chart.width(), chart.height()}, palette::orange), 50);
}

}  // namespace
}  // namespace drawing
