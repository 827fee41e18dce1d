// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Generator.h>

namespace simulated {

/// A device's default generator. With a CPU generator's seed it draws the CPU's numbers.
const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator new_generator(c10::DeviceIndex device);

/// The CPU generator that draws for one of the above, for a kernel to draw from.
at::Generator drawing(const at::Generator& generator);

}  // namespace simulated
