"""What CUDA runs where tensors without data would run something else: everything that is substituted stands here.

On ``meta`` tensors most operations allocate what their CUDA kernels do. The exceptions, each with what CUDA does:

* scaled_dot_product_attention would take the mathematical path: the flash, efficient or cuDNN operation is called, as
  PyTorch chooses by type, width and mask (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp);
* dropout would keep a mask in the activations' type: CUDA keeps one byte per element (native_dropout);
* rms_norm would be composed of many operations: CUDA has one kernel that keeps the reciprocal root in fp32
  (``meta_kernels``);
* autocast knows nothing of ``meta``: operands of products are cast down (weights once, until autocast ends), norms,
  losses and softmax are computed in fp32, after the lists of aten/src/ATen/autocast_mode.h;
* the fused optimizers refuse ``meta``: they make their state and need no temporaries;
* gradient scaling reads a number back, which needs data: scaling multiplies the loss and decides nothing here;
* transformers reads positions back to see whether several sequences are packed into one: ours never are;
* what travels to the host takes no room on the device and has no data here, so it is not copied; an optimizer on the
  host takes nothing of the device but the gradients it reads;
* filling with random numbers, as every weight is at first, has nothing to fill here and is left out;
* optimizers read norms back to scale by them, and sizes do not depend on them: they read one;
* kernels take scratch memory that no tensor shows: ``scratch.py``.
"""

import contextlib
import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.nn import functional as F
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode

from ckbench.errors import CkbenchError
from ckbench.estimate import meta_kernels as meta_kernels  # registers itself

aten = torch.ops.aten

FLASH_MAX_WIDTH = 256
SHORT = (torch.float16, torch.bfloat16)

LOWERED = frozenset(
    {
        F.linear, F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.matmul, torch.mm, torch.bmm,
        torch.addmm, torch.baddbmm, torch.einsum, torch.mv, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__,
        Tensor.mm, Tensor.bmm, Tensor.addmm, Tensor.baddbmm,
    }
)  # fmt: skip
"""Autocast casts their floating operands to the short type."""
RAISED = frozenset(
    {
        F.layer_norm, F.group_norm, F.mse_loss, F.nll_loss, F.l1_loss, F.kl_div, F.binary_cross_entropy_with_logits,
        F.softplus,
        torch.exp, torch.log, torch.pow, torch.rsqrt, torch.reciprocal, torch.logsumexp, torch.log1p, torch.expm1,
        Tensor.exp, Tensor.log, Tensor.pow, Tensor.__pow__, Tensor.rsqrt, Tensor.reciprocal, Tensor.logsumexp,
    }
)  # fmt: skip
"""Autocast casts their floating operands to fp32."""
SOFTMAX = frozenset({F.softmax, torch.softmax, Tensor.softmax})
LOG_SOFTMAX = frozenset({F.log_softmax, torch.log_softmax, Tensor.log_softmax})
RANDOM_FILLS = frozenset({Tensor.normal_, Tensor.uniform_, nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_})
SUMS = frozenset({torch.sum, Tensor.sum, torch.cumsum, Tensor.cumsum, torch.prod, Tensor.prod})
"""Autocast gives their results in fp32."""


class NotEstimated(CkbenchError):
    """Something that cannot be replayed without data; the sentence says what."""


class CudaOperations(TorchFunctionMode):
    """Call what CUDA would call; ``short`` is autocast's type, None without autocast."""

    def __init__(self, short: torch.dtype | None, *, raises_rms_norm: bool) -> None:
        super().__init__()
        self.short = short
        self.is_autocast = False
        self.raises_rms_norm = raises_rms_norm
        self._casts: dict[int, tuple[Tensor, Tensor]] = {}

    def enter_autocast(self) -> None:
        """Begin a span of autocast."""
        self.is_autocast = self.short is not None

    def forget_casts(self) -> None:
        """Let go of cast weights, as the end of autocast does."""
        self._casts.clear()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace what differs on CUDA, then run it."""
        kwargs = kwargs or {}
        if func is Tensor.backward:
            # itself such a function, inside of which this mode would rest, and recomputation runs in there
            assert set(kwargs) <= {"gradient", "retain_graph", "create_graph", "inputs"} and not kwargs.get("inputs")
            with self:
                _engine_run_backward(
                    (args[0],),
                    (torch.ones_like(args[0]),),
                    bool(kwargs.get("retain_graph")),
                    False,
                    (),
                    allow_unreachable=True,
                    accumulate_grad=True,
                )
            return None
        if func is Tensor.copy_ and args[0].device.type != "meta" and args[1].device.type == "meta":
            return args[0]
        if func in RANDOM_FILLS:
            filled = args[0] if args else kwargs["tensor"]
            if filled.is_meta:
                return filled
        substitute = _SUBSTITUTES.get(func)
        if substitute is not None:
            return substitute(self, *args, **kwargs)
        if self.is_autocast:
            if func in LOWERED:
                args, kwargs = self._cast_all(args, kwargs, self.short)
            elif func in RAISED:
                args, kwargs = self._cast_all(args, kwargs, torch.float32)
            elif func in SUMS and _is_short(args[0]) and kwargs.get("dtype") is None:
                kwargs = {**kwargs, "dtype": torch.float32}
        return func(*args, **kwargs)

    def _cast_all(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        assert dtype is not None
        cast = self._cast
        return (
            tuple([cast(x, dtype) for x in arg] if isinstance(arg, list) else cast(arg, dtype) for arg in args),
            {key: cast(value, dtype) for key, value in kwargs.items()},
        )

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        """Cast a floating tensor of another type; a weight's short copy is kept until autocast ends."""
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype == dtype:
            return value
        if value.dtype == torch.float64:
            return value
        is_weight = value.is_leaf and value.requires_grad and value.dtype == torch.float32 and dtype in SHORT
        if not is_weight:
            return value.to(dtype)
        if not torch.is_grad_enabled():
            return value.to(dtype)
        known = self._casts.get(id(value))
        if known is None or known[1].dtype != dtype:
            known = self._casts[id(value)] = (value, value.to(dtype))
        return known[1]


@contextlib.contextmanager
def unpacked_positions(is_hugging_face: bool) -> Iterator[None]:
    """Answer transformers' question after packed sequences, which it would ask the data."""
    if not is_hugging_face:
        yield
        return
    try:
        masks: Any = importlib.import_module("transformers.masking_utils")
        asked = masks.find_packed_sequence_indices
    except (ImportError, AttributeError):  # not installed, or a version that does not look
        yield
        return

    def none_packed(*_args: Any, **_kwargs: Any) -> None:
        return None

    masks.find_packed_sequence_indices = none_packed
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = asked


def _is_short(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in SHORT


def chosen_backend(q: Tensor, k: Tensor, *, has_mask: bool, dropout: float, grouped: bool) -> SDPBackend:
    """Choose as PyTorch does on CUDA among the backends that are enabled: flash, efficient, then the mathematical path.

    ``q`` (B, H, S, K), ``k`` (B, G, T, K). Flash takes short types, widths up to 256 and no mask. The efficient kernel
    takes fp32 too, but no grouped heads. Neither takes tensors without the axis of heads.
    """
    del dropout  # both fused kernels take it
    enabled = torch.backends.cuda
    if q.dim() != 4:
        return SDPBackend.MATH
    if enabled.flash_sdp_enabled() and q.dtype in SHORT and q.shape[-1] <= FLASH_MAX_WIDTH and not has_mask:
        return SDPBackend.FLASH_ATTENTION
    is_grouped = grouped and q.shape[-3] != k.shape[-3]
    alignment = 8 if q.dtype in SHORT else 4
    if enabled.mem_efficient_sdp_enabled() and not is_grouped and q.shape[-1] % alignment == 0:
        return SDPBackend.EFFICIENT_ATTENTION
    if enabled.math_sdp_enabled():
        return SDPBackend.MATH
    raise RuntimeError("No available kernel. Aborting execution.")


def _attention(
    mode: CudaOperations,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if mode.is_autocast:
        assert mode.short is not None
        query, key, value = (mode._cast(x, mode.short) for x in (query, key, value))
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = mode._cast(attn_mask, mode.short)
    backend = chosen_backend(query, key, has_mask=attn_mask is not None, dropout=dropout_p, grouped=enable_gqa)
    if backend is SDPBackend.MATH:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if backend is SDPBackend.FLASH_ATTENTION:
        width = query.shape[-1]
        padded = -(-width // 8) * 8
        if padded != width:  # flash takes multiples of eight
            query, key, value = (F.pad(x, (0, padded - width)) for x in (query, key, value))
        used = 1 / math.sqrt(width) if scale is None else scale
        out: Tensor = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=used)[0]
        return out[..., :width] if padded != width else out
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), -math.inf)
        attn_mask = _aligned_mask(attn_mask, query, key)
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    result: Tensor = aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, needs_grad, dropout_p, is_causal, scale=scale
    )[0]
    return result


def _aligned_mask(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Pad a mask's last axis to a multiple of 16 bytes and view it, as the efficient kernel wants it."""
    last = mask.shape[-1]
    alignment = 16
    if last % alignment:
        mask = F.pad(mask, (0, alignment - last % alignment))[..., :last]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _dropout(
    mode: CudaOperations, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if not training or p == 0.0:
        return input
    dropped: Tensor = torch.native_dropout(input, p, True)[0]
    return dropped


def _rms_norm(
    mode: CudaOperations, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    if mode.is_autocast and mode.raises_rms_norm:
        input = mode._cast(input, torch.float32)
        weight = mode._cast(weight, torch.float32)
    if weight is not None and weight.dtype != input.dtype:
        return F.rms_norm(input, normalized_shape, weight, eps)
    used = torch.finfo(input.dtype).eps if eps is None else eps
    out: Tensor = aten._fused_rms_norm(input, list(normalized_shape), weight, used)[0]
    return out


def _softmax(mode: CudaOperations, input: Tensor, dim: int | None = None, *args: Any, **kwargs: Any) -> Tensor:
    asked = kwargs.get("dtype") or next((arg for arg in args if isinstance(arg, torch.dtype)), None)
    return _soft(aten._softmax, mode, input, dim, asked)


def _log_softmax(mode: CudaOperations, input: Tensor, dim: int | None = None, *args: Any, **kwargs: Any) -> Tensor:
    asked = kwargs.get("dtype") or next((arg for arg in args if isinstance(arg, torch.dtype)), None)
    return _soft(aten._log_softmax, mode, input, dim, asked)


def _soft(op: Any, mode: CudaOperations, input: Tensor, dim: int | None, asked: torch.dtype | None) -> Tensor:
    """CUDA reads fp16 and writes fp32 in one kernel; bf16 it casts first (aten/src/ATen/native/SoftMax.cpp)."""
    wanted = asked or (torch.float32 if mode.is_autocast else input.dtype)
    axis = -1 if dim is None else dim
    in_one = input.dtype == torch.float16 and wanted == torch.float32
    result: Tensor = op(input if in_one else input.to(wanted), axis, in_one)
    return result


def _cross_entropy(mode: CudaOperations, input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if not mode.is_autocast or input.dim() != 2 or kwargs.get("weight") is not None or target.is_floating_point():
        return F.cross_entropy(input, target, *args, **kwargs)
    log_probabilities = _soft(aten._log_softmax, mode, input, 1, None)
    kept = {key: value for key, value in kwargs.items() if key in ("ignore_index", "reduction")}
    return F.nll_loss(log_probabilities, target, **kept)


_SUBSTITUTES: dict[Any, Callable[..., Tensor]] = {
    F.scaled_dot_product_attention: _attention,
    F.dropout: _dropout,
    torch.dropout: _dropout,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    F.cross_entropy: _cross_entropy,
    **dict.fromkeys(SOFTMAX, _softmax),
    **dict.fromkeys(LOG_SOFTMAX, _log_softmax),
}
