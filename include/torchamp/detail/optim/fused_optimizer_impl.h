// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "torchamp/captured_step.h"
#include "torchamp/detail/optim/counter_table.h"
#include "torchamp/detail/optim/plan.h"
#include "torchamp/detail/overlay/weight_casts.h"
#include "torchamp/fused_optimizer.h"

namespace torchamp::detail {

/// The counterpart in LibTorch of an optimizer after `Rule`, with its groups and no states. What it
/// does here need not be compiled here: it reads and writes archives, and its constructor checks
/// options.
template <class Rule>
class Counterpart {
 public:
  explicit Counterpart(const typename Rule::Options& options)
      : optimizer_(ParamGroups(), options) {}
  explicit Counterpart(const ParamGroups& groups) : Counterpart(typename Rule::Options(/*lr=*/0.)) {
    for (const auto& group : groups) optimizer_.param_groups().push_back(group);
  }
  torch::optim::Optimizer& get() { return optimizer_; }

  /// Throws for options that are out of range.
  static void check(const typename Rule::Options& options) { const Counterpart checked(options); }

 private:
  typename Rule::LibTorch optimizer_;
};

/// A FusedOptimizer after a rule (step_rules.h).
template <class Rule>
class FusedOptimizerOf : public FusedOptimizer, public CapturedStep {
 public:
  using Options = typename Rule::Options;
  using State = typename Rule::State;

  FusedOptimizerOf(const ParamGroups& groups, Options defaults)
      : FusedOptimizer(groups, std::make_unique<Options>(defaults)) {
    Counterpart<Rule>::check(defaults);
    for (std::size_t g = 0; g < param_groups_.size(); ++g) {
      Counterpart<Rule>::check(options_of<Rule>(param_groups_, g));
    }
  }

  /// The states of the parameters, in the types of LibTorch's own optimizer; a parameter whose
  /// every step was skipped may have one or not. Brings their step counts, which live on the
  /// device, up to date: reads it if a step since then could be skipped. They may be changed: the
  /// next step starts from them. (state() of a reference to torch::optim::Optimizer gives them as
  /// they were last brought up to date. They may be changed there, too; a count is taken from there
  /// if it, or the whole state, was.)
  ParamStates& state() {
    write_steps();
    counters_.clear();
    plan_ = {};
    return state_;
  }
  const ParamStates& state() const {
    write_steps();
    return state_;
  }

  /// Writes what LibTorch's own optimizer writes, for either to load. Reads the device.
  void save(torch::serialize::OutputArchive& archive) const override {
    write_steps();
    Counterpart<Rule> counterpart(param_groups_);
    for (const auto& [param, state] : state_) {
      const auto counter = counters_.find(param);
      const bool never_stepped = counter && counter->at_most == 0;
      if (!never_stepped) counterpart.get().state()[param] = state->clone();
    }
    counterpart.get().save(archive);
  }

  /// Reads what save() or LibTorch's own optimizer wrote. All of the state is replaced; it goes to
  /// its parameters' device and dtype when they are next stepped. If the archive is another
  /// optimizer's, or one for other parameters, throws and changes nothing.
  void load(torch::serialize::InputArchive& archive) override {
    Counterpart<Rule> counterpart(param_groups_);
    torch::optim::Optimizer& loaded = counterpart.get();
    try {
      // Without it, LibTorch takes the archive for one of version 1.4 or older.
      c10::IValue version;
      archive.read("pytorch_version", version);
      loaded.load(archive);
    } catch (const std::exception& error) {
      const auto* const own = dynamic_cast<const c10::Error*>(&error);
      const std::string cause = own ? own->what_without_backtrace() : error.what();
      const bool tells = cause.find("INTERNAL ASSERT") == std::string::npos;
      TORCH_CHECK(false, Rule::name, "::load: the archive does not hold what ", Rule::name,
                  " or its counterpart in LibTorch saves for such parameter groups",
                  tells ? ": " + cause : ".");
    }
    check_loaded(loaded);
    for (std::size_t g = 0; g < param_groups_.size(); ++g) {
      static_cast<Options&>(param_groups_[g].options()) =
          static_cast<const Options&>(loaded.param_groups()[g].options());
    }
    state_ = std::move(loaded.state());
    counters_.clear();
    plan_ = {};
  }

  bool prepare_captured_step() override {
    const InternalOps internal;
    rates_on_device_ = true;
    const bool like_the_last =
        stepped_with_.empty() || (plan_.is_for(param_groups_, state_) && same_options());
    plan_.write_rates(param_groups_);
    return like_the_last;
  }
  bool may_be_captured() const override { return rates_on_device_; }
  void note_replayed_step() override {
    const DropWeightCasts drop_weight_casts;
    plan_.note_step();
  }

 protected:
  void step_fused(const at::Tensor& grad_scale, const at::Tensor& found_inf) override {
    const DropWeightCasts drop_weight_casts;
    if (!plan_.collect_gradients(param_groups_, state_)) {
      plan_.drop_counters(state_, counters_);
      plan_ = {};  // holds no gradients, should what follows throw
      check_parameters<Rule>(param_groups_, state_);
      plan_ = StepPlan<Rule>::make(param_groups_, static_cast<const Options&>(*defaults_), state_,
                                   counters_);
      TORCH_INTERNAL_ASSERT(plan_.collect_gradients(param_groups_, state_));
    }
    if (rates_on_device_) {
      plan_.write_rates(param_groups_);
      stepped_with_.clear();
      for (std::size_t g = 0; g < param_groups_.size(); ++g) {
        stepped_with_.push_back(options_of<Rule>(param_groups_, g));
      }
    }
    plan_.run(param_groups_, grad_scale, found_inf);
  }

 private:
  /// Whether the options are those of the last step, but for the learning rates.
  bool same_options() const {
    if (stepped_with_.size() != param_groups_.size()) return false;
    for (std::size_t g = 0; g < param_groups_.size(); ++g) {
      Options before = stepped_with_[g];
      const Options& now = options_of<Rule>(param_groups_, g);
      before.lr(now.lr());
      if (!(before == now)) return false;
    }
    return true;
  }

  static void check_loaded(torch::optim::Optimizer& loaded) {
    const ParamGroups& groups = loaded.param_groups();
    for (std::size_t g = 0; g < groups.size(); ++g) {
      const Options& options = options_of<Rule>(groups, g);
      Counterpart<Rule>::check(options);
      for (std::size_t i = 0; i < groups[g].params().size(); ++i) {
        const at::Tensor& param = groups[g].params()[i];
        const auto state = loaded.state().find(param.unsafeGetTensorImpl());
        if (state == loaded.state().end()) continue;
        for (std::size_t k = 0; k < Rule::kinds(options); ++k) {
          const at::Tensor& tensor = Rule::tensor(static_cast<State&>(*state->second), k);
          TORCH_CHECK(tensor.defined() && tensor.sizes() == param.sizes(), Rule::name,
                      "::load: the archive's state of ", place_of(g, i), " has the shape ",
                      tensor.defined() ? c10::str(tensor.sizes()) : "(none)", ", the parameter ",
                      param.sizes(), ". Load it into an optimizer of the same parameters.");
        }
      }
    }
  }

  void write_steps() const {
    if (plan_.drop_counters(state_, counters_)) plan_ = {};
    counters_.read([&](void* param, int64_t steps) {
      const auto state = state_.find(param);
      if (state != state_.end()) Rule::set_steps(static_cast<State&>(*state->second), steps);
    });
    plan_.note_states(state_);
  }

  // Both follow what is done to the states, also in save().
  mutable CounterTable<Rule> counters_;
  mutable StepPlan<Rule> plan_;

  // Where steps are captured.
  bool rates_on_device_ = false;
  std::vector<Options> stepped_with_;
};

}  // namespace torchamp::detail
