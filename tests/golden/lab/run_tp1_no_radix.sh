#!/usr/bin/env bash
# run_tp1_no_radix.sh: no prefix cache, so every prompt is prefilled in full
# tier no-radix (1.1) of ladder lab-cpu, stack sglang-0.5.9-cu128
# runtime 69085bb7d4af4863, patch set a92c6b2442cbdca0
# Written by gpuwright: the next deploy undoes an edit. Change catalog/tiers/sglang-0.5.9-cu128.yaml instead.
set -euo pipefail
# Whoever starts this, the server's environment is what is written here and nothing else.
[ -n "${GPUWRIGHT_SCRIPT-}" ] ||
  exec env -i GPUWRIGHT_SCRIPT="$0" GPUWRIGHT_SUPERVISED="${GPUWRIGHT_SUPERVISED-}" /bin/bash "$0"
# A connection is a file: 1024 concurrent requests need more than the usual soft limit.
ulimit -n "$(ulimit -Hn)" || true

export PATH=/opt/gpuwright/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export LD_LIBRARY_PATH=/opt/gpuwright/lib
export HOME=/opt/gpuwright/run
export LANG=C.UTF-8
export XDG_CACHE_HOME=/opt/gpuwright/cache/69085bb7d4af4863/xdg
export HF_HOME=/opt/gpuwright/cache/69085bb7d4af4863/huggingface
export FLASHINFER_WORKSPACE_BASE=/opt/gpuwright/cache/69085bb7d4af4863/flashinfer
export TRITON_CACHE_DIR=/opt/gpuwright/cache/69085bb7d4af4863/triton
export TORCHINDUCTOR_CACHE_DIR=/opt/gpuwright/cache/69085bb7d4af4863/inductor
export HF_HUB_OFFLINE=1
export SPT_NOENV=1
export OMP_NUM_THREADS=2

echo "[gpuwright] $(date -u +%Y-%m-%dT%H:%M:%SZ) tier no-radix starts" >&2
exec /opt/gpuwright/venv/bin/python -m sglang.launch_server \
  --model-path /opt/gpuwright/model \
  --host 127.0.0.1 \
  --port 31000 \
  --tp-size 1 \
  --device cpu \
  --attention-backend torch_native \
  --disable-cuda-graph \
  --max-total-tokens 20000 \
  --chunked-prefill-size 2048 \
  --random-seed 1 \
  --sleep-on-idle \
  --disable-radix-cache
