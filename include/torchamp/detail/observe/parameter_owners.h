// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <string>

#include "torchamp/detail/observe/named_parameters.h"
#include "torchamp/detail/observe/storage_map.h"

namespace torchamp::detail {

/// The dotted names of the modules that own `parameters`, by these; of a shared one, the first.
inline StorageMap<std::string> owners_of(const NamedParameters& parameters) {
  StorageMap<std::string> owners;
  for (const auto& [name, parameter] : parameters) {
    if (!parameter.defined() || !storage_of(parameter) || owners.find(storage_of(parameter))) {
      continue;
    }
    const auto dot = name.rfind('.');
    owners.set(parameter, dot == std::string::npos ? "" : name.substr(0, dot));
  }
  return owners;
}

}  // namespace torchamp::detail
