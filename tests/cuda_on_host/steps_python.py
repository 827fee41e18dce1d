# SPDX-License-Identifier: BSD-3-Clause
"""Writes steps_python.txt: what a step of the comparison's models takes in Python, by its own torch.amp. Runs on this
folder's libraries, which have to be loaded before those of torch (S: their folder in the build, T: torch's site-packages):

    LD_PRELOAD="$(ls S/*.so* | tr '\\n' ':')" LD_LIBRARY_PATH=S:T/torch/lib PYTHONPATH=T TORCH_CUDNN_V8_API_DISABLED=1 \\
      OMP_NUM_THREADS=1 python3 tests/cuda_on_host/steps_python.py > tests/cuda_on_host/steps_python.txt
"""

import ctypes
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../../examples/benchmark"))

import torch  # noqa: E402
from worker import Trainer  # noqa: E402

SIZES = {  # those of steps_test.cpp
    "feed_forward": {"batch": 8, "hidden": 32},
    "unet": {"batch": 1, "side": 32, "channels": 4},
    "bert": {"batch": 2, "length": 16, "layers": 2, "width": 32, "heads": 2, "vocabulary": 64},
    "gpt": {"batch": 2, "length": 16, "layers": 2, "width": 32, "heads": 2},
}


class Counts(ctypes.Structure):
    """StandInCounts of stand_in.h."""

    _fields_ = [(name, ctypes.c_uint64) for name in (
        "kernels", "captured_nodes", "graph_launches", "replayed_nodes", "to_device", "to_host",
        "on_device", "on_host", "between_devices", "pageable", "memsets", "waits", "queries",
        "allocations", "host_allocations", "refused")]


def counts():
    result = Counts()
    ctypes.CDLL(None).stand_in_counts(ctypes.byref(result))
    return result


def main():
    for model, sizes in SIZES.items():
        for optimizer in ("fused", "stock"):
            trainer = Trainer(model, sizes, torch.float16, optimizer, "eager", torch.device("cuda"))
            trainer.run(3)
            torch.cuda.synchronize()
            before = counts()
            trainer.iterate(trainer.inputs[0])
            after = counts()
            taken = {name: getattr(after, name) - getattr(before, name) for name in ("kernels", "waits")}
            for name, count in [*taken.items(), *sorted(trainer.count_ops(True).items())]:
                print(model, optimizer, name, count)
            if optimizer == "fused":
                for name, count in sorted(trainer.count_ops(False).items()):
                    print(model, "loss", name, count)


if __name__ == "__main__":
    main()
