# SPDX-License-Identifier: BSD-3-Clause
"""Python's half of tests/grad_scaler/grad_scaler_python_test.cpp.

    python tests/parity/exchange.py FOLDER ITERATIONS

For each file FOLDER/*.ours, which torchamp::save_python_state wrote: loads it in every way, goes on with it for
ITERATIONS ("." good, "x" bad), and saves the state as FOLDER/*.python and, deep in a checkpoint, as
FOLDER/*.checkpoint. Of an empty state, checks that it is one.
"""
import math
import pathlib
import sys

import torch


def go_on(state, iterations):
    scaler = torch.amp.GradScaler("cpu", init_scale=3.0)
    scaler.load_state_dict(state)
    assert scaler.state_dict() == state, (scaler.state_dict(), state)
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for what in iterations:
        scaler.scale(torch.ones(()))
        weight.grad = torch.full((1,), math.inf if what == "x" else 1.0)
        scaler.step(optimizer)
        scaler.update()
    return scaler.state_dict()


def main(folder, iterations):
    files = sorted(pathlib.Path(folder).glob("*.ours"))
    for file in files:
        state = torch.load(file, weights_only=True)
        assert state == torch.load(file, weights_only=False) == torch.load(file, mmap=True)
        if not state:
            continue
        assert [type(value) for value in state.values()] == [float, float, float, int, int], state
        after = go_on(state, iterations)
        torch.save(after, file.with_suffix(".python"))
        model = torch.nn.Linear(2, 1)
        torch.save({"model": model.state_dict(), "amp": {"scaler": after}}, file.with_suffix(".checkpoint"))
    print("torch", torch.__version__, "exchanged", len(files))


if __name__ == "__main__":
    main(*sys.argv[1:])
