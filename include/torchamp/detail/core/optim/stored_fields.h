// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>
#include <c10/util/FunctionRef.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstddef>
#include <iterator>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "torchamp/detail/core/base/text.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

// Note [Fields of options and states]
// If LibTorch lacks an optimizer, torchamp has the types of its options and of its state. Such a
// type lists its fields once, in fields(). Reading, writing, comparing and the kernel use this
// list. The names are the names in archives:
//
//     template <class Self>
//     static auto fields(Self& o) {
//       return std::tuple{detail::Field{"lr", o.lr()}, detail::Field{"momentum", o.momentum()}};
//     }
//
// If a field is of an enumeration, the type also has a static names_of(Enumeration), which returns
// an array of the names of the values.

template <class T>
struct Field {
  const char* name;
  T& value;
  friend bool operator==(const Field& a, const Field& b) { return a.value == b.value; }
};
template <class T>
Field(const char*, T&) -> Field<T>;

template <class T>
concept HasFields = requires(T& self) {
  T::fields(self);
};

/// Calls f(name, value) for each field.
template <class Self, class F>
void for_each_field(Self& self, const F& f) {
  std::apply([&f](auto... field) { (f(field.name, field.value), ...); }, Self::fields(self));
}

/// Base of the options of an optimizer that LibTorch lacks. `Derived` has fields(), a constructor
/// from a learning rate, lr() and check(), which throws for an option that is out of range.
template <class Derived>
struct StoredOptions : public torch::optim::OptimizerCloneableOptions<Derived> {
  /// Reads all options; an error if one is missing.
  void serialize(torch::serialize::InputArchive& archive) override {
    for_each_field(self(), [&archive](const char* name, auto& value) {
      c10::IValue stored;
      archive.read(name, stored);
      read_field(name, stored, value);
    });
  }
  /// Writes all options.
  void serialize(torch::serialize::OutputArchive& archive) const override {
    for_each_field(self(), [&archive](const char* name, const auto& value) {
      archive.write(name, written(value));
    });
  }
  /// The learning rate, for LibTorch's schedulers.
  double get_lr() const override { return self().lr(); }
  /// Sets the learning rate, for LibTorch's schedulers.
  void set_lr(const double lr) override { self().lr(lr); }

  /// Whether all options are equal.
  friend bool operator==(const Derived& a, const Derived& b) {
    return Derived::fields(a) == Derived::fields(b);
  }

 private:
  Derived& self() { return static_cast<Derived&>(*this); }
  const Derived& self() const { return static_cast<const Derived&>(*this); }

  template <class T>
  static c10::IValue written(const T& value) {
    if constexpr (std::is_enum_v<T>) {
      return std::string(Derived::names_of(value)[static_cast<std::size_t>(value)]);
    } else {
      return value;
    }
  }
  template <class T>
  static void read_field(const char* name, const c10::IValue& stored, T& value) {
    if constexpr (std::is_enum_v<T>) {
      const auto& names = Derived::names_of(value);
      std::size_t i = 0;
      while (i < std::size(names) && stored.toStringRef() != names[i]) ++i;
      TORCHAMP_CHECK(i < std::size(names), "the archive's ", name, " is '",
                     shorten(stored.toStringRef()), "', which this version does not have.");
      value = static_cast<T>(i);
    } else {
      value = stored.to<T>();
    }
  }
};

template <class T>
constexpr bool is_tensor = std::is_same_v<std::remove_cvref_t<T>, at::Tensor>;

/// The number of fields that are tensors.
template <HasFields T>
constexpr std::size_t number_of_tensors() {
  return []<class... Value>(const std::tuple<Field<Value>...>*) {
    return (std::size_t{is_tensor<Value>} + ... + 0);
  }(static_cast<const decltype(T::fields(std::declval<T&>()))*>(nullptr));
}

/// The tensor of this index among the fields that are tensors.
template <HasFields T>
at::Tensor& tensor_of(T& self, std::size_t index) {
  static_assert(number_of_tensors<T>() > 0, "a state has at least one tensor");
  at::Tensor* found = nullptr;
  for_each_field(self, [&](const char*, auto& value) {
    if constexpr (is_tensor<decltype(value)>) {
      if (index-- == 0) found = &value;
    }
  });
  return *found;
}

/// A state that lists its tensors of the parameter's shape.
struct StateOfTensors {
  StateOfTensors() = default;
  StateOfTensors(const StateOfTensors&) = default;
  StateOfTensors& operator=(const StateOfTensors&) = default;
  virtual void for_each_tensor(c10::function_ref<void(at::Tensor&)> f) = 0;

 protected:
  ~StateOfTensors() = default;
};

/// Base of the state of an optimizer that LibTorch lacks. `Derived` has fields(). Each field is a
/// tensor of the parameter's shape, except a field `step`: the number of steps.
template <class Derived>
struct StoredState : public torch::optim::OptimizerCloneableParamState<Derived>,
                     public StateOfTensors {
  /// Reads the fields. A tensor that the archive lacks is undefined.
  void serialize(torch::serialize::InputArchive& archive) override {
    for_each_field(self(), [&archive](const char* name, auto& value) {
      c10::IValue stored;
      if constexpr (is_tensor<decltype(value)>) {
        if (archive.try_read(name, stored)) value = stored.toTensor();
      } else {
        archive.read(name, stored);
        value = stored.to<std::remove_cvref_t<decltype(value)>>();
      }
    });
  }
  /// Writes the fields, except tensors that are undefined.
  void serialize(torch::serialize::OutputArchive& archive) const override {
    for_each_field(static_cast<const Derived&>(*this), [&archive](auto* name, const auto& value) {
      if constexpr (is_tensor<decltype(value)>) {
        if (!value.defined()) return;
      }
      archive.write(name, c10::IValue(value));
    });
  }

  /// @cond
  void for_each_tensor(c10::function_ref<void(at::Tensor&)> f) final {
    for_each_field(self(), [&f](const char*, auto& value) {
      if constexpr (is_tensor<decltype(value)>) f(value);
    });
  }
  /// @endcond

 private:
  Derived& self() { return static_cast<Derived&>(*this); }
};

}  // namespace TORCHAMP_NAMESPACE::detail
