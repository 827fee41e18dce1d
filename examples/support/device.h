// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <torch/cuda.h>
#include <torch/utils.h>
#include <torchamp/autocast.h>
#include <torchamp/cpu_products.h>

#include <string>

#include "arguments.h"
#include "cpu_features.h"
#include "format.h"
#include "product_times.h"

namespace support {

/// The options --device and --dtype, which the larger examples share.
struct DeviceOptions {
  std::string device = "auto";
  std::string dtype = "auto";

  void add_to(Arguments& arguments) {
    arguments.add_choice("--device", {"auto", "cpu", "cuda"}, "Default: CUDA where there is one.",
                         device);
    arguments.add_choice("--dtype", {"auto", "fp16", "bf16"},
                         "The lower precision. Default: fp16 on CUDA, bf16 on a CPU.", dtype);
  }

  /// Throws UsageError for a device that is not there.
  c10::Device chosen_device() const {
    if (device == "cpu") return c10::kCPU;
    if (torch::cuda::is_available()) return c10::kCUDA;
    if (device == "auto") return c10::kCPU;
    throw UsageError("--device: there is no CUDA device, or this LibTorch was built without CUDA");
  }

  c10::ScalarType chosen_dtype() const {
    if (dtype == "auto") return chosen_device().is_cpu() ? c10::kBFloat16 : c10::kHalf;
    return dtype == "bf16" ? c10::kBFloat16 : c10::kHalf;
  }
};

inline std::string short_name(c10::ScalarType dtype) {
  return dtype == c10::kBFloat16 ? "bf16" : dtype == c10::kHalf ? "fp16" : "fp32";
}

/// What to expect of `dtype` on `device`, in one line or a few; on a CPU products are timed.
inline std::string describe(c10::Device device, c10::ScalarType dtype) {
  if (device.is_cuda()) return "Device: CUDA.\n";
  const std::string name = short_name(dtype);
  std::string units;
  for (const std::string& unit : fast_matmul_units(dtype)) {
    units += (units.empty() ? "" : ", ") + unit;
  }
  const std::string text =
      format("Device: CPU (%s, %d thread%s), ", cpu_name().c_str(), torch::get_num_threads(),
             torch::get_num_threads() == 1 ? "" : "s");
  { const torchamp::AutocastGuard selects_kernels(device, dtype); }
  const std::string measured = describe(time_products(dtype), dtype) + "\n";
  if (torchamp::cpu_products(dtype) == torchamp::CpuProducts::libtorch) {
    const std::string by = units.empty() ? "" : " (" + units + ")";
    return text + "with LibTorch's " + name + " products" + by + ".\n" + measured;
  }
  return text + "without fast " + name +
         " products: torchamp computes them in\nfp32. A step takes " +
         "about as long as in fp32 and keeps half of the activations' memory; it rounds as on a "
         "GPU.\n" +
         measured;
}

}  // namespace support
