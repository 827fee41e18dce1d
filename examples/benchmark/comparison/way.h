// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/ScalarType.h>

#include <string>
#include <vector>

#include "support/arguments.h"

/// One of the ways to train a model, or to predict with it, that are compared. Its fields are
/// words, as on a worker's command line.
struct Way {
  std::string language = "cpp";  ///< cpp, python
  /// fp32, tf32 (fp32 with TF32 products), raw (at::autocast by hand), torch, standard, audited
  /// (policies); for inference also torch_kept, standard_kept (policies, the weights' casts kept),
  /// narrow_kept (all ops in 16 bits), cast (the model itself was cast)
  std::string casts = "standard";
  std::string dtype = "bf16";       ///< fp16, bf16; without casts fp32, tf32
  std::string optimizer = "stock";  ///< stock, fused, muon (with a fused one)
  std::string launch = "eager";     ///< eager, captured, compiled (torch.compile: Python)
  /// plain, masters, recomputed, together (weights are cast together), unfused (LibTorch's own
  /// forward() of torch::nn::Linear adds each bias in an op), kept (host memory); of several
  /// processes parallel, sharded, both also with _16 (gradients are sent in 16 bits), zero
  std::string variant = "plain";

  bool is_python() const { return language == "python"; }
  /// Whether nothing is cast.
  bool is_fp32() const { return casts == "fp32" || is_tf32(); }
  bool is_tf32() const { return casts == "tf32"; }
  bool is_captured() const { return launch == "captured"; }
  bool is_compiled() const { return launch == "compiled"; }

  /// "torchamp standard, fp16, fused, captured"
  std::string name() const {
    if (shares()) return shared_name();
    std::string text = is_python()          ? "Python torch.amp"
                       : casts == "raw"     ? "at::autocast by hand"
                       : casts == "audited" ? "torchamp, audited policy"
                                            : "torchamp";
    if (casts.starts_with("torch") && !is_python()) text = "torchamp, torch policy";
    if (casts == "narrow_kept") text = "torchamp, all ops in 16 bits";
    if (casts.ends_with("_kept")) text += ", casts kept";
    if (is_fp32() || casts == "cast") text = is_python() ? "Python" : "LibTorch";
    text += (casts == "cast" ? ", model cast to " : ", ") + dtype;
    if (optimizer == "fused") text += ", fused";
    if (optimizer == "muon") text += ", Muon";
    if (is_captured() || is_compiled()) text += ", " + launch;
    if (variant == "kept") text += ", memory kept";
    if (variant == "masters") text += ", master weights";
    if (variant == "recomputed") text += ", recomputed";
    if (variant == "together") text += ", weights cast together";
    if (variant == "unfused") text += ", biases apart";
    return text;
  }

  /// Whether several processes share the work.
  bool shares() const {
    return variant.starts_with("parallel") || variant.starts_with("sharded") || variant == "zero";
  }

  friend bool operator==(const Way&, const Way&) = default;

 private:
  /// "Python fully_shard, bf16, sent in fp32"
  std::string shared_name() const {
    const char* const kind = variant == "zero"                 ? " ZeroRedundancyOptimizer"
                             : variant.starts_with("parallel") ? " DistributedDataParallel"
                             : is_python()                     ? " fully_shard"
                                                               : " ShardedMasterWeights";
    return (is_python() ? "Python" : "torchamp") + (kind + (", " + dtype)) + ", sent in " +
           (variant.ends_with("_16") ? dtype : "fp32");
  }
};

inline c10::ScalarType dtype_of(const Way& way) {
  return way.dtype == "fp16" ? c10::kHalf : way.dtype == "bf16" ? c10::kBFloat16 : c10::kFloat;
}

/// All ways, Python's first: the others are compared with them. `compiled`: also torch.compile.
/// `host`: on a CPU, which has ways that keep the host's memory. A GPU has ways in TF32. The first
/// dtype has all ways there, and each other dtype the plain ones with a fused optimizer.
inline std::vector<Way> all_ways(const std::vector<std::string>& dtypes, bool python, bool compiled,
                                 bool host) {
  std::vector<Way> ways;
  const auto is_full = [&](const std::string& dtype) {
    return host || dtype == "fp32" || dtype == dtypes.front();
  };
  const auto add_tf32 = [&](const char* language) {
    if (host) return;
    for (const char* launch : {"eager", "captured"}) {
      ways.push_back({language, "tf32", "tf32", "fused", launch});
    }
  };
  const auto add_variant = [&](const char* language, const char* casts, const std::string& dtype,
                               const char* variant) {
    ways.push_back({language, casts, dtype, "fused", "eager", variant});
  };
  const auto add = [&](const char* language, const char* casts, const std::string& dtype) {
    const bool by_hand = casts == std::string("raw");
    if (is_full(dtype)) ways.push_back({language, casts, dtype, "stock", "eager"});
    if (by_hand) return;
    ways.push_back({language, casts, dtype, "fused", "eager"});
    ways.push_back({language, casts, dtype, "fused", "captured"});
    if (host && casts != std::string("torch")) add_variant(language, casts, dtype, "kept");
  };
  if (python) {
    add("python", "fp32", "fp32");
    add_tf32("python");
    for (const std::string& dtype : dtypes) {
      add("python", "torch", dtype);
      if (!host && is_full(dtype)) ways.push_back({"python", "torch", dtype, "muon", "eager"});
      if (host) add_variant("python", "torch", dtype, "kept");
      if (compiled && is_full(dtype)) {
        ways.push_back({"python", "torch", dtype, "fused", "compiled"});
      }
    }
  }
  add("cpp", "fp32", "fp32");
  add_tf32("cpp");
  for (const std::string& dtype : dtypes) {
    if (!is_full(dtype)) {
      add("cpp", "standard", dtype);
      continue;
    }
    for (const char* casts : {"raw", "torch", "standard", "audited"}) add("cpp", casts, dtype);
    for (const char* variant : {"masters", "recomputed"}) {
      add_variant("cpp", "standard", dtype, variant);
    }
    if (host) continue;
    for (const char* launch : {"eager", "captured"}) {
      ways.push_back({"cpp", "standard", dtype, "muon", launch});
      ways.push_back({"cpp", "standard", dtype, "fused", launch, "together"});
      ways.push_back({"cpp", "standard", dtype, "fused", launch, "unfused"});
    }
  }
  return ways;
}

/// All ways to predict, Python's first. `compiled` and `host`: as in all_ways().
inline std::vector<Way> inference_ways(const std::vector<std::string>& dtypes, bool python,
                                       bool compiled, bool host) {
  std::vector<Way> ways;
  const auto add = [&](const char* language, const std::string& casts, const std::string& dtype) {
    ways.push_back({language, casts, dtype});
    const bool is_best = language == std::string("python") || casts == "fp32" || casts == "raw" ||
                         casts.ends_with("_kept") || casts == "cast";
    if (host && is_best) ways.push_back({language, casts, dtype, "stock", "eager", "kept"});
  };
  if (python) {
    add("python", "fp32", "fp32");
    for (const std::string& dtype : dtypes) {
      for (const char* casts : {"torch", "cast"}) add("python", casts, dtype);
      if (compiled) ways.push_back({"python", "torch", dtype, "stock", "compiled"});
    }
  }
  add("cpp", "fp32", "fp32");
  for (const std::string& dtype : dtypes) {
    for (const char* casts :
         {"raw", "torch", "standard", "torch_kept", "standard_kept", "narrow_kept", "cast"}) {
      add("cpp", casts, dtype);
    }
  }
  return ways;
}

/// All ways of several processes, Python's first.
inline std::vector<Way> shared_ways(const std::vector<std::string>& dtypes, bool python) {
  std::vector<Way> ways;
  const auto add = [&](const char* language, const std::string& dtype, const char* variant) {
    ways.push_back({language, "standard", dtype, "fused", "eager", variant});
  };
  for (const std::string& dtype : dtypes) {
    for (const char* variant : {"parallel", "parallel_16", "sharded", "sharded_16", "zero"}) {
      if (python) add("python", dtype, variant);
    }
  }
  for (const std::string& dtype : dtypes) {
    for (const char* variant : {"parallel", "parallel_16", "sharded", "sharded_16"}) {
      add("cpp", dtype, variant);
    }
  }
  return ways;
}
