// SPDX-License-Identifier: BSD-3-Clause
// NCCL between processes: what each collective gives, what is refused, and who waits for whom.
#include <gtest/gtest.h>

#if !__has_include(<gloo/rendezvous/store.h>)

TEST(NcclOnHost, ExchangesBetweenProcesses) {
  GTEST_SKIP() << "no headers of Gloo (apt install libgloo-dev), by which the processes meet";
}

#else

#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <signal.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "support/expect_error.h"
#include "support/launch.h"
#include "torchamp/distributed/nccl.h"
#include "torchamp/distributed/sharded_masters.h"
#include "torchamp/torchamp.h"

namespace {

using at::Tensor;
using torchamp::DistributedDataParallel;

/// A process's device, current; each has its own.
struct OwnDevice {
  OwnDevice()
      : device(at::kCUDA,
               static_cast<c10::DeviceIndex>(torchamp::ProcessEnvironment::read().local_rank)),
        guard(device) {}
  at::Device device;
  c10::cuda::CUDAGuard guard;
};

/// A communicator of all processes of `group`, by NCCL's own functions.
class Communicator {
 public:
  explicit Communicator(const torchamp::ProcessGroupPtr& group)
      : rank(group->getRank()), size(group->getSize()) {
    ncclUniqueId id;
    if (rank == 0) {
      ncclGetUniqueId(&id);
      group->getStore()->set("id", std::string(id.internal, sizeof(id.internal)));
    } else {
      const auto bytes = group->getStore()->get("id");
      std::copy(bytes.begin(), bytes.end(), id.internal);
    }
    error = ncclCommInitRank(&comm, size, id, rank);
  }
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  ~Communicator() {
    if (comm) ncclCommDestroy(comm);
  }

  Tensor all_reduce(const Tensor& from, ncclDataType_t type, ncclRedOp_t reduction) const {
    Tensor to = at::empty_like(from);
    EXPECT_EQ(
        ncclAllReduce(from.const_data_ptr(), to.mutable_data_ptr(),
                      static_cast<std::size_t>(from.numel()), type, reduction, comm, stream()),
        ncclSuccess);
    return to;
  }
  static cudaStream_t stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

  int rank, size;
  ncclComm_t comm = nullptr;
  ncclResult_t error;
};

bool ran_on_devices(int processes) {
  if (child_role()) return false;
  Launch(processes, {{"CUDA_ON_HOST_DEVICES", std::to_string(processes)}}).expect_success();
  return true;
}

class NcclOnHost : public ::testing::TestWithParam<int> {};

TEST_P(NcclOnHost, GivesEachProcessWhatAllHaveGiven) {
  if (ran_on_devices(GetParam())) return;
  const OwnDevice own;
  const Communicator all(make_group());
  ASSERT_EQ(all.error, ncclSuccess);
  const auto n = static_cast<double>(all.size);
  const std::pair<at::ScalarType, ncclDataType_t> types[] = {
      {at::kFloat, ncclFloat32},     {at::kDouble, ncclFloat64}, {at::kHalf, ncclFloat16},
      {at::kBFloat16, ncclBfloat16}, {at::kLong, ncclInt64},     {at::kByte, ncclUint8}};
  for (const auto& [dtype, type] : types) {
    SCOPED_TRACE(dtype);
    // Of rank r: r + 1, r + 2, …
    const Tensor mine =
        at::arange(5, at::device(own.device).dtype(at::kFloat)).add(all.rank + 1.).to(dtype);
    const Tensor steps = at::arange(5, at::kDouble);
    const auto expect = [&](const Tensor& tensor, const Tensor& expected) {
      EXPECT_TRUE(at::equal(tensor.cpu().to(at::kDouble), expected)) << tensor << expected;
    };
    expect(all.all_reduce(mine, type, ncclSum), n * steps + n * (n + 1.) / 2.);
    expect(all.all_reduce(mine, type, ncclMax), steps + n);
    expect(all.all_reduce(mine, type, ncclMin), steps + 1.);
    if (all.size == 2) expect(all.all_reduce(mine, type, ncclProd), (steps + 1.) * (steps + 2.));
    if (at::isFloatingType(dtype)) {
      expect(all.all_reduce(mine, type, ncclAvg), steps + (n + 1.) / 2.);
    }

    Tensor of_one = mine.clone();
    ncclBroadcast(of_one.const_data_ptr(), of_one.mutable_data_ptr(), 5, type, 1, all.comm,
                  Communicator::stream());
    expect(of_one, steps + 2.);

    Tensor gathered = at::empty({all.size, 5}, mine.options());
    ncclAllGather(mine.const_data_ptr(), gathered.mutable_data_ptr(), 5, type, all.comm,
                  Communicator::stream());
    expect(gathered, at::arange(all.size, at::kDouble).add(1.).unsqueeze(1) + steps);

    Tensor share = at::empty({5}, mine.options());
    ncclReduceScatter(gathered.const_data_ptr(), share.mutable_data_ptr(), 5, type, ncclSum,
                      all.comm, Communicator::stream());
    expect(share, n * (steps + all.rank + 1.));

    Tensor exchanged = at::empty_like(gathered);  // row r: what rank r has for this one
    ncclAlltoAll(gathered.mul(all.rank + 1.).to(dtype).const_data_ptr(),
                 exchanged.mutable_data_ptr(), 5, type, all.comm, Communicator::stream());
    const Tensor factors = at::arange(all.size, at::kDouble).add(1.).unsqueeze(1);
    expect(exchanged, factors * (steps + all.rank + 1.));

    // Each to the next.
    Tensor from_before = at::empty_like(mine);
    ncclGroupStart();
    ncclSend(mine.const_data_ptr(), 5, type, (all.rank + 1) % all.size, all.comm,
             Communicator::stream());
    const int before = (all.rank + all.size - 1) % all.size;
    ncclRecv(from_before.mutable_data_ptr(), 5, type, before, all.comm, Communicator::stream());
    ncclGroupEnd();
    expect(from_before, steps + before + 1.);

    Tensor reduced = mine.clone();
    ncclReduce(mine.const_data_ptr(), reduced.mutable_data_ptr(), 5, type, ncclSum, 1, all.comm,
               Communicator::stream());
    expect(reduced, all.rank == 1 ? n * steps + n * (n + 1.) / 2. : steps + all.rank + 1.);
  }
}

// 16-bit sums are rounded one by one, as NCCL's are.
TEST_P(NcclOnHost, RoundsSumsIn16BitsOneByOne) {
  if (ran_on_devices(GetParam())) return;
  const OwnDevice own;
  const Communicator all(make_group());
  ASSERT_EQ(all.error, ncclSuccess);
  const Tensor mine = at::full({1}, all.rank == 0 ? 256. : 1., own.device).to(at::kBFloat16);
  const Tensor sum = all.all_reduce(mine, ncclBfloat16, ncclSum);
  EXPECT_EQ(sum.item<float>(), 256.F) << "256 + 1 is 256 in bf16";
}

TEST_P(NcclOnHost, TrainsAsOneProcessWithAllBatchesAndAgreesToSkip) {
  if (ran_on_devices(GetParam())) return;
  const OwnDevice own;
  const auto group = make_group();
  torchamp::add_nccl(*group);
  for (const bool shards : {false, true}) {
    SCOPED_TRACE(shards);
    const auto net = [&] {
      torch::manual_seed(3);
      torch::nn::Linear made(4, 2);
      made->to(own.device);
      return made;
    };
    torch::nn::Linear model = net();
    std::optional<DistributedDataParallel<torch::nn::Linear> > replica;
    std::optional<torchamp::ShardedMasterWeights> masters;
    if (shards) {
      masters.emplace(model, group, torchamp::ShardedMasterWeightsOptions{.dtype = at::kBFloat16});
    } else {
      replica.emplace(model, group);
    }
    torchamp::FusedSGD optimizer(shards ? masters->parameters() : model->parameters(),
                                 torch::optim::SGDOptions(0.5));
    torchamp::GradScalerOptions options{.init_scale = 4.};
    if (shards) options.agree_found_inf = torchamp::found_inf_agreement(group);
    torchamp::GradScaler scaler(options);
    for (int step = 0; step < 3; ++step) {
      const bool overflows = step == 1 && group->getRank() == 1;
      const Tensor x = at::full({1, 4}, group->getRank() + (overflows ? INFINITY : 1.), own.device);
      const Tensor out =
          shards ? model->forward(x.to(at::kBFloat16)).to(at::kFloat) : replica->forward(x);
      optimizer.zero_grad();
      scaler.scale(out.mean()).backward();
      if (shards) masters->take_gradients();
      EXPECT_EQ(scaler.step(optimizer).stepped(), step != 1);
      scaler.update();
      if (shards) masters->copy_to_model();
    }
    EXPECT_EQ(scaler.get_scale(), 2.);
    expect_same_everywhere(group, {model->weight.cpu(), model->bias.cpu()});
    // Each of two steps takes 0.5 of the mean gradient, which is the gradient of the mean of all
    // inputs.
    const Tensor before = net()->weight.detach();
    const Tensor expected = before - 0.5 * 2. * 0.5 * (group->getSize() + 1.) / 2.;
    EXPECT_TRUE(at::allclose(model->weight.detach().to(at::kFloat).cpu(), expected.cpu(),
                             shards ? 1e-2 : 1e-6, shards ? 1e-2 : 1e-6));
  }
}

// The others are asked for their flags before the last one has its own.
TEST_P(NcclOnHost, AStepWaitsForTheFlagsOfProcessesThatComeLater) {
  if (ran_on_devices(GetParam())) return;
  const OwnDevice own;
  const auto group = make_group();
  torchamp::add_nccl(*group);
  std::vector<Tensor> first{at::ones({1}, own.device)};
  group->allreduce(first)->wait();  // NCCL's communicator is made by all together
  const bool is_last = group->getRank() == group->getSize() - 1;
  for (const bool shards : {false, true}) {
    SCOPED_TRACE(shards);
    torch::nn::Linear model(4, 2);
    model->to(own.device);
    std::optional<torchamp::ShardedMasterWeights> masters;
    torchamp::GradScalerOptions options{.init_scale = 4.};
    if (shards) {
      masters.emplace(model, group, torchamp::ShardedMasterWeightsOptions{.dtype = at::kBFloat16});
    } else {
      options.agree_found_inf = torchamp::found_inf_agreement(group);
    }
    const std::vector<Tensor> weights = shards ? masters->parameters() : model->parameters();
    torchamp::FusedSGD optimizer(weights, torch::optim::SGDOptions(0.5));
    torchamp::GradScaler scaler(options);
    std::vector<Tensor> before;
    for (const Tensor& weight : weights) {
      before.push_back(weight.detach().cpu());
      weight.mutable_grad() = at::full_like(weight, is_last ? INFINITY : 1.);
    }
    scaler.scale(at::ones({}, own.device));
    const std::string key = shards ? "shards" : "replicas";
    if (is_last) group->getStore()->get(key);  // waits until it is there
    const torchamp::StepResult result = scaler.step(optimizer);
    if (group->getRank() == 0) group->getStore()->set(key, std::string("yes"));
    EXPECT_FALSE(result.stepped());
    for (std::size_t i = 0; i < weights.size(); ++i) {
      EXPECT_TRUE(at::equal(weights[i].detach().cpu(), before[i]));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Processes, NcclOnHost, ::testing::Values(2, 4),
                         ::testing::PrintToStringParamName());

TEST(NcclOnHostOrder, OneDeviceInTwoProcessesIsRefused) {
  if (ran_on_devices(2)) return;
  const c10::cuda::CUDAGuard same(0);
  const Communicator all(make_group());
  EXPECT_EQ(all.error, ncclInvalidUsage);
}

TEST(NcclOnHostOrder, OtherArgumentsThanAnotherProcessHasAreAnError) {
  if (ran_on_devices(2)) return;
  const OwnDevice own;
  const Communicator all(make_group());
  ASSERT_EQ(all.error, ncclSuccess);
  all.all_reduce(at::ones({2 + all.rank}, own.device), ncclFloat32, ncclSum);
  EXPECT_EQ(cudaStreamSynchronize(Communicator::stream()), cudaSuccess);
  ncclResult_t error = ncclSuccess;
  ncclCommGetAsyncError(all.comm, &error);
  EXPECT_EQ(error, ncclInvalidUsage);
}

TEST(NcclOnHostOrder, AProcessThatComesLaterKeepsTheOthersStreamWaitingAndNotTheirHost) {
  if (ran_on_devices(2)) return;
  const OwnDevice own;
  const auto group = make_group();
  const Communicator all(group);
  ASSERT_EQ(all.error, ncclSuccess);
  const Tensor ones = at::ones({3}, own.device);
  if (all.rank == 1) group->getStore()->get("asked");  // waits until it is there
  const Tensor sum = all.all_reduce(ones, ncclFloat32, ncclSum);
  const Tensor twice = sum * 2.;
  if (all.rank == 0) {
    for (int i = 0; i < 20; ++i) {
      EXPECT_EQ(cudaStreamQuery(Communicator::stream()), cudaErrorNotReady);
    }
    group->getStore()->set("asked", std::string("yes"));
  }
  EXPECT_TRUE(at::equal(twice.cpu(), at::full({3}, 4.)));
  EXPECT_EQ(cudaStreamQuery(Communicator::stream()), cudaSuccess);
}

TEST(NcclOnHostOrder, AnAbortedCommunicatorLetsItsStreamGoOn) {
  if (ran_on_devices(2)) return;
  const OwnDevice own;
  Communicator all(make_group());
  ASSERT_EQ(all.error, ncclSuccess);
  if (all.rank == 1) return;
  all.all_reduce(at::ones({3}, own.device), ncclFloat32, ncclSum);
  EXPECT_EQ(cudaStreamQuery(Communicator::stream()), cudaErrorNotReady);
  EXPECT_EQ(ncclCommAbort(std::exchange(all.comm, nullptr)), ncclSuccess);
  EXPECT_EQ(cudaStreamSynchronize(Communicator::stream()), cudaSuccess);
}

/// Process 1 of several dies before a sum, or is there and has no part in it. The others end so.
void expect_ends_without_1(int processes, bool dies, int end,
                           std::map<std::string, std::string> environment = {}) {
  environment.insert({{"CUDA_ON_HOST_DEVICES", std::to_string(processes)},
                      {"TORCH_NCCL_DUMP_ON_TIMEOUT", "0"},
                      {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "100"},
                      {"TORCHAMP_TEST_DIES", dies ? "1" : "0"}});
  Launch launch(processes, environment);
  for (int rank = 0; rank < processes; ++rank) {
    if (rank == 1 && !dies) continue;
    EXPECT_EQ(launch.rank(rank).wait(), rank == 1 ? -SIGKILL : end) << "rank " << rank;
  }
}

void sum_without_1() {
  const OwnDevice own;
  const auto group = make_group();
  torchamp::add_nccl(*group, std::chrono::seconds(3));
  std::vector<Tensor> tensors{at::ones({3}, own.device)};
  group->allreduce(tensors)->wait();
  EXPECT_TRUE(at::equal(tensors[0].cpu(), at::full({3}, 1. * group->getSize())));
  if (group->getRank() == 1) {
    if (std::string(std::getenv("TORCHAMP_TEST_DIES")) == "1") raise(SIGKILL);
    while (true) pause();  // until the test that has started it ends it
  }
  group->allreduce(tensors)->wait();
  cudaDeviceSynchronize();
}

TEST_P(NcclOnHost, TheWatchdogEndsAProcessIfAnotherHasDied) {
  child_role() ? sum_without_1() : expect_ends_without_1(GetParam(), /*dies=*/true, -SIGABRT);
}

TEST_P(NcclOnHost, TheWatchdogEndsAProcessThatWaitsLongerThanTheTimeout) {
  child_role() ? sum_without_1() : expect_ends_without_1(GetParam(), /*dies=*/false, -SIGABRT);
}

TEST_P(NcclOnHost, AHostThatWaitsGetsAnErrorIfAnotherHasDied) {
  if (!child_role()) {
    return expect_ends_without_1(GetParam(), /*dies=*/true, 0, {{"TORCH_NCCL_BLOCKING_WAIT", "1"}});
  }
  EXPECT_THROW(sum_without_1(), c10::Error);
  std::fflush(nullptr);
  _exit(::testing::Test::HasFailure() ? 1 : 0);  // the group's own end would wait, too
}

}  // namespace

#endif
