"""Compile blocks with torch.compile: the compiler of one applied plan, with what it took and where it gave up.

Each block is compiled by itself, so blocks of equal shapes share one compilation. Shapes are static: a trial has one.
Nothing here is seen by compiled code, so no count of ours can make it compile again.
"""

import contextlib
import logging
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # before any block runs: importing it is no part of a step

from ckbench.errors import DeviceUnavailable
from ckbench.plan import Plan
from ckbench.units import one_line

Forward = Callable[..., Any]

VARIANTS = 8
"""Compilations of one block that a trial may need: with and without gradients, its parity runs, unequal shapes."""
REASON_CHARS = 120


class _Tally:
    """What the compiler did: seconds, compilations, graphs. While it works, warnings of its own making are dropped."""

    def __init__(self) -> None:
        self._calm = contextlib.ExitStack()
        self.seconds = 0.0
        self.n_compilations = 0
        self.n_graphs = 0
        self._began_s = 0.0

    def start(self, _about: Any) -> None:
        """Note that a compilation starts."""
        self._calm.enter_context(warnings.catch_warnings())
        # dynamo looks at .grad of every tensor, and hides what that says only where warnings are printed
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        # inductor imports torch.utils.mkldnn, which is written with what torch itself calls deprecated
        warnings.filterwarnings("ignore", message=r"`torch\.jit\.", category=DeprecationWarning)
        self.n_compilations += 1
        self._began_s = time.perf_counter()

    def end(self, _about: Any) -> None:
        """Note that it ended."""
        self.seconds += time.perf_counter() - self._began_s
        self._calm.close()


class BlockCompiler:
    """Compiles forwards for one plan. Until ``remove``, PyTorch's limit of recompilations is set to the stack's depth,
    and reaching it is an error, not a silent return to uncompiled code."""

    def __init__(self, plan: Plan, device_type: str) -> None:
        check_toolchain(device_type)
        logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_news)
        self._tally = _Tally()
        self._backend = _make_backend(self._tally, _settings(plan))
        self._breaks_before = _graph_breaks()
        handler = torch._dynamo.callback.callback_handler
        handler.register_start_callback(self._tally.start)
        handler.register_end_callback(self._tally.end)
        config = torch._dynamo.config
        limit = max(config.recompile_limit, VARIANTS * plan.n_layers)
        self._limits: contextlib.AbstractContextManager[Any] | None = config.patch(
            recompile_limit=limit,
            accumulated_recompile_limit=max(config.accumulated_recompile_limit, limit),
            fail_on_recompile_limit_hit=True,
        )
        self._limits.__enter__()

    def compile(self, forward: Forward) -> Forward:
        """Give the forward, compiled on its first call."""
        compiled: Forward = torch.compile(forward, backend=self._backend, dynamic=False)
        return compiled

    def seconds(self) -> float:
        """Give the time spent in torch.compile so far, forward and backward, running none of it."""
        return self._tally.seconds

    @property
    def n_compilations(self) -> int:
        """Compilations so far; after warm-up no more should come."""
        return self._tally.n_compilations

    def notes(self) -> list[str]:
        """Say what a reader must know once steps have run: graph breaks, or that nothing was compiled."""
        if not self._tally.n_graphs:
            return ["torch.compile compiled nothing of the blocks"]
        broken = [reason for reason, n in _graph_breaks().items() if n > self._breaks_before.get(reason, 0)]
        if not broken:
            return []
        first = one_line(broken[0].strip().partition("\n")[0])[:REASON_CHARS]
        return [f"torch.compile broke the blocks' graph for {len(broken)} reasons; first: {first}"]

    def remove(self) -> None:
        """Put PyTorch's limits back and stop listening."""
        if self._limits is None:
            return
        self._limits.__exit__(None, None, None)
        self._limits = None
        handler = torch._dynamo.callback.callback_handler
        with contextlib.suppress(ValueError):  # torch.compiler.reset forgets who listens
            handler.remove_start_callback(self._tally.start)
            handler.remove_end_callback(self._tally.end)


def check_toolchain(device_type: str) -> None:
    """Raise DeviceUnavailable where the compiler of torch.compile has no compiler to call: C++ for a CPU, Triton for
    CUDA."""
    if device_type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            raise DeviceUnavailable(
                "torch.compile on a CPU needs a C++ compiler and found none; install g++, or name one in the "
                "environment variable CXX"
            ) from None
    elif device_type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise DeviceUnavailable("torch.compile on CUDA needs Triton, which is not there or cannot use this GPU")


def _settings(plan: Plan) -> dict[str, Any]:
    """Give the settings of the autograd compiler for this plan, in force only while it compiles."""
    settings: dict[str, Any] = {}
    if plan.compile_budget is not None:
        settings["activation_memory_budget"] = plan.compile_budget
    if any(region.save_ops for region in plan.walk()):
        settings["enable_autograd_cache"] = False  # its key does not know which operations a policy keeps
    return settings


def _make_backend(tally: _Tally, settings: dict[str, Any]) -> Callable[..., Any]:
    """Make a backend of its own for a plan: dynamo keeps compiled code apart by backend, and two plans with other
    settings must not share any."""
    import torch._functorch.config as autograd_config

    inductor = torch._dynamo.lookup_backend("inductor")

    def compile_graph(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        tally.n_graphs += 1
        with autograd_config.patch(settings):
            return inductor(graph, inputs)

    return compile_graph


def _is_news(record: logging.LogRecord) -> bool:
    """Drop PyTorch's reminder that a region with a context_fn must work nothing in place; parity tells of that."""
    return "context_fn is passed to torch.utils.checkpoint" not in record.getMessage()


def _graph_breaks() -> dict[str, int]:
    return dict(torch._dynamo.utils.counters["graph_break"])
