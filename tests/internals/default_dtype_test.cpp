// SPDX-License-Identifier: BSD-3-Clause
// The dtype of a TrainingStep that is given none.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <optional>
#include <string>

#include "support/linux_only.h"
#include "support/training_steps.h"
#include "support/warnings.h"
#include "torchamp/training_step.h"

namespace {

using torchamp::TrainingStep;
using torchamp::detail::default_dtype;
using torchamp::detail::has_fast_bf16;
using training_steps::make_net;
using training_steps::Net;

TEST(TrainingStep, TakesTheDtypeThatIsFastWhereNoneIsAskedFor) {
  EXPECT_EQ(default_dtype(at::kCUDA, false), at::kHalf);
  EXPECT_EQ(default_dtype(at::kCPU, true), at::kBFloat16);
  EXPECT_EQ(default_dtype(at::kCPU, false), at::kFloat);
  Net net = make_net(at::kCPU);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  CollectedWarnings warnings;
  TrainingStep train(net, optimizer);
  const bool is_fast = has_fast_bf16();
  EXPECT_EQ(train.autocast().enabled, is_fast);
  EXPECT_EQ(warnings.text().empty(), is_fast) << warnings.text();
  const auto product = [&] {
    return train.evaluate([] { return at::ones({2, 2}).mm(at::ones({2, 2})).scalar_type(); });
  };
  EXPECT_EQ(product(), is_fast ? at::kBFloat16 : at::kFloat);
}

#ifdef __linux__

/// Sets a variable of the environment, or takes it away, and restores it.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    if (const char* const before = std::getenv(name)) before_ = before;
    value ? setenv(name, value, 1) : unsetenv(name);
  }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;
  ~Variable() { before_ ? setenv(name_, before_->c_str(), 1) : unsetenv(name_); }

 private:
  const char* name_;
  std::optional<std::string> before_;
};

TEST(FastBf16, IsLimitedByEachNameAndCaseThatOneDnnReads) {
  const Variable no_onednn("ONEDNN_MAX_CPU_ISA", nullptr), no_dnnl("DNNL_MAX_CPU_ISA", nullptr);
  const bool is_fast = has_fast_bf16();
  for (const char* const name : {"ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"}) {
    for (const char* const isa : {"AVX2", "avx2", "avx2_vnni", "Avx512_Core", "avx512_core_vnni"}) {
      const Variable limit(name, isa);
      EXPECT_FALSE(has_fast_bf16()) << name << '=' << isa;
    }
    const Variable limit(name, "avx512_core_amx");
    EXPECT_EQ(has_fast_bf16(), is_fast) << name;
  }
  {
    const Variable empty("ONEDNN_MAX_CPU_ISA", ""), limit("DNNL_MAX_CPU_ISA", "avx2");
    EXPECT_FALSE(has_fast_bf16());
  }
  const Variable first("ONEDNN_MAX_CPU_ISA", "all"), second("DNNL_MAX_CPU_ISA", "avx2");
  EXPECT_EQ(has_fast_bf16(), is_fast) << "oneDNN reads the first alone";
}

#else

TEST(FastBf16, IsLimitedByEachNameAndCaseThatOneDnnReads) {
  SKIP_WITHOUT_LINUX();
}

#endif

}  // namespace
