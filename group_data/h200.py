"""One H200, to try what needs a GPU where there is no Blackwell: docs/doctor.md says what was seen on one."""

ladder = "lab-h200"
device = "cuda"
cuda_home = "/usr/local/cuda-13.0"
model = {"kind": "tiny"}
supervisor = "supervisor"
min_memory_gib = 32
gpu = {
    "count": 1,
    "name": "NVIDIA H200",
    "compute_capability": "9.0",
    "memory_gib": 140,
    "pcie": {"generation": 5, "width": 16},
}
ignored_checks = {
    "nvcc-release": "this machine has CUDA 13.0 alone, and no network to fetch 12.8",
}
profiles = {"smoke": {"levels": [1, 16, 64], "input_len": 256, "output_len": 64, "prompts_per_concurrency": 5}}
