#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# Compares allocators of host memory: processor time per training step of BERTs in bf16 on one thread, as CSV.
#
#   allocators.sh COMMAND…
#
# COMMAND is a worker of the comparison: build/demo/examples/benchmark/comparison --worker, or
# python3 -B examples/benchmark/worker.py. The allocators take turns. JEMALLOC names jemalloc's library.
set -euo pipefail
jemalloc=${JEMALLOC:-libjemalloc.so.2}
declare -A allocators=(
  [glibc]="env"
  ["glibc with settings"]="env MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=2147483647 MALLOC_TOP_PAD_=67108864"
  [jemalloc]="env LD_PRELOAD=$jemalloc"
  ["jemalloc with settings"]="env LD_PRELOAD=$jemalloc MALLOC_CONF=dirty_decay_ms:-1,muzzy_decay_ms:-1"
)
declare -A sizes=(
  [small]="batch=4 length=32 layers=2 width=128 heads=2 vocabulary=2048"
  [large]="batch=4 length=128 layers=2 width=768 heads=12 vocabulary=4096"
)
declare -A steps=([small]=100 [large]=10)

echo "bert,allocator,round,seconds_per_step,peak_bytes"
for round in 1 2 3 4 5; do
  for bert in small large; do
    for allocator in glibc "glibc with settings" jemalloc "jemalloc with settings"; do
      set_sizes=()
      for size in ${sizes[$bert]}; do set_sizes+=(--set "$size"); done
      # shellcheck disable=SC2086
      echo "steps ${steps[$bert]}" | OMP_NUM_THREADS=1 ${allocators[$allocator]} "$@" --model bert --casts "${CASTS:-standard}" \
        --dtype bf16 --optimizer fused --threads 1 --device cpu "${set_sizes[@]}" |
        awk -v row="$bert,$allocator,$round" -v steps="${steps[$bert]}" '$1 == "ran" {
          for (i = 2; i <= NF; ++i) { split($i, pair, "="); value[pair[1]] = pair[2] }
          printf "%s,%.6g,%s\n", row, value["processor"] / steps, value["peak"]
        }'
    done
  done
done
