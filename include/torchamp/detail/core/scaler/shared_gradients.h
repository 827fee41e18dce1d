// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Type.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <list>
#include <string>
#include <typeinfo>
#include <unordered_map>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/detail/core/scaler/optimizer_identity.h"
#include "torchamp/detail/core/scaler/plain_clips.h"
#include "torchamp/version.h"

namespace torchamp::detail {

// Note [Gradients of several optimizers]
// Optimizers that have a parameter in common have its gradient in common, and each would divide it
// by the scale. So an iteration keeps, of each optimizer that was unscaled or stepped, which
// gradients it left, by identity and version. Another optimizer that is to be unscaled must have
// none of them as it was left. There are three forms:
//
//   unchanged              since it was unscaled
//   clipped                since then, which leaves it unscaled; see PlainClips
//   added to               by the backward of a scaled loss, which found it unchanged: one part is
//                          scaled, the other is not
//
// A gradient that was replaced, or written to in any other way, is another one: zero_grad() may
// have cleared it. So a program that clears gradients between two optimizers hears nothing.

/// The gradients that optimizers have divided in an iteration, or left to their steps to divide.
class UnscaledGradients {
 public:
  /// A gradient as it was left.
  struct Left {
    WeakTensor parameter;
    SeenTensor gradient;
    uint32_t version = 0;  ///< of the parameter
  };
  /// Which optimizer it is, and what an error calls it.
  struct Name {
    OptimizerIdentity optimizer;
    const std::type_info* type;
  };

  bool empty() const { return owners_.empty(); }

  /// The gradients of `optimizer` are unscaled now, all of them.
  void note(const torch::optim::Optimizer& optimizer) {
    Owner& owner = owner_of(optimizer);
    owner.time = PlainClips::tick();
    owner.all.clear();
    any_parameter(optimizer, [&](const at::Tensor& parameter) {
      owner.all.push_back(
          {WeakTensor(parameter), SeenTensor(gradient_of(parameter)), version_of(parameter)});
      return false;
    });
  }
  /// A clip that knows the scaler has written to those gradients that are still there.
  TORCHAMP_RARE void note_clipped(const torch::optim::Optimizer& optimizer) {
    for (Left& left : owner_of(optimizer).all) {
      const at::Tensor now = gradient_of(left.parameter.lock());
      if (left.gradient.is(now)) left.gradient = SeenTensor(now);
    }
  }
  TORCHAMP_RARE void forget(const torch::optim::Optimizer& optimizer) {
    const auto is_its = [&](const auto& one) { return one.name.optimizer.is(optimizer); };
    std::erase_if(owners_, is_its);
    std::erase_if(added_to_, is_its);
  }
  void clear() {
    owners_.clear();
    added_to_.clear();
  }

  /// The weights of `optimizer` that were written to since it was noted, as far as LibTorch counts.
  TORCHAMP_RARE std::vector<at::Tensor> written_weights(const OptimizerIdentity& optimizer) const {
    std::vector<at::Tensor> written;
    for_each([&](const Name& name, const Left& left) {
      const at::Tensor weight = left.parameter.lock();
      if (!(name.optimizer == optimizer) || !weight.defined()) return;
      if (version_of(weight) != left.version) written.push_back(weight);
    });
    return written;
  }

  /// Calls `f(name, left)` for each gradient.
  template <class F>
  void for_each(const F& f) const {
    for (const Owner& owner : owners_) {
      for (const Left& left : owner.all) f(owner.name, left);
    }
  }
  /// Calls `f(left)` for the first gradient of each optimizer.
  template <class F>
  void for_first(const F& f) const {
    const auto is_defined = [](const Left& left) { return !left.gradient.is(at::Tensor()); };
    for (const Owner& owner : owners_) {
      const auto first = std::find_if(owner.all.begin(), owner.all.end(), is_defined);
      if (first != owner.all.end()) f(*first);
    }
  }
  /// The backward of a scaled loss has made `gradient` of what `owner` had left.
  void note_added_to(const Name& owner, const WeakTensor& parameter, const at::Tensor& gradient) {
    added_to_.push_back({owner, {parameter, SeenTensor(gradient)}});
  }

  /// Throws where `optimizer`, whose gradients are to be divided by the scale, has one that another
  /// has left.
  TORCHAMP_RARE void check_unshared(const torch::optim::Optimizer& optimizer,
                                    const char* call) const {
    const auto is_other = [&](const auto& one) { return !one.name.optimizer.is(optimizer); };
    if (std::none_of(owners_.begin(), owners_.end(), is_other)) return;
    const Places places = places_in(optimizer);
    for (const AddedTo& one : added_to_) {
      if (!is_other(one) || !places.contains(one.left.parameter.address())) continue;
      const at::Tensor now = gradient_of(one.left.parameter.lock());
      if (!one.left.gradient.is_unchanged(now)) continue;
      fail(optimizer, call, places.at(one.left.parameter.address()), now, *one.name.type,
           "holds a part that was unscaled for another optimizer, ",
           ", and one that a later backward() of a scaled loss has added. Clear the gradients that "
           "both share between the step of one and the backward() for the other, by zero_grad() or "
           "grad().zero_(). (grad().data().zero_() clears them, too, but LibTorch does not count "
           "it.)");
    }
    for (const Owner& owner : owners_) {
      if (is_other(owner)) check_unshared(optimizer, places, owner, call);
    }
  }

 private:
  /// What one optimizer has left.
  struct Owner {
    Name name;
    uint64_t time = 0;
    std::vector<Left> all{};
  };
  struct AddedTo {
    Name name;  // of the one that had left it
    Left left;
  };

  /// Of parameters in their optimizer.
  using Places = std::unordered_map<const c10::TensorImpl*, std::size_t>;

  static Places places_in(const torch::optim::Optimizer& optimizer) {
    Places places;
    any_parameter(optimizer, [&](const at::Tensor& parameter) {
      places.emplace(parameter.unsafeGetTensorImpl(), places.size());
      return false;
    });
    return places;
  }

  TORCHAMP_RARE static void check_unshared(const torch::optim::Optimizer& optimizer,
                                           const Places& places, const Owner& other,
                                           const char* call) {
    for (const Left& left : other.all) {
      const auto place = places.find(left.parameter.address());
      if (place == places.end()) continue;
      const at::Tensor now = gradient_of(left.parameter.lock());
      if (!now.defined() || !left.gradient.is(now)) continue;
      if (!left.gradient.is_unchanged(now) && !PlainClips::has_left(now, other.time)) continue;
      fail(optimizer, call, place->second, now, *other.name.type,
           "was unscaled in this iteration for another optimizer, ",
           ", and would be divided by the scale twice. Give unscale_, clips and step the same "
           "optimizer; where two optimizers share parameters, clear the gradients and run "
           "backward() again between them, or give the shared parameters to one of the two.");
    }
  }

  Owner& owner_of(const torch::optim::Optimizer& optimizer) {
    for (Owner& owner : owners_) {
      if (owner.name.optimizer.is(optimizer)) return owner;
    }
    return owners_.emplace_back(Owner{{OptimizerIdentity(optimizer), &typeid(optimizer)}});
  }

  [[noreturn]] static void fail(const torch::optim::Optimizer& optimizer, const char* call,
                                std::size_t place, const at::Tensor& gradient,
                                const std::type_info& other, const char* what, const char* remedy) {
    TORCHAMP_CHECK(false, call, ": the gradient of parameter ", place, ' ', gradient.sizes(),
                   " of this optimizer, ", c10::demangle(typeid(optimizer).name()), ", ", what,
                   c10::demangle(other.name()), remedy);
  }

  std::list<Owner> owners_;  // in order of appearance
  std::list<AddedTo> added_to_;
};

}  // namespace torchamp::detail
