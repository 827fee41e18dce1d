// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Core. For the one source file of a program that compiles torchamp.

/// @file
/// If TORCHAMP_COMPILED is defined, the other headers only declare the large functions that are no
/// templates, and this header defines them. Define TORCHAMP_COMPILED in all source files of a
/// program, and include this header in exactly one of them. With CMake, link torchamp::library or
/// torchamp::compiled instead: each of them does both. Source files that use torchamp then compile
/// almost as fast as without torchamp, with the same results. If TORCHAMP_COMPILED is not defined,
/// it is an error to include another header of torchamp before this one.

#if defined(TORCHAMP_BODIES) && !defined(TORCHAMP_COMPILED)
#error torchamp/compiled.h comes after another header of torchamp, which has taken this program for one that is compiled \
    header-only. Define TORCHAMP_COMPILED for all source files of the program, or link torchamp::library or torchamp::compiled.
#endif

#ifndef TORCHAMP_COMPILED
#define TORCHAMP_COMPILED
#endif

#include "torchamp/accumulate.h"
#include "torchamp/autocast.h"
#include "torchamp/cpu_products.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/master_weights.h"
#include "torchamp/non_finite_op.h"
#include "torchamp/optim.h"
#include "torchamp/policy.h"
#include "torchamp/policy_text.h"
#include "torchamp/training_checkpoint.h"
#include "torchamp/training_step.h"
#include "torchamp/version.h"

// Every header with such definitions: see .github/CONTRIBUTING.md, Compiled once.
/// @cond
#undef TORCHAMP_BODIES
#define TORCHAMP_BODIES 1
/// @endcond
#include "torchamp/detail/core/autocast/environment-inl.h"
#include "torchamp/detail/core/autocast/policy_scope-inl.h"
#include "torchamp/detail/core/autocast/region-inl.h"
#include "torchamp/detail/core/check_order/order_check-inl.h"
#include "torchamp/detail/core/gradients/separate-inl.h"
#include "torchamp/detail/core/optim/fused_optimizer-inl.h"
#include "torchamp/detail/core/policy/policy-inl.h"
#include "torchamp/detail/core/policy/rules-inl.h"
#include "torchamp/detail/core/policy/schema-inl.h"
#include "torchamp/detail/core/products/cpu_products-inl.h"
#include "torchamp/detail/core/scaler/grad_scaler-inl.h"
#include "torchamp/detail/core/scaler/grad_scaler_archive-inl.h"
#include "torchamp/detail/extras/accumulation/accumulation-inl.h"
#include "torchamp/detail/extras/accumulation/sum-inl.h"
#include "torchamp/detail/extras/io/training_checkpoint-inl.h"
#include "torchamp/detail/extras/masters/master_weights-inl.h"
#include "torchamp/detail/extras/observe/non_finite_op-inl.h"
#include "torchamp/detail/extras/training/training_step-inl.h"

namespace TORCHAMP_NAMESPACE {

namespace detail {
inline const bool environment_names_files = let_environment_name_files();
}

/// @cond
#define TORCHAMP_DEFINE_OPTIMIZER(kernel) template class FusedOptimizerOf<detail::kernel>;
TORCHAMP_FOR_EACH_KERNEL(TORCHAMP_DEFINE_OPTIMIZER)
#undef TORCHAMP_DEFINE_OPTIMIZER
/// @endcond
}  // namespace TORCHAMP_NAMESPACE
