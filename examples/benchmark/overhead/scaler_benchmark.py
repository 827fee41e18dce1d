#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Sets Python's torch.amp.GradScaler beside the program scaler_benchmark, with the same parameters.

    python3 scaler_benchmark.py build/…/scaler_benchmark

Both run in turn, three times each, on one thread; the best time of each counts. A row is the kind of
step, the number of parameters, microseconds in Python and in C++, and C++ over Python.
"""
import subprocess
import sys
import time

import torch


KINDS = "plain", "unscaled", "clipped", "fused", "fused_clipped"


class Idle(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        return None


class IdleFused(Idle):
    _step_supports_amp_scaling = True


def microseconds(kind, count):
    params = [torch.nn.Parameter(torch.zeros(64)) for _ in range(count)]
    for param in params:
        param.grad = torch.zeros(64)
    optimizer = (IdleFused if kind.startswith("fused") else Idle)(params)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    steps = max(20, 5000 // count)
    best = 1e9
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(steps):
            if kind == "unscaled" or kind.endswith("clipped"):
                scaler.unscale_(optimizer)
            if kind.endswith("clipped"):
                torch.nn.utils.clip_grad_norm_(params, 1.0)
            scaler.step(optimizer)
            scaler.update()
        best = min(best, (time.perf_counter() - start) / steps * 1e6)
    return best


def main():
    torch.set_num_threads(1)
    rows = [(kind, count) for count in (10, 100, 1000) for kind in KINDS]
    python = {row: 1e9 for row in rows}
    ours = {row: 1e9 for row in rows}
    for _ in range(3):
        for row in rows:
            python[row] = min(python[row], microseconds(*row))
        for line in subprocess.run([sys.argv[1]], check=True, capture_output=True, text=True).stdout.splitlines():
            kind, count, time_taken = line.split()
            row = kind, int(count)
            ours[row] = min(ours[row], float(time_taken))
    print(f"{'step':14}{'parameters':>10}{'Python us':>12}{'C++ us':>10}{'ratio':>8}")
    for row in rows:
        print(f"{row[0]:14}{row[1]:>10}{python[row]:>12.1f}{ours[row]:>10.1f}{ours[row] / python[row]:>8.2f}")


if __name__ == "__main__":
    main()
