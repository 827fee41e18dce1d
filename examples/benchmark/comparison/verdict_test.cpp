// SPDX-License-Identifier: BSD-3-Clause
#include "benchmark/comparison/verdict.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "benchmark/comparison/earlier_runs.h"
#include "benchmark/comparison/machine.h"
#include "benchmark/comparison/op_count.h"
#include "benchmark/comparison/race.h"
#include "benchmark/comparison/report.h"
#include "support/format.h"
#include "support/op_count.h"
#include "support/temporary_folder.h"

namespace {

using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::Pair;

const Way python{"python", "fp32", "fp32", "stock", "eager"};
const Way libtorch{"cpp", "fp32", "fp32", "stock", "eager"};
const Way mixed{"cpp", "standard", "bf16", "stock", "eager"};
const Way fused{"cpp", "standard", "bf16", "fused", "eager"};

/// A race among workers that make their answers up.
struct MadeUpRace {
  /// What `way` answers: the same to each run, but for `seconds`, one for each round.
  Contestant& add(const Way& way, double loss, double first_loss = 1.,
                  const std::vector<double>& seconds = {1., 1., 1.}, std::int64_t parameters = 10) {
    const std::string rest = support::format(" loss=%g first=%g peak=1048576", loss, first_loss);
    std::string script =
        support::format("echo ready parameters=%d libtorch=2.0;", static_cast<int>(parameters));
    script += "read a; echo ran seconds=100" + rest + ";";  // the warm-up
    for (const double each : seconds) {
      script += support::format("read a; echo ran seconds=%g", each) + rest + ";";
    }
    return run(way, script, static_cast<int>(seconds.size()));
  }

  Contestant& run(const Way& way, const std::string& script, int rounds = 1) {
    Contestant& contestant = race.contestants.emplace_back(
        way, std::vector<std::string>{"sh", "-c", script}, std::filesystem::path("/dev/null"));
    contestant.wait_until_ready();
    contestant.warm_up(1);
    for (int i = 0; i < rounds; ++i) contestant.race(1);
    contestant.dismiss();
    return contestant;
  }

  std::string wrong(const Contestant& contestant) const { return judge(race, contestant).wrong; }

  Race race{.model = &find_model("unet"),
            .sizes = find_model("unet").sizes.at(Preset::small),
            .steps = 1};
};

TEST(Verdict, AcceptsLossesThatDifferByRounding) {
  MadeUpRace all;
  all.add(python, 0.5);
  EXPECT_EQ(all.wrong(all.add(libtorch, 0.501, 1.0002)), "");
  EXPECT_EQ(all.wrong(all.add(mixed, 0.52, 1.01)), "");
}

TEST(Verdict, CallsAWayWrongWhoseFinalLossDisagreesWithPythonOrWithFp32) {
  MadeUpRace all;
  all.add(python, 0.5);
  EXPECT_EQ(all.wrong(all.add(libtorch, 0.54)), "another final loss than Python, fp32");
  EXPECT_EQ(all.wrong(all.add(mixed, 0.62)), "another final loss than LibTorch, fp32");
}

TEST(Verdict, CallsAWayWrongThatStartsElsewhere) {
  MadeUpRace all;
  all.add(python, 0.5);
  EXPECT_EQ(all.wrong(all.add(libtorch, 0.5, 1.002)), "another first loss than Python, fp32");
}

TEST(Verdict, CallsAWayWrongWhoseLossIsNotFinite) {
  MadeUpRace all;
  all.add(python, 0.5);
  EXPECT_EQ(all.wrong(all.add(libtorch, std::numeric_limits<double>::quiet_NaN())),
            "the final loss is not finite");
}

TEST(Verdict, CallsAWayWrongThatTrainsAnotherModel) {
  MadeUpRace all;
  all.add(python, 0.5);
  EXPECT_EQ(all.wrong(all.add(libtorch, 0.5, 1., {1.}, 11)), "another number of parameters");
}

TEST(Verdict, TakesTheMedianOfTheRoundsAndOfTheirRatios) {
  MadeUpRace all;
  all.add(python, 0.5, 1., {2., 4., 8., 8.});
  const Contestant& other = all.add(libtorch, 0.5, 1., {1., 3., 4., 2.});
  // 1/2, 3/4, 4/8, 2/8
  const Verdict verdict = judge(all.race, other);
  EXPECT_EQ(verdict.seconds, 2.5);
  EXPECT_EQ(verdict.to_python, 0.5);
}

TEST(Verdict, TellsWhyAWorkerFailed) {
  MadeUpRace all;
  EXPECT_EQ(all.wrong(all.run(python, "echo error out of memory")), "failed: out of memory");
  EXPECT_EQ(
      all.wrong(all.run(libtorch, "echo ready parameters=1 libtorch=2.0; echo noise; exit 3")),
      "failed: the worker ended unexpectedly (see workers.log)");
}

TEST(Report, MarksWrongResultsAndGivesThemNoTime) {
  MadeUpRace all;
  all.add(python, 0.5, 1., {0.25});
  all.add(libtorch, 0.5, 1., {0.125});
  all.add(mixed, 0.7, 1., {0.0625});
  std::ostringstream table, csv, screen;
  write_table(table, all.race);
  EXPECT_THAT(table.str(), HasSubstr("| LibTorch, fp32 | 125 ms | 0.50 |"));
  EXPECT_THAT(
      table.str(),
      HasSubstr("| torchamp, bf16 | **wrong** | | | 1.0 MiB | **0.7**: another final loss than "));
  std::deque<Race> races;
  races.push_back(std::move(all.race));
  write_csv(csv, races);
  EXPECT_THAT(csv.str(),
              HasSubstr("unet,cpp,fp32,fp32,stock,eager,plain,1,1,0.125,0.5,1048576,no\n"));
  EXPECT_THAT(csv.str(),
              HasSubstr("unet,cpp,standard,bf16,stock,eager,plain,1,1,0.0625,0.7,1048576,yes\n"));
  EXPECT_FALSE(print_table(screen, races.front()));
  EXPECT_THAT(screen.str(), HasSubstr("torchamp, bf16: another final loss than LibTorch, fp32"));
}

TEST(Report, IsContentWhereAllAgree) {
  MadeUpRace all;
  all.add(python, 0.5);
  all.add(libtorch, 0.5);
  std::ostringstream screen;
  EXPECT_TRUE(print_table(screen, all.race));
}

TEST(Verdict, MeasuresAVariantByItsOwnKindAndElseByPlainWays) {
  MadeUpRace all;
  const auto variant = [](Way way, const char* name) {
    way.variant = name;
    return way;
  };
  const Way fused_fp32{"cpp", "fp32", "fp32", "fused", "eager"};
  all.add(fused_fp32, 0.5, 1., {8.});
  all.add(variant(fused_fp32, "kept"), 0.5, 1., {4.});
  EXPECT_EQ(judge(all.race, all.add(variant(fused, "masters"), 0.5, 1., {2.})).saved, 0.75);
  EXPECT_EQ(judge(all.race, all.add(variant(fused, "kept"), 0.5, 1., {2.})).saved, 0.5);
}

TEST(Race, RecomputesModelsThatCan) {
  Way way = fused;
  way.variant = "recomputed";
  Plan plan;
  plan.device = "cpu";
  EXPECT_EQ(why_not(plan, find_model("bert"), way), "");
  EXPECT_EQ(why_not(plan, find_model("gpt"), way), "");
  EXPECT_EQ(why_not(plan, find_model("unet"), way), "its layers cannot be recomputed");
}

TEST(Race, AddsBiasesApartInModelsThatCan) {
  Way way = fused;
  way.variant = "unfused";
  Plan plan;
  plan.device = "cuda";
  EXPECT_EQ(why_not(plan, find_model("bert"), way), "");
  EXPECT_EQ(why_not(plan, find_model("unet"), way), "its layers cannot add biases apart");
  const ModelEntry& bert = find_model("bert");
  const auto model = bert.make(bert.sizes.at(Preset::small));
  const auto batch = model->make_batch();
  ASSERT_TRUE(model->add_biases_apart());
  auto counts = support::count_ops([&] { model->loss(batch); });
  EXPECT_EQ(counts["aten::linear"], 0);
  EXPECT_EQ(counts["aten::matmul"], 2 * 6 + 1);
}

TEST(Race, TrainsTheMatricesOfLayersWithMuon) {
  Way way = fused;
  way.optimizer = "muon";
  Plan plan;
  plan.device = "cuda";
  EXPECT_EQ(way.name(), "torchamp, bf16, Muon");
  EXPECT_EQ(why_not(plan, find_model("bert"), way), "");
  EXPECT_EQ(why_not(plan, find_model("gpt"), way), "");
  EXPECT_EQ(why_not(plan, find_model("unet"), way), "it has no list of layers with matrices");
  const ModelEntry& bert = find_model("bert");
  const auto model = bert.make(bert.sizes.at(Preset::small));
  std::vector<std::size_t> sizes;
  for (const auto& optimizer :
       make_optimizers(named_parameters(model->module()), model->recipe(), "muon")) {
    sizes.push_back(optimizer->param_groups().front().params().size());
  }
  // Of each of two layers six matrices; the embeddings, the head, norms and biases.
  EXPECT_THAT(sizes, ElementsAre(2 * 6, model->module().parameters().size() - 2 * 6));
}

TEST(Ways, CastWeightsTogetherWhereTheHostMayLimit) {
  std::vector<std::string> names;
  for (const Way& way : all_ways({"fp16"}, /*python=*/false, /*compiled=*/false, /*host=*/false)) {
    if (way.variant == "together") names.push_back(way.name());
  }
  EXPECT_THAT(names, ElementsAre("torchamp, fp16, fused, weights cast together",
                                 "torchamp, fp16, fused, captured, weights cast together"));
}

TEST(Ways, UseTf32AndOnlyPlainWaysOfASecondDtypeOnAGpu) {
  const auto names = [](bool host) {
    std::vector<std::string> found;
    for (const Way& way : all_ways({"fp16", "bf16"}, /*python=*/true, /*compiled=*/true, host)) {
      if (way.is_tf32() || way.dtype == "bf16") found.push_back(way.name());
    }
    return found;
  };
  EXPECT_THAT(
      names(/*host=*/false),
      ElementsAre("Python, tf32, fused", "Python, tf32, fused, captured",
                  "Python torch.amp, bf16, fused", "Python torch.amp, bf16, fused, captured",
                  "LibTorch, tf32, fused", "LibTorch, tf32, fused, captured",
                  "torchamp, bf16, fused", "torchamp, bf16, fused, captured"));
  EXPECT_THAT(names(/*host=*/true), Contains("torchamp, torch policy, bf16"));
  EXPECT_THAT(names(/*host=*/true), Not(Contains("LibTorch, tf32, fused")));
}

TEST(Verdict, ComparesTf32WithPythonsTf32AndWithFp32) {
  MadeUpRace all;
  all.add({"python", "tf32", "tf32", "fused", "eager"}, 0.5, 1., {4.});
  all.add({"cpp", "fp32", "fp32", "fused", "eager"}, 0.5, 1., {8.});
  const Way way{"cpp", "tf32", "tf32", "fused", "eager"};
  const Verdict verdict = judge(all.race, all.add(way, 0.53, 1.005, {2.}));
  EXPECT_EQ(verdict.to_python, 0.5);
  EXPECT_EQ(verdict.saved, 0.75);
  EXPECT_EQ(verdict.wrong, "");
  EXPECT_EQ(all.wrong(all.add(way, 0.55)), "another final loss than Python, tf32, fused");
}

TEST(Report, ComparesCapturedStepsWithTorchCompileOnAGpu) {
  MadeUpRace all;
  const auto add = [&](const char* language, const char* casts, const char* launch,
                       double seconds) {
    all.add({language, casts, "fp16", "fused", launch}, 0.5, 1., {seconds});
  };
  add("python", "torch", "eager", 8.);
  add("python", "torch", "captured", 1.);
  add("cpp", "standard", "eager", 6.);
  add("cpp", "standard", "captured", 3.);
  add("python", "torch", "compiled", 4.);
  std::deque<Race> races;
  races.push_back(std::move(all.race));
  std::ostringstream text;
  write_compiled(text, races, /*cuda=*/true);
  EXPECT_THAT(text.str(), HasSubstr("| Python, captured | torchamp | torchamp, captured | first"));
  EXPECT_THAT(text.str(), HasSubstr("| UNet, fp16 | 4 s | 0.50 | 0.25 | 1.50 | 0.75 |  |"));
}

TEST(Report, ShowsWhatIsSavedBesideWhatWasSavedElsewhere) {
  MadeUpRace all;
  all.add(libtorch, 0.5, 1., {0.5});
  all.add(mixed, 0.5, 1., {0.25});
  std::deque<Race> races;
  races.push_back(std::move(all.race));
  std::ostringstream summary;
  write_summary(summary, races, /*cuda=*/false);
  EXPECT_THAT(summary.str(), HasSubstr("\n| UNet |  | 50 % |  |  |  |  | 5 to 30 % |\n"));
}

TEST(Report, CallsAnAuditedPolicyFasterOrSlowerOnlyBeyondNoise) {
  const auto line = [](const std::vector<double>& torch, const std::vector<double>& audited) {
    MadeUpRace all;
    const Way way{"cpp", "audited", "bf16", "fused", "eager"};
    Way torchs = way;
    torchs.casts = "torch";
    all.add(torchs, 0.5, 1., torch);
    all.add(way, 0.5, 1., audited);
    std::deque<Race> races;
    races.push_back(std::move(all.race));
    std::ostringstream text;
    write_audited(text, races);
    return text.str();
  };
  const std::vector<double> steady{4., 4., 4., 4.}, noisy{3., 4., 5., 4.};
  EXPECT_THAT(line(steady, {2., 2., 2., 2.}),
              HasSubstr("| UNet | bf16, fused |  | 4 s | 2 s | 0.50 | 0 us | faster |"));
  EXPECT_THAT(line({2., 2., 2., 2.}, steady), HasSubstr("| slower |"));
  EXPECT_THAT(line(noisy, {3., 3., 3., 3.}), HasSubstr("| within noise |"));
}

TEST(Plan, TakesThePresetThatWasAskedForAndElseTheOneThatTheProductsAreFastEnoughFor) {
  Plan plan;
  plan.device = "cpu";
  plan.threads = 1;
  plan.dtypes = {"bf16"};
  choose_preset(plan, "full");
  EXPECT_EQ(plan.preset, Preset::full);
  EXPECT_THAT(plan.why, HasSubstr(" The preset is full, as was asked for."));
  choose_preset(plan, "auto");
  EXPECT_NE(plan.preset, Preset::full);
  EXPECT_THAT(plan.why, HasSubstr("A product of 512 x 512 matrices takes "));
}

TEST(Race, SkipsCapturedWaysWithAReason) {
  Way captured = fused;
  captured.launch = "captured";
  const ModelEntry& unet = find_model("unet");
  Plan cpu, cuda;
  cpu.device = "cpu";
  cuda.device = "cuda";
  EXPECT_EQ(why_not(cpu, unet, captured), "only a CUDA device has graphs");
  EXPECT_EQ(why_not(cpu, unet, fused), "");
  EXPECT_EQ(why_not(cuda, unet, fused), "");
  captured.language = "python";
  EXPECT_EQ(why_not(cuda, unet, captured), "");
  EXPECT_THAT(why_not(cuda, find_model("yolo"), captured), HasSubstr("whether a step was skipped"));
  Race race;
  EXPECT_THAT(skipped_text(race), IsEmpty());
  race.left_out = {{captured, "of rain"}, {python, "of rain"}, {mixed, "of snow"}};
  EXPECT_THAT(
      skipped_text(race),
      ElementsAre("Skipped, since of rain: Python torch.amp, bf16, fused, captured; Python, fp32.",
                  "Skipped, since of snow: torchamp, bf16."));
}

TEST(Models, HaveThePublishedNumbersOfParameters) {
  const auto count = [](const char* name, Preset preset) {
    const ModelEntry& entry = find_model(name);
    return count_parameters(entry.make(entry.sizes.at(preset))->module());
  };
  for (const Preset preset : {Preset::small, Preset::large, Preset::full}) {
    EXPECT_EQ(count("unet", preset), 7'703'497);
  }
  EXPECT_EQ(count("yolo", Preset::full), 1'872'157);  // YOLOv5n with 80 classes
}

TEST(Contestant, IsEndedAfterItsLimitAndKeepsTheRoundsThatItHasDone) {
  const auto run = [](const std::string& script) {
    Contestant contestant(python, {"sh", "-c", script}, "/dev/null", "seconds", /*limit=*/0.5);
    contestant.wait_until_ready();
    contestant.warm_up(1);
    for (int i = 0; i < 3; ++i) contestant.race(1);
    contestant.dismiss();
    return contestant.failed() ? contestant.failure()
                               : std::to_string(contestant.rounds().size()) + " rounds";
  };
  const std::string ready = "echo ready parameters=1 libtorch=2.0;";
  const std::string ran = "read a; echo ran seconds=1 processor=1 loss=1 first=1 peak=1 sent=0;";
  const std::string hangs = "exec sleep 20";
  EXPECT_EQ(run(ready + ran + ran + ran + ran), "3 rounds");
  EXPECT_EQ(run(ready + ran + ran + hangs), "1 rounds");
  EXPECT_EQ(run(ready + ran + hangs), "not a round in 0.5 s (--limit)");
  EXPECT_EQ(run(hangs), "not a round in 0.5 s (--limit)");
}

TEST(Contestant, IsEndedAfterItsLimitFromItsStart) {
  const auto make = [](const std::string& script) {
    return Contestant(python, {"sh", "-c", script}, "/dev/null", "seconds", /*limit=*/0.5);
  };
  std::deque<Contestant> contestants;
  for (int i = 0; i < 4; ++i) contestants.push_back(make("exec sleep 20"));
  const std::string ran = "read a; echo ran seconds=1 processor=1 loss=1 first=1 peak=1 sent=0;";
  contestants.push_back(make("echo ready parameters=1 libtorch=2.0;" + ran + ran));
  const auto begin = std::chrono::steady_clock::now();
  for (Contestant& contestant : contestants) contestant.wait_until_ready();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(1500));
  Contestant& ready = contestants.back();
  ready.warm_up(1);
  ready.race(1);
  EXPECT_EQ(ready.rounds().size(), 1U);
  contestants.pop_back();
  for (const Contestant& contestant : contestants) {
    EXPECT_EQ(contestant.failure(), "not a round in 0.5 s (--limit)");
  }
}

TEST(EarlierRuns, AreOneRaceForEachModelWithTheRoundsOfAllFiles) {
  const support::TemporaryFolder folder("comparison");
  const std::string head =
      "model,language,casts,dtype,optimizer,launch,variant,round,steps,seconds_per_step,loss,"
      "peak_bytes,wrong\n";
  Options options;
  for (const char* const rows : {"bert,cpp,fp32,fp32,fused,eager,plain,1,8,0.5,2,100,no\n",
                                 "bert,cpp,fp32,fp32,fused,eager,plain,1,8,0.7,1,90,no\n"
                                 "bert,cpp,standard,bf16,fused,eager,plain,1,8,0.1,9,80,yes\n"}) {
    options.from.push_back(folder.path() / (std::to_string(options.from.size()) + ".csv"));
    std::ofstream(options.from.back()) << head << rows;
  }
  const std::deque<Race> races = read_races(options, Preset::small);
  ASSERT_EQ(races.size(), 1U);
  ASSERT_EQ(races[0].contestants.size(), 2U);
  EXPECT_EQ(races[0].steps, 8);
  EXPECT_EQ(median_seconds(races[0].contestants[0]), 0.6);
  EXPECT_EQ(races[0].contestants[0].peak_bytes(), 90);
  EXPECT_TRUE(judge(races[0], races[0].contestants[0]).counts());
  EXPECT_FALSE(judge(races[0], races[0].contestants[1]).counts());
  std::ofstream(options.from.back(), std::ios::app) << "bert,cpp\n";
  EXPECT_THROW(read_races(options, Preset::small), support::UsageError);
}

// Python's nn.Linear is one op; torch::nn::Linear would be `matmul` and `add_` in BERT. A layer
// without a bias, such as the GPT's head, is a `matmul` within its one op.
TEST(Models, CallOneOpForEachLinearLayerAsTheirTwinsDo) {
  const auto count = [](const char* name) {
    const ModelEntry& entry = find_model(name);
    const auto model = entry.make(entry.sizes.at(Preset::small));
    const auto batch = model->make_batch();
    auto counts = support::count_ops([&] { model->loss(batch); });
    return std::pair(counts["aten::linear"], counts["aten::matmul"]);
  };
  EXPECT_THAT(count("feed_forward"), Pair(3, 0));
  EXPECT_THAT(count("bert"), Pair(2 * 6 + 1, 0));
  EXPECT_THAT(count("gpt"), Pair(2 * 4 + 1, 1));
}

TEST(OpCounts, DifferInOpsThatComputeAlone) {
  EXPECT_EQ(support::difference({{"aten::add", 2}, {"aten::empty", 3}}, {{"aten::add", 2}}), "");
  EXPECT_EQ(support::difference({{"aten::add", 2}}, {{"aten::add", 1}, {"aten::rsub", 3}}),
            "aten::add 2 (1), aten::rsub 0 (3)");
}

}  // namespace
