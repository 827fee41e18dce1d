// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <list>
#include <unordered_map>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/snapshot.h"
#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/detail/core/gradients/optimizer_identity.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

// Note [A gradient is divided once]
// Optimizers that share a parameter share its gradient, and each would divide it by the scale. So
// an iteration keeps a Snapshot of the gradients of each optimizer that was unscaled or stepped. A
// gradient in it is
//
//   divided   as long as it is the same tensor. A write, such as a clip, leaves it divided.
//   mixed     if the backward of a scaled loss has written to it, or replaced it, and nothing else
//             has changed it since the division: one part is divided, the other is scaled
//   scaled    if that backward has written to it after another write, which may have cleared it;
//             or if another tensor has replaced it
//
// It is an error to divide a divided or a mixed gradient, and to step with a mixed one.

/// The gradients that the optimizers of an iteration have divided, or that their steps divide. Not
/// safe to use from several threads at once.
class DividedGradients {
  enum class Part : std::uint8_t { divided, mixed, scaled };

  struct Owner {
    OptimizerIdentity optimizer{};
    OptimizerName name{};
    Snapshot parameters{}, gradients{};
    std::vector<Part> parts{};  // of the gradients
    bool any_changed = false;   // by a backward

    /// Gives gradients that a backward has changed to `other`, which divides them.
    void release(const torch::optim::Optimizer& other) {
      if (!any_changed) return;
      any_gradient(other, [this](const at::Tensor& gradient) {
        for (std::size_t i = 0; i < parts.size(); ++i) {
          if (parts[i] != Part::divided && gradients[i].is(gradient)) gradients[i] = {};
        }
        return false;
      });
    }
  };

  /// The gradients that the owner's parameters have now.
  static auto now(const Owner& owner) {
    return [&owner](const auto& f) {
      for (const TensorSnapshot& parameter : owner.parameters) {
        if (f(gradient_of(parameter.lock()))) return true;
      }
      return false;
    };
  }

 public:
  bool empty() const { return owners_.empty(); }

  /// Records the present gradients of `optimizer` as divided.
  void note(const torch::optim::Optimizer& optimizer) {
    for (Owner& other : owners_) other.release(optimizer);
    Owner& owner = owner_of(optimizer);
    owner.parameters.take(walk_parameters(optimizer));
    owner.gradients.take(walk_gradients(optimizer));
    owner.parts.assign(owner.gradients.size(), Part::divided);
    owner.any_changed = false;
  }
  void forget(const torch::optim::Optimizer& optimizer) {
    std::erase_if(owners_, [&](const Owner& owner) { return owner.optimizer.is(optimizer); });
  }
  /// Removes all records; keeps the lists' memory for the next iteration.
  void clear() {
    for (Owner& owner : owners_) {
      owner.optimizer = {};
      owner.parameters.clear();
      owner.gradients.clear();
      owner.parts.clear();
    }
    spare_.splice(spare_.begin(), owners_);
  }

  /// Whether a scaled backward has changed a gradient that `optimizer` still has, after it was
  /// divided for any optimizer.
  bool any_mixed(const torch::optim::Optimizer& optimizer) const {
    return std::any_of(owners_.begin(), owners_.end(), [&](const Owner& owner) {
      return owner.any_changed && any_gradient(optimizer, [&](const at::Tensor& gradient) {
               for (std::size_t i = 0; i < owner.parts.size(); ++i) {
                 if (owner.parts[i] != Part::divided && owner.gradients[i].is(gradient))
                   return true;
               }
               return false;
             });
    });
  }

  /// Whether `optimizer` has a parameter with a gradient that it did not have when it was divided.
  bool any_new_parameter(const torch::optim::Optimizer& optimizer) const {
    const Owner* const owner = find(optimizer);
    return owner && owner->parameters.any_change(
                        walk_parameters(optimizer),
                        [&](std::size_t, Change change, const at::Tensor& parameter) {
                          const bool is_other =
                              change == Change::added || change == Change::replaced;
                          return is_other && gradient_of(parameter).defined() &&
                                 !owner->parameters.contains(parameter);
                        });
  }

  /// Throws if `optimizer`, whose gradients are about to be divided, has one that is divided for
  /// another optimizer, or mixed. `writes_count`: a gradient that was written since is no longer
  /// divided.
  void check_divided_once(const torch::optim::Optimizer& optimizer, const char* call,
                          bool writes_count) const {
    const auto is_other = [&](const Owner& owner) { return !owner.optimizer.is(optimizer); };
    if (std::none_of(owners_.begin(), owners_.end(), is_other)) return;
    std::unordered_map<const c10::TensorImpl*, std::size_t> places;
    any_parameter(optimizer, [&](const at::Tensor& parameter) {
      places.emplace(parameter.unsafeGetTensorImpl(), places.size());
      return false;
    });
    for (const Owner& owner : owners_) {
      if (!is_other(owner)) continue;
      for (std::size_t i = 0; i < owner.parts.size(); ++i) {
        const auto place = places.find(owner.parameters[i].address());
        if (place == places.end()) continue;
        const at::Tensor now = gradient_of(owner.parameters[i].lock());
        if (!now.defined()) continue;
        const Change change = owner.gradients[i].diff(now);
        const Part part = owner.parts[i];
        const bool is_divided =
            part == Part::divided &&
            (change == Change::same || (change == Change::written && !writes_count));
        const bool is_mixed = part == Part::mixed && change == Change::same;
        if (is_divided || is_mixed) fail(optimizer, call, place->second, now, owner, is_mixed);
      }
    }
  }

  // ---- The backward of a scaled loss ----

  /// The gradients when it begins.
  using Before = std::vector<std::pair<OptimizerIdentity, Snapshot>>;
  Before backward_begins() const {
    Before before;
    for (const Owner& owner : owners_) before.emplace_back(owner.optimizer, Snapshot(now(owner)));
    return before;
  }
  void backward_ends(const Before& before) {
    for (const auto& one : before) {  // lambdas of clang++ 14 capture no structured bindings
      const Snapshot& gradients = one.second;
      const auto is_it = [&](const Owner& owner) { return owner.optimizer == one.first; };
      const auto owner = std::find_if(owners_.begin(), owners_.end(), is_it);
      if (owner == owners_.end() || gradients.size() != owner->gradients.size()) continue;
      gradients.any_change(now(*owner), [&](std::size_t i, Change change, const at::Tensor& now) {
        if (change == Change::same) return false;
        // If the gradient was unchanged when this backward began, it is divided.
        const bool was_divided = owner->parts[i] != Part::scaled && gradients[i].was_defined() &&
                                 owner->gradients[i] == gradients[i];
        owner->parts[i] = was_divided ? Part::mixed : Part::scaled;
        owner->gradients[i] = TensorSnapshot(now);
        owner->any_changed = true;
        return false;
      });
    }
  }

 private:
  const Owner* find(const torch::optim::Optimizer& optimizer) const {
    for (const Owner& owner : owners_) {
      if (owner.optimizer.is(optimizer)) return &owner;
    }
    return nullptr;
  }
  Owner& owner_of(const torch::optim::Optimizer& optimizer) {
    if (const Owner* const owner = find(optimizer)) return const_cast<Owner&>(*owner);
    if (spare_.empty()) spare_.emplace_back();
    owners_.splice(owners_.end(), spare_, spare_.begin());
    owners_.back().optimizer = OptimizerIdentity(optimizer);
    owners_.back().name = OptimizerName(optimizer);
    return owners_.back();
  }

  [[noreturn]] static void fail(const torch::optim::Optimizer& optimizer, const char* call,
                                std::size_t place, const at::Tensor& gradient, const Owner& owner,
                                bool is_mixed) {
    const char* const what = is_mixed ? "holds a part that was unscaled for another optimizer, "
                                      : "was unscaled in this iteration for another optimizer, ";
    const char* const remedy =
        is_mixed
            ? ", and a part that a later backward() of a scaled loss has added. Clear the shared "
              "gradients after the step of one optimizer and before the backward() for the other, "
              "by zero_grad() or grad().zero_(). (Do not use grad().data().zero_(): LibTorch does "
              "not count it.)"
            : ", and would be divided by the scale twice. Give unscale_, clips and step the same "
              "optimizer; where two optimizers share parameters, clear the gradients and run "
              "backward() again between them, or give the shared parameters to one of the two.";
    TORCHAMP_CHECK(false, call, ": the gradient of parameter ", place, ' ', gradient.sizes(),
                   " of this optimizer, ", OptimizerName(optimizer).text(), ", ", what,
                   owner.name.text(), remedy);
  }

  std::list<Owner> owners_;  // in order of appearance
  std::list<Owner> spare_;   // for later ones
};

}  // namespace TORCHAMP_NAMESPACE::detail
