"""Count floating-point operations of one step, split at the turn from forward to backward."""

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, _FlopCounterMode

Shape = tuple[int, ...]


def attention_flops(query: Shape, key: Shape, value: Shape, *_args: Any, out_shape: Any = None, **_kwargs: Any) -> int:
    """Count fused attention forward: scores and weighted sum, 2·B·H·S·T·(K + K_v).

    ``query`` (B, H, S, K), ``key`` (B, G, T, K), ``value`` (B, G, T, K_v). Causal masks are counted as
    full, as PyTorch's own formulas do for its CUDA kernels.
    """
    B, H, S, K = query
    T, K_v = key[-2], value[-1]
    return 2 * B * H * S * T * (K + K_v)


def attention_backward_flops(
    grad_out: Shape, query: Shape, key: Shape, value: Shape, *_args: Any, out_shape: Any = None, **_kwargs: Any
) -> int:
    """Count fused attention backward: scores again, then gradients of V, weights, Q and K (five products)."""
    B, H, S, K = query
    T, K_v = key[-2], value[-1]
    return 2 * B * H * S * T * (3 * K + 2 * K_v)


def _fused_attention() -> dict[Any, Any]:
    """Give formulas for fused attention: PyTorch's counter takes the CPU's kernels for nothing, and up to 2.11 refuses
    grouped heads of CUDA's."""
    aten = torch.ops.aten
    kernels = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
    found: dict[Any, Any] = {}
    for kernel in kernels:
        found[getattr(aten, f"_scaled_dot_product_{kernel}")] = attention_flops
        found[getattr(aten, f"_scaled_dot_product_{kernel}_backward")] = attention_backward_flops
    return found


def formulas() -> dict[Any, Any]:
    """Give the formula of every operation that is counted, by packet; each takes arguments and ``out_val``."""
    return dict(FlopCounterMode(display=False, custom_mapping=_fused_attention()).flop_registry)


class _CountingMode(_FlopCounterMode):
    """PyTorch's counter, which compiled code may run under: it then counts the products that compiled code calls.

    Under the counter as it is, torch.compile drops its code and runs uncompiled for the rest of the process.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count an operation; compiled code wraps those that draw random numbers and are run again."""
        wrapped = [i for i, arg in enumerate(args) if isinstance(arg, torch._ops.OpOverload)]
        if not isinstance(func, torch._ops.HigherOrderOperator) or not wrapped:
            return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        result = func(*args, **(kwargs or {}))
        operation, given = args[wrapped[0]], args[wrapped[0] + 1 :]
        self.counter._count_flops(operation._overloadpacket, None, given, {})
        return result


class FlopCounter:
    """An observer that counts: ``forward`` up to each turn, ``backward`` the rest, recomputation included."""

    def __init__(self) -> None:
        self._counts = FlopCounterMode(display=False, custom_mapping=_fused_attention())
        self._mode = _CountingMode(self._counts)
        self._at_last_event = 0
        self._in_backward = False
        self.forward = 0
        self.backward = 0

    def __enter__(self) -> "FlopCounter":
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *details: Any) -> None:
        self._mode.__exit__(*details)  # type: ignore[no-untyped-call]

    def at(self, event: str) -> None:
        """Book what was counted since the last event."""
        total = int(self._counts.get_total_flops())
        grown, self._at_last_event = total - self._at_last_event, total
        if self._in_backward:
            self.backward += grown
        else:
            self.forward += grown
        self._in_backward = event == "turn"
