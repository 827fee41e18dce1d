# SPDX-License-Identifier: BSD-3-Clause
"""The twin of comparison/trainer.h and comparison/worker.h: trains a model of models.py with Python's
torch.amp, in fp32 or mixed precision, and answers "run N" on its input. See Note [Workers]."""

import argparse
import math
import os
import sys
import time

import torch

from models import MODELS, initialize

BATCHES = 4  # different ones, again and again


class WeightAverage:
    """An exponential moving average of weights and running statistics."""

    def __init__(self, module):
        tensors = list(module.parameters()) + list(module.buffers())
        self.values = [t.detach() for t in tensors if t.is_floating_point()]
        self.average = [t.clone() for t in self.values]
        self.steps = 0

    @torch.no_grad()
    def update(self):
        self.steps += 1
        decay = 0.9999 * (1.0 - math.exp(-self.steps / 2000.0))
        torch._foreach_lerp_(self.average, self.values, 1.0 - decay)


def make_optimizers(module, recipe, kind, captured):
    """The twin of make_optimizers in comparison/make_optimizer.h."""
    if kind != "muon":
        return [make_optimizer(list(module.named_parameters()), recipe, kind == "fused", captured)]
    matrices, others = [], []
    for name, parameter in module.named_parameters():
        is_for_muon = parameter.dim() == 2 and name.count(".") >= 3
        (matrices if is_for_muon else others).append((name, parameter))
    return [torch.optim.Muon([parameter for _, parameter in matrices], lr=recipe.learning_rate,
                             adjust_lr_fn="match_rms_adamw"),
            make_optimizer(others, recipe, True, captured)]


def make_optimizer(parameters, recipe, fused, captured):
    # None: PyTorch's own choice
    options = {"lr": recipe.learning_rate, "fused": True if fused else None}
    if recipe.optimizer in ("adam", "adamw"):
        kind = torch.optim.Adam if recipe.optimizer == "adam" else torch.optim.AdamW
        return kind([parameter for _, parameter in parameters], capturable=captured, **options)
    decayed, weights, biases = [], [], []
    for name, parameter in parameters:
        group = biases if name.endswith("bias") else decayed if parameter.dim() > 1 else weights
        group.append(parameter)
    groups = [{"params": decayed, "weight_decay": 5e-4}, {"params": weights, "weight_decay": 0.0},
              {"params": biases, "weight_decay": 0.0}]
    return torch.optim.SGD(groups, momentum=0.937, nesterov=True, **options)


class Trainer:
    first_call = 0.0

    def __init__(self, model, sizes, dtype, optimizer, launch, device):
        self.module = MODELS[model](sizes)
        self.loss_of = self.module.loss
        self.recipe = self.module.recipe
        initialize(self.module, 0)
        torch.manual_seed(1)
        self.inputs = []
        for i in range(BATCHES * self.recipe.accumulate):
            if i % self.recipe.accumulate == 0:
                self.inputs.append([])
            self.inputs[-1].append([t.to(device) for t in self.module.make_batch()])
        self.module.to(device)
        self.device, self.dtype = device, dtype
        self.mixed = dtype is not torch.float32
        captured = launch == "captured"
        self.optimizers = make_optimizers(self.module, self.recipe, optimizer, captured)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.mixed)
        self.average = WeightAverage(self.module) if self.recipe.weight_average else None
        self.step = 0
        self.captured = captured
        self.graph = None
        if captured and self.average:
            raise RuntimeError("the average needs to know on the host whether the step was real")
        if launch == "compiled":
            self.loss_of = torch.compile(self.module.loss)
            start = time.perf_counter()
            with torch.autocast(device.type, dtype=dtype, enabled=self.mixed):
                loss = self.loss_of(self.inputs[0][0])
            loss.backward()
            self.zero_grad()
            self.synchronize()
            self.first_call = time.perf_counter() - start

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def warm_up_learning_rate(self):
        done = self.step / self.recipe.warmup_steps
        groups = self.optimizers[0].param_groups
        for g, group in enumerate(groups):
            start = 0.1 if g + 1 == len(groups) else 0.0
            group["lr"] = start + (self.recipe.learning_rate - start) * done
            group["momentum"] = 0.8 + (0.937 - 0.8) * done

    def iterate(self, batches):
        self.zero_grad()
        total = None
        for batch in batches:
            with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.mixed):
                loss = self.loss_of(batch)
            if len(batches) > 1:
                loss = loss / len(batches)
            self.scaler.scale(loss).backward()
            total = loss.detach() if total is None else total + loss.detach()
        if self.recipe.clip_norm > 0:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.recipe.clip_norm)
        scale_before = self.scaler.get_scale() if self.average and self.mixed else 0.0
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        # torch.amp does not say whether it stepped, but a skipped step lowers the scale.
        if self.average and (not self.mixed or self.scaler.get_scale() >= scale_before):
            self.average.update()
        return total

    def iterate_captured(self, batches):
        """PyTorch's notes on CUDA graphs, "whole-network capture"."""
        if self.graph is None:
            self.static = [[t.clone() for t in batch] for batch in batches]
            self.side = torch.cuda.Stream()
        for static, batch in zip(self.static, batches):
            for to, source in zip(static, batch):
                to.copy_(source)
        if self.step < 3:
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side):
                loss = self.iterate(self.static)
            torch.cuda.current_stream().wait_stream(self.side)
            return loss
        if self.graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.loss = self.iterate(self.static)
            self.graph = graph
        self.graph.replay()
        return self.loss

    def count_ops(self, whole):
        """The twin of Trainer::count_ops."""
        self.zero_grad()
        with torch.autograd.profiler.profile() as record:
            if whole:
                self.iterate(self.inputs[0])
            else:
                with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.mixed):
                    loss = self.loss_of(self.inputs[0][0])
                loss.backward()
        counts = {}
        for event in record.function_events:
            caller = event.cpu_parent.name if event.cpu_parent else ""
            if event.name.startswith("aten::") and event.name != caller:
                counts[event.name] = counts.get(event.name, 0) + 1
        return counts

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def run(self, steps):
        total, first = torch.zeros((), device=self.device), None
        self.synchronize()
        start, processor_start = time.perf_counter(), time.process_time()
        for i in range(steps):
            if 0 < self.recipe.warmup_steps and self.step <= self.recipe.warmup_steps:
                self.warm_up_learning_rate()
            batches = self.inputs[self.step % BATCHES]
            loss = self.iterate_captured(batches) if self.captured else self.iterate(batches)
            self.step += 1
            if i == 0:
                first = loss.clone()
            total.add_(loss)
        self.synchronize()
        seconds = time.perf_counter() - start
        processor = time.process_time() - processor_start
        return seconds, processor, total.item() / steps, first.item()


class Predictor:
    """Calls a model as a server does; the twin of comparison/predictor.h."""

    def __init__(self, model, sizes, dtype, casts, launch, device):
        self.module = MODELS[model](sizes)
        self.predict = self.module.predict
        if launch == "compiled":
            self.predict = torch.compile(self.module.predict)
        initialize(self.module, 0)
        torch.manual_seed(1)
        self.inputs = [[t.to(device) for t in self.module.make_batch()] for _ in range(BATCHES)]
        self.module.to(device).eval()
        self.device, self.dtype = device, dtype
        self.mixed = casts == "torch"
        if casts == "cast":
            self.module.to(dtype)
            self.inputs = [[t.to(dtype) if t.is_floating_point() else t for t in batch]
                           for batch in self.inputs]
        start = self.now()
        self.call(self.inputs[0])
        self.first_call = self.now() - start

    def now(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def call(self, batch):
        with torch.inference_mode(), torch.autocast(
                self.device.type, dtype=self.dtype if self.mixed else None, enabled=self.mixed):
            return self.predict(batch)

    def run(self, calls):
        start, processor_start = self.now(), time.process_time()
        first = last = None
        for i in range(calls):
            last = self.call(self.inputs[i % BATCHES])
            first = last if first is None else first
        seconds, processor = self.now() - start, time.process_time() - processor_start
        return seconds, processor, last.float().abs().mean().item(), first.float().abs().mean().item()


def process_memory(line):
    try:
        with open("/proc/self/status") as status:
            for entry in status:
                if entry.startswith(line + ":"):
                    return int(entry.split()[1]) * 1024
    except OSError:
        pass
    return 0


def serve(options):
    device = torch.device(options.device)
    if options.threads > 0:
        torch.set_num_threads(options.threads)
    sizes = {name: int(value) for name, value in (item.split("=") for item in options.set)}
    if options.dtype == "tf32":
        torch.set_float32_matmul_precision("high")
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(options.dtype, torch.float32)
    # What the libraries load and set up on first use is not a model's memory.
    tiny = {"side": 4, "channels": 4}
    predicts = options.task == "inference"
    if predicts:
        Predictor("checkerboard", tiny, dtype, options.casts, "eager", device).run(1)
    else:
        # Without layers for Muon.
        optimizer = "stock" if options.optimizer == "stock" else "fused"
        Trainer("checkerboard", tiny, dtype, optimizer, "eager", device).run(1)
    before = process_memory("VmRSS")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    if predicts:
        runner = Predictor(options.model, sizes, dtype, options.casts, options.launch, device)
    else:
        runner = Trainer(options.model, sizes, dtype, options.optimizer, options.launch, device)
    count = sum(p.numel() for p in runner.module.parameters())
    print(f"ready parameters={count} libtorch={torch.__version__.split('+')[0]} "
          f"first_call={runner.first_call:.9g}", flush=True)
    for line in sys.stdin:
        command, steps = line.split()[0], int(line.split()[1])
        runner.run(2)
        if command == "count":
            counts = runner.count_ops(steps > 0)
            print("counted", *(f"{name}={count}" for name, count in sorted(counts.items())), flush=True)
            continue
        seconds, processor, loss, first = runner.run(steps)
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated()
        else:
            peak = process_memory("VmHWM") - before
        print(f"ran seconds={seconds:.9g} processor={processor:.9g} loss={loss:.9g} first={first:.9g} "
              f"peak={peak}", flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, choices=sorted(MODELS))
    parser.add_argument("--task", default="training", choices=["training", "inference"])
    parser.add_argument("--casts", default="torch")
    parser.add_argument("--dtype", required=True, choices=["fp32", "tf32", "fp16", "bf16"])
    parser.add_argument("--optimizer", required=True, choices=["stock", "fused", "muon"])
    parser.add_argument("--launch", default="eager", choices=["eager", "captured", "compiled"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="SIZE=N")
    options = parser.parse_args()
    try:
        serve(options)
    except Exception as error:  # the line that the comparison waits for
        print("error", " ".join(f"{type(error).__name__}: {error}".split()), flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
