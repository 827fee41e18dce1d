// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#if __has_include(<gloo/rendezvous/store.h>)

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <signal.h>
#include <torch/nn/modules/linear.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <system_error>
#include <vector>

#include "support/expect_error.h"
#include "support/launch.h"
#include "support/processes.h"
#include "torchamp/distributed/data_parallel.h"
#include "torchamp/distributed/process_group.h"

namespace {

using torchamp::DistributedDataParallel;

TEST(Distributed, GivesAnErrorWhenAnotherProcessNeverComes) {
  if (!child_role()) return Launch(2).expect_success();
  const auto environment = torchamp::ProcessEnvironment::read();
  if (environment.rank == 1) return;
  EXPECT_ERROR(make_group(std::chrono::seconds(2)), "make_process_group: ");
}

TEST(Distributed, MeetsWithoutTorchrunAndOnLoopbackAlone) {
  if (!child_role()) {
    std::map<std::string, std::string> environment{{"MASTER_ADDR", "localhost"},
                                                   {"MASTER_PORT", std::to_string(free_port())},
                                                   {"WORLD_SIZE", "2"},
                                                   {"RANK", "0"}};
    ChildProcess first("rank", environment);
    environment["RANK"] = "1";
    ChildProcess second("rank", environment);
    EXPECT_EQ(second.wait(), 0);
    EXPECT_EQ(first.wait(), 0);
    return;
  }
  const auto group = make_group();
  std::vector<std::int64_t> ranks;
  for (const at::Tensor& rank : gathered(group, at::tensor({group->getRank()}))) {
    ranks.push_back(rank.item<std::int64_t>());
  }
  EXPECT_EQ(ranks, (std::vector<std::int64_t>{0, 1}));
  // What this process listens on, from the kernel's table: hexadecimal, 0A is LISTEN.
  for (const char* table : {"/proc/self/net/tcp", "/proc/self/net/tcp6"}) {
    std::set<std::string> own;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code gone;
      own.insert(std::filesystem::read_symlink(entry, gone).string());
    }
    std::ifstream lines(table);
    for (std::string line; std::getline(lines, line);) {
      std::istringstream words(line);
      std::string number, local, remote, state, rest, inode;
      words >> number >> local >> remote >> state;
      for (int i = 0; i < 5; ++i) words >> rest;
      words >> inode;
      if (state != "0A" || !own.contains("socket:[" + inode + "]")) continue;
      EXPECT_TRUE(local.starts_with("0100007F:")) << table << ": " << local;
    }
  }
}

TEST(ProcessEnvironment, IsAGroupOfOneWithoutVariables) {
  const auto environment = torchamp::ProcessEnvironment::read();
  EXPECT_EQ(environment.rank, 0);
  EXPECT_EQ(environment.world_size, 1);
  const auto group = torchamp::make_process_group();
  torch::nn::Linear model(2, 2);
  DistributedDataParallel net(model, group);
  net.forward(at::ones({1, 2})).sum().backward();
  EXPECT_TRUE(at::equal(model->weight.grad(), at::ones({2, 2})));
}

TEST(ProcessEnvironment, SaysWhatIsMissingOrWrong) {
  const auto read_with = [](const std::map<std::string, std::string>& variables) {
    for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
    std::string text;
    try {
      torchamp::ProcessEnvironment::read();
    } catch (const c10::Error& error) {
      text = error.what_without_backtrace();
    }
    for (const auto& [name, value] : variables) unsetenv(name.c_str());
    return text;
  };
  using testing::HasSubstr;
  EXPECT_THAT(read_with({{"RANK", "0"}}), HasSubstr("variable WORLD_SIZE is not set"));
  EXPECT_THAT(read_with({{"WORLD_SIZE", "2"}}), HasSubstr("variable RANK is not set"));
  EXPECT_THAT(read_with({{"RANK", "two"}, {"WORLD_SIZE", "2"}}), HasSubstr("RANK is 'two'"));
  EXPECT_THAT(read_with({{"RANK", "2"}, {"WORLD_SIZE", "2"}}), HasSubstr("Ranks count from 0"));
  EXPECT_THAT(read_with({{"RANK", "1"}, {"WORLD_SIZE", "2"}}), HasSubstr("MASTER_PORT is not set"));
  EXPECT_EQ(read_with({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", "29500"}}), "");
}

TEST(Distributed, IgnoresASignalThatSendingToADeadProcessRaises) {
  const auto before = std::signal(SIGPIPE, SIG_DFL);
  (void)torchamp::make_process_group();
  EXPECT_EQ(std::signal(SIGPIPE, [](int) {}), SIG_IGN);
  (void)torchamp::make_process_group();
  EXPECT_NE(std::signal(SIGPIPE, before), SIG_IGN);  // the program's own handler stays
}

}  // namespace

#endif
