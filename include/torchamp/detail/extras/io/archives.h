// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full_like.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/Type.h>
#include <torch/nn/module.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/serialize/archive.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/detail/core/optim/kernels.h"
#include "torchamp/detail/core/optim/option_names.h"
#include "torchamp/detail/core/optim/state_tensors.h"
#include "torchamp/detail/extras/io/archive_file.h"
#include "torchamp/detail/extras/shared/master_meta.h"
#include "torchamp/optim.h"

namespace TORCHAMP_NAMESPACE::detail {

/// Writes the archive of torch::nn::Module::save, with value_of(parameter) for each parameter.
template <class ValueOf>
void write_module(const torch::nn::Module& module, torch::serialize::OutputArchive& archive,
                  const ValueOf& value_of) {
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    archive.write(item.key(), value_of(item.value()));
  }
  for (const auto& item : module.named_buffers(/*recurse=*/false)) {
    archive.write(item.key(), item.value(), /*is_buffer=*/true);
  }
  for (const auto& child : module.named_children()) {
    if (!child.value()->is_serializable()) continue;
    torch::serialize::OutputArchive nested(archive.compilation_unit());
    write_module(*child.value(), nested, value_of);
    archive.write(child.key(), nested);
  }
}

inline at::Tensor bytes_of(torch::serialize::OutputArchive& archive) {
  std::ostringstream stream;
  archive.save_to(stream);
  const std::string text = std::move(stream).str();
  at::Tensor bytes = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  return bytes;
}

inline torch::serialize::InputArchive archive_of(const at::Tensor& bytes,
                                                 std::optional<at::Device> device = {}) {
  torch::serialize::InputArchive archive;
  archive.load_from(static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes(), device);
  return archive;
}

/// The keys at the top of the archive that module.save() writes.
inline std::set<std::string> keys_that_saving_writes(const torch::nn::Module& module) {
  torch::serialize::OutputArchive written;
  module.save(written);
  const std::vector<std::string> keys = archive_of(bytes_of(written)).keys();
  return {keys.begin(), keys.end()};
}

/// Calls visit(name, tensor, value) for each parameter and buffer of `module`, with the archive's
/// value; undefined if the archive has none. Returns the dotted names of entries in the archive
/// that saving `module` would not write: layers or weights that LibTorch ignores.
template <class Visit>
std::vector<std::string> read_module(const torch::nn::Module& module,
                                     torch::serialize::InputArchive& archive, const Visit& visit,
                                     const std::string& prefix = "") {
  std::set<std::string> known;
  const auto read = [&](const std::string& key, const at::Tensor& tensor, bool is_buffer) {
    known.insert(key);
    at::Tensor value;
    archive.try_read(key, value, is_buffer);
    visit(prefix + key, tensor, value);
  };
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    read(item.key(), item.value(), false);
  }
  for (const auto& item : module.named_buffers(/*recurse=*/false)) {
    read(item.key(), item.value(), true);
  }
  std::vector<std::string> left;
  for (const auto& child : module.named_children()) {
    known.insert(child.key());
    if (!child.value()->is_serializable()) continue;
    torch::serialize::InputArchive nested;
    archive.try_read(child.key(), nested);
    const auto of_child = read_module(*child.value(), nested, visit, prefix + child.key() + '.');
    left.insert(left.end(), of_child.begin(), of_child.end());
  }
  std::set<std::string> own;  // of a module with its own save()
  for (const std::string& key : archive.keys()) {
    if (known.contains(key)) continue;
    if (own.empty()) own = keys_that_saving_writes(module);
    if (!own.contains(key)) left.push_back(prefix + key);
  }
  return left;
}

/// Whether tensors of dtype `to` can hold the numbers of `from`, apart from range and precision: no
/// complex numbers in real ones, no fractions in integers.
inline bool holds_numbers_of(at::ScalarType to, at::ScalarType from) {
  if (c10::isComplexType(from)) return c10::isComplexType(to);
  if (c10::isFloatingType(from)) return !c10::isIntegralType(to, /*includeBool=*/true);
  return true;
}

/// Each parameter and buffer of `module`, with its value in the archive. Throws if a value is
/// missing, has another shape or kind of dtype, or cannot be filled, and if the archive has further
/// entries. For load() of `masters`, a class that saves a model.
inline std::vector<std::pair<at::Tensor, at::Tensor>> read_all(
    const torch::nn::Module& module, torch::serialize::InputArchive& archive,
    const std::string& masters) {
  const std::string place = masters + "::load: ";
  const std::string remedy =
      ". Load what torch::save of these " + masters + ", or of such a model, has written.";
  std::vector<std::pair<at::Tensor, at::Tensor>> read;
  const auto left = read_module(
      module, archive, [&](const std::string& name, const at::Tensor& to, const at::Tensor& from) {
        TORCH_CHECK(from.defined(), place, "the archive has no '", name, "'", remedy);
        TORCH_CHECK(from.sizes() == to.sizes(), place, "'", name, "' is ", from.sizes(),
                    " in the archive and ", to.sizes(), " in the model", remedy);
        TORCH_CHECK(!to.defined() || holds_numbers_of(to.scalar_type(), from.scalar_type()), place,
                    "'", name, "' is ", from.scalar_type(), " in the archive and ",
                    to.scalar_type(), " in the model, which cannot hold such numbers", remedy);
        TORCH_CHECK(!to.defined() || !repeats_elements(to), place, "several elements of '", name,
                    "' (sizes ", to.sizes(), ", strides ", to.strides(),
                    ") share memory, as after expand(), so a file cannot fill it. Give it "
                    "its own memory: tensor.set_data(tensor.contiguous()).");
        read.emplace_back(to, from);
      });
  TORCH_CHECK(left.empty(), place,
              "the archive has entries that the program's model lacks: ", list_of(left));
  return read;
}

/// LBFGS has tensors that are undefined before use, which LibTorch cannot write: the memory of a
/// step, and all of its state before a first iteration. They are omitted.
inline void save_lbfgs(torch::optim::LBFGS& optimizer, torch::serialize::OutputArchive& archive) {
  auto& states = optimizer.state();
  std::vector<std::unique_ptr<torch::optim::OptimizerParamState>> kept;
  std::vector<void*> keys;
  for (auto& [key, state] : states) keys.push_back(key);
  for (void* const key : keys) {
    auto& state = static_cast<torch::optim::LBFGSParamState&>(*states[key]);
    auto written = std::make_unique<torch::optim::LBFGSParamState>(state);
    written->al(std::nullopt);
    kept.push_back(std::exchange(states[key], std::move(written)));
    if (!state.d().defined()) states.erase(key);
  }
  const auto put_back = c10::make_scope_exit([&] {
    for (std::size_t i = 0; i < keys.size(); ++i) states[keys[i]] = std::move(kept[i]);
  });
  optimizer.save(archive);
}

inline void save_optimizer(torch::optim::Optimizer& optimizer,
                           torch::serialize::OutputArchive& archive) {
  if (auto* const lbfgs = dynamic_cast<torch::optim::LBFGS*>(&optimizer)) {
    return save_lbfgs(*lbfgs, archive);
  }
  optimizer.save(archive);
}

/// The kind of optimizer whose options were written; empty for other options.
inline std::string kind_of_options(torch::serialize::InputArchive& archive) {
  constexpr std::pair<const char*, const char*> kinds[] = {{"amsgrad", "an Adam or AdamW"},
                                                           {"nesterov", "an SGD"},
                                                           {"lr_decay", "an Adagrad"},
                                                           {"centered", "an RMSprop"},
                                                           {"max_iter", "an LBFGS"}};
  const OptionNames names = names_in(archive);
  const std::string fused = FusedNames::of_options(names);
  if (!fused.empty()) return "a " + fused;
  for (const auto& [key, kind] : kinds) {
    if (names.contains(key)) return kind;
  }
  return {};
}

/// The kind and the sizes of the parameter groups of an optimizer that was written.
struct OptimizerShape {
  std::string kind{};
  std::vector<int64_t> groups{};

  /// Throws for an archive that no optimizer of LibTorch has written.
  static OptimizerShape of(torch::serialize::InputArchive& archive) {
    OptimizerShape shape;
    for_each_archived_group(archive, [&](int64_t size, torch::serialize::InputArchive& options) {
      shape.groups.push_back(size);
      shape.kind = kind_of_options(options);
    });
    return shape;
  }

  static OptimizerShape of(const torch::optim::Optimizer& optimizer) {
    OptimizerShape shape;
    for (const auto& group : optimizer.param_groups()) {
      shape.groups.push_back(static_cast<int64_t>(group.params().size()));
      torch::serialize::OutputArchive options;
      group.options().serialize(options);
      auto written = archive_of(bytes_of(options));
      shape.kind = kind_of_options(written);
    }
    return shape;
  }
};

/// Throws if the archive's optimizer has another kind, or other parameter groups.
inline void check_archive_fits(const torch::optim::Optimizer& optimizer,
                               torch::serialize::InputArchive& archive) {
  OptimizerShape held, wanted;
  try {
    held = OptimizerShape::of(archive);
    wanted = OptimizerShape::of(optimizer);
  } catch (const std::exception&) {
    return;  // the program's own optimizer checks its archive itself
  }
  TORCH_CHECK(held.kind == wanted.kind || held.kind.empty() || wanted.kind.empty(),
              "it holds the state of ", held.kind, ", and the program's optimizer is ", wanted.kind,
              ". Create the optimizer of the run that saved it, or do not add this optimizer: it "
              "then starts without state.");
  TORCH_CHECK(held.groups == wanted.groups, "it has parameter groups of ",
              at::IntArrayRef(held.groups), " parameters, and the program's optimizer ",
              at::IntArrayRef(wanted.groups),
              ". Create model and optimizer as in the run that saved it, or do not add this "
              "optimizer: it then starts without state.");
}

/// `tensor`, or, if it was read in inference mode, a copy that may be written to outside of it.
inline at::Tensor writable(const at::Tensor& tensor) {
  if (!tensor.is_inference()) return tensor;
  const c10::InferenceMode no_inference(false);
  const at::NoGradGuard no_grad;
  return tensor.clone();
}

/// An optimizer's state for its next step: on the parameter's device, and in the dtype in which the
/// parameter is stepped.
inline at::Tensor fitted_state(const at::Tensor& state, const at::Tensor& parameter) {
  const at::ScalarType dtype = step_dtype(parameter);
  const bool casts = state.is_floating_point() && c10::isFloatingType(dtype);
  return writable(state.to(parameter.device(), casts ? dtype : state.scalar_type()));
}

/// State of an LBFGS: one state for all parameters together.
inline void fit_lbfgs_state(torch::optim::LBFGSParamState& state,
                            const std::vector<at::Tensor>& parameters) {
  int64_t elements = 0;
  for (const at::Tensor& parameter : parameters) elements += parameter.numel();
  const auto fit = [&](at::Tensor& tensor, bool of_each_element) {
    if (!tensor.defined()) return;
    TORCH_CHECK(!of_each_element || tensor.numel() == elements, "it holds state of ",
                tensor.numel(), " elements, and the parameters have ", elements, " in the program");
    tensor = fitted_state(tensor, parameters.front());
  };
  for (at::Tensor& tensor : state.old_dirs()) fit(tensor, true);
  for (at::Tensor& tensor : state.old_stps()) fit(tensor, true);
  for (at::Tensor& tensor : state.ro()) fit(tensor, false);
  fit(state.d(), true);
  fit(state.prev_flat_grad(), true);
  fit(state.H_diag(), false);
}

/// Calls f with the tensors in a state of `optimizer`, of the parameter's shape.
template <class F>
void for_each_tensor_in_state(const torch::optim::Optimizer& optimizer,
                              torch::optim::OptimizerParamState& state, const F& f) {
  if (for_each_state_tensor(state, f)) return;
  const auto* const fused = dynamic_cast<const FusedOptimizer*>(&optimizer);
  if (fused) fused->for_each_state_tensor(state, f);
}

/// LibTorch loads state of any shape, even if the next step then fails, and leaves it in the
/// archive's dtype and on the archive's device.
inline void fit_state(torch::optim::Optimizer& optimizer) {
  const std::vector<at::Tensor> parameters = all_parameters(optimizer);
  for (const at::Tensor& parameter : parameters) {
    const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
    if (found == optimizer.state().end() || !found->second) continue;
    for_each_tensor_in_state(optimizer, *found->second, [&](at::Tensor& tensor) {
      TORCH_CHECK(tensor.sizes() == parameter.sizes(), "it holds state of shape ", tensor.sizes(),
                  " for parameter ", &parameter - parameters.data(), ", which is ",
                  parameter.sizes(), " in the program");
      tensor = fitted_state(tensor, parameter);
    });
    auto* const state = dynamic_cast<torch::optim::LBFGSParamState*>(found->second.get());
    if (state) fit_lbfgs_state(*state, parameters);
  }
}

inline void load_optimizer(torch::optim::Optimizer& optimizer,
                           torch::serialize::InputArchive& archive) {
  check_archive_fits(optimizer, archive);
  optimizer.state().clear();  // parameters without a state in the file have none afterwards
  try {
    optimizer.load(archive);
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, "it is not of this kind of optimizer with these parameters (",
                error.what_without_backtrace(), ")");
  }
  fit_state(optimizer);
  if (!dynamic_cast<torch::optim::Adagrad*>(&optimizer)) return;
  // It creates its states at construction, and steps without a check.
  for (const auto& group : optimizer.param_groups()) {
    const auto& options = static_cast<const torch::optim::AdagradOptions&>(group.options());
    for (const at::Tensor& parameter : group.params()) {
      auto& state = optimizer.state()[parameter.unsafeGetTensorImpl()];
      if (state) continue;
      auto first = std::make_unique<torch::optim::AdagradParamState>();
      first->step(0);
      first->sum(at::full_like(parameter.detach(), options.initial_accumulator_value()));
      state = std::move(first);
    }
  }
}

/// Returns a function that restores the present tensors and options of an optimizer of LibTorch's
/// kind.
inline std::function<void()> hold_optimizer(torch::optim::Optimizer& optimizer) {
  using State = std::shared_ptr<torch::optim::OptimizerParamState>;
  std::vector<std::pair<void*, State>> states;
  for (const auto& [key, state] : optimizer.state()) {
    if (state) states.emplace_back(key, state->clone());
  }
  std::vector<std::shared_ptr<torch::optim::OptimizerOptions>> options;
  for (const auto& group : optimizer.param_groups()) {
    options.emplace_back(group.options().clone());
  }
  return [&optimizer, states = std::move(states), options = std::move(options)] {
    optimizer.state().clear();
    for (const auto& [key, state] : states) optimizer.state()[key] = state->clone();
    for (std::size_t g = 0; g < options.size(); ++g) {
      optimizer.param_groups()[g].set_options(options[g]->clone());
    }
  };
}

/// The only changing state of a StepLR, which only derived classes can access.
inline unsigned& step_count_of(torch::optim::LRScheduler& scheduler, const std::string& name) {
  TORCH_CHECK_TYPE(
      typeid(scheduler) == typeid(torch::optim::StepLR), "TrainingCheckpoint::add: '", name,
      "' is a ", c10::demangle(typeid(scheduler).name()),
      ", but of an LRScheduler& only LibTorch's StepLR can be saved. Give it save(OutputArchive&) "
      "and load(InputArchive&) that include its step_count_, and add it by its own type.");
  struct Access : torch::optim::LRScheduler {
    static unsigned& of(LRScheduler& any) { return any.*&Access::step_count_; }
  };
  return Access::of(scheduler);
}

/// Empty for the program's own optimizer with unknown options.
inline std::vector<double> rates_of(const torch::optim::Optimizer& optimizer) {
  std::vector<double> rates;
  try {
    for (const auto& group : optimizer.param_groups()) rates.push_back(group.options().get_lr());
  } catch (const c10::Error&) {
    rates.clear();
  }
  return rates;
}

/// The rates in the scheduler's optimizer, which only derived classes can access.
inline std::vector<double> rates_of(const torch::optim::LRScheduler& scheduler) {
  struct Access : torch::optim::LRScheduler {
    static std::vector<double> of(const LRScheduler& any) {
      return (any.*&Access::get_current_lrs)();
    }
  };
  return Access::of(scheduler);
}

}  // namespace TORCHAMP_NAMESPACE::detail
