#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Writes optim.txt: what PyTorch's optimizers make of random walks, for optim_test.cpp and
muon_test.cpp.

    python3 tests/parity/optim.py > tests/parity/optim.txt

A walk has parameters of three shapes; those of Muon are matrices. In each step some of them may lack a gradient, the gradients
are scaled, and the step may be to be skipped; all of it follows from the walk's number through a
small generator that optim_test.cpp has too. A line is: the case, the walk, the step, and all
parameters' elements after it.

The numbers are those of the foreach implementation, whose gradients are divided and which is not
called when a step is to be skipped. Where PyTorch has a fused one that can be called with a scale
and a flag, it must agree, except for SGD with a momentum when the first step is skipped: that one
goes on from uninitialised memory. Muon has one implementation, which steps matrix by matrix.
"""
import torch

SHAPES = [(5,), (2, 3), ()]
MATRICES = [(3, 4), (4, 3), (3, 3), (3, 4), (2, 8)]  # the last is (2, 2, 2, 2) in muon_test.cpp
STEPS = 10
WALKS = (6, 8)  # in the first, the first three steps are skipped
CASES = {
    "adam": (torch.optim.Adam, dict(lr=0.1)),
    "adam_decay_amsgrad": (
        torch.optim.Adam, dict(lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1, amsgrad=True)),
    "adamw": (torch.optim.AdamW, dict(lr=0.1, weight_decay=0.2)),
    "adamw_amsgrad": (torch.optim.AdamW, dict(lr=0.1, betas=(0.7, 0.9), amsgrad=True)),
    "sgd": (torch.optim.SGD, dict(lr=0.1)),
    "sgd_decay": (torch.optim.SGD, dict(lr=0.1, weight_decay=0.1)),
    "sgd_momentum": (torch.optim.SGD, dict(lr=0.1, momentum=0.9)),
    "sgd_nesterov": (torch.optim.SGD, dict(lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True)),
    "sgd_dampening": (torch.optim.SGD, dict(lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.1)),
    "adagrad": (torch.optim.Adagrad, dict(lr=0.1)),
    "adagrad_decay": (
        torch.optim.Adagrad,
        dict(lr=0.1, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.5, eps=1e-3)),
    "muon": (torch.optim.Muon, dict(lr=0.1)),
    "muon_no_nesterov": (torch.optim.Muon, dict(lr=0.1, nesterov=False, momentum=0.7)),
    "muon_match_rms_adamw": (
        torch.optim.Muon, dict(lr=0.1, weight_decay=0.5, adjust_lr_fn="match_rms_adamw")),
    "muon_spectral_unclamped": (
        torch.optim.Muon, dict(lr=0.1, weight_decay=0.0, adjust_lr_fn="spectral_unclamped")),
    "muon_coefficients": (
        torch.optim.Muon,
        dict(lr=0.1, ns_coefficients=(2.0, -1.5, 0.5), ns_steps=8, eps=10.0, momentum=0.0)),
}


class Numbers:
    def __init__(self, seed):
        self.state = seed

    def below(self, n):
        self.state = (self.state * 1103515245 + 12345) % 2**31
        return (self.state >> 8) % n

    def tensor(self, shape):
        count = torch.Size(shape).numel()
        return torch.tensor([(self.below(2001) - 1000) / 512 for _ in range(count)]).reshape(shape)


def walk(kind, options, number, fused):
    numbers = Numbers(number)
    is_muon = kind is torch.optim.Muon
    shapes = MATRICES if is_muon else SHAPES
    params = [numbers.tensor(shape).requires_grad_() for shape in shapes]
    how = {} if is_muon else dict(fused=True) if fused else dict(foreach=True)
    optimizer = kind(params, **options, **how)
    rows = []
    for _ in range(STEPS):
        scale = 2.0 ** numbers.below(8) * (1 + numbers.below(3) / 4)
        skipped = numbers.below(3) == 0
        for param in params:
            absent = numbers.below(4) == 0
            gradient = numbers.tensor(param.shape)
            param.grad = None if absent else gradient * scale
        if fused:
            optimizer.grad_scale = torch.tensor(scale)
            optimizer.found_inf = torch.tensor(float(skipped))
            optimizer.step()
        elif not skipped:
            for param in params:
                if param.grad is not None:
                    param.grad /= scale
            optimizer.step()
        rows.append(torch.cat([param.detach().reshape(-1) for param in params]))
    return torch.stack(rows)


def main():
    for case, (kind, options) in CASES.items():
        for number in WALKS:
            rows = walk(kind, options, number, fused=False)
            if kind is not torch.optim.Muon and not options.get("momentum"):
                torch.testing.assert_close(walk(kind, options, number, fused=True), rows)
            for step, row in enumerate(rows):
                print(case, number, step, *(f"{x:.7g}" for x in row.tolist()))


if __name__ == "__main__":
    main()
