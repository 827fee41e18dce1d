// SPDX-License-Identifier: BSD-3-Clause
// Random programs of nested guards, edits, ops and exceptions, against a plain model of the rules.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "support/thread_state.h"
#include "torchamp/autocast.h"

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

/// The slow plain model: what a region makes of an op.
struct Region {
  bool enabled = false;
  at::ScalarType dtype = at::kBFloat16;
  std::optional<Policy> policy;

  at::ScalarType result(const Op& op, at::ScalarType input) const {
    if (!enabled) return input;
    Cast cast = policy->lookup(op.name, at::kCPU);
    if (cast == Cast::native) cast = op.native.value();
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
    EXPECT_EQ(op.call(at::ones({2, 2}, input)).scalar_type(), region.result(op, input))
        << op.name << " of " << input;
  }

  Policy random_policy() {
    Policy policy = below(2) ? Policy::standard() : Policy::torch();
    for (int edits = below(4); edits > 0; --edits) {
      const char* op = all_ops()[below(static_cast<int>(all_ops().size()))].name;
      switch (below(6)) {
        case 0:
          policy.lower_precision({op});
          break;
        case 1:
          policy.fp32({op});
          break;
        case 2:
          policy.promote({op});
          break;
        case 3:
          policy.unchanged({op});
          break;
        case 4:
          policy.native({op});
          break;
        default:
          EXPECT_THROW(policy.fp32({op, "no_such_op"}), c10::Error);
      }
    }
    return policy;
  }

  void nest(const Region& outer, int depth) {
    Region inner = outer;
    AutocastOptions options;
    if (below(2)) options.dtype = inner.dtype = below(2) ? at::kHalf : at::kBFloat16;
    if (below(2)) options.policy = inner.policy = random_policy();
    if (below(4) == 0) options.cache_enabled = below(2) == 1;
    inner.enabled = options.enabled = below(5) > 0;
    if (!inner.policy) inner.policy = Policy::standard();

    const ThreadState before;
    try {
      if (below(10) == 0) {
        EXPECT_THROW(static_cast<void>(AutocastGuard(at::kMeta, options)), c10::Error);
      }
      const AutocastGuard guard(at::kCPU, options);
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
};

TEST(Fuzz, RandomProgramsFollowTheModelAndRestoreTheState) {
  const ThreadState before;
  for (unsigned seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    RandomProgram(seed).run(Region{}, 0);
    ASSERT_EQ(ThreadState(), before);
    if (HasFailure()) break;
  }
}

}  // namespace
