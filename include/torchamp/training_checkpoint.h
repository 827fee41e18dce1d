// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief TrainingCheckpoint: a file from which a run goes on where it was.

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
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
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "torchamp/detail/io/checkpoint_values.h"
#include "torchamp/detail/masters/master_meta.h"
#include "torchamp/detail/scaler/grad_scaler_archive.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

class GradScaler;

/// Saves a run to a file, and goes on from it: model, optimizer, scaler and whatever else the
/// program names, and the states of the random generators of the CPU and of the devices in use.
///
///     torchamp::TrainingCheckpoint checkpoint("run.pt");
///     checkpoint.add("model", model).add("optimizer", optimizer).add("scaler", scaler);
///     checkpoint.add("step", step);
///     checkpoint.load();                    // false if there is no file yet
///     while (step < steps) {
///       ...
///       ++step;                             // before save(): the file says what is done
///       if (step % 100 == 0) checkpoint.save();
///     }
///
/// On a CPU, with the same libraries and number of threads, the run that goes on is the same bit
/// for bit. Gradients are not kept: save after update(), not between backward() and step(). The
/// checkpoint refers to what is added, which must live as long as it. For several
/// processes, see save_together() and load_together() in distributed/checkpoint.h. One thread at a
/// time may use it.
class TrainingCheckpoint {
 public:
  /// Names the file; touches nothing.
  explicit TrainingCheckpoint(std::filesystem::path path) : path_(std::move(path)) {}

  /// Adds an object under a name of its own: a module holder, a torch::optim::Optimizer, whatever
  /// has save(OutputArchive&) and load(InputArchive&) (GradScaler, MasterWeights), a tensor, a
  /// number, a bool, a string or LibTorch's StepLR. Where MasterWeights are added, the model is
  /// not.
  ///
  /// An optimizer's options come from the file as well, the weight decay too where an AdamW reads
  /// Adam's, which LibTorch writes alike. Learning rates belong to the optimizer: add it with its
  /// scheduler, or save() and load() are errors (unless the program's own object may hold it). Of a
  /// StepLR, also as an LRScheduler&, the number of steps is kept, all that changes in it; its
  /// interval and factor are the program's. A scheduler derived from LRScheduler says itself what
  /// it keeps, in save and load, its step_count_ too. ReduceLROnPlateauScheduler hides its state
  /// and cannot be added.
  ///
  /// An error for a name with a quote, a backslash or the end of a line, which LibTorch writes and
  /// cannot read, and for an LRScheduler& that is no StepLR.
  template <class T>
  TrainingCheckpoint& add(std::string name, T& object) {
    add_to(shared_, std::move(name), object);
    return *this;
  }

  /// Adds an object that each of several processes has its own of, such as the position in its part
  /// of the data.
  template <class T>
  TrainingCheckpoint& add_local(std::string name, T& object) {
    add_to(local_, std::move(name), object);
    return *this;
  }

  /// The file's name.
  const std::filesystem::path& path() const { return path_; }
  /// Whether there is such a file.
  /// Throws where that cannot be known, for example in a folder that may not be searched.
  bool exists() const;

  /// Writes the file, or throws and leaves the old one. Whenever the process is killed or the power
  /// cut, the old file or the new one is there, whole; see Note [Atomic files]. The new one has the
  /// old one's mode and, as far as the system allows it, its owner and group. Reads the devices.
  void save() const { save({local_part()}); }

  /// Fills what was added; false if there is no file. Tensors, and the weights of models, are
  /// filled where they lie, on their own device: optimizers, views and captured graphs see the new
  /// values. A tensor that is undefined, here or in the file, becomes what it was at save(). A
  /// number must fit its type; a float may be rounded. Where the file has tensors of a device that
  /// this machine has not (cuda:1, where there is one GPU), all come by way of the host: what is
  /// filled, and the states of optimizers, go on to their devices, what else an object's own load()
  /// reads lies in host memory.
  ///
  /// An error for a file that is damaged or does not fit what was added, which then stays as it
  /// was: a model of which the file has more weights does not fit, while whole objects in the file
  /// that were not added are passed over (an optimizer's, where a program only evaluates). Any
  /// changed byte is damage: the file ends with a checksum, see Note [The file of a
  /// TrainingCheckpoint]. All of it is read twice, first to check it. Where a device's memory runs
  /// out, all stays as it was, too, but for objects of the program's own whose load() does not see
  /// to it. Reads the devices.
  bool load();

  /// Returns what this process alone has, as bytes. For save() below. Where ShardedMasterWeights or
  /// an optimizer of their pieces were added, all processes call it together: it brings these to
  /// process 0, which then calls save().
  at::Tensor local_part() const;
  /// Writes the file on one of several processes, with the local part of each. An error, before the
  /// old file is touched, where there is none, or one that is no local_part().
  void save(const std::vector<at::Tensor>& local_parts) const;
  /// Loads the file on one of several processes, with the local part of process `rank`. An error
  /// unless it was written by as many `processes`.
  bool load(int64_t rank, int64_t processes);
  /// Loads the file without any local part: to go on with another number of processes, not bit for
  /// bit.
  bool load_shared();
  /// Returns the number of the file last saved or loaded, which differs between any two files.
  int64_t file_id() const { return file_id_; }

 private:
  struct Entry {
    std::string name;
    std::function<void(torch::serialize::OutputArchive&)> save;
    std::function<void(torch::serialize::InputArchive&, int64_t version)> load;
    /// For values, MasterWeights and shares: gives what brings back the value of now; nothing where
    /// what save() writes does.
    std::function<std::function<void()>()> keep = {};
    /// Where what save() writes does: gives what brings back all tensors of now, without memory of
    /// a device. For loads that ran out of that.
    std::function<std::function<void()>()> hold = {};
    /// For what lies on several processes: brings it to process 0.
    std::function<void()> gather = {};
    /// The learning rates that an optimizer has, and that a StepLR has set in its own.
    std::function<std::vector<double>()> rates = {}, scheduled_rates = {};
    /// Of the program's own: nobody knows what it saves.
    bool is_own = false;
  };
  using Undo = std::vector<std::function<void()>>;

  template <class T>
  void add_to(std::vector<Entry>& entries, std::string name, T& object);
  void add_entry(std::vector<Entry>& entries, Entry entry) const;
  void check_schedulers(const char* call) const;
  static void load_module(torch::nn::Module& module, torch::serialize::InputArchive& archive);
  void write(torch::serialize::OutputArchive& archive, const std::vector<Entry>& entries) const;
  void read(torch::serialize::InputArchive& archive, const std::vector<Entry>& entries,
            int64_t version, Undo& undo) const;
  static void load_entry(const Entry& entry, torch::serialize::InputArchive& archive,
                         int64_t version, Undo& undo);
  bool load_parts(const std::function<at::Tensor(torch::serialize::InputArchive&)>& local_part);

  std::filesystem::path path_;
  std::vector<Entry> shared_, local_;
  mutable int64_t file_id_ = 0;
};

namespace detail {
void save_any_optimizer(torch::optim::Optimizer& optimizer,
                        torch::serialize::OutputArchive& archive);
void load_any_optimizer(torch::optim::Optimizer& optimizer,
                        torch::serialize::InputArchive& archive);
void gather_optimizer(torch::optim::Optimizer& optimizer);
std::function<void()> keep_optimizer(torch::optim::Optimizer& optimizer);
std::function<void()> hold_optimizer(torch::optim::Optimizer& optimizer);
unsigned& step_count_of(torch::optim::LRScheduler& scheduler, const std::string& name);
std::vector<double> rates_of(const torch::optim::Optimizer& optimizer);
std::vector<double> rates_of(const torch::optim::LRScheduler& scheduler);

/// Whether a program has made the type, and it may hold an optimizer.
template <class T>
inline constexpr bool may_hold_optimizer =
    !std::derived_from<T, torch::nn::Module> && !std::derived_from<T, Masters> &&
    !std::derived_from<T, torch::optim::LRScheduler> && !std::is_same_v<T, GradScaler>;
}  // namespace detail

template <class T>
void TrainingCheckpoint::add_to(std::vector<Entry>& entries, std::string name, T& object) {
  using torch::serialize::InputArchive;
  using torch::serialize::OutputArchive;
  Entry entry{std::move(name), {}, {}};
  if constexpr (std::derived_from<T, torch::optim::Optimizer>) {
    entry.save = [&object](OutputArchive& archive) { detail::save_any_optimizer(object, archive); };
    entry.load = [&object](InputArchive& archive, int64_t) {
      detail::load_any_optimizer(object, archive);
    };
    entry.keep = [&object] { return detail::keep_optimizer(object); };
    entry.hold = [&object] { return detail::hold_optimizer(object); };
    entry.gather = [&object] { detail::gather_optimizer(object); };
    entry.rates = [&object] { return detail::rates_of(object); };
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
    entry.is_own = detail::may_hold_optimizer<T>;
    if constexpr (std::derived_from<T, torch::nn::Module>) {
      entry.hold = [&object] { return detail::hold_module(object); };
    }
    entry.save = [&object](OutputArchive& archive) { object.save(archive); };
    entry.load = [&object](InputArchive& archive, int64_t) {
      if constexpr (std::derived_from<T, torch::nn::Module>) {
        load_module(object, archive);
      } else {
        object.load(archive);
      }
    };
    if constexpr (std::derived_from<T, detail::Masters>) {
      entry.keep = [&object] { return object.keep(); };
      entry.gather = [&object] { object.gather(); };
    }
  } else if constexpr (std::derived_from<T, torch::optim::LRScheduler>) {
    static_assert(
        std::is_same_v<T, torch::optim::StepLR> || std::is_same_v<T, torch::optim::LRScheduler>,
        "TrainingCheckpoint::add cannot know what a scheduler of your own keeps: give it "
        "save(OutputArchive&) and load(InputArchive&), and keep its step_count_ in them");
    unsigned& steps = detail::step_count_of(object, entry.name);
    add_to(entries, std::move(entry.name), steps);
    entries.back().scheduled_rates = [&object] { return detail::rates_of(object); };
    return;
  } else if constexpr (std::derived_from<T, torch::optim::ReduceLROnPlateauScheduler>) {
    static_assert(
        sizeof(T) == 0,
        "TrainingCheckpoint::add cannot read LibTorch's ReduceLROnPlateauScheduler, which "
        "hides its state: write a scheduler of your own, with save(OutputArchive&) and "
        "load(InputArchive&)");
  } else {
    static_assert(
        std::is_same_v<T, at::Tensor> || std::is_arithmetic_v<T> || std::is_same_v<T, std::string>,
        "TrainingCheckpoint::add takes module holders, optimizers, what has "
        "save(OutputArchive&) and load(InputArchive&), tensors, numbers and strings");
    entry.save = [&object](OutputArchive& archive) {
      archive.write("value", detail::to_ivalue(object));
    };
    entry.load = [&object](InputArchive& archive, int64_t version) {
      c10::IValue value;
      archive.read("value", value);
      detail::from_ivalue(value, object, version);
    };
    entry.keep = [&object] { return detail::undo_of(object); };
  }
  add_entry(entries, std::move(entry));
}

}  // namespace TORCHAMP_NAMESPACE

#include "torchamp/detail/io/training_checkpoint_impl.h"  // IWYU pragma: export
