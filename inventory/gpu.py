"""The Blackwell nodes: put your hosts here. `canary` goes first: pyinfra inventory/gpu.py deploy.py --limit canary"""

from operations.limit import require_match

gpu = ["gpu-01.example", "gpu-02.example"]
canary = ["gpu-01.example"]

require_match(gpu=gpu, canary=canary)
