#!/usr/bin/env bash
# run_tp8_piecewise_ep8.sh: piecewise and ep8 together
# tier piecewise-ep8 of ladder glm5-nvfp4, stack sglang-0.5.9-cu128
# runtime 558a6dac4fe0cb2b, patch set 50188a75c2a01aee
# Written by gpuwright: the next deploy undoes an edit. Change catalog/tiers.yaml instead.
set -euo pipefail
# A connection is a file: 1024 concurrent requests need more than the usual soft limit.
ulimit -n "$(ulimit -Hn)" || true

export PATH=/opt/gpuwright/venv/bin:/usr/local/cuda-12.8/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export CUDA_HOME=/usr/local/cuda-12.8
export FLASHINFER_WORKSPACE_BASE=/opt/gpuwright/cache/558a6dac4fe0cb2b/flashinfer
export TRITON_CACHE_DIR=/opt/gpuwright/cache/558a6dac4fe0cb2b/triton
export TORCHINDUCTOR_CACHE_DIR=/opt/gpuwright/cache/558a6dac4fe0cb2b/inductor
export HF_HUB_OFFLINE=1
export SGLANG_ENABLE_JIT_DEEPGEMM=0
export OMP_NUM_THREADS=8
export SAFETENSORS_FAST_GPU=1
export FLASHINFER_EXTRA_CUDAFLAGS=-DCUTLASS_ENABLE_GDC_FOR_SM100=1
export NCCL_IB_DISABLE=1
export NCCL_P2P_LEVEL=SYS
export NCCL_MIN_NCHANNELS=8
export NCCL_ALLOC_P2P_NET_LL_BUFFERS=1

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
  --mem-fraction-static 0.8 \
  --chunked-prefill-size 8192 \
  --cuda-graph-max-bs 256 \
  --reasoning-parser glm45 \
  --tool-call-parser glm47 \
  --watchdog-timeout 1800 \
  --enable-metrics \
  --enable-piecewise-cuda-graph \
  --piecewise-cuda-graph-max-tokens 8192 \
  --ep-size 8
