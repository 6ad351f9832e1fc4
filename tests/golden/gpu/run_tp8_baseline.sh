#!/usr/bin/env bash
# run_tp8_baseline.sh: the common arguments alone; what every other tier is measured against
# tier baseline (0) of ladder glm5-nvfp4, stack sglang-0.5.9-cu128
# runtime 4b73405717d4e26a, patch set a92c6b2442cbdca0
# Written by gpuwright: the next deploy undoes an edit. Change catalog/tiers/sglang-0.5.9-cu128.yaml instead.
set -euo pipefail
# Whoever starts this, the server's environment is what is written here and nothing else.
[ -n "${GPUWRIGHT_SCRIPT-}" ] ||
  exec env -i GPUWRIGHT_SCRIPT="$0" GPUWRIGHT_SUPERVISED="${GPUWRIGHT_SUPERVISED-}" /bin/bash "$0"
# A connection is a file: 1024 concurrent requests need more than the usual soft limit.
ulimit -n "$(ulimit -Hn)" || true

export PATH=/opt/gpuwright/venv/bin:/usr/local/cuda-12.8/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export CUDA_HOME=/usr/local/cuda-12.8
export HOME=/opt/gpuwright/run
export LANG=C.UTF-8
export XDG_CACHE_HOME=/opt/gpuwright/cache/4b73405717d4e26a/xdg
export HF_HOME=/opt/gpuwright/cache/4b73405717d4e26a/huggingface
export FLASHINFER_WORKSPACE_BASE=/opt/gpuwright/cache/4b73405717d4e26a/flashinfer
export TRITON_CACHE_DIR=/opt/gpuwright/cache/4b73405717d4e26a/triton
export TORCHINDUCTOR_CACHE_DIR=/opt/gpuwright/cache/4b73405717d4e26a/inductor
export HF_HUB_OFFLINE=1
export SPT_NOENV=1
export SGLANG_ENABLE_JIT_DEEPGEMM=0
export OMP_NUM_THREADS=8
export SAFETENSORS_FAST_GPU=1
export FLASHINFER_EXTRA_CUDAFLAGS=-DCUTLASS_ENABLE_GDC_FOR_SM100=1
export NCCL_IB_DISABLE=1
export NCCL_P2P_LEVEL=SYS
export NCCL_MIN_NCHANNELS=8
export NCCL_ALLOC_P2P_NET_LL_BUFFERS=1

echo "[gpuwright] $(date -u +%Y-%m-%dT%H:%M:%SZ) tier baseline starts" >&2
exec /opt/gpuwright/venv/bin/python -m sglang.launch_server \
  --model-path /models/GLM-5-NVFP4 \
  --host 127.0.0.1 \
  --port 30000 \
  --tp-size 8 \
  --trust-remote-code \
  --quantization modelopt_fp4 \
  --attention-backend flashinfer \
  --moe-runner-backend flashinfer_cutlass \
  --kv-cache-dtype bf16 \
  --disable-custom-all-reduce \
  --mem-fraction-static 0.85 \
  --chunked-prefill-size 8192 \
  --cuda-graph-max-bs 256 \
  --reasoning-parser glm45 \
  --tool-call-parser glm47 \
  --watchdog-timeout 1800 \
  --enable-metrics
