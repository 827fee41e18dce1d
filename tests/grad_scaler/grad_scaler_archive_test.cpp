// SPDX-License-Identifier: BSD-3-Clause
// torch::save and torch::load of a GradScaler, state_dict and load_state_dict.
#include <torchamp/torchamp.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <exception>
#include <limits>
#include <random>
#include <sstream>
#include <string>

#include "support/damaged.h"
#include "support/expect_error.h"
#include "support/optimizers.h"

using torchamp::GradScaler;
using torchamp::GradScalerOptions;
using torchamp::GradScalerState;

namespace {

void iterate_with(GradScaler& scaler, bool bad) {
  auto optimizer = sgd({parameter_with(torch::full({1}, bad ? HUGE_VAL : 1.))}, 0.);
  scaler.scale(torch::ones({}));
  scaler.step(optimizer);
  scaler.update();
}

std::string saved(const GradScaler& scaler) {
  std::ostringstream out;
  torch::save(scaler, out);
  return out.str();
}

void load(GradScaler& scaler, const std::string& bytes) {
  std::istringstream in(bytes);
  torch::load(scaler, in);
}

const GradScalerOptions kOptions{.init_scale = 512., .growth_interval = 5, .hysteresis = 3};

}  // namespace

TEST(GradScalerArchive, RestoresAllThatTheUpdateRemembers) {
  for (int good = 0; good < 9; ++good) {
    GradScaler first(kOptions);
    for (int i = 0; i < good; ++i) iterate_with(first, i == 2);
    iterate_with(first, true);
    GradScaler second({.init_scale = 8., .growth_factor = 3., .hysteresis = 3});
    load(second, saved(first));
    EXPECT_EQ(second.state_dict(), first.state_dict());
    EXPECT_EQ(second.skips_in_a_row(), first.skips_in_a_row());
    for (int i = 0; i < 20; ++i) {
      const bool bad = i % 7 < 2;
      iterate_with(first, bad);
      iterate_with(second, bad);
      EXPECT_EQ(second.state_dict(), first.state_dict());
    }
  }
}

TEST(GradScalerArchive, LoadsBeforeAndAfterTheFirstUse) {
  GradScaler source({.init_scale = 32.});
  iterate_with(source, false);
  GradScaler fresh;
  GradScaler used;
  iterate_with(used, true);
  const at::Tensor scale = used.scale_tensor();
  for (GradScaler* scaler : {&fresh, &used}) {
    load(*scaler, saved(source));
    EXPECT_EQ(scaler->get_scale(), 32.);
    EXPECT_EQ(scaler->scale(torch::ones({})).item<float>(), 32.F);
    EXPECT_EQ(scaler->state_dict().growth_tracker, 1);
  }
  EXPECT_TRUE(used.scale_tensor().is_same(scale)) << "written in place";
}

TEST(GradScalerArchive, RefusesToSaveWithinAnIteration) {
  GradScaler scaler;
  scaler.scale(torch::ones({}));
  EXPECT_NO_THROW(saved(scaler)) << "a batch may be dropped there";
  auto optimizer = sgd({parameter_with(torch::ones({1}))});
  scaler.unscale_(optimizer);
  EXPECT_ERROR(saved(scaler), "GradScaler::save: within an iteration");
  scaler.step(optimizer);
  EXPECT_ERROR(saved(scaler), "Save after update()");
  scaler.update();
  EXPECT_NO_THROW(saved(scaler));
}

TEST(GradScalerArchive, OfADisabledScalerIsEmpty) {
  const std::string empty = saved(GradScaler({.enabled = false}));
  GradScaler enabled;
  EXPECT_ERROR(load(enabled, empty), "the archive was saved from a disabled GradScaler");
  GradScaler disabled({.enabled = false});
  EXPECT_NO_THROW(load(disabled, empty));
  EXPECT_NO_THROW(load(disabled, saved(enabled)));
  EXPECT_EQ(disabled.get_scale(), 1.);
}

TEST(GradScalerArchive, RefusesAForeignOneAndChangesNothing) {
  GradScaler scaler(kOptions);
  iterate_with(scaler, false);
  const std::string before = saved(scaler);
  const auto loads = [&](auto&& write) {
    torch::serialize::OutputArchive out;
    write(out);
    std::ostringstream bytes;
    out.save_to(bytes);
    load(scaler, bytes.str());
  };
  const auto all = [](torch::serialize::OutputArchive& out, c10::IValue scale,
                      c10::IValue tracker) {
    out.write("growth_factor", c10::IValue(3.));
    out.write("backoff_factor", c10::IValue(0.25));
    out.write("growth_interval", c10::IValue(7));
    out.write("scale", scale);
    out.write("growth_tracker", tracker);
  };
  EXPECT_ERROR(loads([](auto& out) { out.write("weight", torch::ones({2})); }),
               "GradScaler::load: the archive has no \"scale\"");
  EXPECT_ERROR(loads([](auto& out) { out.write("scale", c10::IValue(2.)); }),
               "the archive has no \"growth_factor\"");
  EXPECT_ERROR(loads([&](auto& out) { all(out, torch::ones({}), 1); }),
               "\"scale\" is of type Tensor, not Double");
  EXPECT_ERROR(loads([&](auto& out) { all(out, 0., 1); }), "GradScaler::load: the state is empty");
  EXPECT_ERROR(loads([&](auto& out) { all(out, HUGE_VAL, 1); }), "the scale is inf");
  EXPECT_ERROR(loads([&](auto& out) { all(out, 4., 1.5); }),
               "\"growth_tracker\" is of type Double, not Int");
  EXPECT_ERROR(loads([&](auto& out) {
                 all(out, 4., 1);
                 out.write("torchamp_overflows", c10::IValue(-1));
               }),
               "\"torchamp_overflows\" is -1, a negative count");
  EXPECT_ERROR(loads([&](auto& out) {
                 all(out, 4., 1);
                 out.write("torchamp_since_change", c10::IValue((int64_t{1} << 53) + 1));
               }),
               "\"torchamp_since_change\" is 9007199254740993. A count must be at most");
  EXPECT_ERROR(loads([&](auto& out) {
                 all(out, 4., 1);
                 out.write("torchamp_checksum", c10::IValue(1));
               }),
               "GradScaler::load: the archive is damaged");
  EXPECT_ERROR(loads([&](auto& out) {
                 all(out, 4., 1);
                 out.write("torchamp_samples", c10::IValue(12.));
               }),
               "GradScalerOptions::predictive(), which torchamp does not have. Continue with a new "
               "GradScaler({.init_scale = 4})");
  EXPECT_EQ(saved(scaler), before);
  EXPECT_NO_THROW(loads([&](auto& out) { all(out, 4., 1); })) << "the five fields are enough";
  EXPECT_EQ(scaler.get_scale(), 4.);
  EXPECT_EQ(scaler.get_growth_factor(), 3.);
}

/// The numbers of this version, and one more.
TEST(GradScalerArchive, OfALaterVersionWithANumberMoreIsRefusedByASentenceThatSaysSo) {
  const auto archive_with = [](const std::string& more, bool has_it) {
    torch::serialize::OutputArchive out;
    out.write("scale", c10::IValue(4.));
    out.write("growth_factor", c10::IValue(2.));
    out.write("backoff_factor", c10::IValue(0.5));
    out.write("growth_interval", c10::IValue(7));
    out.write("growth_tracker", c10::IValue(1));
    out.write("torchamp_credit", c10::IValue(1));
    out.write("torchamp_numbers", c10::IValue("torchamp_credit" + more));
    if (has_it) out.write("torchamp_norm_mean", c10::IValue(1.5));
    out.write("torchamp_checksum", c10::IValue(1));  // of all that it holds
    std::ostringstream bytes;
    out.save_to(bytes);
    return bytes.str();
  };
  GradScaler scaler;
  const GradScalerState before = scaler.state_dict();
  EXPECT_ERROR(load(scaler, archive_with(" torchamp_norm_mean", true)),
               "the archive was saved by a later version of torchamp, whose GradScaler also "
               "remembers \"torchamp_norm_mean\". Load it with that version, or set "
               "GradScalerOptions::init_scale to 4");
  EXPECT_ERROR(load(scaler, archive_with(" torchamp_norm_mean", false)), "the archive is damaged");
  EXPECT_ERROR(load(scaler, archive_with("", true)), "the archive is damaged");
  EXPECT_EQ(scaler.state_dict(), before);
}

/// As every version before the list of numbers has written it.
TEST(GradScalerArchive, WithoutTheListOfItsNumbersIsLoaded) {
  GradScaler source(kOptions);
  for (const bool bad : {true, false, true}) iterate_with(source, bad);
  torch::serialize::InputArchive in;
  std::istringstream bytes(saved(source));
  in.load_from(bytes);
  torch::serialize::OutputArchive out;
  for (const std::string& key : in.keys()) {
    // Its checksum was of other numbers; checkpoint-0.1.pt has one.
    if (key == "torchamp_numbers" || key == "torchamp_checksum") continue;
    c10::IValue value;
    in.read(key, value);
    out.write(key, value);
  }
  std::ostringstream earlier;
  out.save_to(earlier);
  GradScaler scaler(kOptions);
  load(scaler, earlier.str());
  EXPECT_EQ(scaler.state_dict(), source.state_dict());
  EXPECT_EQ(scaler.skips_in_a_row(), source.skips_in_a_row());
}

TEST(GradScalerArchive, MakesAnErrorOfAnyDamageOrIsLoadedUnchanged) {
  GradScaler source(kOptions);
  iterate_with(source, true);
  const std::string whole = saved(source);
  GradScaler scaler(kOptions);
  std::mt19937 random(1);
  int opened = 0, loaded = 0;
  for (int i = 0; i < 1500; ++i) {
    const auto before = scaler.state_dict();
    std::istringstream in(damaged(whole, random));
    torch::serialize::InputArchive archive;
    try {
      archive.load_from(in);
    } catch (const std::exception&) {  // LibTorch's own, of whatever type
      continue;
    }
    ++opened;
    try {
      scaler.load(archive);
      EXPECT_EQ(scaler.state_dict(), source.state_dict());
      iterate_with(scaler, false);
      ++loaded;
    } catch (const c10::Error&) {
      EXPECT_EQ(scaler.state_dict(), before);
    }  // anything else fails the test
  }
  EXPECT_LT(loaded, 500) << "there is padding";
  EXPECT_GT(opened, loaded) << "and what is opened is refused by the scaler";
}

TEST(GradScalerState, GoesFromOneScalerToAnother) {
  GradScaler first(
      {.init_scale = 16., .growth_factor = 3., .backoff_factor = 0.25, .growth_interval = 10});
  for (int i = 0; i < 4; ++i) iterate_with(first, false);
  const GradScalerState state = first.state_dict();
  EXPECT_EQ(state, (GradScalerState{16., 3., 0.25, 10, 4}));
  GradScaler second;
  second.load_state_dict(state);
  EXPECT_EQ(second.state_dict(), state);
  EXPECT_EQ(second.get_growth_interval(), 10);
}

TEST(GradScalerState, IsLoadedWholeOrNotAtAll) {
  GradScaler scaler;
  const GradScalerState before = scaler.state_dict();
  const GradScalerState good{16., 3., 0.25, 10, 4};
  const auto with = [&](auto member, auto value) {
    GradScalerState state = good;
    state.*member = value;
    return state;
  };
  EXPECT_ERROR(scaler.load_state_dict({}), "GradScaler::load_state_dict: the state is empty");
  EXPECT_ERROR(scaler.load_state_dict(with(&GradScalerState::scale, -1.)), "the scale is -1");
  EXPECT_ERROR(scaler.load_state_dict(with(&GradScalerState::growth_factor, 0.5)),
               "the growth factor is 0.5");
  EXPECT_ERROR(scaler.load_state_dict(with(&GradScalerState::backoff_factor, 2.)),
               "the backoff factor is 2");
  EXPECT_ERROR(scaler.load_state_dict(with(&GradScalerState::growth_interval, 0)),
               "the growth interval is 0");
  EXPECT_ERROR(scaler.load_state_dict(with(&GradScalerState::growth_tracker, int64_t{1} << 40)),
               "the growth tracker is 1099511627776");
  EXPECT_EQ(scaler.state_dict(), before);
}
