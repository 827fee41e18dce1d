// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/serialize/archive.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "torchamp/detail/extras/shared/captured_call.h"
#include "torchamp/detail/extras/shared/master_meta.h"
#include "torchamp/detail/extras/shared/model.h"
#include "torchamp/detail/extras/shared/optimizer_set.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {
class TrainingCheckpoint;
class TrainingResult;
}  // namespace TORCHAMP_NAMESPACE

namespace TORCHAMP_NAMESPACE::detail {

// Note [Parts of a TrainingStep]
// A TrainingStep uses masters, graphs, process groups and schedulers through the interfaces below.
// The value of such an option is a Choice: it converts the program's value into a function that
// creates the part. So only a program that sets an option instantiates its implementation. Options
// of masters and graphs name their class. Groups have their own header; if it is not included, an
// error of StepGroupOf names it.

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;
using Tensors = std::vector<at::Tensor>;

/// For a static_assert in a template that must not be instantiated.
template <class...>
inline constexpr bool is_never = false;

/// Any type except `Type` itself, which has its own copy constructors.
template <class Given, class Type>
concept OtherThan = !std::same_as<std::remove_cvref_t<Given>, Type>;

/// The value of an option: `make` creates the part; it is null if the option is not set.
/// `Option::maker_of(given...)` has an overload for each type that the option takes. A further
/// overload takes all other types: its error lists the valid types.
template <class Option>
struct Choice {
  Choice() = default;
  template <OtherThan<Choice> Given, class... More>
  Choice(Given&& given, More&&... more)
      : make(Option::maker_of(std::forward<Given>(given), std::forward<More>(more)...)) {}

  typename Option::Maker make{};
};

/// The dtype of a region on `device` if the program selects none. All CPUs get 16 bits: if 16-bit
/// products are slow, they are computed in fp32 (cpu_products.h) and take fp32's time, with half of
/// the memory.
at::ScalarType default_dtype(at::DeviceType device);

// ---- What the program passes --------------------------------------------------------------------

template <class Made>
concept OptimizerPointer = std::convertible_to<Made, std::shared_ptr<torch::optim::Optimizer>>;
/// A pointer to an optimizer, or a vector of these.
template <class Made>
concept OptimizersMade = OptimizerPointer<Made> || requires(Made made) {
  requires OptimizerPointer<decltype(std::move(*made.begin()))>;
};
template <OptimizersMade Made>
OptimizerPointers pointers_of(Made made) {
  if constexpr (OptimizerPointer<Made>) {
    return {std::move(made)};
  } else {
    return {std::make_move_iterator(made.begin()), std::make_move_iterator(made.end())};
  }
}

/// A function that creates one or several optimizers for `Parameters`, and returns pointers to
/// them.
template <class Factory, class Parameters>
concept MakesOptimizerOf = std::invocable<Factory&, Parameters> &&
    OptimizersMade<std::invoke_result_t<Factory&, Parameters>>;
/// A function that also takes the parameters' names. (A generic lambda is not checked for this.)
template <class Factory>
concept MakesOptimizerOfNames =
    !std::invocable<Factory&, Tensors> && MakesOptimizerOf<Factory, const NamedTensors&>;

/// Whether the arguments are a function, or inputs and a function of them.
template <class... Given>
inline constexpr bool is_loss_call = false;
template <class Loss>
inline constexpr bool is_loss_call<Loss> = std::invocable<Loss>;
template <class Inputs, class Loss>
inline constexpr bool is_loss_call<Inputs, Loss> =
    std::convertible_to<Inputs, const Tensors&>&& std::invocable<Loss, const Tensors&>;

/// Whether such a function returns a tensor.
template <class Loss, class... Inputs>
inline constexpr bool returns_loss =
    std::convertible_to<std::invoke_result_t<Loss, Inputs...>, at::Tensor>;
template <class Loss, class... Inputs>
constexpr void check_loss_of() {
  static_assert(returns_loss<Loss, Inputs...>,
                "TrainingStep: the function must return the loss, an at::Tensor with its graph: "
                "train([&] { return torch::mse_loss(model->forward(x), y); })");
}

/// The type of such a function, or of what a std::function holds.
template <class Loss>
const std::type_info& type_of_function(const Loss& function) {
  if constexpr (requires { function.target_type(); }) {
    return function.target_type();
  } else {
    return typeid(Loss);
  }
}

/// Does not compile, for a call with other arguments.
template <class... Given>
constexpr void refuse_arguments() {
  static_assert(
      is_never<Given...>,
      "TrainingStep: pass a function that computes the loss, because it is called under "
      "the guard: train([&] { return torch::mse_loss(model->forward(x), y); }); or a list "
      "of inputs and a function of them: train({x, y}, [&](const auto& inputs) {...})");
}

/// Options of a scaler, or a scaler.
struct ScalerChoice {
  ScalerChoice() = default;
  ScalerChoice(GradScalerOptions given) : options(std::move(given)) {}
  ScalerChoice(GradScaler& given) : scaler(&given) {}
  template <OtherThan<ScalerChoice> Given>
  requires(!std::convertible_to<Given, GradScalerOptions>) ScalerChoice(Given&&) {
    static_assert(is_never<Given>,
                  "TrainingStep: .scaler takes GradScalerOptions, or a GradScaler by its name, "
                  "which outlives the TrainingStep: {.scaler = scaler}");
  }

  std::optional<GradScalerOptions> options;
  GradScaler* scaler = nullptr;
};

// ---- Processes ----------------------------------------------------------------------------------

/// Averages gradients over processes.
class StepGroup {
 public:
  virtual ~StepGroup() = default;

  /// Gives all processes the same parameters, before masters of them are made.
  virtual void broadcast(const torch::nn::Module& model) = 0;
  /// From now on gradients of `model` are averaged, by its masters if these average.
  virtual void attach(const std::shared_ptr<torch::nn::Module>& model, Masters* masters) = 0;
  /// Computes a loss whose backward averages the gradients, unless no_sync() is alive.
  virtual at::Tensor forward(const std::function<at::Tensor()>& loss) = 0;
  virtual std::shared_ptr<void> no_sync() = 0;
  /// Averages gradients of passes under no_sync().
  virtual void sync_gradients() = 0;
  /// The group itself, if it is of that type.
  virtual const void* find(const std::type_info& type) const = 0;
  virtual void save(TrainingCheckpoint& checkpoint) = 0;
  virtual bool load(TrainingCheckpoint& checkpoint) = 0;
};

template <class Group>
struct StepGroupOf {
  static_assert(sizeof(Group) == 0,
                "TrainingStep: include torchamp/distributed/training_group.h to set .group.");
};

template <class Given>
inline constexpr bool is_group = false;
template <class Group>
inline constexpr bool is_group<c10::intrusive_ptr<Group>> = true;

struct GroupOption {
  using Maker = std::function<std::unique_ptr<StepGroup>()>;

  template <class Group, class... Options>
  static Maker maker_of(const c10::intrusive_ptr<Group>& group, const Options&... options) {
    return [=] { return StepGroupOf<Group>::make(group, options...); };
  }
  template <class Given>
  requires(!is_group<Given>) static Maker maker_of(const Given&) {
    static_assert(is_never<Given>,
                  "TrainingStep: .group takes a process group, as make_process_group() returns it: "
                  "{.group = group}");
    return {};
  }
};

// ---- Masters ------------------------------------------------------------------------------------

/// A record of a model's parameters before masters are made, which give them other memory.
class ModelBefore {
 public:
  explicit ModelBefore(const torch::nn::Module& model) {
    for (const at::Tensor& parameter : model.parameters()) {
      before_.push_back({parameter, parameter.variable_data(), parameter.grad(), hook_of(parameter),
                         parameter.unsafeGetTensorImpl()->get_backend_meta_intrusive_ptr()});
    }
  }
  /// Restores them. Call it after the masters are destroyed.
  void put_back() const {
    for (const Parameter& one : before_) {
      if (hook_of(one.tensor) != one.hook) {
        torch::autograd::impl::set_post_acc_grad_hooks(one.tensor, nullptr);
      }
      one.tensor.mutable_grad().reset();
      at::Tensor(one.tensor).set_data(one.data);
      one.tensor.unsafeGetTensorImpl()->set_backend_meta(one.meta);
      one.tensor.mutable_grad() = one.gradient;
    }
  }

 private:
  struct Parameter {
    at::Tensor tensor, data, gradient;
    const void* hook;
    c10::intrusive_ptr<c10::BackendMeta> meta;
  };
  std::vector<Parameter> before_;
};

/// Options of masters, which name the class of the masters and, if they need a group, the type of
/// the group.
struct MastersOption {
  using OfModel = std::shared_ptr<torch::nn::Module>;
  /// Creates the masters. Its members are needed before that.
  struct Maker : std::function<std::unique_ptr<Masters>(const OfModel&, StepGroup*)> {
    at::ScalarType dtype = at::kHalf;
    bool needs_group = false;
  };

  template <class Options, class Made = typename Options::Masters>
  static Maker maker_of(const Options& options) {
    constexpr bool needs_group = requires {
      typename Options::Group;
    };
    const auto make = [options](const OfModel& model,
                                StepGroup* group) -> std::unique_ptr<Masters> {
      if constexpr (needs_group) {
        using Group = typename Options::Group;
        const void* const found = group->find(typeid(Group));
        TORCH_CHECK(found, "TrainingStep: the masters cannot be sharded over this kind of group.");
        return std::make_unique<Made>(model, *static_cast<const Group*>(found), options);
      } else {
        return std::make_unique<Made>(model, options);
      }
    };
    return {{make}, options.dtype, needs_group};
  }
  template <class Given>
  requires(!requires { typename Given::Masters; }) static Maker maker_of(const Given&) {
    static_assert(
        is_never<Given>,
        "TrainingStep: .masters takes MasterWeightsOptions or ShardedMasterWeightsOptions, "
        "from which the TrainingStep makes the masters");
    return {};
  }
};

// ---- Graphs -------------------------------------------------------------------------------------

/// Options of a graph, which name it: CudaGraphOptions.
struct CaptureOption {
  using Body = std::function<BodyResult(const Tensors&)>;
  /// Creates the graph. Its member is needed before that.
  struct Maker : std::function<StepCapture(const OptimizerPointers&, const Model&, Body)> {
    bool when_possible = false;
  };

  template <class Options, class Graph = typename Options::Graph>
  static Maker maker_of(const Options& options) {
    const auto make = [options](const OptimizerPointers& optimizers, const Model& model,
                                Body body) -> StepCapture {
      Options of_model = options;
      of_model.models.push_back(model);
      typename Graph::Optimizers stepped;
      for (const auto& optimizer : optimizers) stepped.emplace_back(*optimizer);
      const auto graph = std::make_shared<Graph>(std::move(stepped), std::move(body), of_model);
      return {[graph](const Tensors& inputs, const CapturedCall& call) -> const BodyResult& {
                return graph->run(inputs, call);
              },
              [graph](const std::function<void()>& work) { graph->run_eagerly(work); },
              [graph] { graph->capture_again(); }};
    };
    return {{make}, options.when_possible};
  }
  template <class Given>
  requires(!requires { typename Given::Graph; }) static Maker maker_of(const Given&) {
    static_assert(is_never<Given>, "TrainingStep: .capture takes CudaGraphOptions");
    return {};
  }
};

// ---- Schedulers ---------------------------------------------------------------------------------

/// A learning rate scheduler of any type that has step(); with save() and load(), or a StepLR, it
/// can be kept in files.
class StepScheduler {
 public:
  template <class Scheduler>
  explicit StepScheduler(std::shared_ptr<Scheduler> scheduler)
      : step_([scheduler] { scheduler->step(); }) {
    if constexpr (requires(torch::serialize::OutputArchive & out,
                           torch::serialize::InputArchive & in) {
                    scheduler->save(out);
                    scheduler->load(in);
                  }) {
      save_ = [scheduler](torch::serialize::OutputArchive& out) { scheduler->save(out); };
      load_ = [scheduler](torch::serialize::InputArchive& in) { scheduler->load(in); };
    } else if constexpr (std::derived_from<Scheduler, torch::optim::LRScheduler>) {
      plain_ = scheduler.get();
    }
  }

  void step() const { step_(); }

  template <class Checkpoint>
  void add_to(Checkpoint& checkpoint, const std::string& name) {
    TORCH_CHECK(plain_ || save_,
                "TrainingStep: the scheduler has no save() and load(), so a file cannot hold it. "
                "Give it both (LibTorch's StepLR needs none).");
    plain_ ? checkpoint.add(name, *plain_) : checkpoint.add(name, *this);
  }
  void save(torch::serialize::OutputArchive& archive) const { save_(archive); }
  void load(torch::serialize::InputArchive& archive) { load_(archive); }

 private:
  std::function<void()> step_;
  std::function<void(torch::serialize::OutputArchive&)> save_;
  std::function<void(torch::serialize::InputArchive&)> load_;
  torch::optim::LRScheduler* plain_ = nullptr;
};

/// An lvalue with step() without arguments.
template <class Given>
concept NamedScheduler = std::is_lvalue_reference_v<Given> && requires(Given given) {
  given.step();
};

/// Schedulers, or a function that makes one for each optimizer.
struct SchedulerOption {
  using Maker = std::function<std::vector<StepScheduler>(const OptimizerPointers&)>;

  template <class... Schedulers>
  requires(sizeof...(Schedulers) > 0 && (... && NamedScheduler<Schedulers&>)) static Maker
      maker_of(Schedulers&... schedulers) {
    return [&schedulers...](const OptimizerPointers&) -> std::vector<StepScheduler> {
      const std::shared_ptr<void> unowned;
      return {StepScheduler(std::shared_ptr<Schedulers>(unowned, &schedulers))...};
    };
  }
  template <std::invocable<torch::optim::Optimizer&> Factory>
  static Maker maker_of(Factory factory) {
    return [factory](const OptimizerPointers& optimizers) {
      std::vector<StepScheduler> all;
      for (const auto& optimizer : optimizers) {
        auto made = factory(*optimizer);
        using Scheduler = typename decltype(made)::element_type;
        all.emplace_back(std::shared_ptr<Scheduler>(std::move(made)));
      }
      return all;
    };
  }
  template <class Given, class... More>
  requires(!std::invocable<Given, torch::optim::Optimizer&> &&
           !(NamedScheduler<Given> && ... && NamedScheduler<More>)) static Maker
      maker_of(Given&&, More&&...) {
    static_assert(is_never<Given>,
                  "TrainingStep: .scheduler takes a scheduler with step() by its name, which "
                  "outlives the TrainingStep, not a pointer to it: {.scheduler = scheduler}; or a "
                  "function that creates one: [](auto& optimizer) { return "
                  "std::make_shared<torch::optim::StepLR>(optimizer, 10, 0.1); }");
    return {};
  }
};

}  // namespace TORCHAMP_NAMESPACE::detail
