"""Passes when SGLang reaches flashinfer's fp4_quantize by an operator of its own, which Dynamo takes as it is under
fullgraph, so that nothing in flashinfer is traced; no GPU needed.

One compilation must serve any number of rows, a second one row, since Dynamo specialises sizes 0 and 1. Shapes and
dtypes must be those of the real kernel: values (m, k/2) uint8; scales uint8, (roundup(m, 128), k/16) swizzled and
(m, k/16) plain.
"""

import torch
import torch._dynamo
from sglang.srt.layers.quantization import fp4_utils
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

ROWS = (7, 128, 300, 1)
K = 7168


def compile_and_call(swizzled, scale_rows):
    torch._dynamo.reset()
    counter = CompileCounter()

    def quantize(x):
        return fp4_utils.fp4_quantize(x, scale, is_sf_swizzled_layout=swizzled)

    compiled = torch.compile(quantize, fullgraph=True, backend=counter)
    for m in ROWS:
        x = torch.empty(m, K, dtype=torch.bfloat16, device="cuda")
        torch._dynamo.maybe_mark_dynamic(x, 0)
        found = [(tuple(t.shape), t.dtype) for t in compiled(x)]
        expected = [((m, K // 2), torch.uint8), ((scale_rows(m), K // 16), torch.uint8)]
        assert found == expected, f"{m} rows: {found}, not {expected}"
        assert counter.frame_count == (2 if m == 1 else 1), f"{counter.frame_count} compilations at {m} rows"


with FakeTensorMode(allow_non_fake_inputs=True):
    scale = torch.empty((), dtype=torch.float32, device="cuda")
    compile_and_call(True, lambda m: (m + 127) // 128 * 128)
    compile_and_call(False, lambda m: m)
