#!/bin/sh
# SPDX-License-Identifier: BSD-3-Clause
# Instructions of 2000 calls of ops without a kernel of torchamp's, under raw autocast and under a guard.
# In-place ops show the dispatch alone. Ops that allocate pay a few instructions per allocation: there
# LibTorch's CPU allocator asks c10::ThreadLocalDebugInfo for a profiler, and passes the policy's slot.
# Usage: count_instructions.sh PATH/TO/autocast_instructions      (needs valgrind)
set -eu
program=$1
count() {
  valgrind --tool=callgrind --callgrind-out-file=/dev/null --toggle-collect=measured_calls \
    "$program" "$1" "$2" 2>&1 | sed -n 's/.*Collected : \([0-9]*\).*/\1/p'
}
for ops in in_place allocating; do
  raw=$(count raw $ops)
  guarded=$(count torchamp $ops)
  echo "$ops: raw autocast $raw, AutocastGuard $guarded, difference $((guarded - raw))"
done
