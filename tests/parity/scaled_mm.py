#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Writes scaled_mm.txt: what PyTorch's _scaled_mm makes of some matrices on a CPU, for internals/record_test.cpp.

    python3 tests/parity/scaled_mm.py > tests/parity/scaled_mm.txt

A line is: the recipe, M, K, N, the bytes of a [M, K] and b [N, K] in e4m3, their inverse scales, and the product's
elements in bf16. The matrices come from a small generator that it has too; here they are quantised
by the definition: a power of two for the tensor, or for each row.
"""
import math

import torch

from optim import Numbers

SHAPES = [(4, 8, 3), (5, 17, 7), (16, 32, 16), (1, 1, 1)]


def scale_of(values):
    largest = max(abs(value) for value in values)
    scale = 2.0**40
    while largest * scale > 448:
        scale /= 2
    return scale


def quantize(matrix, rowwise):
    rows = matrix.tolist()
    scales = [scale_of(row) for row in rows]
    if not rowwise:
        scales = [min(scales)] * len(rows)
    inverse = torch.tensor([[1 / scale] for scale in scales])
    codes = (matrix * torch.tensor([[scale] for scale in scales])).to(torch.float8_e4m3fn)
    return codes, inverse if rowwise else inverse[0, 0]


def text(values):
    return " ".join(repr(value) for value in values)


def main():
    numbers = Numbers(7)
    for rowwise in (False, True):
        for m, k, n in SHAPES:
            a, inverse_a = quantize(numbers.tensor((m, k)), rowwise)
            b, inverse_b = quantize(numbers.tensor((n, k)), rowwise)
            product = torch._scaled_mm(a, b.t(), inverse_a, inverse_b.t() if rowwise else inverse_b,
                                       out_dtype=torch.bfloat16)
            print("rowwise" if rowwise else "tensorwise", m, k, n, "|",
                  text(a.view(torch.uint8).flatten().tolist()), "|", text(b.view(torch.uint8).flatten().tolist()), "|",
                  text(inverse_a.flatten().tolist()), "|", text(inverse_b.flatten().tolist()), "|",
                  text(product.float().flatten().tolist()))


if __name__ == "__main__":
    main()
