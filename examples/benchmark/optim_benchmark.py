#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Sets Python's optimizers, torch.amp and clipping beside those of the program optim_benchmark.

    python3 optim_benchmark.py build/optim_benchmark

Both run here and now, the one after the other for each row, on one thread. A row is what is
measured, the number of parameters, microseconds in Python and in C++, and C++ over Python.
"""
import json
import re
import subprocess
import sys
import time
import warnings

import torch

SIZES = {"10": (10, 64), "100": (100, 64), "1000": (1000, 64), "10_large": (10, 6400)}
KINDS = {
    "adam": (torch.optim.Adam, {}),
    "adamw": (torch.optim.AdamW, {}),
    "sgd": (torch.optim.SGD, dict(momentum=0.9)),
    "adagrad": (torch.optim.Adagrad, {}),
}


def make_params(size):
    count, elements = SIZES[size]
    params = [torch.randn(elements, requires_grad=True) for _ in range(count)]
    for param in params:
        param.grad = torch.randn(elements)
    return params


def what_to_call(name, size):
    """Python's counterpart of a row of the program."""
    params = make_params(size)
    kind, way = name.split("/")
    if kind == "clip_norm":
        return lambda: torch.nn.utils.clip_grad_norm_(params, 1e6)
    if kind == "clip_value":
        return lambda: torch.nn.utils.clip_grad_value_(params, 1e6)
    make, options = KINDS[kind]
    optimizer = make(params, lr=1e-6, fused=way.startswith("fused"), **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=10**9)
    scaler.scale(torch.ones(()))

    def scaled():
        scaler.step(optimizer)
        scaler.update()

    def clipped():
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, 1e6)
        scaled()

    return {"_scaled": scaled, "_clipped": clipped}.get(
        (re.search("_(scaled|clipped)$", way) or [""])[0], optimizer.step)


def microseconds(call):
    for _ in range(3):
        call()
    best = float("inf")
    for _ in range(5):
        repeats, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < 0.05:
            call()
            repeats += 1
        best = min(best, (time.perf_counter() - begin) / repeats)
    return 1e6 * best


def measured_by(program, row):
    arguments = [program, f"--benchmark_filter=^{row}$", "--benchmark_format=json",
                 "--benchmark_repetitions=5", "--benchmark_min_time=0.05"]
    output = subprocess.run(arguments, check=True, capture_output=True, text=True).stdout
    runs = json.loads(output)["benchmarks"]
    return min(run["real_time"] for run in runs if run["run_type"] == "iteration") / 1e3


def main():
    program = sys.argv[1]
    pattern = re.compile(sys.argv[2] if len(sys.argv) > 2 else "")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = subprocess.run([program, "--benchmark_list_tests"], check=True, capture_output=True,
                          text=True).stdout.split()
    print(f"{'':28} {'params':>8} {'Python':>9} {'C++':>9} {'ratio':>6}")
    for row in filter(pattern.search, rows):
        name, size = row.rsplit("/", 1)
        python, cpp = microseconds(what_to_call(name, size)), measured_by(program, row)
        print(f"{name:28} {size:>8} {python:9.1f} {cpp:9.1f} {cpp / python:6.3f}", flush=True)


if __name__ == "__main__":
    main()
