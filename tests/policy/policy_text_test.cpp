// SPDX-License-Identifier: BSD-3-Clause
#include "torchamp/policy_text.h"
#include "torchamp/labs/fp8.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "support/expect_error.h"
#include "support/growth.h"

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

TEST(PolicyText, WritesAndReadsTheOptionsOfFp8InBrackets) {
  const Policy policy =
      torchamp::fp8(torchamp::fp8(Policy::standard(), torchamp::ops::dense), {"mm"},
                    {.strict = true, .only_worthwhile = true}, {.dtype = at::kBFloat16});
  const std::string text =
      "policy standard\n"
      "fp8: ops::dense\n"
      "fp8(strict only_worthwhile) when bfloat16: mm\n";
  EXPECT_EQ(torchamp::to_text(policy), text);
  EXPECT_EQ(torchamp::to_text(torchamp::parse_policy(text)), text);
  EXPECT_EQ(torchamp::to_text(torchamp::parse_policy(
                "policy standard\nfp8 ( only_worthwhile, recipe=tensorwise ): linear")),
            "policy standard\nfp8(only_worthwhile): linear\n");
  EXPECT_EQ(torchamp::parse_policy(text).lookup("linear", at::kCPU), Cast::fp8);
  const Policy nearest =
      torchamp::fp8(Policy::torch(), {"mm"},
                    {.recipe = torchamp::Fp8Recipe::nvfp4, .stochastic_rounding = false});
  EXPECT_EQ(torchamp::to_text(nearest), "policy torch\nfp8(recipe=nvfp4 round_to_nearest): mm\n");
  EXPECT_EQ(torchamp::to_text(torchamp::parse_policy(torchamp::to_text(nearest))),
            torchamp::to_text(nearest));
}

TEST(PolicyText, AWrongFp8RuleIsAnErrorThatNamesTheLine) {
  const auto parse = [](const std::string& line) {
    return torchamp::parse_policy("policy standard\n" + line);
  };
  EXPECT_ERROR(parse("fp8(fast): mm"), "line 2: there is no option 'fast' of fp8; the options are");
  EXPECT_ERROR(parse("fp8(recipe=best): mm"), "there is no option 'recipe=best' of fp8");
  EXPECT_ERROR(parse("fp8(strict: mm"), "'fp8(strict' is not of the form 'fp8(option option)'");
  EXPECT_ERROR(parse("fp32(strict): mm"), "'fp32(strict)' is not of the form");
  EXPECT_ERROR(parse("fp8: softmax"), "line 2: torchamp::fp8: 'softmax' cannot run in fp8: only");
  EXPECT_ERROR(parse("fp8(strict, strict): mm"),
               "line 2: the option 'strict' of fp8 is given twice");
  EXPECT_ERROR(parse("fp8(recipe=rowwise strict recipe=mxfp8): mm"),
               "the option 'recipe' of fp8 is given twice; leave one out");
}

TEST(PolicyText, AnEditWithoutNamesIsNoEdit) {
  const Policy policy = Policy::standard().fp32({}).unchanged(std::vector<std::string>{});
  EXPECT_EQ(torchamp::to_text(policy), "policy standard\n");
}

TEST(PolicyText, WithoutEditsIsOfThePolicyThatIsMadeOnce) {
  EXPECT_EQ(torchamp::parse_policy("policy standard\n").data(), Policy::standard().data());
  EXPECT_EQ(torchamp::parse_policy("policy torch").data(), Policy::torch().data());
}

TEST(PolicyText, WritesAUsersOwnFamilyByItsNames) {
  static constexpr std::string_view names[] = {"relu", "gelu"};
  for (const char* name : {"mine", "norm"}) {  // also one that is called as one of torchamp's
    const torchamp::OpFamily family(name, names);
    const Policy policy = Policy::standard().fp32(family);
    EXPECT_EQ(torchamp::to_text(policy), "policy standard\nfp32: relu, gelu\n");
    EXPECT_EQ(torchamp::parse_policy(torchamp::to_text(policy)).lookup("gelu", at::kCPU),
              Cast::fp32);
  }
  const torchamp::OpFamily copy = torchamp::ops::norm;
  EXPECT_EQ(torchamp::to_text(Policy::torch().fp32(copy)), "policy torch\nfp32: ops::norm\n");
}

TEST(PolicyText, DistinguishesAnOpOfALibraryCalledOpsFromAFamily) {
  static const auto library = [] {
    auto own = std::make_unique<torch::Library>(torch::Library::DEF, "ops", std::nullopt, __FILE__,
                                                __LINE__);
    own->def("twice(Tensor x) -> Tensor");
    own->def("norm.named(Tensor x) -> Tensor");
    return own;
  }();
  const Policy policy = Policy::torch().fp32({"ops::twice", "ops::norm.named"});
  EXPECT_EQ(torchamp::to_text(policy), "policy torch\nfp32: ops::twice, ops::norm.named\n");
  const Policy read = torchamp::parse_policy(torchamp::to_text(policy));
  EXPECT_EQ(read.lookup("ops::twice", at::kCPU), Cast::fp32);
  EXPECT_EQ(read.lookup("ops::norm.named", at::kCPU), Cast::fp32);
  EXPECT_EQ(read.lookup("layer_norm", at::kCPU), Cast::unchanged);
  EXPECT_ERROR((void)torchamp::to_text(Policy::torch().fp32({"ops::norm"})),
               "torchamp::to_text: in the rule 'fp32: ops::norm', the op 'ops::norm' has the name "
               "of a family. Name its overload");
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

TEST(PolicyText, TakesTabsAndAByteOrderMarkAsOtherProgramsWriteThem) {
  const Policy policy = torchamp::parse_policy(
      "\xEF\xBB\xBFpolicy\tstandard\r\nfp32:\tmm\nfp32\twhen \tfloat16 :\trelu\nunchanged:gelu");
  EXPECT_EQ(torchamp::to_text(policy),
            "policy standard\nfp32: mm\nfp32 when float16: relu\nunchanged: gelu\n");
}

TEST(PolicyText, RefusesALongUnknownNameInATimeThatGrowsWithItAndDoesNotRepeatItAll) {
  const auto refuse = [](std::size_t length) {
    const std::string name(length, 'x');
    for (const std::string& text :
         {"policy torch\nfp32: " + name, "policy torch\nfp32: aten::mm." + name,
          "policy torch\nfp32: ops::" + name, "policy torch\n" + name,
          "policy torch\n" + name + ": mm", "policy torch\nfp32 when " + name + ": mm",
          "policy " + name}) {
      try {
        (void)torchamp::parse_policy(text);
        ADD_FAILURE() << "taken: " << text.substr(0, 60);
      } catch (const c10::Error& error) {
        const std::string what = error.what_without_backtrace();
        EXPECT_THAT(what, ::testing::HasSubstr("torchamp::parse_policy: line "));
        EXPECT_THAT(what, ::testing::HasSubstr("xxx..."));
        EXPECT_LT(what.size(), 1000u);
      }
    }
  };
  EXPECT_LT(growth(refuse, 5'000, 20'000), 10.);
}

TEST(PolicyText, ErrorsNameTheLineAndTheFault) {
  const auto expect = [](const std::string& text, const std::string& error) {
    EXPECT_ERROR((void)torchamp::parse_policy(text), error);
  };
  expect("", "torchamp::parse_policy: the text is empty. It must begin with 'policy standard'");
  expect("# nothing\n\n", "the text is empty");
  expect("fp32: mm\n", "line 1: 'fp32: mm' stands where 'policy standard' or 'policy torch' must");
  expect("policy fast\n", "line 1: 'policy fast' stands where");
  expect("policy torch\n\nfp64: mm\n",
         "line 3: there is no rule 'fp64'; the rules are lower_precision");
  expect("policy torch\nfp32 mm\n", "line 2: 'fp32 mm' is not of the form 'fp32: op, op'");
  expect("policy torch\nfp32: \n", "line 2: 'fp32:' is not of the form");
  expect("policy torch\nfp32: ,\n", "line 2: 'fp32: ,' names no op");
  expect("policy torch\nfp32 if float16: mm\n", "line 2: 'fp32 if float16' is not a rule");
  expect("policy torch\nfp32::mm\n", "line 2: 'fp32::mm' is not of the form");
  expect("policy torch\nfp32: ops::none\n",
         "line 2: there is no family 'ops::none'; the families are matmul");
  expect("policy torch\nfp32: sofmax\n",
         "line 2: Policy::fp32: LibTorch knows no op 'sofmax'. Did you mean 'softmax'?");
  expect("policy torch\npolicy standard\n",
         "line 2: 'policy standard' is a second line of its kind. A text begins with one, which "
         "holds for the modules in it, too");
  for (const std::string line : {"modules b", "Module b", "module a b"}) {
    expect("policy torch\n" + line + "\n",
           "line 2: '" + line + "' is not of the form 'fp32: op, op' or 'module NAME'");
  }
}

TEST(PolicyText, APredicateHasNoText) {
  const Policy policy =
      Policy::standard().fp32({"pow"}, {.predicate = [](const torchamp::OpCall&) { return true; }});
  EXPECT_ERROR((void)torchamp::to_text(policy),
               "torchamp::to_text: the rule 'fp32: pow' depends on a predicate");
}

TEST(PolicyText, APredicateThatALaterEditHasRemovedDoesNotMatter) {
  const torchamp::When sometimes{.predicate = [](const torchamp::OpCall&) { return true; }};
  Policy policy = Policy::standard().fp32({"pow"}, sometimes).unchanged({"relu"}).native({"pow"});
  EXPECT_EQ(torchamp::to_text(policy), "policy standard\nunchanged: relu\nnative: pow\n");
  // Nor does it if another one still exists.
  policy.fp32({"tanh"}, {.dtype = at::kHalf});
  EXPECT_EQ(torchamp::to_text(policy),
            "policy standard\nunchanged: relu\nnative: pow\nfp32 when float16: tanh\n");
  // Where one overload keeps it, it does.
  policy.fp32({"pow"}, sometimes).native({"pow.Scalar"});
  EXPECT_ERROR((void)torchamp::to_text(policy),
               "torchamp::to_text: the rule 'fp32: pow' depends on a predicate");
}

TEST(PolicyText, ReadsALongTextInATimeThatGrowsWithItsLength) {
  const auto read = [](std::size_t lines) {
    std::string text = "policy torch\n";
    for (std::size_t i = 0; i < lines; ++i) text += "fp32: mm\n";
    EXPECT_EQ(torchamp::parse_policy(text).data()->edits.size(), lines);
  };
  EXPECT_LT(growth(read, 4'000, 16'000), 8.);
}

TEST(PolicyText, ErrorsOfAFileNameItAndTheLine) {
  const std::string path = ::testing::TempDir() + "torchamp_bad_policy.txt";
  const auto expect = [&](const std::string& text, const std::string& error) {
    std::ofstream(path) << text;
    EXPECT_ERROR((void)torchamp::load_policy(path),
                 "torchamp::load_policy: '" + path + "': " + error);
  };
  expect("policy standard\nfp32: sofmax\n", "line 2: Policy::fp32: LibTorch knows no op 'sofmax'");
  expect("policy fast\n", "line 1: 'policy fast' stands where");
  expect("", "the text is empty");
  expect(
      "policy torch\nfp32: mm\n\nmodule head  # the last\nfp32: addmm\n",
      "line 4: 'module head' begins the policy of a module, and this call reads a single policy. "
      "Read such a file by torchamp::load_policies");
  std::remove(path.c_str());
}

TEST(PolicyText, LoadsFromAFile) {
  const std::string path = ::testing::TempDir() + "torchamp_policy.txt";
  std::ofstream(path) << "policy standard\nfp32: relu\n";
  EXPECT_EQ(torchamp::load_policy(path).lookup("relu", at::kCPU), Cast::fp32);
  std::remove(path.c_str());
  EXPECT_ERROR((void)torchamp::load_policy(path),
               "torchamp::load_policy: cannot read '" + path + "': No such file or directory.");
  EXPECT_ERROR((void)torchamp::load_policy(::testing::TempDir()), "': Is a directory.");
  std::ofstream(path) << std::string((1 << 20) + 1, '\n');  // as from a device without an end
  EXPECT_ERROR((void)torchamp::load_policy(path), "' is longer than 1048576 bytes");
}

}  // namespace
