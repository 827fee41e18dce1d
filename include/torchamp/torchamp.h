// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "torchamp/autocast.h"
#include "torchamp/autocast_state.h"
#include "torchamp/captured_step.h"
#include "torchamp/cast.h"
#include "torchamp/clip_grad.h"
#include "torchamp/custom_function.h"
#include "torchamp/fused_optimizer.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/module_policy.h"
#include "torchamp/op_names.h"
#include "torchamp/ops.h"
#include "torchamp/optim.h"
#include "torchamp/policy.h"
#include "torchamp/policy_text.h"
#include "torchamp/rule.h"
#include "torchamp/version.h"
