// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Extra. TrainingCheckpoint: a file from which a run resumes.

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/serialize/archive.h>

#include <concepts>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "torchamp/detail/extras/io/archives.h"
#include "torchamp/detail/extras/io/checkpoint_values.h"
#include "torchamp/detail/extras/shared/master_meta.h"
#include "torchamp/detail/extras/shared/script_module.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

/// Saves a run to a file and resumes it: model, optimizer, scaler and other objects of the program,
/// and the random states of the CPU and of the devices in use.
///
///     torchamp::TrainingCheckpoint checkpoint("run.pt");
///     checkpoint.add("model", model).add("optimizer", optimizer).add("scaler", scaler);
///     checkpoint.add("step", step);
///     if (checkpoint.load()) std::cout << "goes on at step " << step << '\n';   // false: no file
///     while (step < steps) {
///       ...
///       ++step;                             // before save(): the number of finished steps
///       if (step % 100 == 0) checkpoint.save();
///     }
///
/// On a CPU, with the same libraries and number of threads, the resumed run is bitwise identical.
/// Gradients are not saved: save after update(), not between backward() and step(). Added objects
/// must outlive the checkpoint. For several processes, see save_together() and load_together() in
/// distributed/checkpoint.h. One thread at a time.
class TrainingCheckpoint {
 public:
  /// Stores the file's name; does not open it.
  explicit TrainingCheckpoint(std::filesystem::path path) : path_(std::move(path)) {}

  /// Adds an object under a unique name: a module or its holder, a torch::jit::Module, a
  /// torch::optim::Optimizer, a TrainingStep, anything with save(OutputArchive&) and
  /// load(InputArchive&) (GradScaler, MasterWeights), a tensor, a std::vector of tensors, a number,
  /// a bool, a string or LibTorch's StepLR. If you add MasterWeights, do not add the model. A
  /// TrainingStep adds its model or masters, optimizer, scaler, scheduler and number of steps under
  /// names that begin with `name` and a dot. A vector of tensors must have the same size as in the
  /// file, unless it is empty here.
  ///
  /// An optimizer's options are also loaded. LibTorch writes the options of Adam and AdamW alike,
  /// so an AdamW also loads the options of an Adam.
  ///
  /// Learning rates are stored with the optimizer. If you add a scheduler, also add its optimizer.
  /// For a StepLR without it, save() and load() throw (unless another added object may contain it).
  /// For a StepLR, or an LRScheduler& to one, only the number of steps is saved; interval and
  /// factor come from the program. Your own scheduler, derived from LRScheduler, saves its state in
  /// save and load, including step_count_. ReduceLROnPlateauScheduler has private state and cannot
  /// be added.
  ///
  /// Errors: a name that another object has; a name with a quote, a backslash or a line end,
  /// because LibTorch cannot read such names; an LRScheduler& that is not a StepLR.
  template <class T>
  TrainingCheckpoint& add(std::string name, T& object) {
    add_to(std::move(name), object, /*is_local=*/false);
    return *this;
  }

  /// Adds an object that differs between processes, such as the position in a process's part of the
  /// data.
  template <class T>
  TrainingCheckpoint& add_local(std::string name, T& object) {
    add_to(std::move(name), object, /*is_local=*/true);
    return *this;
  }

  /// The file's name.
  const std::filesystem::path& path() const { return path_; }
  /// Whether the file exists. Throws if that cannot be determined, for example without search
  /// permission.
  bool exists() const;

  /// Writes the file. If this fails, it throws and leaves the old file. If the process is killed or
  /// the power fails, a complete file remains, the old or the new one; see Note [Atomic files]. The
  /// new file has the mode of the old file (on Linux also its access list) and, if the system
  /// permits it, its owner and group. Synchronises: the tensors are read from their devices.
  void save() const { save({local_part()}); }

  /// Loads the added objects. Returns false if there is no file: check the path. Tensors, and the
  /// weights of models, are filled in place on their own device, so optimizers, views and captured
  /// graphs use the new values. A tensor that is undefined here or in the file is replaced by the
  /// saved tensor. A number must fit its type; a float may be rounded. An optimizer's state in
  /// another floating-point dtype is cast to the dtype of its parameters, as in Python.
  ///
  /// If the file has tensors of a device that this machine lacks (cuda:1 with one GPU), all tensors
  /// are read into host memory. Filled tensors and states of optimizers then move to their devices;
  /// other tensors, which an object's own load() reads, stay on the host.
  ///
  /// You may call it in an iteration, for example after an exception: the scalers then clear
  /// their records of the added optimizers, like discard(). Clear the gradients, which belong to
  /// the old weights. Error: a call in a window of an Accumulation. In a region, later ops
  /// use the new weights.
  ///
  /// If the file is damaged or does not fit the added objects, it throws and changes nothing. If a
  /// model in the file has more weights than the model here, the file does not fit. Whole objects
  /// in the file that were not added are ignored, for example an optimizer in a program that only
  /// evaluates. Any changed byte is detected: the file ends with a checksum, see
  /// Note [The file of a TrainingCheckpoint]. The file is read twice, first to check it. If a
  /// device's memory runs out, nothing changes, except objects of your types whose load() fails
  /// halfway. Synchronises.
  [[nodiscard]] bool load() { return load(0, 1); }

  /// Returns this process's own part, as bytes, for save() below. If ShardedMasterWeights or an
  /// optimizer of their shards were added, all processes call it together: it gathers masters and
  /// states on process 0, which then calls save().
  at::Tensor local_part() const;
  /// Writes the file on one of several processes, with the local part of each process. Errors,
  /// before the old file is touched: no local parts; a tensor that is not a local_part().
  void save(const std::vector<at::Tensor>& local_parts) const;
  /// Loads the file on one of several processes, with the local part of process `rank`. Error:
  /// another number of `processes` wrote the file.
  [[nodiscard]] bool load(int64_t rank, int64_t processes) { return load_parts(rank, processes); }
  /// Loads the file without local parts, to resume with another number of processes. The resumed
  /// run is then not bitwise identical.
  [[nodiscard]] bool load_shared() { return load_parts(std::nullopt, 0); }
  /// Returns the id of the file that was last saved or loaded. Any two files have different ids.
  int64_t file_id() const { return file_id_; }

  /// For the library's own headers: records that a TrainingStep has added its objects, with names
  /// that begin with `prefix`. `check(call)` throws if the step may not be saved or loaded now.
  void note_step(std::function<void(const std::string&)> check, std::string prefix = {}) {
    steps_.push_back({std::move(prefix), std::move(check)});
  }

 private:
  struct Entry {
    std::string name;
    std::function<void(torch::serialize::OutputArchive&)> save;
    std::function<void(torch::serialize::InputArchive&, int64_t version)> load;
    /// For values, GradScalers, MasterWeights and shards: returns a function that restores the
    /// present value. Empty if save()'s data suffice.
    std::function<std::function<void()>()> keep = {};
    /// For types whose `keep` is empty: returns a function that restores all present tensors,
    /// without device memory. Used if a load runs out of device memory.
    std::function<std::function<void()>()> hold = {};
    /// For state on several processes: gathers it on process 0.
    std::function<void()> gather = {};
    /// The learning rates of an optimizer, and the rates that a StepLR has set in its optimizer.
    std::function<std::vector<double>()> rates = {}, scheduled_rates = {};
    /// For an optimizer: clears a scaler's records of it in this iteration.
    std::function<void(GradScaler&)> discard = {};
    GradScaler* scaler = nullptr;  ///< the object, if it is a scaler
    /// Whether the program defines the object's type, whose contents are unknown.
    bool is_own = false;
    bool is_local = false;
  };
  using Undo = std::vector<std::function<void()>>;
  /// A TrainingStep: see note_step().
  struct Step {
    std::string prefix;
    std::function<void(const std::string&)> check;
  };
  /// Adds the objects of a TrainingStep.
  struct PartsOfStep {
    template <class T>
    PartsOfStep& add(const std::string& name, T& object) {
      checkpoint.add_to(prefix + name, object, is_local);
      return *this;
    }
    void note_step(std::function<void(const std::string&)> check) {
      checkpoint.note_step(std::move(check), prefix);
    }

    TrainingCheckpoint& checkpoint;
    std::string prefix;
    bool is_local;
  };

  template <class T>
  void add_to(std::string name, T& object, bool is_local);
  static void fill(Entry& entry, torch::optim::Optimizer& optimizer);
  template <class T>
  static void fill_value(Entry& entry, T& object);
  void add_entry(Entry entry);
  void check_schedulers(const char* call) const;
  static void load_module(torch::nn::Module& module, torch::serialize::InputArchive& archive);
  void write(torch::serialize::OutputArchive& archive, bool local) const;
  void read(torch::serialize::InputArchive& archive, bool local, int64_t version, Undo& undo) const;
  static void load_entry(const Entry& entry, torch::serialize::InputArchive& archive,
                         int64_t version, Undo& undo);
  bool load_parts(std::optional<int64_t> rank, int64_t processes);
  void begin_iterations() const;
  bool has(std::string_view name) const;
  bool is_of_step(const std::string& name) const;
  void check_entries_of_step(torch::serialize::InputArchive& shared) const;

  std::filesystem::path path_;
  std::vector<Step> steps_;
  std::vector<Entry> entries_;
  mutable int64_t file_id_ = 0;
};

namespace detail {
/// Whether the program defines the type, the type is no module, and it may hold an optimizer.
template <class T>
inline constexpr bool may_hold_optimizer =
    !std::derived_from<T, Masters> && !std::derived_from<T, torch::optim::LRScheduler> &&
    !std::is_same_v<T, GradScaler>;
}  // namespace detail

template <class T>
void TrainingCheckpoint::fill_value(Entry& entry, T& object) {
  static_assert(
      std::is_same_v<T, at::Tensor> || std::is_arithmetic_v<T> || std::is_same_v<T, std::string>,
      "TrainingCheckpoint::add takes modules, module holders, optimizers, a TrainingStep, objects "
      "with save(OutputArchive&) and load(InputArchive&), tensors, vectors of tensors, numbers and "
      "strings");
  entry.save = [&object](torch::serialize::OutputArchive& archive) {
    archive.write("value", detail::to_ivalue(object));
  };
  entry.load = [&object](torch::serialize::InputArchive& archive, int64_t version) {
    c10::IValue value;
    archive.read("value", value);
    detail::from_ivalue(value, object, version);
  };
  entry.keep = [&object] { return detail::undo_of(object); };
}

template <class T>
void TrainingCheckpoint::add_to(std::string name, T& object, bool is_local) {
  using torch::serialize::InputArchive;
  using torch::serialize::OutputArchive;
  Entry entry{.name = std::move(name), .save = {}, .load = {}, .is_local = is_local};
  if constexpr (std::derived_from<T, torch::optim::Optimizer>) {
    fill(entry, object);
  } else if constexpr (std::is_same_v<T, torch::jit::Module>) {
    auto module = detail::ScriptModule::of(object);
    entry.save = [module](OutputArchive& archive) { module->save(archive); };
    entry.load = [module](InputArchive& archive, int64_t) { load_module(*module, archive); };
    entry.hold = [module] { return detail::hold_module(*module); };
  } else if constexpr (std::is_same_v<T, std::vector<at::Tensor>>) {
    entry.save = [&object](OutputArchive& archive) { detail::write_tensors(object, archive); };
    entry.load = [&object](InputArchive& archive, int64_t version) {
      detail::read_tensors(archive, object, version);
    };
    entry.keep = [&object] { return detail::undo_of(object); };
  } else if constexpr (requires(OutputArchive & out, InputArchive & in) {
                         object->save(out);
                         object->load(in);
                       }) {
    entry.save = [&object](OutputArchive& archive) { object->save(archive); };
    entry.load = [&object](InputArchive& archive, int64_t) { load_module(*object, archive); };
    entry.hold = [&object] { return detail::hold_module(*object); };
  } else if constexpr (requires(OutputArchive & out, InputArchive & in) {
                         object.save(out);
                         object.load(in);
                       }) {
    entry.save = [&object](OutputArchive& archive) { object.save(archive); };
    if constexpr (std::derived_from<T, torch::nn::Module>) {
      entry.load = [&object](InputArchive& archive, int64_t) { load_module(object, archive); };
      entry.hold = [&object] { return detail::hold_module(object); };
    } else {
      entry.load = [&object](InputArchive& archive, int64_t) { object.load(archive); };
      entry.is_own = detail::may_hold_optimizer<T>;
    }
    if constexpr (std::is_same_v<T, GradScaler>) {
      entry.scaler = &object;
      entry.keep = [&object] { return detail::keep_scaler(object); };
    }
    if constexpr (std::derived_from<T, detail::Masters>) {
      entry.keep = [&object] { return object.keep(); };
      entry.gather = [&object] { object.gather(); };
    }
  } else if constexpr (std::derived_from<T, torch::optim::LRScheduler>) {
    static_assert(
        std::is_same_v<T, torch::optim::StepLR> || std::is_same_v<T, torch::optim::LRScheduler>,
        "TrainingCheckpoint::add cannot save your own scheduler without its help: give it "
        "save(OutputArchive&) and load(InputArchive&), and save its step_count_ there");
    unsigned& steps = detail::step_count_of(object, entry.name);
    add_to(std::move(entry.name), steps, is_local);
    entries_.back().scheduled_rates = [&object] { return detail::rates_of(object); };
    return;
  } else if constexpr (std::derived_from<T, torch::optim::ReduceLROnPlateauScheduler>) {
    static_assert(sizeof(T) == 0,
                  "TrainingCheckpoint::add cannot read LibTorch's ReduceLROnPlateauScheduler, "
                  "whose state is private: write your own scheduler, with save(OutputArchive&) and "
                  "load(InputArchive&)");
  } else if constexpr (requires(PartsOfStep & parts) { object.add_to(parts); }) {
    PartsOfStep parts{*this, entry.name + '.', is_local};
    object.add_to(parts);
    return;
  } else {
    fill_value(entry, object);
  }
  add_entry(std::move(entry));
}

}  // namespace TORCHAMP_NAMESPACE

#if TORCHAMP_BODIES
#include "torchamp/detail/extras/io/training_checkpoint-inl.h"  // IWYU pragma: export
#endif
