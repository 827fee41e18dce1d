#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Writes lr_scheduler.txt: learning rates of PyTorch's schedulers, for lr_scheduler_test.cpp.

    python3 tests/parity/lr_scheduler.py > tests/parity/lr_scheduler.txt

A line is: the schedule, warmup_steps, total_steps, min_lr_ratio, and the rates of the first steps
of two groups whose full rates are 0.1 and 3. They come from a LambdaLR with the formulas of
Hugging Face's transformers. A SequentialLR of a warmup and a decay must agree and, without warmup
and to a rate of 0, PyTorch's CosineAnnealingLR and LinearLR.
"""
import math
import warnings

import torch
from torch.optim import lr_scheduler

FULL = [0.1, 3.0]
CASES = [(4, 12, 0.1), (0, 7, 0.0), (1, 9, 0.5), (5, 6, 0.25)]


def rates(make):
    groups = [dict(params=[torch.zeros(1, requires_grad=True)], lr=lr) for lr in FULL]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    schedulers = make(optimizer)
    rows = []
    for _ in range(16):
        rows.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedulers.step()
    return torch.tensor(rows, dtype=torch.float64)


def sequence(kind, warmup, total, ratio):
    def share(n):
        n = min(n, total - warmup) / (total - warmup)
        return (1 + math.cos(math.pi * n)) / 2 if kind == "cosine" else 1 - n

    def make(optimizer):
        grow = lr_scheduler.LambdaLR(optimizer, lambda n: n / max(1, warmup))
        decay = lr_scheduler.LambdaLR(optimizer, lambda n: ratio + (1 - ratio) * share(n))
        return lr_scheduler.SequentialLR(optimizer, [grow, decay], [warmup]) if warmup else decay

    return make


def pytorchs_own(kind, total):
    if kind == "cosine":
        return lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, total)
    return lambda optimizer: lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total)


def transformers(kind, warmup, total, ratio):
    """get_cosine_with_min_lr_schedule_with_warmup and get_linear_schedule_with_warmup."""

    def factor(n):
        if n < warmup:
            return n / max(1, warmup)
        progress = min(1.0, (n - warmup) / max(1, total - warmup))
        share = 0.5 * (1 + math.cos(math.pi * progress)) if kind == "cosine" else 1 - progress
        return share * (1 - ratio) + ratio

    return lambda optimizer: lr_scheduler.LambdaLR(optimizer, factor)


def main():
    warnings.simplefilter("ignore")
    near = dict(rtol=1e-12, atol=1e-12)
    for kind in ("cosine", "linear"):
        for warmup, total, ratio in CASES:
            rows = rates(transformers(kind, warmup, total, ratio))
            torch.testing.assert_close(rates(sequence(kind, warmup, total, ratio)), rows, **near)
            if warmup == 0 and ratio == 0:
                own = rates(pytorchs_own(kind, total))
                torch.testing.assert_close(own[: total + 1], rows[: total + 1], **near)
            print(kind, warmup, total, ratio, *(f"{x:.15g}" for x in rows.flatten().tolist()))


if __name__ == "__main__":
    main()
