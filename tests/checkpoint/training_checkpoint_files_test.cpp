// SPDX-License-Identifier: BSD-3-Clause
// Files of a TrainingCheckpoint: files of earlier versions, and damaged files.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <fstream>
#include <functional>
#include <iterator>
#include <random>
#include <vector>

#include "support/damaged.h"
#include "support/expect_error.h"
#include "support/linux_only.h"
#include "support/moved_file.h"
#include "support/temporary_folder.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/optim.h"
#include "torchamp/training_checkpoint.h"

#ifdef __linux__
#include <sys/stat.h>
#endif

namespace {

namespace fs = std::filesystem;
using at::Tensor;
using torchamp::TrainingCheckpoint;

/// One object of each kind, with values that are the same in every process.
struct Contents {
  explicit Contents(const fs::path& path) : checkpoint(path) {
    checkpoint.add("step", step).add("seed", seed).add("rate", rate).add("flag", flag);
    checkpoint.add("text", text).add("tensor", tensor).add("none", none).add("model", net);
    checkpoint.add("optimizer", optimizer).add("scaler", scaler).add_local("losses", losses);
  }

  /// Values other than those at construction.
  void fill() {
    step = -7, seed = (std::uint64_t{1} << 63) + 5, rate = 0.25f, flag = true, text = "a\nb";
    losses = 1.5;
    tensor.copy_(at::arange(64) / 8);
    none.reset();
    const at::NoGradGuard no_grad;
    for (Tensor& parameter : net->parameters()) {
      parameter.copy_(at::arange(parameter.numel()).view(parameter.sizes()) / 4);
      parameter.mutable_grad() = at::full_like(parameter, 0.5);
    }
    optimizer.step();
    scaler.load_state_dict({.scale = 2048.,
                            .growth_factor = 2.,
                            .backoff_factor = 0.5,
                            .growth_interval = 2000,
                            .growth_tracker = 3});
  }

  /// All of it, to compare.
  std::vector<Tensor> state() {
    std::vector<Tensor> all{
        at::tensor({rate, static_cast<float>(flag)}), tensor.clone(),
        at::tensor({step, static_cast<std::int64_t>(seed), static_cast<std::int64_t>(text.size())}),
        at::tensor({scaler.get_scale(), losses}),
        at::tensor(static_cast<std::int64_t>(none.defined()))};
    for (const Tensor& parameter : net->parameters()) {
      all.push_back(parameter.detach().clone());
      const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (found == optimizer.state().end()) continue;
      auto& one = static_cast<torch::optim::AdamWParamState&>(*found->second);
      all.insert(all.end(), {one.exp_avg().clone(), one.exp_avg_sq().clone()});
    }
    return all;
  }

  std::int64_t step = 1;
  std::uint64_t seed = 1;
  float rate = 1.f;
  bool flag = false;
  std::string text;
  Tensor tensor = at::zeros({64}), none = at::ones({1});
  torch::nn::Linear net{4, 4};
  torchamp::FusedAdamW optimizer{net->parameters(), torch::optim::AdamWOptions(0.5)};
  torchamp::GradScaler scaler;
  double losses = 0.;
  TrainingCheckpoint checkpoint;
};

// What made checkpoint/checkpoint-0.1.pt, with torchamp 0.1 and LibTorch 2.15, in tests/:
// training_checkpoint_files_test --gtest_also_run_disabled_tests --gtest_filter='*WritesAFile*'
TEST(TrainingCheckpointFiles, DISABLED_WritesAFile) {
  at::manual_seed(5);
  Contents contents("checkpoint/checkpoint-new.pt");
  contents.fill();
  contents.checkpoint.save();
}

void write(const fs::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

void expect_same(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << i;
}

/// 1000 damaged copies of `whole` are errors that leave everything as it was.
void expect_damage_to_be_seen(const std::string& whole, const std::vector<bool>& padding) {
  const TemporaryFolder folder;
  const fs::path path = folder / "run.pt";
  Contents contents(path);
  const auto before = contents.state();
  const Tensor handle = contents.tensor;
  at::manual_seed(3);
  const auto random_state = at::detail::getDefaultCPUGenerator().get_state();
  std::mt19937 random(17);
  for (int i = 0; i < 1000 && !::testing::Test::HasFailure(); ++i) {
    SCOPED_TRACE(i);
    write(path, damaged_once(whole, padding, random));
    EXPECT_ERROR((void)contents.checkpoint.load(),
                 "TrainingCheckpoint::load: '" + path.string() + "': it ");
  }
  expect_same(contents.state(), before);
  EXPECT_TRUE(contents.tensor.is_same(handle));
  EXPECT_TRUE(at::equal(at::detail::getDefaultCPUGenerator().get_state(), random_state));
  write(path, whole);
  EXPECT_TRUE(contents.checkpoint.load());
}

TEST(TrainingCheckpointFiles, DetectsAnyDamage) {
  const TemporaryFolder folder;
  Contents contents(folder / "run.pt");
  contents.fill();
  contents.checkpoint.save();
  const std::string whole = content_of(folder / "run.pt");
  expect_damage_to_be_seen(whole, std::vector<bool>(whole.size()));
}

TEST(TrainingCheckpointFiles, DetectsAnyDamageOfAFileOfVersion01ButToItsPadding) {
  const std::string whole = content_of("checkpoint/checkpoint-0.1.pt");
  expect_damage_to_be_seen(whole, padding_of(whole));
}

TEST(TrainingCheckpointFiles, DetectsAFlipOfAnyBitNearBothEnds) {
  const TemporaryFolder folder;
  const fs::path path = folder / "run.pt";
  Tensor tensor = at::arange(4);
  TrainingCheckpoint checkpoint(path);
  checkpoint.add("tensor", tensor);
  checkpoint.save();
  const std::string whole = content_of(path);
  for (std::size_t at = 0; at < whole.size(); ++at) {
    if (at == 32) at = whole.size() - 150;
    for (int bit = 0; bit < 8; ++bit) {
      std::string bytes = whole;
      bytes[at] = static_cast<char>(bytes[at] ^ 1 << bit);
      write(path, bytes);
      SCOPED_TRACE(std::to_string(at) + " " + std::to_string(bit));
      EXPECT_ERROR((void)checkpoint.load(), "it is damaged");
    }
  }
}

TEST(TrainingCheckpointFiles, DetectsThatTheChecksumIsGone) {
  const TemporaryFolder folder;
  const fs::path path = folder / "run.pt";
  int step = 0;
  TrainingCheckpoint checkpoint(path);
  checkpoint.add("step", step);
  checkpoint.save();
  std::string bytes = content_of(path);
  bytes.resize(bytes.size() - 34);
  bytes[bytes.size() - 2] = '\0';
  write(path, bytes);
  EXPECT_ERROR((void)checkpoint.load(), "it is damaged: its checksum is missing.");
}

TEST(TrainingCheckpointFiles, ReadsAFileOfVersion01) {
  const TemporaryFolder folder;
  Contents expected(folder / "run.pt"), read("checkpoint/checkpoint-0.1.pt");
  expected.fill();
  EXPECT_TRUE(read.checkpoint.load());
  expect_same(read.state(), expected.state());
  EXPECT_EQ(read.text, "a\nb");
  at::manual_seed(5);
  const Contents draws(folder / "other.pt");  // as before the file was written
  const Tensor next = at::rand({3});
  EXPECT_TRUE(read.checkpoint.load());
  EXPECT_TRUE(at::equal(at::rand({3}), next));
}

TEST(TrainingCheckpointFiles, ReadsAFileWithoutCrcsAndOfADeviceThatIsNotHere) {
  if (at::globalContext().hasXPU()) GTEST_SKIP() << "the device is here";
  const TemporaryFolder folder;
  write(folder / "run.pt", moved_file("checkpoint/checkpoint-0.1.pt", "cpu", "xpu:0"));
  Contents expected(folder / "other.pt"), read(folder / "run.pt");
  expected.fill();
  EXPECT_TRUE(read.checkpoint.load());
  expect_same(read.state(), expected.state());
}

TEST(TrainingCheckpointFiles, NamesTheFileWhateverIsWrongWithIt) {
  const TemporaryFolder folder;
  const fs::path path = folder / "run.pt";
  int step = 1;
  TrainingCheckpoint checkpoint(path);
  checkpoint.add("step", step);
  const std::string start = "TrainingCheckpoint::load: '" + path.string() + "': it ";
  fs::create_directory(path);
  EXPECT_ERROR((void)checkpoint.load(), start + "is not a file.");
  fs::remove(path);
  for (const std::string bytes : {"", "x", "PK\5\6"}) {
    write(path, bytes);
    EXPECT_ERROR((void)checkpoint.load(), start + "is damaged");
  }
}

TEST(TrainingCheckpointFiles, RefusesAPathThatIsNoFileWithoutAWait) {
#ifdef __linux__
  const TemporaryFolder folder;
  const fs::path pipe = folder / "pipe", one = folder / "one", other = folder / "other";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  fs::create_symlink(other, one);
  fs::create_symlink(one, other);
  int step = 1;
  TrainingCheckpoint piped(pipe), circular(one);
  piped.add("step", step);
  circular.add("step", step);
  EXPECT_ERROR((void)piped.load(), "it is not a file.");
  EXPECT_ERROR(piped.save(),
               "TrainingCheckpoint::save: '" + pipe.string() + "' exists and is not a");
  EXPECT_TRUE(fs::is_fifo(pipe));
  EXPECT_ERROR((void)circular.load(),
               "TrainingCheckpoint: cannot determine whether '" + one.string() + "' exists: ");
  EXPECT_ERROR(circular.save(), "TrainingCheckpoint::save: cannot replace '" + one.string());
  EXPECT_TRUE(fs::is_symlink(one));
#else
  SKIP_WITHOUT_LINUX();
#endif
}

TEST(TrainingCheckpointFiles, RemovesWhatAKilledWriterLeftAndNothingOfTheUsers) {
  const TemporaryFolder folder;
  for (const char* const name :
       {"run.pt.partial-12", "run.pt.partial-", "run.pt.partial-1-of-2", "run.pt.partial-notes"}) {
    write(folder / name, "x");
  }
  int step = 1;
  TrainingCheckpoint(folder / "run.pt").add("step", step).save();
  EXPECT_FALSE(fs::exists(folder / "run.pt.partial-12"));
  EXPECT_EQ(folder.files(), 4);
}

TEST(TrainingCheckpointFiles, IsAZipFileThatLibTorchReads) {
  const TemporaryFolder folder;
  int step = 12;
  TrainingCheckpoint(folder / "run.pt").add("step", step).save();
  torch::serialize::InputArchive archive;
  archive.load_from((folder / "run.pt").string());
  c10::IValue version;
  archive.read("torchamp_checkpoint", version);
  EXPECT_EQ(version.toInt(), 2);
}

TEST(TrainingCheckpointFiles, RefusesAFileOfALaterVersion) {
  const TemporaryFolder folder;
  torch::serialize::OutputArchive archive, shared(archive.compilation_unit());
  archive.write("torchamp_checkpoint", c10::IValue(std::int64_t{3}));
  archive.write("id", c10::IValue(std::int64_t{1}));
  archive.write("shared", shared);
  archive.save_to((folder / "run.pt").string());
  EXPECT_ERROR((void)TrainingCheckpoint(folder / "run.pt").load(),
               "it is of version 3, and this torchamp reads versions 1 to 2.");
}

}  // namespace
