# SPDX-License-Identifier: BSD-3-Clause
"""Writes checkpoints as Python does, for tests/checkpoint/python_state_test.cpp.

Refresh with
    python tests/parity/python_checkpoints.py > tests/parity/python_checkpoints.txt

Lines are
    state NAME KEYS SCALE GROWTH BACKOFF INTERVAL TRACKER BASE64    a file and the state in it; KEYS is "-" or a/b
    foreign NAME BASE64                                             a file without one
    ours HEX                                                        the pickle that we write; checked here
"""

import base64
import collections
import io
import pickle
import random

import torch


def scaler(**options):
    s = torch.amp.GradScaler("cpu", **options)
    s.scale(torch.ones(()))
    return s


def saved(what, **options):
    out = io.BytesIO()
    torch.save(what, out, **options)
    return base64.b64encode(out.getvalue()).decode()


def state(name, what, keys, s, **options):
    values = (f"{v:.17g}" if isinstance(v, float) else str(v) for v in s.state_dict().values())
    print("state", name, "/".join(keys) or "-", *values, saved(what, **options))


class Anything:
    def __init__(self):
        self.scale = {"scale": 1.0}


def record():
    random.seed(1)
    torch.manual_seed(1)
    plain = scaler(init_scale=1024.0, growth_factor=1.7, backoff_factor=0.3, growth_interval=70000)
    plain._growth_tracker.fill_(12345)
    for protocol in (2, 3, 4, 5):
        state(f"protocol_{protocol}", plain.state_dict(), [], plain, pickle_protocol=protocol)
    state("before_the_first_scale", torch.amp.GradScaler("cpu").state_dict(), [], torch.amp.GradScaler("cpu"))
    whole = scaler(growth_factor=3, growth_interval=2**31 - 1)  # an int where a float is usual
    state("whole_numbers", whole.state_dict(), [], whole)
    ordered = collections.OrderedDict(plain.state_dict())
    state("ordered", ordered, [], plain)

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    checkpoint = {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "best": None,
        "amp": {"scaler": plain.state_dict(), "dtype": torch.float16}, "names": ["a", ("b", b"c", {1, 2})],
        "same": plain.state_dict(), "object": Anything(), "big": 1 << 100, "flag": True,
    }
    checkpoint["loop"] = checkpoint
    for protocol in (2, 5):
        state(f"checkpoint_{protocol}", checkpoint, ["amp", "scaler"], plain, pickle_protocol=protocol)
    state("checkpoint_loop", checkpoint, ["loop", "loop", "same"], plain)

    print("foreign", "disabled", saved(torch.amp.GradScaler("cpu", enabled=False).state_dict()))
    print("foreign", "tensor", saved(torch.ones(2)))
    print("foreign", "list", saved([plain.state_dict()]))
    print("foreign", "model", saved(model.state_dict()))
    print("foreign", "whole_scaler", saved(plain))
    print("foreign", "legacy", saved(plain.state_dict(), _use_new_zipfile_serialization=False))
    print("foreign", "bare_pickle", base64.b64encode(pickle.dumps(plain.state_dict())).decode())
    incomplete = plain.state_dict()
    del incomplete["_growth_tracker"]
    print("foreign", "incomplete", saved(incomplete))
    print("foreign", "text_for_number", saved({**plain.state_dict(), "scale": "1024"}))
    print("foreign", "float_for_int", saved({**plain.state_dict(), "growth_interval": 2.5}))
    print("foreign", "tensor_for_number", saved({**plain.state_dict(), "scale": torch.ones(())}))

    ours = bytes.fromhex(OURS)
    assert pickle.loads(ours) == plain.state_dict(), pickle.loads(ours)
    print("ours", OURS)


OURS = (
    "80027d2858050000007363616c657100474090000000000000580d00000067726f7774685f666163746f727101473f"
    "fb333333333333580e0000006261636b6f66665f666163746f727102473fd3333333333333580f00000067726f7774"
    "685f696e74657276616c71034a70110100580f0000005f67726f7774685f747261636b657271044d39307571052e"
)


if __name__ == "__main__":
    record()
