"""One or two H200, torch kept by someone else, no package index: the interpreter is adopted, the rest carried in."""

import os

_gpus = int(os.environ.get("GPUWRIGHT_GPUS", "1"))  # 1 or 2, as benchmarks/gpu.sh says

stack = "sglang-0.5.12-cu130-triton"
ladder = "h200-llama" if _gpus == 1 else "h200-llama-tp2"
device = "cuda"
python = "3.12"
adopt = {"interpreter": "/opt/torch/.venv/bin/python3", "versions": {"torch": "==2.11.0"}}
wheelhouse = "wheelhouse"  # the folder of this checkout
cuda_home = "/usr/local/cuda-13.0"
model = {"kind": "folder", "path": "/opt/models/random-llama"}  # benchmarks/random_llama.py
min_memory_gib = 32
gpu = {
    "count": _gpus,
    "name": "NVIDIA H200",
    "compute_capability": "9.0",
    "memory_gib": 140,
    "pcie": {"generation": 5, "width": 16},
}
supervisor = "supervisor"  # no systemd there
ready_timeout_s = 420
_lengths = {"levels": [1, 16, 64], "input_len": 512, "output_len": 64}
profiles = {
    "smoke": {"prompts_per_concurrency": 8, "min_prompts": 32, "repeats": 3, **_lengths},
    "full": {"prompts_per_concurrency": 48, "min_prompts": 64, "repeats": 5, **_lengths},
}
