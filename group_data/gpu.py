"""Eight RTX PRO 6000 Blackwell GPUs, GLM-5-NVFP4."""

ladder = "glm5-nvfp4"
device = "cuda"
cuda_home = "/usr/local/cuda-12.8"  # one absolute, versioned path
model = {"kind": "folder", "path": "/models/GLM-5-NVFP4"}
smoke_benchmark = {"levels": [1, 10, 256, 1024], "input_len": 1024, "output_len": 128}
