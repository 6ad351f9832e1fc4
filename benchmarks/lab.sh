#!/usr/bin/env bash
# How long the lab takes, on this machine, now: `make lab` on a fresh clone with a warm uv cache, then a second run.
# usage: benchmarks/lab.sh [REPEATS of the second run, default 7]
# Clones the committed state into a temporary folder; nothing of this checkout's .lab/ is touched.
set -euo pipefail
repeats=${1:-7}
here=$(cd "$(dirname "$0")/.." && pwd)
folder=$(mktemp -d)
trap 'make -C "$folder/clone" lab-down >/dev/null 2>&1; rm -rf "$folder"' EXIT
git clone -q "$here" "$folder/clone"
cd "$folder/clone"
seconds() {
  local begin
  begin=$(date +%s%N)
  "$@" >"$folder/out" 2>&1 || { cat "$folder/out" >&2; return 1; }
  awk -v ns=$(($(date +%s%N) - begin)) 'BEGIN {printf "%.2f\n", ns / 1e9}'
}

echo "machine: $(nproc) cores, $(awk '/MemTotal/ {printf "%.0f GiB", $2/1048576}' /proc/meminfo), $(python3 --version), $(git rev-parse --short HEAD), $(date -u +%F)"
venv=$(seconds make venv)
lab=$(seconds make lab)
echo "make venv, s: $venv"
echo "make lab after it, with a warm uv cache, s: $lab"
grep -E 'ready after|tok/s|accepted' "$folder/out" | sed 's/^ *\[[^]]*\] */  /'
for _ in $(seq "$repeats"); do seconds .venv/bin/pyinfra inventory/lab.py deploy.py -y; done | sort -n |
  awk '{v[NR]=$1} END {printf "second deploy, nothing to do, s: median %.2f, lowest %.2f, highest %.2f of %d\n", v[int((NR+1)/2)], v[1], v[NR], NR}'
