// SPDX-License-Identifier: BSD-3-Clause
#include "torchamp/policy_text.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>
#include <string>

#include "support/expect_error.h"

namespace {

using torchamp::Cast;
using torchamp::Policy;

TEST(PolicyText, WritesTheBaseTableAndEachEdit) {
  const Policy policy = Policy::torch()
                            .fp32(torchamp::ops::norm)
                            .lower_precision({"mv", "pow.Scalar"}, {.dtype = at::kHalf})
                            .native({"mm"});
  EXPECT_EQ(torchamp::to_text(policy),
            "policy torch\n"
            "fp32: ops::norm\n"
            "lower_precision when float16: mv, pow.Scalar\n"
            "native: mm\n");
}

TEST(PolicyText, ReadsBackWhatItWrote) {
  const Policy policy = Policy::standard()
                            .unchanged({"relu", "mul"})
                            .promote({"maximum"})
                            .fp32({"mm"}, {.dtype = at::kBFloat16});
  const std::string text = torchamp::to_text(policy);
  const Policy read = torchamp::parse_policy(text);
  EXPECT_EQ(torchamp::to_text(read), text);
  EXPECT_EQ(read.lookup("maximum", at::kCPU), Cast::promote);
}

TEST(PolicyText, AllowsCommentsWhiteSpaceAndFamiliesAmongNames) {
  const Policy policy = torchamp::parse_policy(
      "# for the second stage\n\n"
      "  policy standard   # the base\r\n"
      "\tfp32: ops::conv ,relu,\tlinear   # three of them\n");
  for (const char* op : {"conv2d", "relu", "linear"}) {
    EXPECT_EQ(policy.lookup(op, at::kCPU), Cast::fp32) << op;
  }
}

TEST(PolicyText, ErrorsNameTheLineAndTheFault) {
  const auto expect = [](const std::string& text, const std::string& error) {
    EXPECT_ERROR((void)torchamp::parse_policy(text), error);
  };
  expect("", "torchamp::parse_policy: the text is empty. It starts with 'policy standard'");
  expect("# nothing\n\n", "the text is empty");
  expect("fp32: mm\n", "line 1: 'fp32: mm' stands where 'policy standard' or 'policy torch' must");
  expect("policy fast\n", "line 1: 'policy fast' stands where");
  expect("policy torch\n\nfp64: mm\n",
         "line 3: there is no rule 'fp64'; the rules are lower_precision");
  expect("policy torch\nfp32 mm\n", "line 2: 'fp32 mm' is not of the form 'fp32: op, op'");
  expect("policy torch\nfp32: \n", "line 2: 'fp32:' is not of the form");
  expect("policy torch\nfp32: ,\n", "line 2: 'fp32: ,' names no op");
  expect("policy torch\nfp32 if float16: mm\n", "line 2: 'fp32 if float16' is not a rule");
  expect("policy torch\nfp32 when int8: mm\n", "line 2: 'int8' is not float16 or bfloat16");
  expect("policy torch\nfp32: ops::none\n",
         "line 2: there is no family 'ops::none'; the families are matmul");
  expect("policy torch\nfp32: sofmax\n",
         "line 2: Policy::fp32: LibTorch knows no op 'sofmax'. Did you mean 'softmax'?");
  expect("policy torch\npolicy standard\n", "line 2: 'policy standard' is not of the form");
}

TEST(PolicyText, APredicateHasNoText) {
  const Policy policy =
      Policy::standard().fp32({"pow"}, {.predicate = [](const torchamp::OpCall&) { return true; }});
  EXPECT_ERROR((void)torchamp::to_text(policy),
               "torchamp::to_text: the rule 'fp32: pow' depends on a predicate");
}

TEST(PolicyText, LoadsFromAFile) {
  const std::string path = ::testing::TempDir() + "torchamp_policy.txt";
  std::ofstream(path) << "policy standard\nfp32: relu\n";
  EXPECT_EQ(torchamp::load_policy(path).lookup("relu", at::kCPU), Cast::fp32);
  std::remove(path.c_str());
  EXPECT_ERROR((void)torchamp::load_policy(path),
               "torchamp::load_policy: cannot read '" + path + "'");
}

}  // namespace
