// SPDX-License-Identifier: BSD-3-Clause
#include "benchmark/comparison/op_profile.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <numeric>

namespace {

double share_of(const OpProfile& profile, OpKind kind) {
  return profile.shares()[static_cast<std::size_t>(kind)];
}

}  // namespace

TEST(OpProfile, GivesEachKindItsShareAndTheRestToNoOp) {
  const torch::Tensor a = torch::randn({64, 64}).requires_grad_();
  const OpProfile profile;
  for (int i = 0; i < 5; ++i) torch::matmul(a, a).to(torch::kBFloat16).sum().backward();
  const auto shares = profile.shares();
  EXPECT_NEAR(std::accumulate(shares.begin(), shares.end(), 0.), 1., 1e-12);
  for (const OpKind kind : {OpKind::product, OpKind::cast, OpKind::other, OpKind::rest}) {
    EXPECT_GT(share_of(profile, kind), 0.) << kOpKinds[static_cast<std::size_t>(kind)];
  }
  EXPECT_EQ(share_of(profile, OpKind::optimizer), 0.);
  EXPECT_EQ(share_of(profile, OpKind::norm), 0.);
}

TEST(OpProfile, CountsACopyAsWhatTheOpThatCallsItIs) {
  const torch::Tensor a = torch::randn({64, 64});
  const OpProfile profile;
  (void)a.to(torch::kBFloat16);  // calls _to_copy, empty_strided and copy_
  EXPECT_GT(share_of(profile, OpKind::cast), 0.);
  EXPECT_EQ(share_of(profile, OpKind::other), 0.);
}

TEST(OpProfile, SeesNothingOfWhatWasBefore) {
  { const OpProfile earlier; }
  (void)torch::matmul(torch::randn({8, 8}), torch::randn({8, 8}));
  const OpProfile profile;
  EXPECT_EQ(share_of(profile, OpKind::product), 0.);
}
