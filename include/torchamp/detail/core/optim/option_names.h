// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "torchamp/detail/core/base/text.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

// Note [Whose archive it is]
// An archive of an optimizer does not name the optimizer, and LibTorch's load ignores options that
// it does not read. So the names of the options distinguish optimizers. A fused optimizer loads an
// archive only if its own type of options reads each option that the archive has. The type itself
// throws if an option is missing. (LibTorch's Adam and AdamW have the same names, and load each
// other's archives.)

/// The names of the options in an archive.
using OptionNames = std::set<std::string>;

inline OptionNames names_in(torch::serialize::InputArchive& options) {
  const std::vector<std::string> keys = options.keys();
  return {keys.begin(), keys.end()};
}

/// The names that a type of options writes.
template <class Options>
const OptionNames& option_names() {
  static const OptionNames names = [] {
    torch::serialize::OutputArchive written;
    Options(/*lr=*/0.).serialize(written);
    std::stringstream stream;
    written.save_to(stream);
    torch::serialize::InputArchive read;
    read.load_from(stream);
    return names_in(read);
  }();
  return names;
}

/// Calls f(number of parameters, archive of options) for each group in the archive of an optimizer.
/// Throws for an archive that no optimizer of LibTorch has written.
template <class F>
void for_each_archived_group(torch::serialize::InputArchive& archive, const F& f) {
  torch::serialize::InputArchive all;
  at::Tensor count;
  archive.read("param_groups", all);
  all.read("param_groups/size", count);
  for (int64_t g = 0; g < count.item<int64_t>(); ++g) {
    torch::serialize::InputArchive group, options;
    at::Tensor size;  // a new one each time: read() into one that is there changes the archive's
    all.read("param_groups/" + std::to_string(g), group);
    group.read("params/size", size);
    group.read("options", options);
    f(size.item<int64_t>(), options);
  }
}

/// Throws if a group in the archive of an optimizer has other options than `Options`.
template <class Options>
void check_option_names(torch::serialize::InputArchive& archive) {
  for_each_archived_group(archive, [](int64_t, torch::serialize::InputArchive& options) {
    const OptionNames& own = option_names<Options>();
    for (const std::string& name : names_in(options)) {
      TORCHAMP_CHECK(own.contains(name), "it has the option '", name, "' of another optimizer");
    }
  });
}

}  // namespace TORCHAMP_NAMESPACE::detail
