"""Eight RTX PRO 6000 Blackwell GPUs, GLM-5-NVFP4."""

ladder = "glm5-nvfp4"
device = "cuda"
cuda_home = "/usr/local/cuda-12.8"  # one absolute, versioned path
model = {"kind": "folder", "path": "/models/GLM-5-NVFP4"}
gpu = {
    "count": 8,
    "name": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "compute_capability": "12.0",
    "memory_gib": 94,  # nvidia-smi shows 97887 MiB
    "pcie": {"generation": 5, "width": 16},
}
# Settings of the host (catalog/system.yaml): True, or a value of your own. What is taken out is put back on the node.
system = {
    "build-tools": True,
    "python": True,
    "numa": True,
    "inspection": True,
    "cuda-toolkit": True,
    "numa-balancing": True,
    "persistence": True,
    "hold-driver": True,
    # "power-limit": 450,  # W for each card
    # "governor": True,
    # "uvm-no-hmm": True,  # counts after a reboot
}
profiles = {
    "smoke": {"levels": [1, 10, 256], "input_len": 1024, "output_len": 128, "prompts_per_concurrency": 5},
    "full": {
        "levels": [1, 10, 256, 1024],
        "input_len": 1024,
        "output_len": 128,
        "prompts_per_concurrency": 5,
        "min_prompts": 20,
        "warmup_per_concurrency": 2,
        "repeats": 5,
    },
}
