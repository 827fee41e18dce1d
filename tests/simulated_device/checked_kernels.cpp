// SPDX-License-Identifier: BSD-3-Clause
#include <torch/version.h>

#include <array>
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "simulated_device/device.h"
#include "simulated_device/kernel.h"
#include "simulated_device/register.h"

namespace simulated {

namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;

/// The arguments of a call, by name.
class Arguments {
 public:
  Arguments(const c10::OperatorHandle& op, const torch::jit::Stack& stack)
      : schema_(op.schema()), first_(&stack[stack.size() - schema_.arguments().size()]) {}

  const c10::IValue* find(const char* name) const {
    const auto index = schema_.argumentIndexWithName(name);
    return index ? first_ + *index : nullptr;
  }
  Tensors list(const char* name) const { return find(name)->toTensorVector(); }
  Tensor tensor(const char* name) const {
    const c10::IValue* const value = find(name);
    return value && value->isTensor() ? value->toTensor() : Tensor();
  }

 private:
  const c10::FunctionSchema& schema_;
  const c10::IValue* first_;
};

void check_fp32_scalar(const char* op, const char* name, const Tensor& tensor) {
  TORCH_CHECK(is_on_device(tensor), op, ": ", name, " must be on the device, is on ",
              tensor.device());
  TORCH_CHECK(tensor.numel() == 1, op, ": ", name, " must be a 1-element tensor.");
  TORCH_CHECK(tensor.scalar_type() == at::kFloat, op, ": ", name, " must be a float tensor.");
}

/// CUDA's kernels compare the flag with 1; what it is beside 0 is a mistake. Called by the kernel,
/// with its arguments on the host.
void check_flag(const c10::OperatorHandle& op, const torch::jit::Stack& host) {
  const Tensor flag = Arguments(op, host).tensor("found_inf");
  if (!flag.defined()) return;
  const float value = *flag.const_data_ptr<float>();
  TORCH_CHECK(value == 0.F || value == 1.F, op.schema().name().substr(6), ": found_inf is ", value,
              ", neither 0 nor 1");
}

void run_on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* host) {
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), host);
}

// ---- Of the scaler -----------------------------------------------------------------------------

/// CUDA's kernel checks fp64 gradients as fp32. Called by it, with its arguments on the host.
void flag_what_fp32_cannot_hold(const Arguments& host) {
  for (const Tensor& gradient : host.list("self")) {
    if (gradient.scalar_type() != at::kDouble) continue;
    if (gradient.to(at::kFloat).isinf().any().item<bool>()) host.tensor("found_inf").fill_(1.);
  }
}

void unscale(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  constexpr const char* name = "_amp_foreach_non_finite_check_and_unscale_";
  const Arguments args(op, *stack);
  const Tensors gradients = args.list("self");
  check_fp32_scalar(name, "inv_scale", args.tensor("inv_scale"));
  check_fp32_scalar(name, "found_inf", args.tensor("found_inf"));
  for (const Tensor& g : gradients) {
    TORCH_CHECK(is_on_device(g), name, ": one of scaled_grads was not a tensor on the device.");
    TORCH_CHECK(g.device() == gradients[0].device(), name,
                ": scaled_grads must be on the same device.");
    TORCH_CHECK(g.layout() == at::kStrided, name,
                ": one of scaled_grads was not a strided tensor.");
    TORCH_CHECK_NOT_IMPLEMENTED(
        g.scalar_type() == at::kDouble || g.scalar_type() == at::kFloat ||
            g.scalar_type() == at::kHalf,
        "\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for '",
        c10::toString(g.scalar_type()), "'");
  }
  run_kernel(op, stack, [op](torch::jit::Stack* host) {
    check_flag(op, *host);
    flag_what_fp32_cannot_hold(Arguments(op, *host));
    run_on_the_cpu(op, host);
  });
}

/// It reads the lower half of the fp32 factor as a number of the gradients' dtype.
void unscale_as_old_mps(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run_kernel(op, stack, [op](torch::jit::Stack* host) {
    const Arguments args(op, *host);
    const Tensor factor = args.tensor("inv_scale").reshape({1});
    for (Tensor& gradient : args.list("self")) {
      if (!gradient.isfinite().all().item<bool>()) args.tensor("found_inf").fill_(1.);
      gradient.mul_(factor.view(gradient.scalar_type())[0]);
    }
    torch::jit::drop(*host, op.schema().arguments().size());
  });
}

/// What has registered that kernel; null while the device lacks it.
std::unique_ptr<torch::Library>& unscale_kernel() {
  static auto& library = *new std::unique_ptr<torch::Library>;
  return library;
}
template <c10::BoxedKernel::BoxedKernelFunction* kernel = &unscale>
std::unique_ptr<torch::Library> make_unscale_kernel() {
  auto library = std::make_unique<torch::Library>(
      torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  library->impl("_amp_foreach_non_finite_check_and_unscale_",
                torch::CppFunction::makeFromBoxedFunction<kernel>());
  return library;
}

void update_scale(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  constexpr const char* name = "_amp_update_scale_";
  const Arguments args(op, *stack);
  check_fp32_scalar(name, "current_scale", args.tensor("self"));
  check_fp32_scalar(name, "found_inf", args.tensor("found_inf"));
  const Tensor tracker = args.tensor("growth_tracker");
  TORCH_CHECK(is_on_device(tracker) && tracker.numel() == 1 && tracker.scalar_type() == at::kInt,
              name, ": growth_tracker must be an int32 tensor of 1 element on the device.");
  run_kernel(op, stack);
}

// ---- Of the optimizers -------------------------------------------------------------------------

/// The lists whose tensors go through the kernel together.
constexpr std::array<const char*, 6> lists{"self",        "grads",           "exp_avgs",
                                           "exp_avg_sqs", "max_exp_avg_sqs", "state_sums"};

/// 2.11's CPU kernel of SGD stores 16-bit parameters only in part; CUDA's has no such fault.
bool is_lost_on_the_cpu(const std::string& op, const Tensor& param) {
  return TORCH_VERSION_MINOR < 15 && op.find("sgd") != std::string::npos &&
         (param.scalar_type() == at::kHalf || param.scalar_type() == at::kBFloat16);
}

/// Runs the CPU's kernel on fp32 copies of the lists and copies back what it wrote.
void run_in_fp32(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  std::vector<std::pair<Tensor, Tensor>> copies;
  const std::size_t count = op.schema().arguments().size();
  for (std::size_t i = stack->size() - count; i < stack->size(); ++i) {
    if (!(*stack)[i].isTensorList()) continue;
    Tensors wide;
    for (const Tensor& t : (*stack)[i].toTensorVector()) {
      wide.push_back(t.to(at::kFloat));
      copies.emplace_back(t, wide.back());
    }
    (*stack)[i] = wide;
  }
  run_on_the_cpu(op, stack);
  for (const auto& [narrow, wide] : copies) narrow.copy_(wide);
}

void fused(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::string whole = op.schema().name().substr(6);
  const char* const name = whole.c_str();
  const Arguments args(op, *stack);
  const Tensors params = args.list("self");
  if (params.empty()) return;
  const auto check_beside_params = [&](const char* list, bool same_dtype) {
    if (!args.find(list)) return;
    const Tensors tensors = args.list(list);
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const Tensor &t = tensors[i], &p = params[i];
      TORCH_CHECK(is_on_device(t) && t.device() == params[0].device(), name, ": ", list, "[", i,
                  "] is on ", t.device(), ", the parameters on ", params[0].device());
      TORCH_CHECK(!same_dtype || t.scalar_type() == params[0].scalar_type(), name, ": ", list, "[",
                  i, "] is of ", t.scalar_type(), ", the parameters of ", params[0].scalar_type());
      TORCH_CHECK(
          t.sizes() == p.sizes() && t.strides() == p.strides() && t.is_non_overlapping_and_dense(),
          name, ": ", list, "[", i, "] has other strides than its parameter: ", t.strides(), ", ",
          p.strides());
    }
  };
  for (const char* const list : lists) check_beside_params(list, true);
  if (op.schema().name().find("sgd") != std::string::npos) {
    check_beside_params("momentum_buffer_list", true);
  }
  if (args.find("state_steps")) {
    for (const Tensor& step : args.list("state_steps")) {
      TORCH_CHECK(is_on_device(step) && step.device() == params[0].device(), name,
                  ": a step count is on ", step.device(), ", the parameters on ",
                  params[0].device());
      TORCH_CHECK(step.scalar_type() == at::kFloat && step.numel() == 1, name,
                  ": a step count must be of fp32 and have one element");
    }
  }
  // CUDA's take one on the host by reading it, and a graph then holds it for good.
  if (const Tensor lr = args.tensor("lr"); lr.defined()) {
    TORCH_CHECK(lr.device() == params[0].device(), name, ": lr is a tensor on ", lr.device(),
                ", the parameters are on ", params[0].device());
  }
  if (const Tensor flag = args.tensor("found_inf"); flag.defined()) {
    check_fp32_scalar(name, "found_inf", flag);
  }
  if (const Tensor scale = args.tensor("grad_scale"); scale.defined()) {
    check_fp32_scalar(name, "grad_scale", scale);
  }
  run_kernel(op, stack, [op, wide = is_lost_on_the_cpu(whole, params[0])](torch::jit::Stack* host) {
    check_flag(op, *host);
    wide ? run_in_fp32(op, host) : run_on_the_cpu(op, host);
  });
}

}  // namespace

WithoutUnscaleKernel::WithoutUnscaleKernel() {
  unscale_kernel().reset();
}
WithoutUnscaleKernel::~WithoutUnscaleKernel() {
  unscale_kernel() = make_unscale_kernel();
}

UnscaleKernelOfOldMps::UnscaleKernelOfOldMps() {
  unscale_kernel().reset();
  unscale_kernel() = make_unscale_kernel<&unscale_as_old_mps>();
}
UnscaleKernelOfOldMps::~UnscaleKernelOfOldMps() {
  unscale_kernel().reset();
  unscale_kernel() = make_unscale_kernel();
}

void register_checked_kernels(torch::Library& aten) {
  unscale_kernel() = make_unscale_kernel();
  aten.impl("_amp_update_scale_", torch::CppFunction::makeFromBoxedFunction<&update_scale>());
  for (const std::string name :
       {"_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"}) {
    aten.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&fused>());
    aten.impl((name + ".tensor_lr").c_str(), torch::CppFunction::makeFromBoxedFunction<&fused>());
  }
}

}  // namespace simulated
