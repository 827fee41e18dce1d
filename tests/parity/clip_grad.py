#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Writes clip_grad.txt: what PyTorch's clipping makes of some gradients, for clip_grad_test.cpp.

    python3 tests/parity/clip_grad.py > tests/parity/clip_grad.txt

A line is: norm or value, the dtype, what is put into the first gradient, the limit, the kind of
norm, the total norm, and all gradients' elements after clipping. The gradients have three shapes
and come from a small generator that clip_grad_test.cpp has too.
"""
import itertools

import torch

from optim import SHAPES, Numbers

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "fp16": torch.float16, "bf16": torch.bfloat16}
LIMITS = [0.0, 0.75, 1000.0]


def params(dtype, special):
    numbers = Numbers(3)
    result = []
    for shape in SHAPES:
        param = torch.zeros(shape, dtype=dtype, requires_grad=True)
        param.grad = numbers.tensor(shape).to(dtype)
        result.append(param)
    if special != "-":
        result[0].grad[1] = float(special)
    return result


def row(params):
    return [f"{x:.12g}" for p in params for x in p.grad.double().reshape(-1).tolist()]


def main():
    kinds = [2.0, 1.0, float("inf"), 3.0, 0.5]
    for dtype, special in itertools.product(DTYPES, ["-", "inf", "-inf", "nan"]):
        for limit, kind in itertools.product(LIMITS, kinds):
            if dtype != "fp32" and (limit, kind) != (0.75, 2.0):
                continue
            clipped = params(DTYPES[dtype], special)
            norm = torch.nn.utils.clip_grad_norm_(clipped, limit, kind).double().item()
            print("norm", dtype, special, limit, kind, f"{norm:.12g}", *row(clipped))
        clipped = params(DTYPES[dtype], special)
        torch.nn.utils.clip_grad_value_(clipped, 0.75)
        print("value", dtype, special, 0.75, 0.0, 0.0, *row(clipped))


if __name__ == "__main__":
    main()
