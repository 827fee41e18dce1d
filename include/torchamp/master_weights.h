// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Extra. MasterWeights: a model in 16 bits, with fp32 masters of its weights for the
/// optimizer.

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/serialize/archive.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/extras/masters/make_masters.h"
#include "torchamp/detail/extras/masters/split_weight.h"
#include "torchamp/detail/extras/shared/master_meta.h"
#include "torchamp/detail/extras/shared/tensor_pairs.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

/// How MasterWeights stores its masters.
enum class MasterStorage {
  full,   ///< as separate fp32 tensors: with the model's weights 6 bytes per weight
  split,  ///< only the lower 16 bits; the model's bf16 weights are the upper 16 bits: 4 bytes per
          ///< weight. For fused optimizers only
};

class MasterWeights;

namespace detail {

/// The common part of both kinds of masters.
class MastersOfModel : public Masters {
 public:
  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> result;
    for (auto& [name, tensor] : named_parameters()) result.push_back(std::move(tensor));
    return result;
  }
  void save(torch::serialize::OutputArchive& archive) const override { save(archive, at::kFloat); }
  void save(torch::serialize::OutputArchive& archive, at::ScalarType dtype) const;
  TORCHAMP_BODY void load(torch::serialize::InputArchive& archive) override;
  TORCHAMP_BODY std::function<void()> keep() override;

 protected:
  /// A parameter of the model.
  struct Weight {
    std::string name;
    at::Tensor parameter;
    bool is_narrow;         // kept in 16 bits
    bool is_split = false;  // its lower 16 bits are stored separately
    /// The optimizer's tensor, if it is not the parameter: the master, or this process's shard.
    at::Tensor master{};
    std::optional<std::size_t> index{};    // of a sharded one, in the layout
    GivenWeight given{};                   // the parameter, at the last copy
    std::shared_ptr<MainGradient> main{};  // with main_gradients: adds gradients in backward

    SplitWeight* split() const { return split_of(master.defined() ? master : parameter); }
    /// The beginning of an error message.
    auto in(const std::string& call) const {
      return [this, &call] { return c10::str(call, ": the weight '", name, "'"); };
    }
  };

  /// `owner` begins error messages.
  MastersOfModel(const char* owner, std::shared_ptr<torch::nn::Module> model)
      : owner_(owner), model_(std::move(model)) {
    TORCH_CHECK_VALUE(model_, owner_, ": the model is null. Pass one that is not.");
  }
  /// Lists the model's parameters, each once. Throws if masters cannot be made.
  template <class Options>
  void list_weights(const Options& options, bool main_gradients);
  /// The weight of this parameter of the model; null if there is none.
  const Weight* weight_of(const at::Tensor& parameter) const;
  void warn_of_written_model();

  /// Throws if the masters' values cannot be saved now. `call` begins the message.
  virtual void check_saved(const std::string& call) const = 0;
  /// The value of a weight in a file, in its dtype.
  virtual at::Tensor value_of(const Weight& weight) const = 0;
  /// Sets the value of a weight in `parameter` and in its master. `parameter` is or becomes the
  /// model's parameter.
  virtual void set(const Weight& weight, const at::Tensor& value,
                   const at::Tensor& parameter) const = 0;
  /// Whether the masters were copied to the model since the last change.
  virtual bool is_copied() const { return true; }
  TORCHAMP_BODY virtual void note_copied();

  const char* owner_;
  std::shared_ptr<torch::nn::Module> model_;
  std::vector<Weight> weights_;
  bool warned_of_written_ = false;
};

}  // namespace detail

/// Options of MasterWeights.
struct MasterWeightsOptions {
  using Masters = MasterWeights;  ///< made with these options

  /// fp16 or bf16.
  at::ScalarType dtype = at::kHalf;

  /// Names of parameters that stay fp32, or of modules whose parameters all stay fp32:
  /// `{"head", "embed.weight"}`.
  std::vector<std::string> keep_fp32 = {};

  /// Whether normalisation layers stay fp32: modules whose type is named …Norm, …Norm1d, 2d or 3d
  /// (BatchNorm2d, LayerNorm, GroupNorm, your own RMSNorm).
  bool keep_norms = true;

  /// How masters are stored; see MasterWeights.
  MasterStorage storage = MasterStorage::full;

  /// True: backward adds each 16-bit gradient to the masters' gradients, in fp32, and frees it at
  /// once. Then take_gradients() is not needed, micro-batches accumulate in fp32, and the model's
  /// gradients take no memory. DistributedDataParallel averages the masters' gradients in fp32, or
  /// in its reduce_dtype.
  bool main_gradients = false;
};

/// Keeps a model in 16 bits, with fp32 masters of its weights for the optimizer. 16 bits are enough
/// to compute, but not to add small updates: a bf16 weight of 1 cannot change by less than 0.004.
/// Weights and activations take half the memory in forward and backward, and AutocastGuard has no
/// weights to cast.
///
///     torchamp::MasterWeights masters(model, {.dtype = torch::kBFloat16});
///     torchamp::FusedAdamW optimizer(masters.parameters(), torch::optim::AdamWOptions(1e-3));
///     ...
///     masters.zero_grad();
///     scaler.scale(loss).backward();
///     masters.take_gradients();
///     scaler.unscale_(optimizer);
///     torchamp::clip_grad_norm_(masters.parameters(), 1.);
///     scaler.step(optimizer);
///     scaler.update();
///     masters.copy_to_model();
///
/// Run forward under an AutocastGuard of the same dtype: it casts between 16-bit and fp32 layers.
/// First move the model to its device, then create this object, then the optimizer and other
/// objects that refer to the model's parameters. Buffers, and parameters that are not fp32, fp16 or
/// bf16, are unchanged. A parameter that does not require grad is cast, but has no master.
///
/// With `.storage = MasterStorage::split` (bf16 only) the model's weight is the upper half of its
/// master, rounded (ties away from zero), and the lower 16 bits are stored separately. parameters()
/// returns the model's weights; take_gradients() makes their gradients fp32. A fused optimizer
/// steps both halves, in chunks of bounded size. For the same gradients the results equal the
/// results with full masters; the optimizer's state is fp32. copy_to_model() is not needed. A model
/// that is cloned, moved or cast later has rounded weights and no masters.
///
/// Split masters allow only fused optimizers. With any other optimizer, GradScaler::step and
/// unscale_ throw; without a scaler, copy_to_model() or the next take_gradients() throws. If the
/// program writes to a split weight, the next take_gradients(), step or copy_to_model() throws.
///
/// LibTorch's SGD writes to weights through data(), which LibTorch does not count. So MasterWeights
/// treats data() and detach() of a split weight as a possible write. If the program calls one of
/// them after take_gradients(), and no fused step follows, then copy_to_model() or the next
/// take_gradients() throws. To drop gradients without a step, call zero_grad() of this
/// class or of the fused optimizer.
///
/// With `.main_gradients` backward() does the work of take_gradients(), one gradient at a time,
/// with the same errors. The program's own hook on a weight still gets the 16-bit gradient.
///
/// Only load() and keep() synchronise. One thread at a time.
class MasterWeights final : public detail::MastersOfModel {
 public:
  /// Casts the parameters of `model`, in place. Errors, before anything is changed: a dtype other
  /// than fp16 and bf16 (with MasterStorage::split: other than bf16); a name in keep_fp32 that the
  /// model does not have; a trained parameter that is a result of expand(); two parameters in the
  /// same memory if one of them is trained (one parameter that several modules share is not an
  /// error); a parameter with a master in other MasterWeights or ShardedMasterWeights that still
  /// exist.
  ///
  /// Until the constructor returns, the weights exist in both dtypes: with split masters of an fp32
  /// model, 8 bytes per weight. If memory runs out, the model is unchanged.
  explicit MasterWeights(std::shared_ptr<torch::nn::Module> model,
                         MasterWeightsOptions options = {});

  /// For a module holder, as TORCH_MODULE makes it.
  template <class Module>
  explicit MasterWeights(const torch::nn::ModuleHolder<Module>& model,
                         MasterWeightsOptions options = {})
      : MasterWeights(std::shared_ptr<torch::nn::Module>(model.ptr()), std::move(options)) {}

  /// The tensors for the optimizer and clip_grad_norm_, in the model's order: the master of each
  /// parameter, or the parameter itself if it is fp32 or split. Parameters that do not require grad
  /// are left out.
  using MastersOfModel::parameters;

  /// parameters(), with their names in the model: for parameter groups.
  TORCHAMP_BODY std::vector<std::pair<std::string, at::Tensor>> named_parameters() const override;

  /// After backward(): adds the model's 16-bit gradients to the masters' gradients, in fp32, and
  /// frees them. Call it before GradScaler::unscale_. If you call it after each micro-batch,
  /// gradients accumulate in fp32. If you call it once after several micro-batches, they accumulate
  /// in 16 bits. With an Accumulation, call it in before_unscale(); the Accumulation itself takes
  /// the gradients of earlier micro-batches. With DistributedDataParallel::no_sync(), call it once,
  /// after the last micro-batch, because gradients that the masters already have are not averaged.
  /// Does nothing with `.main_gradients`.
  ///
  /// Takes two passes over all parameters (one if the masters have no gradients yet). Error: the
  /// optimizer has changed the masters since the last copy_to_model(). (LibTorch's own SGD writes
  /// without changing versions, so its steps are detected only if a GradScaler took them.) If a
  /// fused optimizer's zero_grad() was called while the model had gradients, and backward() has
  /// then added to them, take_gradients() warns once: call zero_grad() of this class instead.
  TORCHAMP_BODY void take_gradients() override;

  /// Clears the gradients of the model and of parameters(). Call it before backward(), instead of
  /// the optimizer's zero_grad(), which does not clear the model's gradients. Also call it after an
  /// exception between backward() and take_gradients(); Accumulation::discard() calls it for you.
  void zero_grad();

  /// After the optimizer's step, taken or skipped: copies the masters to the model, rounded to 16
  /// bits. One pass over all parameters per device; not needed for split masters. Error, before
  /// anything is changed: the program has forgotten take_gradients(). This means that the model has
  /// gradients, and since the last copy_to_model() no gradients were taken and no full master has
  /// changed.
  ///
  /// If the program has written to the model's weights since the last copy_to_model(), these values
  /// are lost, with one warning. There is no warning for a weight that was written an even number
  /// of times, because a program may write averages and then restore the weights.
  TORCHAMP_BODY void copy_to_model() override;

  /// For torch::save(masters, path): writes the same file as torch::save(model, path), with the
  /// masters' fp32 values. torch::load reads it into a plain fp32 model. An override of save() in a
  /// module of the model is not called.
  ///
  /// With a `dtype` after the archive, weights that the model keeps in 16 bits are written in that
  /// dtype; other weights and buffers are unchanged. torch::load does not convert dtypes: read such
  /// a file into a model of the same dtypes.
  using MastersOfModel::save;

  /// For torch::load(masters, path): fills masters and model, in place, from a file of save(), or
  /// of torch::save of a model with the same names and shapes, in any floating-point dtype. If it
  /// throws, nothing is changed. Errors include: a file with more weights than the model; complex
  /// numbers for real weights, or fractions for integers; a buffer or frozen weight whose elements
  /// share memory. Synchronises: until it returns, it holds a copy of the weights on the host.
  TORCHAMP_BODY void load(torch::serialize::InputArchive& archive) override;

  /// For TrainingCheckpoint: returns a function that restores the present weights from a copy on
  /// the host. Valid while these masters live.
  TORCHAMP_BODY std::function<void()> keep() override;

  /// The options of construction.
  const MasterWeightsOptions& options() const { return options_; }

 private:
  void check_saved(const std::string& call) const override { check_split_weights(call); }
  TORCHAMP_BODY at::Tensor value_of(const Weight& weight) const override;
  TORCHAMP_BODY void set(const Weight& weight, const at::Tensor& value,
                         const at::Tensor& parameter) const override;
  bool is_copied() const override { return master_versions() == copied_versions_; }
  TORCHAMP_BODY void note_copied() override;
  void note_stepped();
  void check_split_weights(const std::string& call, bool unwritten = true) const;
  void check_taken() const;
  void check_takes_gradients() const;
  int64_t master_versions() const;
  void warn_of_left_gradients();

  MasterWeightsOptions options_;
  detail::TensorPairs model_from_masters_;
  int64_t copied_versions_ = 0;  // of the masters, at the last copy_to_model()
  bool warned_of_left_ = false;
  bool was_taken_ = false;  // gradients were taken, or load() was called, since then
  std::shared_ptr<const void> token_ =
      std::make_shared<char>();  // identifies these masters in the weights' records
};

namespace detail {

/// Calls save(), for torch::save.
inline torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                   const Masters& masters) {
  masters.save(archive);
  return archive;
}
/// Calls load(), for torch::load.
inline torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                  Masters& masters) {
  masters.load(archive);
  return archive;
}

}  // namespace detail

}  // namespace TORCHAMP_NAMESPACE

#if TORCHAMP_BODIES
#include "torchamp/detail/extras/masters/master_weights-inl.h"  // IWYU pragma: export
#endif
