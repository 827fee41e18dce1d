#!/bin/sh
# SPDX-License-Identifier: BSD-3-Clause
# How much torchamp adds to compile time: torchamp/torchamp.h to a file that includes torch/torch.h,
# or, with `program`, guard, scaler and a fused optimizer to a training program, optimised; with
# `compiled` the same where the library is compiled apart (torchamp/compiled.h).
# Usage: include_time.sh INCLUDE_DIRECTORY_OF_TORCHAMP LIBTORCH_PREFIX [ROUNDS | instructions] [program | compiled]
# By default user seconds of both, in turn, and the median of the pairs' ratios (5 rounds): quick, and
# noisy by some percent. `instructions` counts those of the compiler (needs valgrind; some twenty
# minutes) and is the same each time. The compiler is CXX, by default c++; the program's flags are
# CXXFLAGS, by default -O2.
#
# Note [What a program costs to compile]
# LibTorch 2.15, g++ 12, -O2, billions of instructions of the compiler (`perf stat -e
# instructions:u`) and bytes of code and data of the object file:
#   without torchamp                                58.73   62,173
#   guard, scaler and a fused optimizer             92.90  291,889
#   the same, the library compiled apart            62.80   57,290
#   the library's own file, once                   105.8   566,939
#   torchamp.h included, nothing used               66.7    60,984
#   the same, the library compiled apart            63.3    61,123
# (These rows are of the core before it was rewritten for its readers, when the object had 296,455
# bytes. Since then it has 374,294, and the program takes 22.8 s instead of 20.5. The rows with
# TORCHAMP_COMPILED are older still: the second was 112.81 and 469,375 then.) So 58 %, or 7.2 % with
# TORCHAMP_COMPILED. Header-only there is no way
# near that: no part stands out (800 functions, the largest of 4.2 kB), and the compiler spends 0.12
# to 0.15 billion on a kilobyte of them; on one of the rest of the program, most of it instances of
# LibTorch's templates, 0.27. What is included and not used takes 8 in the program, 5 of them
# because GCC decides otherwise what to do about LibTorch's virtual calls: with -fno-devirtualize
# the program takes 52.1 without torchamp.h and 55.2 with it.
# With -fsyntax-only, torchamp.h was 8.5 % of what torch/torch.h takes (3.56 of 42.0): autocast.h
# 1.58, optim.h 0.76, grad_scaler.h 1.63. Since the rewrite it is 19.5 % (8.2), a third of which is
# one more garbage collection of the compiler's: without any, 17 % of the seconds, and 12 % before.
# Six tenths of it are instances of templates over types that LibTorch's headers do not have there.
# In these billions: a std::vector of such a type takes 0.008, and 0.012 more where something is
# added to it; an optional 0.016; a shared_ptr 0.008, and 0.015 more with make_shared; a unique_ptr
# or an intrusive_ptr 0.022; a map 0.05 to 0.08; a call with a range of <ranges> 0.06. All texts of
# errors together take 0.07. ATen/autocast_mode.h, which torch/torch.h does not include, takes 0.12.
set -eu
include=$(realpath "$1")
torch=$(realpath "$2")
how=${3:-5}
what=${4:-headers}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
output=-fsyntax-only
if [ "$what" != headers ]; then
  program=$(dirname "$0")/training_program.cpp
  cp "$program" "$folder/without.cpp"
  { echo '#define WITH_TORCHAMP' && cat "$program"; } >"$folder/with.cpp"
  if [ "$what" = compiled ]; then sed -i '1i #define TORCHAMP_COMPILED' "$folder/with.cpp"; fi
  output="${CXXFLAGS:--O2} -c"
else
  echo '#include <torch/torch.h>' >"$folder/without.cpp"
  printf '#include <torch/torch.h>\n#include <torchamp/torchamp.h>\n' >"$folder/with.cpp"
fi
compile() {  # NAME PREFIX...
  name=$1
  shift
  # shellcheck disable=SC2086  # several flags
  (cd "$folder" && "$@" "${CXX:-c++}" -std=c++20 $output -I"$include" -isystem "$torch/include" \
    -isystem "$torch/include/torch/csrc/api/include" "$name.cpp")
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
print(f"without torchamp: {statistics.median(a for a, _ in pairs):.6g} {unit}")
print(f"with torchamp:    {statistics.median(b for _, b in pairs):.6g} {unit}")
print(f"added:            {100 * (statistics.median(b / a for a, b in pairs) - 1):.2f} %")' "$folder/pairs" "$unit"
if [ "$what" != headers ]; then
  echo 'code and data, bytes:'
  size "$folder/without.o" "$folder/with.o" | awk 'NR > 1 { print "  " $1 + $2, $6 }'
fi
