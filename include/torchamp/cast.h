// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <ostream>
#include <string_view>

namespace torchamp {

/// What happens to the floating-point tensor arguments of an op in an autocast region.
/// Only tensors of the region's device are cast, and fp64 never is.
enum class Cast : std::uint8_t {
  native,           ///< LibTorch's own autocast kernel for the device decides
  lower_precision,  ///< cast to the region's dtype (fp16 on CUDA, bf16 on CPU, unless told
                    ///< otherwise)
  fp32,             ///< cast to fp32; an op with an optional output dtype is asked for fp32 instead
  promote,          ///< cast to the widest dtype among the arguments
  unchanged,        ///< left as they are, also in the ops that this op calls
};

/// "native", "lower_precision", "fp32", "promote" or "unchanged".
constexpr std::string_view to_string(Cast cast) {
  switch (cast) {
    case Cast::native:
      return "native";
    case Cast::lower_precision:
      return "lower_precision";
    case Cast::fp32:
      return "fp32";
    case Cast::promote:
      return "promote";
    case Cast::unchanged:
      return "unchanged";
  }
  return "?";
}

inline std::ostream& operator<<(std::ostream& out, Cast cast) {
  return out << to_string(cast);
}

}  // namespace torchamp
