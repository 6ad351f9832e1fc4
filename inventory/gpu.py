"""The Blackwell nodes. Put your hosts here; `canary` is deployed first: pyinfra inventory/gpu.py deploy.py --limit canary"""

from gpuwright.limit import require_match

gpu = ["gpu-01.example", "gpu-02.example"]
canary = ["gpu-01.example"]

require_match(gpu=gpu, canary=canary)
