// SPDX-License-Identifier: BSD-3-Clause
#include <torchamp/lr_scheduler.h>

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/optim.h>

#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "support/expect_error.h"

namespace {

using torchamp::WarmupCosine;
using torchamp::WarmupLinear;
using torchamp::WarmupOptions;

/// Groups of one parameter each, with these rates.
struct RatedGroups {
  explicit RatedGroups(const std::vector<double>& rates) {
    for (const double rate : rates) add(rate);
  }
  void add(double rate) {
    optimizer.add_param_group({std::vector<at::Tensor>{torch::zeros({1}).requires_grad_()},
                               std::make_unique<torch::optim::SGDOptions>(rate)});
  }
  std::vector<double> rates() const {
    std::vector<double> all;
    for (const auto& group : optimizer.param_groups()) all.push_back(group.options().get_lr());
    return all;
  }
  torchamp::FusedSGD optimizer{std::vector<torch::optim::OptimizerParamGroup>(),
                               torch::optim::SGDOptions(7.)};
};

std::unique_ptr<torchamp::WarmupScheduler> schedule(const std::string& kind, RatedGroups& groups,
                                                    const WarmupOptions& options) {
  if (kind == "cosine") return std::make_unique<WarmupCosine>(groups.optimizer, options);
  return std::make_unique<WarmupLinear>(groups.optimizer, options);
}

TEST(WarmupSchedulers, HaveTheRatesOfPythons) {
  std::ifstream file("parity/lr_scheduler.txt");
  ASSERT_TRUE(file) << "run the test in the folder tests/";
  int cases = 0;
  for (std::string line; std::getline(file, line); ++cases) {
    SCOPED_TRACE(line);
    std::istringstream words(line);
    std::string kind;
    WarmupOptions options;
    words >> kind >> options.warmup_steps >> options.total_steps >> options.min_lr_ratio;
    RatedGroups groups({0.1, 3.});
    const auto rates = schedule(kind, groups, options);
    int steps = 0;
    for (double first = 0., second = 0.; words >> first >> second; ++steps) {
      EXPECT_NEAR(groups.rates()[0], first, 1e-14);
      EXPECT_NEAR(groups.rates()[1], second, 1e-14);
      rates->step();
    }
    EXPECT_EQ(steps, 16);
  }
  EXPECT_EQ(cases, 8);
}

TEST(WarmupSchedulers, GoOnBitForBitFromAnArchive) {
  for (const char* const kind : {"cosine", "linear"}) {
    const WarmupOptions options{.warmup_steps = 3, .total_steps = 20, .min_lr_ratio = 0.1};
    RatedGroups groups({0.1, 3.}), others({5., 6.});
    const auto rates = schedule(kind, groups, options);
    const auto loaded = schedule(kind, others, options);
    for (int i = 0; i < 5; ++i) rates->step();
    torch::serialize::OutputArchive saved;
    rates->save(saved);
    std::stringstream stream;
    saved.save_to(stream);
    torch::serialize::InputArchive archive;
    archive.load_from(stream);
    loaded->load(archive);
    for (int i = 0; i < 20; ++i) {
      EXPECT_EQ(groups.rates(), others.rates());
      rates->step();
      loaded->step();
    }
  }
}

TEST(WarmupSchedulers, RefuseAnArchiveOfOtherGroupsAndChangeNothing) {
  RatedGroups groups({0.1, 3.}), one({0.5});
  const WarmupOptions options{.warmup_steps = 4, .total_steps = 8};
  WarmupCosine rates(groups.optimizer, options), of_one(one.optimizer, options);
  of_one.step();
  torch::serialize::OutputArchive saved;
  rates.save(saved);
  std::stringstream stream;
  saved.save_to(stream);
  torch::serialize::InputArchive archive;
  archive.load_from(stream);
  EXPECT_ERROR(of_one.load(archive), "WarmupCosine::load: the archive has learning rates of 2");
  EXPECT_EQ(one.rates(), std::vector<double>{0.125});
  of_one.step();
  EXPECT_EQ(one.rates(), std::vector<double>{0.25});
}

TEST(WarmupSchedulers, TakeTheRateOfAGroupThatIsAddedLaterForItsFullRate) {
  RatedGroups groups({1.});
  WarmupLinear rates(groups.optimizer, {.warmup_steps = 2, .total_steps = 4});
  groups.add(8.);
  rates.step();
  EXPECT_EQ(groups.rates(), (std::vector<double>{0.5, 4.}));
}

TEST(WarmupSchedulers, RefuseOptionsOutOfRange) {
  RatedGroups groups({1.});
  auto& optimizer = groups.optimizer;
  EXPECT_ERROR(WarmupCosine(optimizer, {}), "WarmupCosine: total_steps is 0. It must be above");
  EXPECT_ERROR(WarmupCosine(optimizer, {.warmup_steps = 5, .total_steps = 5}),
               "total_steps is 5. It must be above warmup_steps, which is 5.");
  EXPECT_ERROR(WarmupLinear(optimizer, {.warmup_steps = -1, .total_steps = 5}),
               "WarmupLinear: warmup_steps is -1");
  EXPECT_ERROR(WarmupLinear(optimizer, {.total_steps = 5, .min_lr_ratio = 1.5}),
               "min_lr_ratio is 1.5");
  EXPECT_EQ(groups.rates(), std::vector<double>{1.});
}

}  // namespace
