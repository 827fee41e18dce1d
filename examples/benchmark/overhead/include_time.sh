#!/bin/sh
# SPDX-License-Identifier: BSD-3-Clause
# How much torchamp/torchamp.h adds to the compile time of a file that includes torch/torch.h.
# Usage: include_time.sh INCLUDE_DIRECTORY_OF_TORCHAMP LIBTORCH_PREFIX [ROUNDS | instructions]
# By default user seconds of both, in turn, and the median of the pairs' ratios (5 rounds): quick, and
# noisy by some percent. `instructions` counts those of the compiler (needs valgrind; some twenty
# minutes) and is the same each time. The compiler is CXX, by default c++.
set -eu
include=$1
torch=$2
how=${3:-5}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
echo '#include <torch/torch.h>' >"$folder/without.cpp"
printf '#include <torch/torch.h>\n#include <torchamp/torchamp.h>\n' >"$folder/with.cpp"
compile() {  # NAME PREFIX...
  name=$1
  shift
  "$@" "${CXX:-c++}" -std=c++20 -fsyntax-only -I"$include" -isystem "$torch/include" \
    -isystem "$torch/include/torch/csrc/api/include" "$folder/$name.cpp"
}
count_instructions() {
  compile "$1" valgrind --tool=exp-bbv --instr-count-only=yes --trace-children=yes \
    --bb-out-file="$folder/%p.bb" --log-file="$folder/$1.%p.log"
  cat "$folder/$1".*.log | sed -n 's/.*Total instructions: *\([0-9]*\).*/\1/p' |
    awk '{ sum += $1 } END { printf "%.0f\n", sum }'
}
count_seconds() {
  compile "$1" python3 -c '
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime)'
}
measure=count_seconds rounds=$how unit=s
if [ "$how" = instructions ]; then
  measure=count_instructions rounds=1 unit=instructions
fi
for _ in $(seq "$rounds"); do
  without=$($measure without)
  with=$($measure with)
  echo "$without $with" >>"$folder/pairs"
done
python3 -c '
import statistics, sys
pairs = [tuple(map(float, line.split())) for line in open(sys.argv[1])]
unit = sys.argv[2]
print(f"torch/torch.h alone: {statistics.median(a for a, _ in pairs):.6g} {unit}")
print(f"and torchamp.h:      {statistics.median(b for _, b in pairs):.6g} {unit}")
print(f"added:               {100 * (statistics.median(b / a for a, b in pairs) - 1):.2f} %")' "$folder/pairs" "$unit"
