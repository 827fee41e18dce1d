# SPDX-License-Identifier: BSD-3-Clause
# Functions of .ci/run and .ci/nightly: parts with a time limit each, and a line for each part at the end. Source it in
# the repository's root.
exec </dev/null
export CI=true  # warnings are errors

title() { printf '\n==== %s (%d s)\n' "$*" "$SECONDS"; }

# install_missing PACKAGE…: installs Debian's packages that are missing.
install_missing() {
  local package missing=() as_root=()
  for package in "$@"; do
    [ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  echo "installing ${missing[*]}"
  [ "$(id -u)" -eq 0 ] || as_root=(sudo -n)
  "${as_root[@]}" apt-get update -qq
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${missing[@]}" \
    >/dev/null
}

# The packages that all tests and examples need.
packages=(git g++ clang clang-format clang-tidy cmake make python3-venv libgtest-dev libgmock-dev libpng-dev
  libbenchmark-dev libgloo-dev dataset-fashion-mnist doxygen pkgconf)

# If memory is slow, compilers are several times as fast with huge pages.
huge_pages() {
  local pages=/sys/kernel/mm/transparent_hugepage/enabled
  if [ -w $pages ]; then echo always >$pages || true; fi
}

# part LIMIT TITLE FUNCTION: calls FUNCTION, for at most LIMIT seconds and within `whole` seconds of the script. If
# `may_end_early` is yes, a part that reaches its limit is reported as left out, not as failed.
whole=5100
may_end_early=no
results=$(mktemp)
trap 'rm -f "$results"' EXIT
report() {
  echo "$1: $2" >>"$results"
  printf '\n---- %s: %s\n' "$1" "$2"
}
part() {
  local limit=$1 what=$2 start=$SECONDS code=0 took
  [ "$limit" -lt $((whole - SECONDS)) ] || limit=$((whole - SECONDS))
  title "$what"
  if [ "$limit" -lt 60 ]; then
    report "left out" "$what (no time was left)"
    return
  fi
  export -f "$3"
  timeout --kill-after=30 "$limit" bash -euo pipefail -c "$3" || code=$?
  took=$((SECONDS - start))
  if [ $code -eq 0 ]; then
    report passed "$what ($took s)"
  elif [ $took -ge "$limit" ] && [ $may_end_early = yes ]; then
    report "left out" "$what (ended after $limit s)"
  else
    report FAILED "$what (exit code $code)"
  fi
}

# part_beside LIMIT TITLE FUNCTION: like part, but the next parts run at the same time. It is for a part that keeps one
# core busy. end_beside waits for it and prints its output.
beside=
part_beside() {
  mkdir -p build
  part "$@" >build/ci-beside.log 2>&1 &
  beside=$!
}
end_beside() {
  [ -n "$beside" ] || return 0
  wait "$beside"
  cat build/ci-beside.log
  beside=
}

# Prints a line for each part; returns 1 if one failed.
end_of_parts() {
  title "done"
  cat "$results"
  ! grep -q '^FAILED' "$results"
}
