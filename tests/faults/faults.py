#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Plants the faults of faults.txt in a copy of the tree, and checks that the tests notice each.

    python tests/faults/faults.py [--build FOLDER] [--jobs N] [--search] [NUMBER…]

The copy is FOLDER/tree (build/faults/tree), built once with all faults in it; the environment variable
TORCHAMP_FAULT turns on one at a time. Without a fault the named tests must pass; with a fault the test that
faults.txt names for it must fail. --search runs the test programs of .ci/topics instead and prints which tests
fail. NUMBER…: these faults alone. Exit status: 1 if a fault was not noticed.

An entry of faults.txt:

    == what is wrong
    file below include/torchamp/
    - text that the file holds exactly once; several lines if needed
    + what replaces it, where PLANTED is true while the fault is on
    ? test program and gtest filter that notices it; without such a line, no test is known to
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
HEADER = """#pragma once
#include <cstdlib>
inline bool torchamp_planted(int fault) {
  static const char* const chosen = std::getenv("TORCHAMP_FAULT");
  static const int number = chosen ? std::atoi(chosen) : 0;
  return number == fault;
}
"""


class Fault:
    def __init__(self, number, title, path):
        self.number, self.title, self.path = number, title, path
        self.found, self.replacement, self.test = [], [], None


def read_faults():
    faults, title = [], None
    for line in (HERE / "faults.txt").read_text().splitlines():
        if line.startswith("== "):
            title = line[3:]
        elif title:
            faults.append(Fault(len(faults) + 1, title, line))
            title = None
        elif line.startswith("- "):
            faults[-1].found.append(line[2:])
        elif line.startswith("+ "):
            faults[-1].replacement.append(line[2:])
        elif line.startswith("? "):
            faults[-1].test = line[2:].split()
        elif line and not line.startswith("#"):
            sys.exit(f"faults.txt: cannot read {line!r}")
    return faults


def plant(faults, tree):
    """Edits a fresh copy of the tracked files. Unchanged files keep their time, so that little is compiled again."""
    texts = {}
    for fault in faults:
        path = "include/torchamp/" + fault.path
        text = texts.get(path) or (ROOT / path).read_text()
        found = "\n".join(fault.found)
        if text.count(found) != 1:
            sys.exit(f"fault {fault.number} ({fault.title}): {path} holds its text {text.count(found)} times, not once")
        replacement = "\n".join(fault.replacement).replace("PLANTED", f"::torchamp_planted({fault.number})")
        texts[path] = text.replace(found, replacement)
    for path in texts:
        texts[path] = texts[path].replace("#pragma once\n", '#pragma once\n#include "torchamp/planted.h"\n', 1)
    texts["include/torchamp/planted.h"] = HEADER
    listed = ["git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    for name in filter(None, subprocess.check_output(listed, text=True).split("\0")):
        source = ROOT / name
        if name not in texts and source.is_file():
            texts[name] = source.read_bytes()
    for name, text in texts.items():
        data, target = text if isinstance(text, bytes) else text.encode(), tree / name
        if target.is_file() and target.read_bytes() == data:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        if (ROOT / name).is_file():
            target.chmod((ROOT / name).stat().st_mode)


def programs_of(fault):
    """The test programs of .ci/topics for the fault's file."""
    found = []
    for line in (ROOT / ".ci/topics").read_text().splitlines():
        prefix, *programs = line.split()
        if fault.path.startswith(prefix):
            found += [one for one in programs if one not in found]
    return found


def failures(tree, build, fault, program, gtest_filter):
    """The tests that fail: their names, or what has ended the program."""
    environment = os.environ | {"TORCHAMP_FAULT": str(fault), "OMP_NUM_THREADS": "1"}
    command = [build / "tests" / f"{program}_test", f"--gtest_filter={gtest_filter}", "--gtest_fail_fast"]
    try:
        done = subprocess.run(command, cwd=tree / "tests", env=environment, timeout=600, text=True, errors="replace",
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except subprocess.TimeoutExpired:
        return ["did not end"]
    if re.search(r"Running 0 tests", done.stdout):
        sys.exit(f"{program}_test has no test {gtest_filter}")
    if done.returncode == 0:
        return []
    names = re.findall(r"^\[  FAILED  \] ([\w./]+)", done.stdout, re.MULTILINE)
    started = re.findall(r"^\[ RUN      \] ([\w./]+)", done.stdout, re.MULTILINE)
    return sorted(set(names)) or started[-1:] or [f"exit code {done.returncode}"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/faults")
    parser.add_argument("--jobs", default=2)
    parser.add_argument("--search", action="store_true")
    parser.add_argument("numbers", nargs="*", type=int)
    given = parser.parse_args()
    every = read_faults()
    faults = [fault for fault in every if not given.numbers or fault.number in given.numbers]
    tree, build = given.build.resolve() / "tree", given.build.resolve() / "build"
    plant(every, tree)
    if given.search:
        runs = {fault: [(program, "*") for program in programs_of(fault)] for fault in faults}
    else:
        runs = {fault: [fault.test] if fault.test else [] for fault in faults}
    programs = sorted({program for tests in runs.values() for program, _ in tests})
    if not (build / "CMakeCache.txt").is_file():
        subprocess.check_call(["cmake", "--preset", "test", "-B", build, "-DTORCHAMP_BUILD_EXAMPLES=OFF"], cwd=tree)
    targets = [f"{program}_test" for program in programs]
    subprocess.check_call(["cmake", "--build", build, "--parallel", str(given.jobs), "--target", *targets])
    if not given.search:
        for program in programs:
            named = ":".join(sorted({test[1] for tests in runs.values() for test in tests if test[0] == program}))
            if failed := failures(tree, build, 0, program, named):
                sys.exit(f"without a fault, {program}_test fails: {' '.join(failed)}")
    noticed = 0
    for fault, tests in runs.items():
        by = []
        for program, gtest_filter in tests:
            by = [f"{program}: {name}" for name in failures(tree, build, fault.number, program, gtest_filter)]
            if by:
                break
        noticed += bool(by)
        print(f"{fault.number:3}  {fault.title} ({fault.path})\n       {', '.join(by) or 'NOT NOTICED'}", flush=True)
    print(f"{noticed} of {len(faults)} faults are noticed")
    return noticed < len(faults)


if __name__ == "__main__":
    sys.exit(main())
