# SPDX-License-Identifier: BSD-3-Clause
"""The twin of comparison/growth_costs.h: what Python's torch.amp costs as things grow. Writes lines of
"axis,name,size,seconds"."""

import argparse
import time

import torch


class Idle(torch.optim.Optimizer):
    """Its own work is nothing: what is left is the scaler's."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        return None


class IdleFused(Idle):
    _step_supports_amp_scaling = True


def parameters_of(count, elements):
    params = [torch.nn.Parameter(torch.zeros(elements)) for _ in range(count)]
    for param in params:
        param.grad = torch.zeros(elements)
    return params


def plain_step(count, elements):
    return torch.optim.SGD(parameters_of(count, elements), lr=0.0).step


def step_of(kind, before, count, elements):
    params = parameters_of(count, elements)
    optimizer = kind(params)
    scaler = torch.amp.GradScaler("cpu")
    loss = torch.ones(())

    def call():
        scaler.scale(loss)
        if before in ("unscale", "clip"):
            scaler.unscale_(optimizer)
        if before == "clip":
            torch.nn.utils.clip_grad_norm_(params, 1.0)
        scaler.step(optimizer)
        scaler.update()
    return call


def window_of(micro_batches):
    optimizer = IdleFused(parameters_of(10, 64))
    scaler = torch.amp.GradScaler("cpu")
    loss = torch.ones(())

    def call():
        for _ in range(micro_batches):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                pass
            scaler.scale(loss)
        scaler.step(optimizer)
        scaler.update()
    return call


def nest(depth):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if depth > 1:
            nest(depth - 1)


STEPS = {
    "optimizer.step() alone": plain_step,
    "scaler step + update": lambda *shape: step_of(Idle, None, *shape),
    "unscale_ + step + update": lambda *shape: step_of(Idle, "unscale", *shape),
    "clip + step + update": lambda *shape: step_of(Idle, "clip", *shape),
    "fused step + update": lambda *shape: step_of(IdleFused, None, *shape),
}
COUNTS = 10, 30, 100, 300, 1000, 3000, 10000
ELEMENTS = 10, 100, 1000, 10000, 100000, 1000000
DEPTHS = 1, 3, 10, 30, 100


def costs():
    for name, make in STEPS.items():
        for count in COUNTS:
            yield "parameters of 64 elements", name, count, make(count, 64)
        for elements in ELEMENTS:
            yield "elements of 10 parameters", name, elements, make(10, elements)
    for depth in DEPTHS:
        yield "micro-batches", "guards + scales + fused step + update", depth, window_of(depth)
        yield "nested regions", "guards", depth, lambda depth=depth: nest(depth)


def seconds_of(call):
    def seconds(calls):
        start = time.process_time()
        for _ in range(calls):
            call()
        return (time.process_time() - start) / calls
    seconds(2)
    calls = min(max(int(5e-3 / max(seconds(2), 1e-9)), 1), 5000)
    return min(seconds(calls) for _ in range(7))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--largest", type=int, default=1 << 62, help="sizes above it are passed over")
    largest = parser.parse_args().largest
    torch.set_num_threads(1)
    for axis, name, size, call in costs():
        if size <= largest:
            print(f"{axis},{name},{size},{seconds_of(call):.9g}", flush=True)


if __name__ == "__main__":
    main()
