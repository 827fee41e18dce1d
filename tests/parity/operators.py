#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Runs PyTorch's operator database under torchamp's policies.

    python tests/parity/operators.py --library LIBRARY [--torch FOLDER] [--sample N] [--limit N]
                                     [--only NAME]

LIBRARY is the target python_policy of the tests, linked with the LibTorch that Python's torch is. Each
operator runs with its samples, forward and backward, in regions of bf16 and of fp16, with arguments in
fp32 and with the first one in the region's dtype:

 - under Policy::torch() it does what torch.autocast does, bit for bit;
 - under Policy::standard() it runs wherever it runs under torch.autocast, and each result and gradient
   agrees with the operator without autocast, with its arguments as they are, in fp32 or in the region's
   dtype, within the tolerance of 16 bits.

operators.txt beside this script has the known deviations, each with its reason; "both" may also agree. --sample: N operators,
spread over the database; --limit: N samples of each. Exit status: 1 after a failure, 77 if there is no
such torch.
"""

import argparse
import contextlib
import ctypes
import pathlib
import re
import sys
import warnings

HERE = pathlib.Path(__file__).resolve().parent
SKIPPED = 77


def skip(reason):
    print("skipped:", reason)
    sys.exit(SKIPPED)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", required=True)
    parser.add_argument("--torch", help="a folder with the package torch, if Python finds no other")
    parser.add_argument("--sample", type=int)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--only")
    return parser.parse_args()


ARGUMENTS = arguments()
warnings.simplefilter("ignore")
if ARGUMENTS.torch:
    sys.path.append(ARGUMENTS.torch)
try:
    import torch
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.utils._pytree import tree_flatten, tree_map
except (ImportError, OSError) as error:
    skip(f"no importable torch with its operator database: {error}")
VERSION = re.search(rb"operators.py: LibTorch ([0-9.]+)", pathlib.Path(ARGUMENTS.library).read_bytes())[1].decode()
if torch.__version__.split("+")[0] != VERSION:
    skip(f"Python's torch is {torch.__version__}, the tests' LibTorch {VERSION}")

LIBRARY = ctypes.CDLL(ARGUMENTS.library)
LIBRARY.begin_policy.restype = ctypes.c_char_p
TOLERANCE = {torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8}


class Policy:
    """A region of torchamp's."""

    def __init__(self, name, dtype):
        self.text, self.half = f"policy {name}".encode(), int(dtype == torch.float16)

    def __enter__(self):
        error = LIBRARY.begin_policy(self.text, self.half)
        if error:
            raise RuntimeError(error.decode())

    def __exit__(self, *_):
        LIBRARY.end_policy()


# ---- One call ------------------------------------------------------------------------------------


def is_narrowable(value):
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.float16, torch.bfloat16)


def tensors(value):
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def fresh(value, given, dtype=None):
    """The arguments, copied: cast to `given(tensor)`, if that is no None, and then to `dtype`."""

    def copy(leaf):
        if not isinstance(leaf, torch.Tensor):
            return leaf
        made = leaf.detach().clone()
        if is_narrowable(leaf):
            for to in (given(leaf), dtype):
                made = made if to is None else made.to(to)
        return made.requires_grad_(leaf.requires_grad)

    return tree_map(copy, value)


def run(op, sample, region, given, dtype=None):
    """(results and gradients, None), or (None, error)."""
    args = fresh((sample.input, sample.args, sample.kwargs), given, dtype)
    torch.manual_seed(0)
    try:
        with region:
            out = op(args[0], *args[1], **args[2])
        results = tensors(out)
        leaves = [leaf for leaf in tensors(args) if leaf.requires_grad]
        differentiable = [r for r in tensors(sample.output_process_fn_grad(out)) if r.requires_grad]
        gradients = []
        if leaves and differentiable:
            ones = [torch.ones_like(r) for r in differentiable]
            gradients = torch.autograd.grad(differentiable, leaves, ones, allow_unused=True)
        return [r.detach() for r in results] + [g for g in gradients if g is not None], None
    except Exception as error:  # an operator may raise any
        return None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


# ---- Comparisons ---------------------------------------------------------------------------------


def dense(value):
    value = value.to_dense() if value.layout != torch.strided else value
    return value.resolve_conj().resolve_neg()


def are_equal(a, b):
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = dense(a), dense(b)
    if a.is_floating_point():
        a, b = a.double(), b.double()  # some dtypes have no comparison
    return bool(((a == b) | ((a != a) & (b != b))).all())


def are_same(ours, theirs):
    return len(ours) == len(theirs) and all(are_equal(a, b) for a, b in zip(ours, theirs))


def is_close(ours, exact, tolerance):
    if ours.shape != exact.shape:
        return False
    if not (ours.is_floating_point() or ours.is_complex()):
        return torch.equal(ours, exact)
    wide = torch.complex128 if ours.is_complex() or exact.is_complex() else torch.float64
    a, b = dense(ours).to(wide), dense(exact).to(wide)
    finite = torch.isfinite(a) & torch.isfinite(b)
    if not bool(((torch.isfinite(a) == torch.isfinite(b)) | (b.abs() > 60000)).all()):
        return False
    if not bool(finite.any()):
        return True
    a, b = a[finite], b[finite]
    return bool(((a - b).abs() <= tolerance * (1 + b.abs().max())).all())


def differing(ours, references, tolerance):
    """The indices of results that agree with no reference."""
    known = [r for r in references if r is not None and len(r) == len(ours)]
    if not known:
        return []  # nothing to compare with
    return [i for i, one in enumerate(ours) if not any(is_close(one, r[i], tolerance) for r in known)]


# ---- The database --------------------------------------------------------------------------------


def deviations():
    known = {}
    for line in (HERE / "operators.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, policy, reason = (part.strip() for part in line.split("|"))
            known[name, policy] = reason
    return known


def samples(op):
    try:
        found = []
        for sample in op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd):
            found.append(sample)
            if ARGUMENTS.limit and len(found) == ARGUMENTS.limit:
                break
        return found
    except Exception as error:
        print(f"  {op.full_name}: no samples: {type(error).__name__}")
        return []


def is_random(op, sample):
    args = fresh((sample.input, sample.args, sample.kwargs), lambda leaf: None)
    made = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        try:
            made.append([r.detach() for r in tensors(op(args[0], *args[1], **args[2]))])
        except Exception:
            return False
    return not are_same(*made)


def check(op, sample, region, narrow_first):
    """The failures of one call, as (policy, text)."""
    flat = [leaf for leaf in tensors((sample.input, sample.args, sample.kwargs)) if is_narrowable(leaf)]
    if narrow_first and not flat:
        return
    first = flat[0] if flat else None

    def given(leaf):
        return region if narrow_first and leaf is first else None

    theirs, their_error = run(op, sample, torch.autocast("cpu", dtype=region), given)
    ours, error = run(op, sample, Policy("torch", region), given)
    if (error is None) != (their_error is None):
        yield "torch", f"{error or 'no error'}; torch.autocast: {their_error or 'no error'}"
    elif error is None and not is_random(op, sample) and not are_same(ours, theirs):
        yield "torch", "differs from torch.autocast"
    ours, error = run(op, sample, Policy("standard", region), given)
    if error is not None:
        if their_error is None:
            yield "standard", f"{error}; torch.autocast: no error"
        return
    if is_random(op, sample):
        return
    references = [
        run(op, sample, contextlib.nullcontext(), given, dtype)[0]
        for dtype in (None, torch.float32, region)
    ] + [theirs]
    for index in differing(ours, references, TOLERANCE[region]):
        yield "standard", f"result or gradient {index} agrees with no reference"


def main():
    known, failures, used, calls = deviations(), [], set(), 0
    ops = [op for op in op_db if not ARGUMENTS.only or op.name == ARGUMENTS.only]
    if ARGUMENTS.sample:
        ops = ops[:: max(1, len(ops) // ARGUMENTS.sample)][: ARGUMENTS.sample]
    for op in ops:
        for sample in samples(op):
            for region in (torch.bfloat16, torch.float16):
                for narrow_first in (False, True):
                    calls += 1
                    for policy, text in check(op, sample, region, narrow_first):
                        if (op.full_name, "both") in known:
                            continue
                        if (op.full_name, policy) in known:
                            used.add((op.full_name, policy))
                            continue
                        how = f"{str(region)[6:]}, {'the first argument in 16 bits' if narrow_first else 'fp32'}"
                        failure = f"{op.full_name}, Policy::{policy}(), {how}: {text}"
                        if failure not in failures:
                            print(failure, flush=True)
                        failures.append(failure)
    if not (ARGUMENTS.sample or ARGUMENTS.limit or ARGUMENTS.only):
        for name, policy in sorted(one for one in set(known) - used if one[1] != "both"):
            failures.append(name)
            print(f"{name}, Policy::{policy}(): operators.txt names a deviation that there is not")
    print(f"{len(ops)} operators, {calls} calls: {len(failures)} failed")
    return 1 if failures or not calls else 0


if __name__ == "__main__":
    sys.exit(main())
