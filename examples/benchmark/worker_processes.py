# SPDX-License-Identifier: BSD-3-Clause
"""The twin of comparison/group_worker.cpp: one process of several, which train a model of models.py with
DistributedDataParallel, fully_shard or ZeroRedundancyOptimizer. See Note [Workers in a group]."""

import argparse
import contextlib
import ctypes
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (bf16_compress_hook,
                                                                       fp16_compress_hook)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from models import MODELS, initialize
from worker import BATCHES, process_memory


class SentBytes:
    """What comparison/sent_bytes.cpp, which was preloaded, has counted."""

    def __init__(self):
        self.library = ctypes.CDLL(None)
        self.counts = hasattr(self.library, "sent_bytes_total")
        if self.counts:
            self.library.sent_bytes_total.restype = ctypes.c_int64
            self.library.sent_bytes_entry.argtypes = [
                ctypes.c_size_t, ctypes.POINTER(ctypes.c_int64), ctypes.POINTER(ctypes.c_int64)]

    def total(self):
        return self.library.sent_bytes_total() if self.counts else -1

    def log(self, on):
        if self.counts:
            self.library.sent_bytes_log(int(on))

    def entries(self):
        at, when, size = 0, ctypes.c_int64(), ctypes.c_int64()
        while self.counts and self.library.sent_bytes_entry(at, ctypes.byref(when),
                                                            ctypes.byref(size)):
            yield when.value * 1e-9, size.value
            at += 1


class Loss(torch.nn.Module):
    """A module whose forward is the loss, as the wrappers want it."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, batch):
        return self.module.loss(batch)


class GroupTrainer:
    def __init__(self, model, sizes, dtype, sharing, bucket):
        self.module = MODELS[model](sizes)
        self.recipe = self.module.recipe
        initialize(self.module, 0)
        torch.manual_seed(1 + dist.get_rank())
        self.inputs = [[self.module.make_batch() for _ in range(self.recipe.accumulate)]
                       for _ in range(BATCHES)]
        self.count = sum(p.numel() for p in self.module.parameters())
        self.dtype = dtype
        self.step, self.marks = 0, None
        narrow, kind = sharing.endswith("_16"), sharing.removesuffix("_16")
        self.shards = kind == "sharded"
        self.net = Loss(self.module)
        if self.shards:
            options = {"reshard_after_forward": False,
                       "mp_policy": MixedPrecisionPolicy(
                           param_dtype=dtype, reduce_dtype=dtype if narrow else torch.float32,
                           cast_forward_inputs=False)}
            for part in list(self.module.modules()):
                if isinstance(part, torch.nn.modules.batchnorm._BatchNorm):  # stays fp32
                    fully_shard(part, reshard_after_forward=False)
                elif isinstance(part, (torch.nn.ModuleList, torch.nn.Sequential)):
                    for block in part:
                        if any(True for _ in block.children()):
                            fully_shard(block, **options)
            fully_shard(self.net, **options)
        else:
            options = {"bucket_cap_mb": bucket / 2**20} if bucket else {}
            self.net = DistributedDataParallel(self.net, **options)
            if narrow:
                self.net.register_comm_hook(None, fp16_compress_hook if dtype == torch.float16 else
                                            bf16_compress_hook)
        kind_of = torch.optim.AdamW if self.recipe.optimizer == "adamw" else torch.optim.Adam
        parameters, rate = list(self.net.parameters()), self.recipe.learning_rate
        if kind == "zero":
            self.optimizer = ZeroRedundancyOptimizer(parameters, kind_of, lr=rate, fused=True)
        else:
            self.optimizer = kind_of(parameters, lr=rate, fused=True)
        # bf16 needs no scale.
        self.scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)

    def only_locally(self, locally):
        if self.shards:
            self.net.set_requires_gradient_sync(not locally)
            self.net.set_reshard_after_backward(not locally)
            return contextlib.nullcontext()
        return self.net.no_sync() if locally else contextlib.nullcontext()

    def mark(self, name):
        if self.marks is not None:
            self.marks[name] = time.monotonic()

    def iterate(self, batches):
        self.optimizer.zero_grad()
        total = None
        for i, batch in enumerate(batches):
            with self.only_locally(i + 1 < len(batches)):
                with torch.autocast("cpu", dtype=self.dtype):
                    loss = self.net(batch)
                if len(batches) > 1:
                    loss = loss / len(batches)
                self.mark("forward")
                if self.marks is not None:  # when all gradients are computed, not when all are sent
                    loss.register_hook(lambda _: torch.autograd.Variable._execution_engine.
                                       queue_callback(lambda: self.mark("backward")))
                self.scaler.scale(loss).backward()
            total = loss.detach() if total is None else total + loss.detach()
        if self.recipe.clip_norm > 0:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.recipe.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return total

    def run(self, steps):
        total, first = torch.zeros(()), None
        start, processor_start = time.perf_counter(), time.process_time()
        for i in range(steps):
            loss = self.iterate(self.inputs[self.step % BATCHES])
            self.step += 1
            if i == 0:
                first = loss.clone()
            total.add_(loss)
        seconds, processor = time.perf_counter() - start, time.process_time() - processor_start
        return seconds, processor, total.item() / steps, first.item()


def serve(options):
    if options.threads > 0:
        torch.set_num_threads(options.threads)
    sizes = {name: int(value) for name, value in (item.split("=") for item in options.set)}
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[options.dtype]
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    # What the libraries load and set up on first use is not a model's memory.
    tiny = {"batch": 1, "length": 4, "layers": 1, "width": 8, "heads": 1}
    GroupTrainer("gpt", tiny, dtype, options.variant, options.bucket).run(1)
    before = process_memory("VmRSS")
    sent = SentBytes()
    trainer = GroupTrainer(options.model, sizes, dtype, options.variant, options.bucket)
    print(f"ready parameters={trainer.count} libtorch={torch.__version__.split('+')[0]} "
          f"first_call=0", flush=True)
    for line in sys.stdin:
        command, steps = line.split()
        trainer.run(2)
        if command == "trace":
            trainer.marks = {"start": time.monotonic()}
            sent.log(True)
            trainer.run(1)
            trainer.mark("end")
            entries = ",".join(f"{when:.9f}:{size}" for when, size in sent.entries())
            sent.log(False)
            marks = " ".join(f"{name}={when:.9f}" for name, when in trainer.marks.items())
            trainer.marks = None
            print(f"traced {marks} sent={entries}", flush=True)
            continue
        sent_before = sent.total()
        seconds, processor, loss, first = trainer.run(int(steps))
        bytes_sent = sent.total() - sent_before if sent.counts else -1
        peak = process_memory("VmHWM") - before
        print(f"ran seconds={seconds:.9g} processor={processor:.9g} loss={loss:.9g} first={first:.9g} "
              f"peak={peak} sent={bytes_sent}", flush=True)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, choices=sorted(MODELS))
    parser.add_argument("--variant", required=True,
                        choices=["parallel", "parallel_16", "sharded", "sharded_16", "zero"])
    parser.add_argument("--dtype", required=True, choices=["fp16", "bf16"])
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--bucket", type=int, default=0, help="bytes; 0: the library's own choice")
    parser.add_argument("--set", action="append", default=[], metavar="SIZE=N")
    options = parser.parse_args()
    try:
        serve(options)
    except Exception as error:  # the line that the comparison waits for
        print("error", " ".join(f"{type(error).__name__}: {error}".split()), flush=True)
        # Not by sys.exit: threads of the group would be waited for.
        os._exit(1)


if __name__ == "__main__":
    main()
