"""Passes when sglang's NVFP4 linear, over flashinfer's fp4_quantize, compiles under fullgraph for SM120; no GPU needed.

The real ModelOptFp4LinearMethod.apply and CompressedTensorsW4A4Fp4.apply_weights are compiled over fake CUDA tensors on
a device that says it is of compute capability 12.0. One compilation must serve any number of rows, a second one row,
since Dynamo specialises sizes 0 and 1. Shapes and dtypes must be those of the real kernel: values (m, k/2) uint8;
scales uint8, (roundup(m, 128), k/16) swizzled and (m, k/16) plain.
"""

import os

os.environ["FLASHINFER_CUDA_ARCH_LIST"] = "12.0a"  # what flashinfer would find on an SM120 GPU

import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

torch.cuda.get_device_capability = lambda device=None: (12, 0)

import sglang.srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4 as compressed
import sglang.srt.layers.quantization.modelopt_quant as modelopt
from flashinfer import fp4_quantize

# What these modules hold on SM120; without a GPU they took sgl_kernel's function, or none.
modelopt.fp4_quantize = compressed.fp4_quantize = fp4_quantize
modelopt.enable_flashinfer_fp4_gemm = compressed.enable_flashinfer_fp4_gemm = True

ROWS = (7, 128, 300, 1)
K, N = 7168, 512


def compile_and_call(function, expected):
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for m in ROWS:
        x = torch.empty(m, K, dtype=torch.bfloat16, device="cuda")
        torch._dynamo.maybe_mark_dynamic(x, 0)
        out = compiled(x)
        found = [(tuple(t.shape), t.dtype) for t in (out if isinstance(out, tuple) else (out,))]
        assert found == expected(m), f"{m} rows: {found}, not {expected(m)}"
        assert counter.frame_count == (2 if m == 1 else 1), f"{counter.frame_count} compilations at {m} rows"


def round_up(value, multiple):
    return (value + multiple - 1) // multiple * multiple


with FakeTensorMode(allow_non_fake_inputs=True):
    scale = torch.empty((), dtype=torch.float32, device="cuda")
    layer = torch.nn.Module()
    layer.output_size_per_partition = N
    layer.weight = layer.weight_packed = torch.empty(N, K // 2, dtype=torch.uint8, device="cuda")
    layer.weight_scale = torch.empty(N, K // 16, dtype=torch.float8_e4m3fn, device="cuda")
    layer.weight_scale_interleaved = layer.weight_scale
    layer.alpha = layer.input_scale_inv = layer.input_global_scale = scale

    compile_and_call(
        lambda x: fp4_quantize(x, scale),
        lambda m: [((m, K // 2), torch.uint8), ((round_up(m, 128), K // 16), torch.uint8)],
    )
    compile_and_call(
        lambda x: fp4_quantize(x, scale, is_sf_swizzled_layout=False),
        lambda m: [((m, K // 2), torch.uint8), ((m, K // 16), torch.uint8)],
    )
    for scheme, name in (
        (modelopt.ModelOptFp4LinearMethod, "apply"),
        (compressed.CompressedTensorsW4A4Fp4, "apply_weights"),
    ):
        method = getattr(object.__new__(scheme), name)
        compile_and_call(lambda x, method=method: method(layer, x), lambda m: [((m, N), torch.bfloat16)])
