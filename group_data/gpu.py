"""Eight RTX PRO 6000 Blackwell GPUs, GLM-5-NVFP4."""

ladder = "glm5-nvfp4"
device = "cuda"
cuda_home = "/usr/local/cuda-12.8"  # one absolute, versioned path
model = {"kind": "folder", "path": "/models/GLM-5-NVFP4"}
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
