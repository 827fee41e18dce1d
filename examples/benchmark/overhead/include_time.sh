#!/bin/sh
# SPDX-License-Identifier: BSD-3-Clause
# How much torchamp/torchamp.h adds to the compile time of a file that includes torch/torch.h: user
# seconds of both, in turn, and the median of the pairs' ratios.
# Usage: include_time.sh INCLUDE_DIRECTORY_OF_TORCHAMP LIBTORCH_PREFIX [ROUNDS]     (CXX, default c++)
set -eu
include=$1
torch=$2
rounds=${3:-5}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
echo '#include <torch/torch.h>' >"$folder/without.cpp"
printf '#include <torch/torch.h>\n#include <torchamp/torchamp.h>\n' >"$folder/with.cpp"
seconds() {
  python3 - "$@" <<'PYTHON'
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime)
PYTHON
}
compile() {
  seconds "${CXX:-c++}" -std=c++20 -fsyntax-only -I"$include" -isystem "$torch/include" \
    -isystem "$torch/include/torch/csrc/api/include" "$folder/$1.cpp"
}
for round in $(seq "$rounds"); do
  echo "$(compile without) $(compile with)"
done | python3 -c '
import statistics, sys
pairs = [tuple(map(float, line.split())) for line in sys.stdin]
print(f"torch/torch.h alone: {statistics.median(a for a, _ in pairs):.2f} s")
print(f"and torchamp.h:      {statistics.median(b for _, b in pairs):.2f} s")
print(f"added:               {100 * (statistics.median(b / a for a, b in pairs) - 1):.1f} %")'
