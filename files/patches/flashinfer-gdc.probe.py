"""Passes when the GDC define reaches the ninja files of flashinfer's SM120 FP4 GEMM and MoE. Compiles nothing."""

import os

os.environ["FLASHINFER_CUDA_ARCH_LIST"] = "12.0a"
os.environ.setdefault("CUDA_HOME", "/usr/local/cuda-12.8")  # only written into the file here

from flashinfer.jit.fused_moe import gen_cutlass_fused_moe_sm120_module
from flashinfer.jit.gemm import gen_gemm_sm120_module_cutlass_fp4

for generate in (gen_gemm_sm120_module_cutlass_fp4, gen_cutlass_fused_moe_sm120_module):
    spec = generate()
    spec.write_ninja()
    text = spec.ninja_path.read_text()
    assert "-DCUTLASS_ENABLE_GDC_FOR_SM100=1" in text, f"{spec.name}: the define is not in {spec.ninja_path}"
