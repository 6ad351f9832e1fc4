#!/usr/bin/env bash
# The whole product on this machine's own GPU, without a network: adopt what is there, carry in the rest, serve, measure,
# drift, crash. docs/gpu-h200.md shows what came of it; inventory/h200.py and group_data/h200.py say what is deployed.
# usage: benchmarks/gpu.sh gather DIR LIST  where a package index can be reached: all wheels that the machine needs beside
#                                           what it has, which is LIST: its own `pip list --format json`
#        benchmarks/gpu.sh prepare DIR  there: a control environment and the wheelhouse from DIR, and a random model
#        benchmarks/gpu.sh deploy       doctor, then tier baseline: install, patch, serve, smoke; a second deploy; a check
#        benchmarks/gpu.sh tiers [TIER…]  other tiers (piecewise), compared with it; baseline again
#        benchmarks/gpu.sh drift        a hand edit: check 2, deploy, check 0; the scheduler killed, then a deploy
#        benchmarks/gpu.sh report FILE  the HTML report
# Each fits in ten minutes on one H200, a tier by the longer PROFILE=full alone. GPUWRIGHT_GPUS=2 does it with tensor
# parallelism 2.
set -euo pipefail
cd "$(dirname "$0")/.."
inventory=inventory/h200.py
stack=sglang-0.5.12-cu130-triton
python=/opt/torch/.venv/bin/python3 # what is adopted; it makes the control environment too
export GPUWRIGHT_GPUS=${GPUWRIGHT_GPUS:-1} PYTHONDONTWRITEBYTECODE=1

step() {
  local begin=$SECONDS code=0
  echo "== $*"
  "$@" || code=$?
  echo "== exit code $code after $((SECONDS - begin)) s"
  return "$code"
}
expect() { # CODE COMMAND…
  local wanted=$1 code=0
  shift
  step "$@" || code=$?
  [ "$code" = "$wanted" ] || { echo "expected exit code $wanted"; exit 1; }
}
deploy() { step .venv/bin/pyinfra "$inventory" deploy.py -y --data "profile=${PROFILE:-smoke}" "$@" 2>&1; }
unchanged() { # a deploy that is to change nothing
  deploy | tee /tmp/unchanged.log
  if grep -qE ' Success$' /tmp/unchanged.log; then echo "a second deploy changed something"; exit 1; fi
}
check() { expect "$1" .venv/bin/python check.py "$inventory" --data "profile=${PROFILE:-smoke}" "${@:2}"; }

case "${1:-}" in
gather)
  to=${2:?DIR}
  mkdir -p "$to/control"
  .venv/bin/python -m gpuwright wheelhouse "$stack" --python 3.12 --to "$to/wheelhouse" --beside "${3:?LIST}"
  # pip judges markers by the Python it runs on; uv by the one that is named.
  .venv/bin/uv pip compile --quiet --no-deps --generate-hashes --python-version 3.12 requirements.txt -o "$to/control.txt"
  .venv/bin/python -m pip download --quiet --disable-pip-version-check --require-hashes --only-binary :all: \
    --python-version 3.12 --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 \
    --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 --no-deps -r "$to/control.txt" -d "$to/control"
  du -sh "$to"/*
  ;;
prepare)
  from=${2:?DIR}
  "$python" -m venv .venv
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-index --find-links "$from/control" \
    --require-hashes -r requirements.txt
  mkdir -p wheelhouse && cp -pu "$from"/wheelhouse/* wheelhouse/
  step "$python" benchmarks/random_llama.py /opt/models/random-llama --tensor-parallel "$GPUWRIGHT_GPUS"
  nvidia-smi --query-gpu=name,driver_version,memory.total,power.limit --format=csv
  ;;
deploy)
  step .venv/bin/pyinfra "$inventory" doctor.py -y || true # it says what could be better, too
  deploy
  unchanged
  check 0
  ;;
tiers)
  tiers=("${@:2}")
  for tier in "${tiers[@]:-piecewise}"; do
    deploy --data "tier=$tier"
    step .venv/bin/python -m gpuwright compare "$tier" || true
  done
  deploy
  ;;
drift)
  file=$(ls /opt/gpuwright/venv/lib/python3.12/site-packages/sglang/srt/utils/common.py)
  cp -p "$file" /tmp/kept.py
  cp "$file" /tmp/edited.py && echo '# by hand' >>/tmp/edited.py && mv /tmp/edited.py "$file"
  check 2
  deploy --data smoke=never
  check 0
  cmp "$file" /tmp/kept.py
  scheduler=$(pgrep -f 'sglang::scheduler' | head -1)
  step kill -9 "$scheduler"
  for _ in $(seq 60); do # until supervisor has started another
    now=$(pgrep -f 'sglang::scheduler' | head -1 || true)
    [ -n "$now" ] && [ "$now" != "$scheduler" ] && break
    sleep 1
  done
  check 2
  deploy --data smoke=never
  check 0
  nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv
  ;;
report)
  .venv/bin/python -m gpuwright report --output "${2:?FILE}"
  ;;
*)
  sed -n '2,14s/^# \{0,1\}//p' "$0"
  exit 64
  ;;
esac
