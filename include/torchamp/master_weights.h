// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief MasterWeights: a model in 16 bits, with fp32 copies of its weights for the optimizer.

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "torchamp/detail/masters/make_masters.h"
#include "torchamp/detail/masters/master_meta.h"
#include "torchamp/detail/tensor_pairs.h"
#include "torchamp/detail/tensors.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

/// How MasterWeights keeps its masters.
enum class MasterStorage {
  full,   ///< as tensors of their own: with the model's weights 6 bytes per weight
  split,  ///< only the 16 bits that the model's bf16 weights lack: with these, 4 bytes per weight.
          ///< For fused optimizers only
};

class MasterWeights;

namespace detail {

/// What both kinds of masters do.
class MastersOfModel : public Masters {
 public:
  std::vector<at::Tensor> parameters() const;
  void save(torch::serialize::OutputArchive& archive) const override { save(archive, at::kFloat); }
  void save(torch::serialize::OutputArchive& archive, at::ScalarType dtype) const;

 protected:
  /// `owner` begins errors.
  MastersOfModel(const char* owner, std::shared_ptr<torch::nn::Module> model);
  /// Throws where the masters' values are not at hand. `call` begins the error.
  virtual void check_saved(const std::string& call) const = 0;
  /// What a file gets for a parameter of the model.
  virtual at::Tensor value_of(const at::Tensor& parameter, at::ScalarType narrow) const = 0;

  const char* owner_;
  std::shared_ptr<torch::nn::Module> model_;
};

}  // namespace detail

/// Which parameters MasterWeights keeps in 16 bits, and which in fp32.
struct MasterWeightsOptions {
  using Masters = MasterWeights;  ///< what is made with them

  /// fp16 or bf16.
  at::ScalarType dtype = at::kHalf;

  /// Parameters, or modules with all that is in them, that stay fp32: `{"head", "embed.weight"}`.
  std::vector<std::string> keep_fp32 = {};

  /// Whether normalisation layers stay fp32: modules whose type is named …Norm, …Norm1d, 2d or 3d
  /// (BatchNorm2d, LayerNorm, GroupNorm, your own RMSNorm).
  bool keep_norms = true;

  /// How masters are kept; see MasterWeights.
  MasterStorage storage = MasterStorage::full;

  /// Whether backward adds each 16-bit gradient to the masters' gradients, in fp32, and frees it as
  /// soon as it has made it, so that take_gradients() is not needed, micro-batches add up in fp32,
  /// and the model's gradients take no memory. DistributedDataParallel averages them in fp32, or in
  /// its reduce_dtype.
  bool main_gradients = false;
};

/// A model kept in 16 bits, with fp32 masters of its weights for the optimizer. 16 bits are enough
/// to compute with, but not to add small updates to: a bf16 weight of 1 does not change by less
/// than 0.004. Weights take half the memory in forward and backward, activations too, and
/// AutocastGuard has no weights to cast.
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
/// Forward runs under an AutocastGuard of the same dtype, which casts between 16-bit and fp32
/// layers. Move the model to its device before; build the optimizer, and whatever keeps hold of the
/// model's parameters, after. Buffers stay as they are, and so do parameters that are not fp32,
/// fp16 or bf16. A parameter that needs no gradient gets no master.
///
/// With `.storage = MasterStorage::split` (bf16 only) the model's weight is the upper half of its
/// master, rounded (ties away from zero), and the 16 bits that it lacks lie beside it. parameters()
/// gives the model's weights, whose gradients become fp32 in take_gradients(). A fused optimizer
/// steps both halves, in pieces of bounded size, and computes what it would compute with masters of
/// their own from the same gradients; its state is fp32. There is nothing to copy to the model:
/// copy_to_model() is not needed. Any other optimizer is an error: of GradScaler::step and
/// unscale_, or, without a scaler, of copy_to_model(), and of take_gradients() when it is next
/// called. (LibTorch's SGD is found out by what it asks for, the weights' data(). A program that
/// does so between take_gradients() and dropping the gradients without a step calls zero_grad()
/// here, or the fused optimizer's, to drop them.) So is writing to the weights. Move the model
/// before; a model that is cloned, moved or cast later has rounded weights and no masters.
///
/// With `.main_gradients` the line with take_gradients() falls away: backward() does it, one
/// gradient at a time. What take_gradients() refuses is an error of backward() then. (The program's
/// own hook on a weight still sees the 16-bit gradient.)
///
/// Reads no device. One thread at a time.
class MasterWeights final : public detail::MastersOfModel {
 public:
  /// Casts the parameters of `model`, in place. Errors, before anything is changed: a dtype other
  /// than fp16 and bf16, or than bf16 for MasterStorage::split; a name in keep_fp32 that the model
  /// does not have; a trained parameter that expand() gave; one that has a master in other
  /// MasterWeights or ShardedMasterWeights which still exist. Where memory runs out, the model is
  /// as it was: until it returns, its weights are there before and after the cast, with split ones
  /// of an fp32 model 8 bytes per weight.
  explicit MasterWeights(std::shared_ptr<torch::nn::Module> model,
                         MasterWeightsOptions options = {});

  /// For a module holder, as TORCH_MODULE makes it.
  template <class Module>
  explicit MasterWeights(const torch::nn::ModuleHolder<Module>& model,
                         MasterWeightsOptions options = {})
      : MasterWeights(std::shared_ptr<torch::nn::Module>(model.ptr()), std::move(options)) {}

  /// What the optimizer updates and clip_grad_norm_ clips, in the model's order: the master of each
  /// parameter, or the parameter itself where it is fp32 or split. Without those that need no
  /// gradient.
  using MastersOfModel::parameters;

  /// What parameters() returns, with the names that the model has for them: for parameter groups.
  inline std::vector<std::pair<std::string, at::Tensor>> named_parameters() const override;

  /// After backward(): adds the model's 16-bit gradients to the masters' gradients, in fp32, and
  /// frees them. Once for each micro-batch accumulates in fp32, once for several of them in 16
  /// bits. With DistributedDataParallel::no_sync() once, after the last: only the model's gradients
  /// are averaged. Before GradScaler::unscale_: in the before_unscale() of an Accumulation. Two
  /// passes over all parameters (one where the masters have no gradients yet). An error if the
  /// optimizer has changed the masters since the last copy_to_model() (but LibTorch's own SGD,
  /// which writes where autograd does not see it, only by a GradScaler's step). A warning, once, if
  /// a fused optimizer's zero_grad() was called between two backward passes whose gradients these
  /// are. Finds nothing with `.main_gradients`.
  inline void take_gradients() override;

  /// Drops the gradients, both of the model and of parameters(): before backward(), instead of the
  /// optimizer's zero_grad(), which leaves those that the model still holds, and after an exception
  /// between backward() and take_gradients(). (Accumulation::discard() does it, too.)
  void zero_grad();

  /// After the optimizer's step, taken or skipped: gives the model the masters' values, rounded to
  /// 16 bits. One pass over all parameters of a device; split masters need none. An error, before
  /// anything is changed, if masters of their own are what they were at the last call, no gradients
  /// were taken since, and the model holds some: take_gradients() was forgotten. A warning, once,
  /// if others have written to the model's weights since the last call: what they wrote is lost.
  inline void copy_to_model() override;

  /// For torch::save(masters, path): what torch::save(model, path) writes, but with the masters'
  /// values, in fp32. A plain fp32 model reads it with torch::load. (An override of save() in a
  /// module of the model is not called.)
  /// With a `dtype` behind the archive, weights that the model keeps in 16 bits are written in that
  /// one; the others, and buffers, as they are. torch::load takes such a file for the dtypes of the
  /// model that it loads: read it into a model of the same ones.
  using MastersOfModel::save;

  /// For torch::load(masters, path): fills masters and model, in place, from what save() or
  /// torch::save of such a model has written, in any dtype. All or nothing; an error, too, for a
  /// file that holds more weights than the model has, and for a buffer or frozen weight of which
  /// several elements are one number in memory. Until it returns, the values that it reads take 4
  /// bytes per weight more on the device, those of split weights 8.
  inline void load(torch::serialize::InputArchive& archive) override;

  /// For TrainingCheckpoint: what brings back the weights of now, which it keeps on the host. Not
  /// for longer than these masters live.
  inline std::function<void()> keep() override;

  /// What they were made with.
  const MasterWeightsOptions& options() const { return options_; }

 private:
  struct Weight {
    std::string name;
    at::Tensor parameter;  // of the model
    bool is_narrow;        // kept in 16 bits
    bool is_split;         // with the other 16 beside it
    at::Tensor master;     // undefined where it needs no gradient, is split or is not narrow
    std::shared_ptr<detail::MainGradient> main = nullptr;  // where backward takes gradients
    detail::GivenWeight given = {};                        // the parameter, at the last copy

    at::Tensor value() const;
    void set(const at::Tensor& value, const detail::NarrowWeight& halves) const;
    void check_not_half_stepped(const char* call) const;
  };
  inline void check_saved(const std::string& call) const override { check_split(call); }
  inline at::Tensor value_of(const at::Tensor& parameter, at::ScalarType narrow) const override;
  void check_split(const std::string& call, bool unwritten = true) const;
  void check_taken() const;
  int64_t master_versions() const;
  void note_copied();
  void note_given();
  void warn_of_written_model();
  void warn_of_left_gradients();

  MasterWeightsOptions options_;
  std::vector<Weight> weights_;
  detail::TensorPairs model_from_masters_;
  int64_t copied_versions_ = 0;  // of the masters, at the last copy_to_model()
  bool warned_of_written_ = false, warned_of_left_ = false;
  bool was_taken_ = false;  // gradients were, or load() was called, since then
  std::shared_ptr<const void> token_ = std::make_shared<char>();  // what weights go by
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

#include "torchamp/detail/masters/master_weights_impl.h"  // IWYU pragma: export
