// SPDX-License-Identifier: BSD-3-Clause
// Puts the mirror before LibTorch's CUDA kernels when the library is loaded. See README.md.
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <torch/version.h>

#include <algorithm>
#include <memory>
#include <set>

#include "cuda_on_host/stand_in.h"
#include "op.h"

namespace mirror {

using at::Tensor;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

namespace {

/// Calls `use` with the device's current stream. The legacy one, whose handle is nullptr, is that
/// of the current device.
template <class Use>
auto with_stream(c10::DeviceIndex device, const Use& use) {
  const c10::cuda::CUDAGuard guard(device);
  return use(static_cast<void*>(c10::cuda::getCurrentCUDAStream(device).stream()));
}

bool captures(c10::DeviceIndex device) {
  return with_stream(device, stand_in_captures);
}
void finish(c10::DeviceIndex device) {
  with_stream(device, stand_in_finish);
}

template <class F>
void submit(c10::DeviceIndex device, F work) {
  with_stream(device, [&](void* stream) {
    stand_in_submit(
        stream, [](void* data) { (*static_cast<F*>(data))(); }, new F(std::move(work)),
        [](void* data) { delete static_cast<F*>(data); });
  });
}

/// The devices of a call's CUDA tensors, or of its argument `device`, in order.
std::vector<c10::DeviceIndex> devices_of(const Stack& arguments) {
  std::vector<c10::DeviceIndex> result;
  const auto add = [&](c10::Device device) {
    if (!device.is_cuda()) return;
    const auto index = device.has_index() ? device.index() : c10::cuda::current_device();
    if (std::find(result.begin(), result.end(), index) == result.end()) result.push_back(index);
  };
  for (const IValue& argument : arguments)
    for_each_tensor(argument, [&](const Tensor& tensor) { add(tensor.device()); });
  for (const IValue& argument : arguments) {
    if (result.empty() && argument.isDevice()) add(argument.toDevice());
  }
  return result;
}

bool any_on_cpu(const Stack& arguments) {
  bool result = false;
  for (const IValue& argument : arguments)
    for_each_tensor(argument, [&](const Tensor& tensor) { result |= tensor.is_cpu(); });
  return result;
}

Draw draw_of(const Op& op, const Stack& arguments, c10::DeviceIndex device) {
  std::optional<at::Generator> generator;
  if (op.generator >= 0) {
    const IValue& given = arguments[static_cast<std::size_t>(op.generator)];
    if (given.isGenerator()) generator = given.toGenerator();
  }
  if (!generator) generator = at::globalContext().defaultGenerator({at::kCUDA, device});
  auto* const cuda = at::check_generator<at::CUDAGeneratorImpl>(generator);
  const std::lock_guard<std::mutex> lock(cuda->mutex_);
  const at::PhiloxCudaState state = cuda->philox_cuda_state(0);
  if (state.captured_) {
    return {.captured_seed = state.seed_.ptr,
            .captured_position = state.offset_.ptr,
            .position = state.offset_intragraph_};
  }
  return {.seed = state.seed_.val, .position = state.offset_.val};
}

/// A CUDA tensor with a CPU tensor's values.
Tensor on_cuda(const Tensor& values, c10::DeviceIndex device) {
  if (values.layout() == at::kSparse) {
    const c10::Device cuda(at::kCUDA, device);
    return at::_sparse_coo_tensor_unsafe(on_cuda(values._indices(), device),
                                         on_cuda(values._values(), device), values.sizes(),
                                         values.options().device(cuda), values.is_coalesced());
  }
  const Tensor result =
      at::empty(values.sizes(), values.options().device(at::Device(at::kCUDA, device)));
  if (values.numel() > 0) store(on_host(result), values);
  return result;
}

// ---- What a GPU refuses ------------------------------------------------------------------------

/// Of the ops whose CUDA code is not run here, which would refuse by itself: those without 16-bit
/// kernels, as tests/parity/autocast_cuda.txt has it from a GPU.
bool is_linear_algebra(const std::string& name) {
  return name.find("linalg_") != std::string::npos;
}
/// cuFFT takes fp16 where every size that is transformed is a power of two.
bool is_fourier_transform(const std::string& name) {
  return name.starts_with("_fft_");
}

/// The sizes of a transform's input, or of its result if that is real and larger, in `dim`.
bool are_powers_of_two(const OperatorHandle& handle, const Stack& arguments) {
  const Arguments named(handle.schema(), arguments);
  const Tensor self = named.tensor("self");
  const std::vector<int64_t> dims = named.ints("dim");
  return std::all_of(dims.begin(), dims.end(), [&](int64_t dim) {
    const bool is_halved = handle.operator_name().name == "aten::_fft_c2r" && dim == dims.back();
    const int64_t size = is_halved ? named.integer("last_dim_size") : self.size(dim);
    return size > 0 && (size & (size - 1)) == 0;
  });
}

void refuse_as_a_gpu_does(const Op& op, const Stack& arguments) {
  for (const IValue& argument : arguments) {
    for_each_tensor(argument, [&](const Tensor& tensor) {
      if (!tensor.defined()) return;
      const at::ScalarType dtype = at::toRealValueType(tensor.scalar_type());
      if (dtype != at::kHalf && dtype != at::kBFloat16) return;
      TORCH_CHECK_NOT_IMPLEMENTED(!is_linear_algebra(op.name), '"', op.name,
                                  "\" not implemented for '", tensor.scalar_type(), "'");
      if (!is_fourier_transform(op.name)) return;
      TORCH_CHECK(dtype == at::kHalf, "Unsupported dtype ", tensor.scalar_type());
      TORCH_CHECK(are_powers_of_two(op.handle, arguments),
                  "cuFFT only supports dimensions whose sizes are powers of two when computing in "
                  "half precision");
    });
  }
}

/// A transform's result in fp16, as cuFFT gives it: the CPU computes in fp32.
Tensor as_cufft_gives(const Tensor& result, const Stack& arguments) {
  const bool is_half = at::toRealValueType(arguments.front().toTensor().scalar_type()) == at::kHalf;
  if (!is_half || !result.defined()) return result;
  return result.to(result.is_complex() ? at::kComplexHalf : at::kHalf);
}

class Mirrored final : public c10::OperatorKernel {
 public:
  explicit Mirrored(std::unique_ptr<Op> op) : op_(std::move(op)) {}

  void operator()(const OperatorHandle& handle, c10::DispatchKeySet keys, Stack* stack) {
    const Stack arguments(stack->end() - static_cast<std::ptrdiff_t>(op_->arguments()),
                          stack->end());
    const std::vector<c10::DeviceIndex> devices = devices_of(arguments);
    // Copies from and to the host are real, and their further work consists of separate calls.
    const bool is_real = op_->name == "copy_" && any_on_cpu(arguments);
    if (devices.empty() || is_real || writes_to_sparse(arguments))
      return op_->original.callBoxed(handle, keys, stack);
    fill_freed_memory();
    const c10::DeviceIndex device = devices.front();
    const bool is_captured = captures(device);
    if (op_->reads_back && !is_captured) {
      refuse_as_a_gpu_does(*op_, arguments);
      return compute_at_once(stack, arguments, device);
    }

    const auto call = std::make_shared<Call>(*op_);
    if (op_->is_random) call->draw = draw_of(*op_, arguments, device);
    for (const std::size_t i : op_->written) {
      for_each_tensor(arguments[i], [&](const Tensor& tensor) {
        if (!is_on_cuda(tensor) || tensor.layout() != at::kStrided || tensor.numel() == 0) return;
        auto* const memory = static_cast<char*>(stand_in_alias(tensor.const_data_ptr()));
        call->written.push_back({memory, bytes_spanned(tensor), {}});
      });
    }
    if (!call->written.empty()) submit(device, [call] { call->keep_written(); });

    op_->original.callBoxed(handle, keys, stack);
    try {
      describe(*call, arguments, *stack, is_captured || stand_in_is_late());
    } catch (const std::exception& error) {
      return no_values(op_->name, error.what());
    }
    // Each device may go on after the original's events, and none waits for what comes now.
    const bool at_once = devices.size() > 1 && stand_in_is_late();
    for (const c10::DeviceIndex one : devices) {
      if (at_once) finish(one);
    }
    submit(device, [call] { call->compute(); });
    if (at_once) finish(device);
  }

 private:
  bool writes_to_sparse(const Stack& arguments) const {
    return std::any_of(op_->written.begin(), op_->written.end(), [&](std::size_t i) {
      const IValue& argument = arguments[i];
      return argument.isTensor() && argument.toTensor().defined() &&
             argument.toTensor().is_sparse();
    });
  }

  /// What the call works on: the arguments' and the results' memory.
  void describe(Call& call, const Stack& arguments, const Stack& stack, bool later) const {
    const PlainCalls plain;
    std::set<const void*> now;
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      const bool is_written =
          std::find(op_->written.begin(), op_->written.end(), i) != op_->written.end();
      call.arguments.push_back(map_tensors(arguments[i], [&](const Tensor& tensor) {
        if (later && !is_written && tensor.defined() && tensor.is_cpu()) return tensor.clone();
        const Tensor alias = on_host(tensor);
        if (is_written && alias.defined() && alias.numel() > 0) now.insert(alias.const_data_ptr());
        return alias;
      }));
      if (static_cast<int>(i) == op_->generator) call.arguments.back() = IValue();
    }
    // An out= argument that was resized lies elsewhere now.
    std::erase_if(call.written,
                  [&](const Call::Kept& kept) { return now.count(kept.memory) == 0; });
    const auto& returns = op_->schema().returns();
    const std::size_t first = stack.size() - returns.size();
    for (std::size_t i = 0; i < returns.size(); ++i) {
      const bool is_argument = returns[i].alias_info() != nullptr;
      call.outputs.push_back(is_argument ? IValue() : map_tensors(stack[first + i], on_host));
    }
  }

  /// The original would read from the device what its kernels, which compute nothing, have left.
  void compute_at_once(Stack* stack, const Stack& arguments, c10::DeviceIndex device) const {
    c10::cuda::getCurrentCUDAStream(device).synchronize();
    Call call(*op_);
    for (const IValue& argument : arguments)
      call.arguments.push_back(map_tensors(argument, on_host));
    call.compute();
    torch::jit::drop(*stack, op_->arguments());
    const std::size_t returns = op_->schema().returns().size();
    TORCH_CHECK(call.results.size() == returns, op_->name, ": the CPU could not compute it");
    const PlainCalls plain;
    for (const IValue& result : call.results) {
      stack->push_back(map_tensors(result, [&](const Tensor& tensor) {
        const bool is_transform = is_fourier_transform(op_->name);
        const Tensor given = is_transform ? as_cufft_gives(tensor, arguments) : tensor;
        return given.defined() ? on_cuda(given, device) : given;
      }));
    }
  }

  std::unique_ptr<Op> op_;
};

// ---- Which ops ---------------------------------------------------------------------------------

using Names = std::set<std::string>;

/// They make, size and describe tensors, or their host code has the whole effect.
const Names left_alone = {"empty",
                          "empty_strided",
                          "resize_",
                          "_resize_output_",
                          "set_",
                          "record_stream",
                          "_local_scalar_dense",
                          "_pin_memory",
                          "is_pinned",
                          "is_set_to",
                          "_efficientzerotensor",
                          "_copy_from",
                          "_copy_from_and_resize",
                          "as_strided",
                          "view",
                          "alias",
                          "_assert_async",
                          "_fused_sdp_choice",
                          "_cudnn_init_dropout_state",
                          "_cudnn_rnn_flatten_weight",
                          "_use_cudnn_ctc_loss",
                          "_use_miopen_ctc_loss",
                          "_has_same_storage_numel"};
/// Without a kernel of CUDA's own, but with host code that computes.
const Names also_mirrored = {"copy_", "convolution_backward"};
const Names data_shaped = {"_coalesce",
                           "nonzero",
                           "masked_select",
                           "_unique",
                           "_unique2",
                           "unique_dim",
                           "unique_consecutive",
                           "unique_dim_consecutive",
                           "_linalg_svd",
                           "_linalg_eigh",
                           "_linalg_det",
                           "_linalg_slogdet",
                           "_linalg_solve_ex",
                           "linalg_cholesky_ex",
                           "linalg_inv_ex",
                           "linalg_lu_factor_ex",
                           "linalg_qr",
                           "linalg_eig",
                           "_fft_r2c",
                           "_fft_c2r",
                           "_fft_c2c"};
/// Of sparse tensors, what kernels of their own do; the rest is made of dense ops.
const Names of_sparse_tensors = {"_coalesce", "add.out", "add_.Tensor", "sub_.Tensor"};
/// Sums of products are rounded once, as tensor cores do. Before 2.15 the CPU's fused SGD loses
/// steps of 16-bit parameters; CUDA's does not.
const Names products_in_fp32 = {"mm",
                                "addmm",
                                "addmm_",
                                "_addmm_activation",
                                "bmm",
                                "dot",
                                "vdot",
                                "mv",
                                "addmv",
                                "addmv_",
                                "baddbmm",
                                "baddbmm_",
                                "addbmm",
                                "addr",
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 15
                                "_fused_sgd_",
#endif
                                "convolution_backward"};

bool returns_view(const c10::FunctionSchema& schema) {
  return std::any_of(schema.returns().begin(), schema.returns().end(), [](const auto& result) {
    return result.alias_info() && !result.alias_info()->isWrite();
  });
}

bool returns_numbers(const c10::FunctionSchema& schema) {
  return std::any_of(schema.returns().begin(), schema.returns().end(), [](const auto& result) {
    return result.type()->isSubtypeOf(*c10::NumberType::get()) ||
           result.type()->isSubtypeOf(*c10::BoolType::get());
  });
}

std::unique_ptr<Op> describe_op(const OperatorHandle& handle, c10::DispatchKey key) {
  const c10::OperatorName& full = handle.operator_name();
  const std::string base = full.name.substr(std::string("aten::").size());
  const std::string name = full.overload_name.empty() ? base : base + "." + full.overload_name;
  if (left_alone.count(base) != 0 || returns_view(handle.schema())) return nullptr;
  const bool is_dense = key == c10::DispatchKey::CUDA;
  if (!is_dense && of_sparse_tensors.count(name) == 0) return nullptr;
  const bool is_chosen = is_dense && also_mirrored.count(base) != 0 && name == base;
  if (!handle.hasKernelForDispatchKey(key) && !is_chosen) return nullptr;

  auto op = std::make_unique<Op>(
      Op{.handle = handle, .original = handle.getComputedKernelForDispatchKey(key), .name = name});
  op->substitute = substitute_for(name);
  if (!op->substitute && full.overload_name == "out") op->substitute = substitute_for(base);
  if (!op->substitute && full.overload_name == "dtype_out")
    op->substitute = substitute_for(base + ".dtype");
  if (!op->substitute && !handle.hasComputedKernelForDispatchKey(
                             is_dense ? c10::DispatchKey::CPU : c10::DispatchKey::SparseCPU))
    return nullptr;
  op->in_fp32 = !op->substitute && products_in_fp32.count(base) != 0;

  const auto& arguments = handle.schema().arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].alias_info() && arguments[i].alias_info()->isWrite()) op->written.push_back(i);
    if (arguments[i].name() == "generator") op->generator = static_cast<int>(i);
  }
  const auto tags = handle.getTags();
  op->is_random = !op->substitute &&
                  (op->generator >= 0 || std::find(tags.begin(), tags.end(),
                                                   at::Tag::nondeterministic_seeded) != tags.end());
  op->reads_back = !op->substitute && op->written.empty() &&
                   (data_shaped.count(base) != 0 || returns_numbers(handle.schema()));
  return op;
}

class NoWarnings final : public c10::WarningHandler {
 public:
  void process(const c10::Warning&) override {}
};

void install() {
  // Each registration warns that it takes the place of another.
  NoWarnings none;
  c10::WarningHandler* const before = c10::WarningUtils::get_warning_handler();
  c10::WarningUtils::set_warning_handler(&none);
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const std::optional<OperatorHandle> handle = dispatcher.findSchema(name);
    for (const auto key : {c10::DispatchKey::CUDA, c10::DispatchKey::SparseCUDA}) {
      std::unique_ptr<Op> op = handle ? describe_op(*handle, key) : nullptr;
      if (!op) continue;
      auto kernel = std::make_unique<Mirrored>(std::move(op));
      new c10::RegistrationHandleRAII(dispatcher.registerImpl(
          name, key, c10::KernelFunction::makeFromBoxedFunctor(std::move(kernel)), std::nullopt,
          nullptr, "cuda_on_host"));  // for good
    }
  }
  c10::WarningUtils::set_warning_handler(before);
  at::globalContext().setSDPUseCuDNN(false);  // cuDNN's attention is of its graph API
}

const bool installed = [] {
  install();
  return true;
}();

}  // namespace

}  // namespace mirror
