#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Records what torch.amp does: runs each case under torch.amp.autocast for bf16 and fp16.

    python tests/parity/record_autocast.py [--missing] [cpu] [cuda]

The cases are those of cases.txt and PyTorch's own, which are read from the installed package
(torch.testing._internal.autocast_test_lists) and written down in the same syntax. The record,
autocast_cpu.txt or autocast_cuda.txt beside this script, repeats each case and has one line per
region and input below it: dtype and shape of each result, and the means of its elements, of their
absolute values, and of their products with -2, -1, 0, 1, 2, -2, …; and one line where the device has
an autocast kernel for the op. Without arguments every device
that PyTorch sees is recorded. --missing keeps what the record has, and its heading, and records the cases
that it lacks. tests/internals/parity_test.cpp replays the record in C++.
"""

import ast
import collections
import importlib
import pathlib
import sys
import types
import unittest.mock
import warnings

import torch

HERE = pathlib.Path(__file__).resolve().parent
DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int32": torch.int32,
    "int64": torch.int64,
    "bool": torch.bool,
}
REGIONS = [torch.bfloat16, torch.float16]


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


# ---- A case, from text to a call -----------------------------------------------------------------


def fraction(index, place):
    """Element `index` of the tensor at `place` in its case: between 0 and 1, the same in C++."""
    return ((index * 7919 + place * 1047 + 1234) % 10007 + 0.5) / 10007


def elements(shape, fill, values, place):
    count = 1
    for size in shape:
        count *= size
    if values is not None:
        return [values[i % len(values)] for i in range(count)]
    if fill == "spd":  # symmetric, its diagonal large
        n = shape[-1]
        cells = [(i // n % n, i % n) for i in range(count)]
        return [row + n if row == column else fraction(row + column, place) for row, column in cells]
    scale, offset = {"spread": (2, -1), "unit": (1.8, -0.9), "positive": (0.9, 0.1)}[fill]
    return [scale * fraction(i, place) + offset for i in range(count)]


class Names(dict):
    """What the names in a case mean: a dtype makes tensors, any other name is an op."""

    def __init__(self, device, x, lower):
        self.device, self.place = device, 0
        self.dtypes = dict(DTYPES, x=x, lower=lower)

    def __missing__(self, name):
        return Dtype(self, name) if name in self.dtypes else Op(name)

    def tensor(self, name, shape, fill="spread", values=None, grad=False):
        dtype = self.dtypes[name]
        self.place += 1
        if not dtype.is_floating_point:
            values = values or range(max(1, torch.Size(shape).numel()))
        flat = elements(shape, fill, values, self.place)
        # First to fp32: a 16-bit input is the fp32 one, rounded.
        wide = torch.float32 if dtype.is_floating_point and dtype != torch.float64 else dtype
        tensor = torch.tensor(flat, dtype=wide).view(shape).to(dtype).to(self.device)
        return tensor.requires_grad_() if grad else tensor


class Dtype:
    def __init__(self, names, name):
        self.names, self.name = names, name

    def __call__(self, *shape, **options):
        return self.names.tensor(self.name, shape, **options)


class Op:
    def __init__(self, name, overload="default"):
        self.name, self.overload = name, overload

    def __getattr__(self, overload):
        return Op(self.name, overload)

    def __call__(self, *args, **kwargs):
        def plain(value):
            if isinstance(value, Dtype):
                return value.names.dtypes[value.name]
            return [plain(v) for v in value] if isinstance(value, list) else value

        packet = getattr(torch.ops.aten, self.name)
        op = getattr(packet, self.overload)
        args = [plain(a) for a in args]
        kwargs = {k: plain(v) for k, v in kwargs.items()}
        return lambda: op(*args, **kwargs)


def exists(op):
    name, _, overload = op.partition(".")
    packet = getattr(torch.ops.aten, name, None)
    return packet is not None and (overload or "default") in packet.overloads()


def has_kernel(op, device):
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{op}", f"Autocast{device.upper()}")


# ---- A result, as text ---------------------------------------------------------------------------


def describe(value, magnitudes):
    if value is None:
        return ["none"]
    if isinstance(value, (tuple, list)):
        return [text for v in value for text in describe(v, magnitudes)]
    if not isinstance(value, torch.Tensor):
        return [f"value {value}"]
    if value.dtype in (torch.uint8, torch.uint64):  # scratch memory, states of random generators
        return [name_of(value.dtype)]
    text = f"{name_of(value.dtype)}{list(value.shape)}"
    flat = value.detach().cpu().resolve_conj()
    flat = torch.view_as_real(flat) if flat.is_complex() else flat
    flat = flat.double().flatten()
    if magnitudes:
        flat = flat.abs()
    if flat.numel() == 0:
        return [text]
    weights = torch.arange(flat.numel()) % 5 - 2
    digits = 4 if value.dtype in REGIONS else 6
    numbers = [flat.mean(), flat.abs().mean(), (flat * weights).mean()]
    return [text + "".join(f" {n.item() + 0.0:.{digits}g}" for n in numbers)]


def error_name(error):
    known = (NotImplementedError, IndexError, ValueError, TypeError, torch.linalg.LinAlgError)
    for kind in known:
        if isinstance(error, kind):
            return kind.__name__.lstrip("_")
    return "RuntimeError"


def outcome(case, device, region, x, magnitudes):
    names = Names(device, x, region)
    call = eval(case, {"__builtins__": {}}, names)  # noqa: S307: our own file
    try:
        with torch.amp.autocast(device, dtype=region):
            return " | ".join(describe(call(), magnitudes))
    except Exception as error:
        return f"error {error_name(error)}"


# A CPU's kernels that nothing keeps from a GPU's memory: such a call ends the process.
ON_HOST_ALONE = ["_grid_sampler_2d_cpu_fallback"]


def record_case(case, device, magnitudes):
    op = case[: case.index("(")]
    if not exists(op):
        return [f"# not in this PyTorch: {case}"]
    if device != "cpu" and op in ON_HOST_ALONE:
        return [f"# not on {device}: {case}"]
    names = {node.id for node in ast.walk(ast.parse(case)) if isinstance(node, ast.Name)}
    lines = [case] + ["  kernel: yes"] * has_kernel(op, device)
    for region in REGIONS:
        if "x" in names:
            for x in (torch.float32, region):
                text = outcome(case, device, region, x, magnitudes)
                lines.append(f"  {name_of(region)} {name_of(x)}: {text}")
        else:
            lines.append(f"  {name_of(region)}: {outcome(case, device, region, None, magnitudes)}")
    return lines


# ---- PyTorch's own cases, from values to text ----------------------------------------------------


def literal(value):
    if isinstance(value, torch.Tensor):
        return tensor_literal(value)
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(literal(v) for v in value) + "]"
    return '"' + value + '"' if isinstance(value, str) else repr(value)


def tensor_literal(tensor):
    if tensor.dim() == 5:  # of the three-dimensional convolutions: every size is the same
        tensor = tensor[:3, :3, :3, :3, :3]
    dtype = "lower" if tensor.dtype in REGIONS else name_of(tensor.dtype)
    arguments = [str(size) for size in tensor.shape]
    flat = tensor.flatten().tolist()
    if all(value == int(value) for value in flat):
        values = flat[:1] if len(set(flat)) == 1 else flat
        arguments.append("values=[" + ", ".join(str(int(v)) for v in values) + "]")
    elif len(flat) < 8:  # too few to tell their range by
        pass
    elif min(flat) >= 0:
        arguments.append('fill="positive"')
    elif max(map(abs, flat)) <= 0.901:
        arguments.append('fill="unit"')
    return f"{dtype}({', '.join(arguments)})"


def torch_cases(lists):
    """(list, case, expected dtype) of each entry of PyTorch's lists for a device."""
    for title, entries in vars(lists).items():
        for op, *rest in entries:
            op = op.strip("_") if op.startswith("__") else op
            expected = "lower" if title.endswith("16") else "float32"
            kwargs, calls = {}, []
            for part in rest:
                if isinstance(part, torch.dtype):
                    expected = name_of(part)
                elif isinstance(part, dict):
                    kwargs = part
                elif isinstance(part, tuple):
                    calls.append(part)
            if isinstance(rest[0], str):  # einsum's entry leaves out its operands' shapes
                continue
            for args in calls:
                try:
                    overload = torch._C._jit_resolve_packet(f"aten::{op}", *args, **kwargs)
                except RuntimeError:
                    continue
                texts = [literal(value) for value in args]
                texts += [f"{name}={literal(value)}" for name, value in kwargs.items()]
                suffix = "" if overload == "default" else "." + overload
                yield title, f"{op}{suffix}({', '.join(texts)})", expected


def torch_lists():
    """The module with PyTorch's lists, without the test framework that it asks for."""
    framework = "torch.testing._internal.common_utils"
    stand_in = types.ModuleType(framework)
    stand_in.TEST_WITH_ROCM, stand_in.TestCase = False, object
    with unittest.mock.patch.dict(sys.modules, {framework: stand_in}):
        return importlib.import_module("torch.testing._internal.autocast_test_lists")


def torch_sections(device):
    """PyTorch's own cases as sections: CUDA's on every device, a CPU's on a CPU."""
    lists = torch_lists()
    torch.manual_seed(0)
    sources = [("cuda", lists.AutocastTestLists)]
    if device == "cpu":
        sources.append(("cpu", lists.AutocastCPUTestLists))
    for source, make in sources:
        sections = collections.OrderedDict()
        for title, case, expected in torch_cases(make("cpu")):
            sections.setdefault((title, expected), collections.OrderedDict())[case] = None
        for (title, expected), cases in sections.items():
            yield f"[PyTorch's {source} {title}] expects={expected}", list(cases)


# ---- The whole -----------------------------------------------------------------------------------


def our_sections():
    header, cases = None, []
    for line in (HERE / "cases.txt").read_text().splitlines():
        if line.startswith("["):
            if header:
                yield header, cases
            header, cases = line, []
        elif line and not line.startswith("#"):
            cases.append(line)
    yield header, cases


def machine(device):
    """What decides which kernels exist: the same text in C++."""
    if device == "cuda":
        return torch.cuda.get_device_name().replace(" ", "_")
    units = [
        name
        for name in ("bf16", "fp16")
        if getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")()
    ]
    return "+".join([torch.backends.cpu.get_cpu_capability(), *units])


def recorded(path):
    """The heading of a record, and the lines of each of its cases, the case first."""
    lines = path.read_text().splitlines()
    cases = {}
    for line in lines:
        if line.startswith("  "):
            results.append(line)
        elif line and not line.startswith(("#", "[")):
            results = [line]
            cases.setdefault(line, results)  # one that stands there twice has the same results
    return next(line for line in lines if line.startswith("[record]")), cases


def record(device, only_missing):
    path = HERE / f"autocast_{device}.txt"
    version = torch.__version__.split("+")[0]
    heading = f"[record] device={device} torch={version} machine={machine(device)}"
    known = {}
    if only_missing:
        heading, known = recorded(path)
    lines = ["# What torch.amp does with each case: written by record_autocast.py, not by hand.", heading]
    counts = collections.Counter()
    for sections in (our_sections(), torch_sections(device)):
        for header, cases in sections:
            lines += ["", header]
            for case in cases:
                results = known.get(case) or record_case(case, device, "compare=magnitudes" in header)
                counts["cases"] += 1
                counts["results"] += sum(line.startswith("  ") for line in results)
                counts["errors"] += sum(": error " in line for line in results)
                lines += results
    path.write_text("\n".join(lines) + "\n")
    print(f"{path.name}: {dict(counts)}")


def main():
    known = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    only_missing = "--missing" in sys.argv
    asked = [device for device in sys.argv[1:] if device != "--missing"] or known
    for device in asked:
        if device not in known:
            sys.exit(f"no device '{device}' here; there is {' and '.join(known)}")
    warnings.simplefilter("ignore")
    for device in asked:
        record(device, only_missing)


if __name__ == "__main__":
    main()
