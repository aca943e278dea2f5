"""What kernels take for themselves while they run, which no tensor shows."""

from typing import Any

import torch
from torch import Tensor

from ckbench.estimate.tracker import Scratch

aten = torch.ops.aten


def cuda_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Give what a CUDA kernel takes for itself while it runs.

    Flash attention's backward: the softmax's row sums, fp32 (B, H, S'), and the queries' gradient accumulated in fp32
    (B, S', H, K'), with S' the sequence rounded up to 128 and K' the width rounded up to 32 (to 64 above 128);
    and with grouped heads the gradients of keys and values expanded to all heads. Source: flash_api.cpp (mha_bwd).

    Matrix products: a copy of each factor whose rows or columns do not lie one after the other, as those of an
    expanded gradient. Source: aten/src/ATen/native/cuda/Blas.cpp (prepare_matrix_for_cublas and its batched form).
    """
    if func is aten._scaled_dot_product_flash_attention_backward.default:
        query, key = args[1], args[2]
        B, H, S, K = (int(n) for n in query.shape)
        rows = -(-S // 128) * 128
        width = -(-K // 32) * 32 if K <= 128 else -(-K // 64) * 64
        scratch = 4 * B * H * rows * (1 + width)
        if key.shape[1] != H:
            scratch += 2 * B * H * int(key.shape[2]) * K * int(key.element_size())
        return scratch
    first = _FIRST_FACTOR.get(func)
    if first is not None:
        return sum(x.numel() * x.element_size() for x in args[first : first + 2] if not _is_plain_matrix(x))
    return 0


_FIRST_FACTOR = {aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1, aten.baddbmm.default: 1}
"""Where the two factors of a product stand among its arguments."""


def _is_plain_matrix(x: Tensor) -> bool:
    """Tell whether cuBLAS can read (..., M, N) as it lies: one of both strides is 1, the other spans it."""
    (rows, columns), (down, right) = x.shape[-2:], x.stride()[-2:]
    return (right == 1 and down >= max(1, columns)) or (down == 1 and right >= max(1, rows)) or x.is_contiguous()


def cpu_bytes(n_threads: int) -> Scratch:
    """Give what CPU kernels of a process with so many threads take.

    Layer norm's backward: sums of the weight's and the bias's gradient for each thread, (2, threads, N) of the input's
    type. Source: aten/src/ATen/native/cpu/layer_norm_kernel.cpp (LayerNormBackwardKernelImplInternal). Matrix products
    of short types take more, which is not known here.
    """

    def scratch_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        if func is not aten.native_layer_norm_backward.default or not any(args[7][1:]):
            return 0
        width = 1
        for size in args[2]:
            width *= int(size)
        return 2 * n_threads * width * int(args[1].element_size())

    return scratch_bytes
