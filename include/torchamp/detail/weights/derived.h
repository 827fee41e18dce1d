// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "torchamp/detail/overlay/kept_weights.h"
#include "torchamp/detail/weights/stamp.h"
#include "torchamp/version.h"

namespace torchamp::detail {

// Note [What is derived from weights]
// A 16-bit cast of a weight, its 8-bit form: whoever makes such a thing keeps it here, and nowhere
// else, and here alone it is decided whether it still holds. A process has one store (store.h),
// which hangs on the SharedRuntime. To derive something, say how, and get it:
//
//     const Tensors form = derived_weights().get(
//         weight, {WeightForm::Kind::fp8, code_of_the_recipe}, keep_of_this_thread(),
//         [&](const Tensors& reusable) { return quantised(weight, reusable); });
//
// `make` runs only if nothing is kept, or if the weight has changed. It gets what was kept for the
// old values if nobody else holds it, to write to, or nothing; and returns tensors without
// gradients that share no memory with the weight, made outside of inference mode so that writes to
// them count. It runs without a lock, and may run on two threads at once for one weight. What is
// returned is shared: it must not be written to (a write that LibTorch counts is noticed, and the
// thing made again), and an autograd node belongs on an alias of it, one for each use.
//
// keep_of_this_thread() (store.h) says how long: for the region, unless the guard asked for
// more; not at all outside of guards. Nothing is kept or found while a graph is captured.
//
// Who writes to weights tells so unless LibTorch counts the write: see changed(). In doubt: tell. A
// kernel that writes may bump the weight's version instead.

using Tensors = std::vector<at::Tensor>;

/// What was made of a weight: of which kind, and which of that kind's variants.
struct WeightForm {
  enum class Kind : std::uint8_t {
    cast,  ///< variant: the dtype
    fp8,   ///< variant: the recipe's
  };
  Kind kind;
  std::uint32_t variant;

  bool operator==(const WeightForm&) const = default;
};

/// What was derived from weights, for as long as it holds and is to be kept. Any thread.
class DerivedWeights final : public KeptWeights {
 public:
  struct Counts {
    int64_t hits = 0;
    int64_t misses = 0;
    int64_t bytes = 0;  // that are kept
  };

  DerivedWeights();
  ~DerivedWeights();

  /// What `make` gives for the weight as it is now: see Note [What is derived from weights]. `hit`
  /// gets whether it was kept.
  template <class Make>
  Tensors get(const at::Tensor& weight, WeightForm form, WeightKeep keep, const Make& make,
              bool* hit = nullptr) {
    Found found = find(weight, form, keep);
    if (hit != nullptr) *hit = found.is == Found::Is::kept;
    if (found.is == Found::Is::kept) return std::move(found.tensors);
    if (found.is == Found::Is::not_for_keeping) return make(Tensors());
    // Of before: should another thread write to the weight meanwhile, this does not hold.
    WeightStamp stamp(weight);
    Tensors made = make(std::as_const(found.tensors));
    found.tensors.clear();
    add(weight, std::move(stamp), form, keep, made, found.times_told);
    return made;
  }

  TORCHAMP_BODY void changed(at::TensorList weights) override;
  TORCHAMP_BODY void all_changed() override;
  TORCHAMP_BODY std::uint64_t begin_region() override;
  TORCHAMP_BODY void end_region(std::uint64_t region) override;
  TORCHAMP_BODY void end_window() override;
  TORCHAMP_BODY void clear() override;

  /// Drops what belongs to weights that are gone.
  void drop_gone();

  /// Nothing is kept or found while one of these lives.
  class Suspension {
   public:
    explicit Suspension(DerivedWeights& weights);
    ~Suspension();
    Suspension(const Suspension&) = delete;
    Suspension& operator=(const Suspension&) = delete;

   private:
    DerivedWeights& weights_;
  };

  /// At most so many bytes are kept from now on; what was used least recently leaves first.
  void set_budget(int64_t bytes);

  /// Whether nothing is kept.
  bool is_empty() const;

  Counts counts() const;

 private:
  struct Found {
    enum class Is : std::uint8_t { kept, outdated, not_for_keeping };
    Is is;
    Tensors tensors;  // kept: those; outdated: to write to, or none
    std::uint64_t times_told = 0;
  };
  Found find(const at::Tensor& weight, WeightForm form, WeightKeep keep);
  void add(const at::Tensor& weight, WeightStamp stamp, WeightForm form, WeightKeep keep,
           const Tensors& made, std::uint64_t times_told);

  struct Entries;
  Entries* const entries_;  // owned; of a type that only the bodies know
};

}  // namespace torchamp::detail

#if TORCHAMP_BODIES
#include "torchamp/detail/weights/derived_impl.h"  // IWYU pragma: export
#endif
