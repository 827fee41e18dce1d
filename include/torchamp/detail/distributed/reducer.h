// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/nn/module.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/default_comm_hooks.hpp>
#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "torchamp/detail/distributed/collective.h"
#include "torchamp/detail/distributed/main_reducer.h"
#include "torchamp/detail/distributed/reduce_dtype.h"
#include "torchamp/detail/libtorch.h"
#include "torchamp/detail/overlay/kept_weights.h"
#include "torchamp/detail/overlay/runtime.h"
#include "torchamp/detail/split_bits.h"
#include "torchamp/detail/split_weight.h"
#include "torchamp/version.h"

namespace torchamp::detail {

/// What of an expanded tensor lies in memory: it cannot be written to as it is.
inline at::Tensor without_repetition(at::Tensor tensor) {
  if (tensor.layout() != at::kStrided) return tensor;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.stride(d) == 0 && tensor.size(d) > 1) tensor = tensor.narrow(d, 0, 1);
  }
  return tensor;
}

/// Of split weights, both halves.
inline void broadcast(const char* call, const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                      const std::vector<at::Tensor>& tensors, int root) {
  constexpr std::size_t together = 250 << 20;
  const at::NoGradGuard no_grad;
  if (tensors.empty()) return;
  std::vector<at::Tensor> all, whole;
  for (const at::Tensor& tensor : tensors) all.push_back(without_repetition(tensor));
  for (const at::Tensor& tensor : tensors) {
    const SplitWeight* const split = split_of(tensor);
    if (!split) continue;
    all.push_back(in_memory_order(split->low).view(at::kByte));  // backends lack int16
    if (split->is_unwritten(tensor)) whole.push_back(tensor);
  }
  for (const at::Tensor& tensor : tensors) {  // whose masters are alike as well
    if (WeightMeta* const meta = weight_meta_of(tensor)) meta->same_writes -= version_of(tensor);
  }
  collective(call, [&] { c10d::broadcast_coalesced(group, all, together, root); });
  for (const at::Tensor& tensor : tensors) {
    if (WeightMeta* const meta = weight_meta_of(tensor)) meta->same_writes += version_of(tensor);
  }
  for (const at::Tensor& tensor : whole) split_of(tensor)->note_version(tensor);
  if (KeptWeights* const kept = kept_weights()) kept->changed(tensors);
}

/// How gradients are averaged, see DistributedDataParallelOptions.
struct ReducerOptions {
  int64_t bucket_bytes;
  bool find_unused_parameters;
  std::optional<c10d::BuiltinCommHookType> communication;
  std::optional<at::ScalarType> reduce_dtype;
};

// Note [What a window has used]
// With find_unused_parameters, c10d's Reducer marks what a backward pass uses, within no_sync() as
// well, until a pass averages. It takes each mark for a gradient, and fails where there is none, so
// the marks go where gradients do: with those that are averaged without it, and those that the
// program has dropped.

/// What only some versions of LibTorch give c10d's Reducer: see Note [Versions of LibTorch].
struct ReducerExtras {
#if TORCHAMP_LIBTORCH < 207
  explicit ReducerExtras(const std::vector<std::size_t>& bucket_limits) : limits(bucket_limits) {}
  std::tuple<std::vector<std::size_t>> limits;
#else
  explicit ReducerExtras(const std::vector<std::size_t>&) {}
  std::tuple<> limits;
#endif
#if TORCHAMP_LIBTORCH < 208
  std::tuple<> last;
#elif TORCHAMP_LIBTORCH < 211
  std::tuple<bool, bool> last;  // skip_all_reduce_unused_params, use_python_reducer
#else
  std::tuple<bool, bool, std::vector<int64_t>> last;  // and bucket_bytes_cap_list
#endif
};

/// c10d's Reducer, for windows that end without it.
class WindowReducer final : public c10d::Reducer {
 public:
  using Reducer::Reducer;

  /// Drops the marks of all parameters, or of those without a gradient.
  void drop_marks(bool all) {
    const std::lock_guard lock(mutex_);
    if (!local_used_map_.defined()) return;
    auto* const marks = local_used_map_.mutable_data_ptr<int32_t>();
    for (std::size_t p = 0; p < params_.size(); ++p) {
      if (all || !params_[p].unsafeGetTensorImpl()->grad().defined()) marks[p] = 0;
    }
  }
};

/// c10d's Reducer over the parameters of a module that need gradients; a MainGradientReducer where
/// there are main gradients.
class GradientReducer {
 public:
  GradientReducer(const torch::nn::Module& module, c10::intrusive_ptr<c10d::ProcessGroup> group,
                  const ReducerOptions& options)
      : group_(std::move(group)), options_(options) {
    check_reduce_dtype("DistributedDataParallel", options.reduce_dtype);
    TORCH_CHECK_VALUE(!options.communication || !options.reduce_dtype,
                      "DistributedDataParallel: communication and reduce_dtype both say how "
                      "gradients are sent. Pass one of them.");
    const bool has_main_gradients = MainGradientReducer::is_for(module);
    TORCH_CHECK_VALUE(!options.communication || !has_main_gradients,
                      "DistributedDataParallel: communication is for c10d's Reducer, which does "
                      "not average main gradients. Pass reduce_dtype.");
    std::vector<at::Tensor> parameters;
    std::unordered_map<std::size_t, std::string> names;
    for (const auto& item : module.named_parameters()) {
      const auto is_same = [&](const at::Tensor& other) { return other.is_same(item.value()); };
      if (!item.value().requires_grad() || std::ranges::any_of(parameters, is_same)) continue;
      names.emplace(parameters.size(), item.key());
      parameters.push_back(item.value());
    }
    TORCH_CHECK(!parameters.empty(),
                "DistributedDataParallel: no parameter of the model needs a gradient.");
    constexpr const char* call = "DistributedDataParallel";
    collective(call,
               [&] { c10d::verify_params_across_processes(group_, parameters, std::nullopt); });
    broadcast(call, group_, module.parameters(), 0);
    broadcast(call, group_, module.buffers(), 0);

    if (has_main_gradients) {
      main_ = std::make_shared<MainGradientReducer>(
          module, group_, options.reduce_dtype.value_or(at::kFloat), options.bucket_bytes,
          options.find_unused_parameters);
      main_->hook();
      return;
    }
    // A first, small bucket starts the communication early. Backward comes to the last parameters
    // first.
    const auto bytes = static_cast<std::size_t>(options.bucket_bytes);
    const std::size_t first = std::min<std::size_t>(c10d::kDefaultFirstBucketBytes, bytes);
    std::vector<bool> sparse(parameters.size(), false);
    auto assigned = c10d::compute_bucket_assignment_by_size(parameters, {first, bytes}, sparse);
    auto& buckets = std::get<0>(assigned);
    std::ranges::reverse(buckets);
    const ReducerExtras extras(std::get<1>(assigned));
    // No views: the Optimizer::zero_grad of C++ detaches gradients in place, an error for a view.
    constexpr bool gradient_as_bucket_view = false;
    reducer_ = std::apply(
        [](auto&&... arguments) {
          return std::make_shared<WindowReducer>(std::forward<decltype(arguments)>(arguments)...);
        },
        std::tuple_cat(std::tuple(std::move(parameters), std::move(buckets)), extras.limits,
                       std::tuple(group_, std::move(sparse), options.bucket_bytes,
                                  options.find_unused_parameters, gradient_as_bucket_view,
                                  std::move(names), static_cast<int64_t>(first)),
                       extras.last));
    // Where it looks for unused parameters, it reports to a logger without asking for one.
    logger_ = std::make_shared<c10d::Logger>(reducer_);
    reducer_->set_logger(logger_);
    if (options.communication) reducer_->register_builtin_comm_hook(*options.communication);
    if (options.reduce_dtype) {
      reducer_->register_comm_hook(std::make_unique<ReduceInDtype>(group_, *options.reduce_dtype));
    }
  }

  /// After the first backward, the buckets are arranged again, in the order in which it computed
  /// the gradients.
  void before_forward() {
    if (main_) return;
    reducer_->drop_marks(/*all=*/false);
    reducer_->prepare_for_forward();
    if (!reducer_->should_rebuild_buckets()) return;
    collective("DistributedDataParallel::forward", [&] { reducer_->rebuild_buckets(); });
  }

  /// The next backward averages. `outputs` of the forward are where unused parameters are looked
  /// for.
  void prepare_for_backward(const std::vector<at::Tensor>& outputs) {
    main_ ? main_->prepare_for_backward() : reducer_->prepare_for_backward(outputs);
  }
  const c10::intrusive_ptr<c10d::ProcessGroup>& group() const { return group_; }

  /// Averages the gradients as they are, of the module that was given.
  void average_now(const torch::nn::Module& module) {
    if (main_) return main_->average_now();
    const auto own = std::make_shared<MainGradientReducer>(
        module, group_, dtype_on_the_wire(module), options_.bucket_bytes, true);
    own->average_now();
    reducer_->drop_marks(/*all=*/true);
  }

 private:
  at::ScalarType dtype_on_the_wire(const torch::nn::Module& module) const {
    if (options_.reduce_dtype) return *options_.reduce_dtype;
    if (options_.communication == c10d::BuiltinCommHookType::FP16_COMPRESS) return at::kHalf;
    const std::vector<at::Tensor> parameters = module.parameters();
    const bool is_wide = std::ranges::any_of(parameters, [](const at::Tensor& parameter) {
      return parameter.requires_grad() && parameter.scalar_type() == at::kDouble;
    });
    return is_wide ? at::kDouble : at::kFloat;
  }

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  ReducerOptions options_;
  std::shared_ptr<MainGradientReducer> main_;  // or
  std::shared_ptr<WindowReducer> reducer_;
  std::shared_ptr<c10d::Logger> logger_;
};

}  // namespace torchamp::detail
