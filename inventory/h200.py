"""This machine, with an NVIDIA H200 and no network: benchmarks/gpu.sh deploys to it (docs/gpu-h200.md)."""

from operations.limit import require_match

h200 = ["@local"]

require_match(h200=h200)
