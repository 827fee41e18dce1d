# SPDX-License-Identifier: BSD-3-Clause
"""Python's half of tests/checkpoint/python_weights_test.cpp.

    python tests/parity/weights.py FOLDER

Loads the weights of a model that C++ has trained from FOLDER/model.pt (torch::save) and FOLDER/weights.pt
(torch::pickle_save), trains the model for a step, and writes its weights as FOLDER/python.pt (torch.save) and
FOLDER/scripted.pt (torch.jit.save), and what it gives for FOLDER/input.pt, before and after, as FOLDER/outputs.pt.
"""
import pathlib
import sys

import torch


def main(folder):
    folder = pathlib.Path(folder)
    weights = torch.load(folder / "weights.pt", weights_only=False)
    archive = torch.jit.load(folder / "model.pt").state_dict()
    assert weights.keys() == archive.keys(), (weights.keys(), archive.keys())
    for name, value in weights.items():
        assert value.dtype == archive[name].dtype and torch.equal(value, archive[name]), name

    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    model.load_state_dict(weights)
    x = torch.load(folder / "input.pt", weights_only=False)["input"]
    before = model.eval()(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autocast("cpu"):
        loss = model.train()(x).square().mean()
    loss.backward()
    optimizer.step()
    after = model.eval()(x)
    torch.save(dict(model.state_dict()), folder / "python.pt")
    torch.jit.save(torch.jit.script(model), folder / "scripted.pt")
    torch.save({"before": before.detach(), "after": after.detach()}, folder / "outputs.pt")
    print("torch", torch.__version__, "exchanged", len(weights))


if __name__ == "__main__":
    main(*sys.argv[1:])
