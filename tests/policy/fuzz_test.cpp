// SPDX-License-Identifier: BSD-3-Clause
// Random programs of nested guards, edits, ops and exceptions, against a plain model of the rules.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "support/thread_state.h"
#include "torchamp/autocast.h"
#include "torchamp/labs/cast_recorder.h"
#include "torchamp/policy_text.h"

namespace {

using torchamp::AutocastGuard;
using torchamp::AutocastOptions;
using torchamp::Cast;
using torchamp::Policy;

/// An op of one fp32 or 16-bit matrix whose result has the dtype that it computed in.
struct Op {
  const char* name;
  std::function<at::Tensor(const at::Tensor&)> call;
  /// Where it has an autocast kernel on the CPU: what that does.
  std::optional<Cast> native;
};

const std::vector<Op>& all_ops() {
  static const std::vector<Op> ops{
      {"mm", [](const at::Tensor& x) { return x.mm(x); }, Cast::lower_precision},
      {"matmul", [](const at::Tensor& x) { return x.matmul(x); }, Cast::lower_precision},
      {"prod", [](const at::Tensor& x) { return x.prod(); }, Cast::fp32},
      {"add", [](const at::Tensor& x) { return x + x; }, {}},
      {"sum", [](const at::Tensor& x) { return x.sum(); }, {}},
      {"var", [](const at::Tensor& x) { return x.var(); }, {}},
      {"softmax", [](const at::Tensor& x) { return x.softmax(0); }, {}},
      {"exp", [](const at::Tensor& x) { return x.exp(); }, {}},
      {"relu", [](const at::Tensor& x) { return x.relu(); }, {}},
      {"mul", [](const at::Tensor& x) { return x * x; }, {}},
      {"mv", [](const at::Tensor& x) { return x.mv(x[0]); }, {}},
      {"amax", [](const at::Tensor& x) { return x.amax(); }, {}},
  };
  return ops;
}

/// A policy, and the edits that made it.
struct RandomPolicy {
  struct Edit {
    std::string op;
    Cast cast;
    std::optional<at::ScalarType> dtype;
    std::optional<bool> predicate;  // what it says
  };
  Policy base = Policy::standard();
  Policy policy = base;
  std::vector<Edit> edits;

  /// Whether a predicate is active: an unconditional rule removes earlier predicates.
  bool has_predicate() const {
    std::set<std::string> asked;
    for (const Edit& edit : edits) {
      if (edit.predicate) asked.insert(edit.op);
      if (!edit.predicate && !edit.dtype) asked.erase(edit.op);
    }
    return !asked.empty();
  }

  /// What the edits make of an op in a region of `dtype`; conditions left out if there is none.
  Cast effect(const Op& op, std::optional<at::ScalarType> dtype) const {
    Cast cast = base.lookup(op.name, at::kCPU);
    for (const Edit& edit : edits) {
      if (edit.op != op.name) continue;
      const bool always = !edit.dtype && !edit.predicate;
      const bool holds = always || (dtype && edit.dtype.value_or(*dtype) == *dtype &&
                                    edit.predicate.value_or(true));
      if (holds) cast = edit.cast;
    }
    return cast == Cast::native ? op.native.value_or(Cast::unchanged) : cast;
  }
};

/// The slow plain model: what a region makes of an op.
struct Region {
  bool enabled = false;
  at::ScalarType dtype = at::kBFloat16;
  std::optional<RandomPolicy> policy;

  at::ScalarType result(const Op& op, at::ScalarType input) const {
    if (!enabled) return input;
    const Cast cast = policy->effect(op, dtype);
    EXPECT_EQ(policy->policy.effect(op.name, at::kCPU), policy->effect(op, std::nullopt))
        << op.name;
    switch (cast) {
      case Cast::lower_precision:
        return dtype;
      case Cast::fp32:
        return at::kFloat;
      case Cast::promote:
        return input;  // one argument, of the region's dtype or fp32
      default:
        return input;
    }
  }
};

class RandomProgram {
 public:
  explicit RandomProgram(unsigned seed) : random_(seed) {}

  void run(const Region& region, int depth) {
    const int steps = below(4);
    for (int step = 0; step < steps; ++step) {
      check_an_op(region);
      if (depth < 4 && below(2)) nest(region, depth);
      if (depth > 0 && below(12) == 0) throw std::runtime_error("random");
    }
  }

 private:
  int below(int limit) { return static_cast<int>(random_() % static_cast<unsigned>(limit)); }

  void check_an_op(const Region& region) {
    const Op& op = all_ops()[below(static_cast<int>(all_ops().size()))];
    const at::ScalarType input = below(2) ? at::kFloat : region.dtype;
    const at::ScalarType expected = region.result(op, input);
    std::optional<torchamp::CastRecorder> recorder;  // must make no difference
    if (below(4) == 0) recorder.emplace();
    asked_ = 0;
    EXPECT_EQ(op.call(at::ones({2, 2}, input)).scalar_type(), expected)
        << op.name << " of " << input;
    EXPECT_LE(asked_, 4) << "each predicate once";
  }

  torchamp::When random_condition(RandomPolicy::Edit& edit) {
    torchamp::When when;
    if (below(3) == 0) when.dtype = edit.dtype = below(2) ? at::kHalf : at::kBFloat16;
    if (below(3) == 0) {
      edit.predicate = below(2) == 1;
      when.predicate = [this, says = *edit.predicate](const torchamp::OpCall& call) {
        ++asked_;
        const at::Tensor x = call.argument("self").toTensor();
        return (x.mm(x) + x).numel() == 4 && says;  // casts nothing, and asks no predicate
      };
    }
    return when;
  }

  RandomPolicy random_policy() {
    RandomPolicy made;
    if (below(2)) made.policy = made.base = Policy::torch();
    for (int edits = below(5); edits > 0; --edits) {
      const std::string op = all_ops()[below(static_cast<int>(all_ops().size()))].name;
      RandomPolicy::Edit edit{op, Cast::native, {}, {}};
      if (below(6) == 0) {
        EXPECT_THROW(made.policy.fp32({op, "no_such_op"}), c10::Error);
        EXPECT_THROW(made.policy.fp32({op}, {.dtype = at::kFloat8_e4m3fn}), c10::Error);
        continue;
      }
      const torchamp::When when = random_condition(edit);
      switch (below(5)) {
        case 0:
          made.policy.lower_precision({op}, when);
          edit.cast = Cast::lower_precision;
          break;
        case 1:
          made.policy.fp32({op}, when);
          edit.cast = Cast::fp32;
          break;
        case 2:
          made.policy.promote({op}, when);
          edit.cast = Cast::promote;
          break;
        case 3:
          made.policy.unchanged({op}, when);
          edit.cast = Cast::unchanged;
          break;
        default:
          made.policy.native({op}, when);
      }
      made.edits.push_back(edit);
    }
    if (made.has_predicate()) {
      EXPECT_THROW((void)torchamp::to_text(made.policy), c10::Error);
    } else if (below(2)) {
      made.policy = torchamp::parse_policy(torchamp::to_text(made.policy));
    }
    return made;
  }

  void nest(const Region& outer, int depth) {
    Region inner = outer;
    AutocastOptions options;
    if (below(2)) options.dtype = inner.dtype = below(2) ? at::kHalf : at::kBFloat16;
    if (below(2)) {
      inner.policy = random_policy();
      options.policy = inner.policy->policy;
    }
    if (below(4) == 0) options.cache_enabled = below(2) == 1;
    inner.enabled = options.enabled = below(5) > 0;
    if (!inner.policy) inner.policy = RandomPolicy();

    const ThreadState before;
    try {
      if (below(10) == 0) {
        EXPECT_THROW(static_cast<void>(AutocastGuard(at::kMeta, options)), c10::Error);
        AutocastOptions wrong = options;
        wrong.dtype = at::kInt;
        EXPECT_THROW(static_cast<void>(AutocastGuard(at::kCPU, wrong)), c10::Error);
        EXPECT_EQ(ThreadState(), before);
      }
      std::optional<AutocastGuard> guard;
      if (below(2)) {
        guard.emplace(at::kCPU, options);
      } else {
        guard.emplace(at::Device(at::kCPU, below(2) - 1), options);
      }
      if (below(8) == 0) {  // no such backend: runs disabled, and changes nothing here
        const AutocastGuard other(at::kIPU, {.policy = Policy::torch()});
        check_an_op(inner);
      }
      run(inner, depth + 1);
      if (below(3) == 0) {
        at::autocast::set_autocast_dtype(at::kCPU, at::kHalf);
        at::autocast::set_autocast_enabled(at::kCPU, below(2) == 1);
        at::autocast::set_autocast_cache_enabled(below(2) == 1);
      }
    } catch (const std::runtime_error&) {
    }
    EXPECT_EQ(ThreadState(), before);
  }

  std::mt19937 random_;
  int asked_ = 0;  // how often a predicate was
};

TEST(Fuzz, RandomProgramsFollowTheModelAndRestoreTheState) {
  const ThreadState before;
  for (unsigned seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    RandomProgram(seed).run(Region{}, 0);
    ASSERT_EQ(ThreadState(), before);
    if (HasFailure()) break;
  }
}

}  // namespace
