"""Kernels for ``meta`` tensors that PyTorch does not bring, with the results that CUDA's kernels have.

``aten._fused_rms_norm`` has a kernel on CUDA, and elsewhere falls apart into a dozen operations whose results
autograd would keep. The CUDA kernel (aten/src/ATen/native/cuda/layer_norm_kernel.cu) makes the output and one
reciprocal root per row, in fp32 for short types.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

LIBRARY = torch.library.Library("aten", "IMPL")
"""Kept for as long as the process lives: its kernels go with it."""


def fused_rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    """Give the output, shaped like ``input``, and the reciprocal roots, with 1 in place of each normalised size."""
    n = len(normalized_shape)
    short = input.dtype in (torch.float16, torch.bfloat16)
    assert math.prod(normalized_shape) == math.prod(input.shape[-n:])
    roots = input.new_empty((*input.shape[:-n], *(1 for _ in range(n))), dtype=torch.float32 if short else input.dtype)
    return torch.empty_like(input), roots


if hasattr(torch.ops.aten, "_fused_rms_norm"):
    LIBRARY.m.impl("_fused_rms_norm", "Meta", fused_rms_norm)  # type: ignore[union-attr]
