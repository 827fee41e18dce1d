// SPDX-License-Identifier: BSD-3-Clause
#include "torchamp/labs/cast_recorder.h"

#include <gtest/gtest.h>

#include <sstream>
#include <string>

#include "support/locales.h"

namespace {

using torchamp::CastReport;

CastReport::Row row(bool backward, std::string module, std::string op, std::int64_t bytes) {
  CastReport::Row row;
  row.backward = backward;
  row.module = std::move(module);
  row.op = std::move(op);
  row.casts = bytes > 0 ? 2 : 0;
  row.cast_bytes = bytes;
  return row;
}

CastReport example() {
  auto relu = row(false, "", "relu", 0);
  relu.calls = {{at::kBFloat16, 1}};
  auto mm = row(false, "encoder.0", "mm", 108);
  mm.calls = {{at::kBFloat16, 3}, {at::kFloat, 1}};
  mm.undone = 1;
  mm.fp32_by_input = 1;
  auto reverse = row(true, "encoder.0", "ToCopyBackward0", 96);
  reverse.calls = {{at::kFloat, 2}};
  return CastReport({relu, reverse, mm});
}

TEST(CastReport, PutsTheMostBytesFirstAndAddsUp) {
  const CastReport report = example();
  ASSERT_EQ(report.rows().size(), 3u);
  EXPECT_EQ(report.rows()[0].op, "mm");
  EXPECT_EQ(report.rows()[2].op, "relu");
  const auto total = report.total();
  EXPECT_EQ(total.calls.at(at::kBFloat16), 4);
  EXPECT_EQ(total.calls.at(at::kFloat), 3);
  EXPECT_EQ(total.casts, 4);
  EXPECT_EQ(total.cast_bytes, 204);
  EXPECT_EQ(total.undone, 1);
  EXPECT_EQ(total.fp32_by_input, 1);
}

TEST(CastReport, PrintsATable) {
  std::ostringstream out;
  out << example();
  EXPECT_EQ(
      out.str(),
      "phase     module     op               float32  bfloat16  casts  bytes  undone  by input\n"
      "forward   encoder.0  mm                     1         3      2    108       1         1\n"
      "backward  encoder.0  ToCopyBackward0        2         -      2     96       -         -\n"
      "forward              relu                   -         1      -      -       -         -\n"
      "total                                       3         4      4    204       1         1\n"
      "calls by dtype; casts made for them, with the bytes read and written; undone: casts back to "
      "the\ndtype that an earlier cast left; by input: calls in fp32 only because an input was "
      "fp32\n");
}

TEST(CastReport, PrintsATableOfNothing) {
  std::ostringstream out;
  out << CastReport({});
  EXPECT_EQ(out.str().substr(0, out.str().find("calls")),
            "phase  module  op  casts  bytes  undone  by input\n"
            "total                  -      -       -         -\n");
}

TEST(CastReport, WritesJson) {
  EXPECT_EQ(example().to_json(),
            R"({"rows": [
  {"phase": "forward", "module": "encoder.0", "op": "mm", "calls": {"float32": 1, "bfloat16": 3}, "casts": 2, "cast_bytes": 108, "undone": 1, "fp32_by_input": 1},
  {"phase": "backward", "module": "encoder.0", "op": "ToCopyBackward0", "calls": {"float32": 2}, "casts": 2, "cast_bytes": 96, "undone": 0, "fp32_by_input": 0},
  {"phase": "forward", "module": "", "op": "relu", "calls": {"bfloat16": 1}, "casts": 0, "cast_bytes": 0, "undone": 0, "fp32_by_input": 0}],
 "total": {"calls": {"float32": 3, "bfloat16": 4}, "casts": 4, "cast_bytes": 204, "undone": 1, "fp32_by_input": 1}}
)");
}

TEST(CastReport, EscapesNamesInJson) {
  const std::string json = CastReport({row(false, "a \"b\"\\\n", "mm", 0)}).to_json();
  EXPECT_NE(json.find(R"("module": "a \"b\"\\\u000a")"), std::string::npos) << json;
}

TEST(CastReport, WritesTheSameJsonWhateverTheLocale) {
  auto mm = row(false, "a\n", "mm", 406272);
  mm.calls = {{at::kFloat, 1234567}};
  mm.cache_hits = 1000;
  mm.fp8 = 2000;
  mm.not_fp8 = {{"why", 3000}};
  const CastReport report({mm});
  const std::string json = report.to_json();
  EXPECT_NE(json.find("\"cast_bytes\": 406272"), std::string::npos) << json;
  {
    const GroupingStreams grouping;
    EXPECT_EQ(report.to_json(), json);
  }
  const CommaOfC comma;
  EXPECT_EQ(report.to_json(), json);
}

}  // namespace
