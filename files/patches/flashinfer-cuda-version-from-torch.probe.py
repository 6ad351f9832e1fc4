"""Passes when Dynamo can trace flashinfer's CUDA version check under fullgraph; pristine, it raises Unsupported."""

import torch
from flashinfer.jit.cpp_ext import is_cuda_version_at_least

compiled = torch.compile(lambda x: x + 1 if is_cuda_version_at_least("12.8") else x, fullgraph=True, backend="eager")
assert compiled(torch.zeros(1)).item() == 1.0, "torch.version.cuda 12.8 must count as at least 12.8"
