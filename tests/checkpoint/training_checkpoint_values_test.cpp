// SPDX-License-Identifier: BSD-3-Clause
// What a TrainingCheckpoint fills, in place and without narrowing, and what it refuses to name.
#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <c10/util/ScopeExit.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/expect_error.h"
#include "support/temporary_folder.h"
#include "torchamp/training_checkpoint.h"

namespace {

using at::Tensor;
using torchamp::TrainingCheckpoint;

// ---- Tensors in place ---------------------------------------------------------------------------

TEST(TrainingCheckpointValues, KeepsATensorInItsOptimizersHands) {
  const TemporaryFolder folder;
  Tensor w = at::full({2}, 4.).requires_grad_();
  const Tensor handle = w;
  torch::optim::SGD optimizer({w}, 0.5);
  TrainingCheckpoint checkpoint(folder / "run.pt");
  checkpoint.add("w", w).add("optimizer", optimizer);
  checkpoint.save();
  w.mutable_grad() = at::ones({2});
  optimizer.step();
  const void* const storage = w.const_data_ptr();
  EXPECT_TRUE(checkpoint.load());
  EXPECT_TRUE(w.is_same(handle));
  EXPECT_EQ(w.const_data_ptr(), storage);
  EXPECT_TRUE(w.requires_grad());
  optimizer.step();
  EXPECT_TRUE(at::equal(w.detach(), at::full({2}, 3.5)));
}

TEST(TrainingCheckpointValues, KeepsHandlesAndValuesIfALaterObjectDoesNotFit) {
  const TemporaryFolder folder;
  Tensor w = at::ones({2}), once_none, once_some = at::ones({3});
  std::int64_t step = 1;
  TrainingCheckpoint saved(folder / "run.pt");
  Tensor some = at::full({3}, 2.), none;
  std::string text = "no number";
  saved.add("w", w).add("a", some).add("b", none).add("step", text).save();
  w.fill_(5.);
  const Tensor handle = w, other = once_some;
  TrainingCheckpoint checkpoint(folder / "run.pt");
  checkpoint.add("w", w).add("a", once_none).add("b", once_some).add("step", step);
  EXPECT_ERROR((void)checkpoint.load(), "'step' in '" + (folder / "run.pt").string() +
                                            "' does not fit: it is a String in the file");
  EXPECT_TRUE(w.is_same(handle));
  EXPECT_TRUE(at::equal(w, at::full({2}, 5.)));
  EXPECT_FALSE(once_none.defined());
  EXPECT_TRUE(once_some.is_same(other));
  EXPECT_TRUE(at::equal(once_some, at::ones({3})));
  EXPECT_EQ(step, 1);
}

TEST(TrainingCheckpointValues, RefusesATensorOfAnotherShapeOrDtype) {
  const TemporaryFolder folder;
  Tensor w = at::ones({2, 3});
  TrainingCheckpoint(folder / "run.pt").add("w", w).save();
  for (Tensor other : {at::zeros({3, 2}), at::zeros({2, 3}, at::kHalf), at::zeros({6})}) {
    const Tensor before = other.clone(), handle = other;
    TrainingCheckpoint checkpoint(folder / "run.pt");
    checkpoint.add("w", other);
    EXPECT_ERROR((void)checkpoint.load(), "it is float [2, 3] in the file and ");
    EXPECT_TRUE(other.is_same(handle));
    EXPECT_TRUE(at::equal(other, before));
  }
}

TEST(TrainingCheckpointValues, KeepsWhatUndefinedMeansOnEitherSide) {
  const TemporaryFolder folder;
  Tensor some = at::arange(3), none;
  TrainingCheckpoint checkpoint(folder / "run.pt");
  checkpoint.add("some", some).add("none", none);
  checkpoint.save();
  some.reset(), none = at::ones({2});
  EXPECT_TRUE(checkpoint.load());
  EXPECT_TRUE(at::equal(some, at::arange(3)));
  EXPECT_FALSE(none.defined());
}

TEST(TrainingCheckpointValues, FillsAViewInPlace) {
  const TemporaryFolder folder;
  Tensor base = at::arange(12.).view({3, 4});
  Tensor column = base.select(1, 1);
  TrainingCheckpoint checkpoint(folder / "run.pt");
  checkpoint.add("column", column);
  checkpoint.save();
  base.zero_();
  EXPECT_TRUE(checkpoint.load());
  EXPECT_TRUE(at::equal(base.select(1, 1), at::tensor({1., 5., 9.}, base.options())));
  EXPECT_EQ(base.sum().item<double>(), 15.);
}

// A captured graph, or a flat buffer that the weights are views of, holds their memory.
TEST(TrainingCheckpointValues, SavesOfAViewNoMoreThanItShows) {
  const TemporaryFolder folder;
  const Tensor large = at::rand({1 << 16});
  Tensor small = large.narrow(0, 7, 3).requires_grad_(), loaded;
  TrainingCheckpoint(folder / "run.pt").add("small", small).save();
  EXPECT_LT(std::filesystem::file_size(folder / "run.pt"), 16 << 10);
  EXPECT_TRUE(TrainingCheckpoint(folder / "run.pt").add("small", loaded).load());
  EXPECT_TRUE(at::equal(loaded, small));
  EXPECT_TRUE(loaded.requires_grad());
}

// ---- Numbers ------------------------------------------------------------------------------------

/// Saves a value as one type and loads it as another.
template <class To, class From>
To through(From from) {
  const TemporaryFolder folder;
  TrainingCheckpoint(folder / "run.pt").add("value", from).save();
  To to{};
  EXPECT_TRUE(TrainingCheckpoint(folder / "run.pt").add("value", to).load());
  return to;
}

template <class T>
void expect_limits() {
  using Limits = std::numeric_limits<T>;
  for (const T value : {Limits::lowest(), Limits::min(), Limits::max(), T{1}}) {
    EXPECT_EQ(through<T>(value), value);
  }
}

TEST(TrainingCheckpointValues, KeepsEveryNumberOfEveryType) {
  expect_limits<char>();
  expect_limits<signed char>();
  expect_limits<unsigned char>();
  expect_limits<std::int16_t>();
  expect_limits<std::uint32_t>();
  expect_limits<std::int64_t>();
  expect_limits<std::uint64_t>();
  expect_limits<float>();
  expect_limits<double>();
  EXPECT_EQ(through<std::int64_t>(std::uint8_t{200}), 200);
  EXPECT_TRUE(std::isnan(through<float>(std::numeric_limits<double>::quiet_NaN())));
  EXPECT_EQ(through<float>(-std::numeric_limits<double>::infinity()),
            -std::numeric_limits<float>::infinity());
}

TEST(TrainingCheckpointValues, LoadsASmallNumberIfTheThreadFlushesDenormals) {
  const TemporaryFolder folder;
  float small = 1e-40F;
  TrainingCheckpoint checkpoint(folder / "run.pt");
  checkpoint.add("small", small).save();
  if (!at::globalContext().setFlushDenormal(true)) GTEST_SKIP() << "this CPU flushes none";
  const auto as_before = c10::make_scope_exit([] { at::globalContext().setFlushDenormal(false); });
  EXPECT_TRUE(checkpoint.load());
}

TEST(TrainingCheckpointValues, RefusesANumberThatItsTypeCannotHold) {
  EXPECT_ERROR(through<int>(std::int64_t{5'000'000'000}),
               "it is 5000000000 in the file, which an integer of 32 bits cannot hold");
  EXPECT_ERROR(through<std::int8_t>(128), "it is 128 in the file");
  EXPECT_ERROR(through<std::int16_t>(-40000), "it is -40000 in the file");
  EXPECT_ERROR(through<unsigned>(-1), "which an unsigned integer of 32 bits cannot hold");
  EXPECT_ERROR(through<std::uint64_t>(-1), "which an unsigned integer of 64 bits cannot hold");
  EXPECT_ERROR(through<std::int64_t>(std::numeric_limits<std::uint64_t>::max()),
               "it is 18446744073709551615 in the file");
  EXPECT_ERROR(through<int>(std::numeric_limits<std::uint64_t>::max()), "18446744073709551615");
  EXPECT_ERROR(through<float>(1e300), "it is 1e+300 in the file, which a float cannot hold");
  EXPECT_ERROR(through<float>(-1e300), "which a float cannot hold");
  EXPECT_ERROR(through<float>(1e-300), "it is 1e-300 in the file, which a float cannot hold");
  EXPECT_ERROR(through<float>(0x1p-150), "which a float cannot hold");
  EXPECT_EQ(through<float>(0x1.8p-150), std::numeric_limits<float>::denorm_min()) << "rounded";
  EXPECT_ERROR(through<int>(1.5), "it is a Double in the file and an integer in the program");
  EXPECT_ERROR(through<int>(true), "it is a Bool in the file and an integer in the program");
  EXPECT_ERROR(through<double>(1), "it is a Int in the file and a floating-point number");
  EXPECT_ERROR(through<bool>(1), "it is a Int in the file and a bool in the program");
  EXPECT_ERROR(through<std::string>(1), "it is a Int in the file and a string in the program");
  EXPECT_ERROR(through<Tensor>(1), "it is a Int in the file and a tensor in the program");
}

TEST(TrainingCheckpointValues, HoldsALongDoubleWithAllItsBits) {
  const auto third = 1.L / 3;
  EXPECT_EQ(through<long double>(third), third);
  EXPECT_EQ(through<long double>(0.5), 0.5L);
  EXPECT_EQ(through<double>(1.5L), 1.5);
  const long double infinite = std::numeric_limits<long double>::infinity();
  EXPECT_EQ(through<long double>(-infinite), -infinite);
}

TEST(TrainingCheckpointValues, HoldsLongDoublesBeyondAllDoubles) {
  const TemporaryFolder folder;
  using Limits = std::numeric_limits<long double>;
  for (const long double number : {Limits::max(), -Limits::max(), Limits::min(),
                                   Limits::denorm_min(), 1e-310L * (1.L + Limits::epsilon())}) {
    long double from = number, to = 0;
    TrainingCheckpoint(folder / "run.pt").add("number", from).save();
    EXPECT_TRUE(TrainingCheckpoint(folder / "run.pt").add("number", to).load());
    EXPECT_EQ(to, number);
  }
}

// ---- Names --------------------------------------------------------------------------------------

TEST(TrainingCheckpointValues, RefusesANameThatCouldNotBeRead) {
  int value = 0;
  TrainingCheckpoint checkpoint("run.pt");
  for (const std::string name : {"\"", "a\"b", "\\", "a\\x41b", "a\\", "\n", "a\nb", "\\u1234"}) {
    EXPECT_ERROR(checkpoint.add(name, value), "TrainingCheckpoint::add: the name '" + name + "'");
    EXPECT_ERROR(checkpoint.add_local(name, value), "no quote, backslash or line end");
  }
}

TEST(TrainingCheckpointValues, RefusesANameTwiceWhicheverOfTheTwoIsLocal) {
  int value = 0;
  TrainingCheckpoint checkpoint("run.pt");
  checkpoint.add("shared", value).add_local("local", value);
  EXPECT_ERROR(checkpoint.add_local("shared", value), "there is a 'shared' already");
  EXPECT_ERROR(checkpoint.add("local", value), "there is a 'local' already");
}

TEST(TrainingCheckpointValues, ReadsEveryOtherName) {
  const TemporaryFolder folder;
  std::vector<std::string> names{"",   "../b", "é",    "日本",   "__class__",
                                 "%s", "{x}",  "self", "import", "a\xc3"};
  for (int c = 0; c < 256; ++c) {
    if (c != '"' && c != '\\' && c != '\n') names.push_back({'a', static_cast<char>(c), 'b'});
  }
  std::vector<int> values(names.size());
  TrainingCheckpoint checkpoint(folder / "run.pt");
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (i % 2 == 0) checkpoint.add(names[i], values[i]);
    if (i % 2 == 1) checkpoint.add_local(names[i], values[i]);
    values[i] = static_cast<int>(i);
  }
  checkpoint.save();
  for (int& value : values) value = -1;
  EXPECT_TRUE(checkpoint.load());
  for (std::size_t i = 0; i < names.size(); ++i) EXPECT_EQ(values[i], i) << names[i];
}

// ---- Errors -------------------------------------------------------------------------------------

/// Whose load and save throw what is no c10::Error.
struct Broken {
  void save(torch::serialize::OutputArchive&) const {
    if (saves_fail) throw std::runtime_error("no room");
  }
  void load(torch::serialize::InputArchive&) { throw std::out_of_range("no such thing"); }
  bool saves_fail = false;
};

TEST(TrainingCheckpointValues, RefusesToSaveWithoutLocalPartsAndLeavesTheOldFile) {
  const TemporaryFolder folder;
  int64_t step = 3;
  TrainingCheckpoint checkpoint(folder / "run.pt");
  checkpoint.add("step", step);
  checkpoint.save();
  EXPECT_ERROR(checkpoint.save(std::vector<Tensor>{}),
               "TrainingCheckpoint::save: the list of local parts is empty");
  EXPECT_ERROR(checkpoint.save({checkpoint.local_part(), Tensor()}),
               "TrainingCheckpoint::save: local part 1 is not a result of local_part()");
  EXPECT_ERROR(checkpoint.save({at::ones({3})}), "local part 0 is not a result");
  step = 0;
  EXPECT_TRUE(checkpoint.load());
  EXPECT_EQ(step, 3);
}

TEST(TrainingCheckpointValues, RestoresTheOthersIfOneThrowsATypeThatIsNoException) {
  struct Thrower {
    void save(torch::serialize::OutputArchive&) const {}
    void load(torch::serialize::InputArchive&) {
      (void)at::rand({2});
      throw 5;
    }
  };
  const TemporaryFolder folder;
  int step = 1;
  Thrower thrower;
  TrainingCheckpoint checkpoint(folder / "run.pt");
  checkpoint.add("step", step).add("thrower", thrower).save();
  step = 2;
  at::manual_seed(4);
  const Tensor next = at::rand({2});
  at::manual_seed(4);
  EXPECT_THROW((void)checkpoint.load(), int);
  EXPECT_EQ(step, 2);
  EXPECT_TRUE(at::equal(at::rand({2}), next)) << "the thrower has drawn numbers";
}

TEST(TrainingCheckpointValues, NamesTheObjectWhateverItThrows) {
  const TemporaryFolder folder;
  torch::nn::BatchNorm1d net(2);
  Broken broken;
  int step = 1;
  TrainingCheckpoint checkpoint(folder / "run.pt");
  checkpoint.add("step", step).add("net", net).add("broken", broken);
  checkpoint.save();
  const at::NoGradGuard no_grad;
  step = 2;
  net->weight.fill_(3.);
  const Tensor view = net->weight.detach();
  at::manual_seed(4);
  const Tensor next = at::rand({2});
  at::manual_seed(4);
  EXPECT_ERROR((void)checkpoint.load(),
               "'broken' in '" + (folder / "run.pt").string() + "' does not fit: no such thing");
  EXPECT_EQ(step, 2);
  EXPECT_TRUE(at::equal(view, at::full({2}, 3.)));
  EXPECT_TRUE(view.is_alias_of(net->weight));
  EXPECT_TRUE(at::equal(at::rand({2}), next));
  broken.saves_fail = true;
  EXPECT_ERROR(checkpoint.save(), "TrainingCheckpoint::save: 'broken' cannot be saved: no room");
  EXPECT_ERROR((void)checkpoint.load(),
               "does not fit: what is here now could not be kept: no room");
  EXPECT_EQ(step, 2);
}

}  // namespace
