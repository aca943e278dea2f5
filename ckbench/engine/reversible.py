"""Run coupled blocks that keep nothing between them: backward rebuilds their inputs from their outputs.

Every block is an autograd function of its own, with the hidden state, the parameters and the further tensors as its
inputs. So gradients reach parameters as they do without it: accumulated, summed over places that share one, one block
after the other, with hooks that fire once. Only the last block keeps a tensor, the output of the stack; each backward
hands the input it rebuilt to the block before. Source: Gomez et al. 2017 (arXiv 1707.04585), algorithm 1.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ckbench.engine.counts import Counts
from ckbench.errors import PlanError
from ckbench.models.base import Invertible

Coupling = Callable[[Tensor], Tensor]
States = list[Tensor]
"""States of the generators that random numbers come from: the CPU's, and that of the CUDA device in use."""


class Inverted:
    """A span of coupled blocks, of which only the output is kept."""

    def __init__(self, blocks: Sequence[nn.Module], start: int, counts: Counts, *, preserve_rng: bool = True) -> None:
        self.counts = counts
        self.preserve_rng = preserve_rng
        self.blocks = [_Block(block, start + i, counts) for i, block in enumerate(blocks)]

    def run(self, calls: Sequence[Any], hidden: Tensor) -> Tensor:
        """Run the span on ``hidden`` (B, S, 2·D); a block's further arguments: ``args`` and ``kwargs`` of its call."""
        return self._run([tree_flatten((call.args, call.kwargs)) for call in calls], hidden)

    def run_plain(self, hidden: Tensor) -> Tensor:
        """Run the span where blocks take nothing but the hidden state."""
        return self._run([tree_flatten(((), {})) for _ in self.blocks], hidden)

    def _run(self, arguments: Sequence[tuple[list[Any], TreeSpec]], hidden: Tensor) -> Tensor:
        self.counts.enter_region()
        span = _Pass(hidden, self.counts, self.preserve_rng)
        for i, (block, (leaves, spec)) in enumerate(zip(self.blocks, arguments, strict=True)):
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            rest = [_HOLE if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            step = _Step(span, block, rest, spec, is_first=i == 0, is_last=i == len(self.blocks) - 1)
            inputs = (hidden, *tensors, *block.parameters())
            hidden = _Coupled.apply(step, len(tensors), *inputs)  # type: ignore[no-untyped-call]
        return hidden


_HOLE = object()
"""Stands where a tensor is among the arguments: tensors are autograd's to keep, not ours."""


class _Block:
    """A block with the places of its parameters, so that backward can put leaves of its own there."""

    def __init__(self, module: nn.Module, index: int, counts: Counts) -> None:
        if not isinstance(module, Invertible):
            raise PlanError(f"block {index} cannot rebuild its input; only coupled blocks can, see model.residual")
        self.module = module
        self.index = index
        self.counts = counts
        self.places: list[tuple[dict[str, Any], str]] = [
            (inner._parameters, name)
            for inner in module.modules()
            for name, parameter in inner._parameters.items()
            if parameter is not None
        ]

    def parameters(self) -> list[Tensor]:
        """List the parameters, each once."""
        return list(dict.fromkeys(table[name] for table, name in self.places))

    def enter(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Coupling, Coupling]:
        """Count a start of the block and give f and g for these arguments."""
        self.counts.enter_block(self.index)
        return self.module.couplings(*args, **kwargs)

    @contextlib.contextmanager
    def holding(self, stand_ins: dict[Tensor, Tensor]) -> Iterator[None]:
        """Put stand-ins where the parameters are.

        A gradient taken with respect to a parameter itself would fire its hooks here, and again when it arrives.
        """
        parameters = [table[name] for table, name in self.places]
        try:
            for (table, name), parameter in zip(self.places, parameters, strict=True):
                table[name] = stand_ins[parameter]
            yield
        finally:
            for (table, name), parameter in zip(self.places, parameters, strict=True):
                table[name] = parameter


class _Pass:
    """One forward through a span and the backward that belongs to it."""

    def __init__(self, hidden: Tensor, counts: Counts, preserve_rng: bool) -> None:
        self.counts = counts
        kinds = sorted(filter(torch.amp.is_autocast_available, {hidden.device.type, "cpu"}))
        self._autocast = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds}
        self._cuda = hidden.device if hidden.device.type == "cuda" else None
        self._preserve_rng = preserve_rng
        self.rebuilt: tuple[Tensor, Tensor] | None = None
        """In backward, the streams behind the block that is next."""

    @contextlib.contextmanager
    def arithmetic(self) -> Iterator[None]:
        """Compute in the types of the forward pass.

        Casts of weights are not cached: a weight is cast once per pass, and a cache would hold all of them until the
        loss. Older PyTorch would also hand a cast made without a graph to a later use of the weight, which then gets no
        gradient (its pull request 165068).
        """
        with contextlib.ExitStack() as stack:
            for kind, (enabled, dtype) in self._autocast.items():
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
            yield

    def states_for(self, block: Invertible) -> States:
        """Read the generators before f or g of a block runs; nothing is kept where it draws nothing."""
        return self._read() if self._preserve_rng and block.draws else []

    @contextlib.contextmanager
    def drawing_from(self, states: States) -> Iterator[None]:
        """Draw what forward drew from these states, and leave the generators as they were found."""
        if not states:
            yield
            return
        found = self._read()
        try:
            self._write(states)
            yield
        finally:
            self._write(found)

    def _read(self) -> States:
        states = [torch.get_rng_state()]
        if self._cuda is not None:
            states.append(torch.cuda.get_rng_state(self._cuda))
        return states

    def _write(self, states: States) -> None:
        torch.set_rng_state(states[0])
        if self._cuda is not None:
            torch.cuda.set_rng_state(states[1], self._cuda)


@dataclass
class _Step:
    """One block in one pass, with what its backward needs besides tensors that autograd keeps for it."""

    span: _Pass
    block: _Block
    rest: list[Any]
    spec: TreeSpec
    is_first: bool
    is_last: bool
    f_states: States = field(default_factory=list)
    g_states: States = field(default_factory=list)
    """The generators before f and before g; empty where these draw nothing."""

    def enter(self, tensors: Sequence[Tensor]) -> tuple[Coupling, Coupling]:
        """Start the block with these tensors among its arguments: give f and g."""
        given = iter(tensors)
        leaves = [next(given) if leaf is _HOLE else leaf for leaf in self.rest]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return self.block.enter(args, kwargs)

    def forward(self, x_BS2D: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """Couple the streams as ``Invertible.forward`` does, and note where f and g draw random numbers."""
        f, g = self.enter(tensors)
        x1_BSD, x2_BSD = x_BS2D.chunk(2, dim=-1)
        self.f_states = self.span.states_for(self.block.module)
        y1_BSD = x1_BSD + f(x2_BSD)
        self.g_states = self.span.states_for(self.block.module)
        y2_BSD = x2_BSD + g(y1_BSD)
        return torch.cat((y1_BSD, y2_BSD), dim=-1)


class _Coupled(torch.autograd.Function):
    """y1 = x1 + f(x2), y2 = x2 + g(y1); backward rebuilds x from y and runs f and g once, with a graph."""

    @staticmethod
    def forward(ctx: Any, step: _Step, n_tensors: int, x_BS2D: Tensor, *inputs: Tensor) -> Tensor:
        """Keep the further arguments, and y where nobody behind will rebuild it."""
        tensors = inputs[:n_tensors]
        with step.span.arithmetic():
            y_BS2D = step.forward(x_BS2D, tensors)
        ctx.step = step
        ctx.save_for_backward(*tensors, *((y_BS2D,) if step.is_last else ()))
        return y_BS2D

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BS2D: Tensor) -> tuple[Tensor | None, ...]:
        """Give the gradients of x, of the further tensors and of the parameters; hand x to the block before."""
        step: _Step = ctx.step
        span, block, tensors = step.span, step.block, list(ctx.saved_tensors)
        needs_x, *needs = ctx.needs_input_grad[2:]
        if step.is_last:
            span.counts.enter_region()
            y1_BSD, y2_BSD = tensors.pop().detach().chunk(2, dim=-1)
        else:
            assert span.rebuilt is not None, "the block behind hands over what it rebuilt"
            y1_BSD, y2_BSD = span.rebuilt
        span.rebuilt = None
        parameters = block.parameters()
        leaves = [x.detach().requires_grad_(need) for x, need in zip((*tensors, *parameters), needs, strict=True)]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        stand_ins = dict(zip(parameters, leaves[len(tensors) :], strict=True))
        dy1_BSD, dy2_BSD = dy_BS2D.chunk(2, dim=-1)
        with block.holding(stand_ins), span.arithmetic():
            f, g = step.enter(leaves[: len(tensors)])
            with span.drawing_from(step.g_states):
                g_BSD, dx_BSD, by_g = _through(g, y1_BSD, dy2_BSD, wanted)
            x2_BSD = y2_BSD - g_BSD
            del g_BSD, y2_BSD
            dx1_BSD = dy1_BSD + dx_BSD
            with span.drawing_from(step.f_states):
                f_BSD, dx_BSD, by_f = _through(f, x2_BSD, dx1_BSD, wanted)
            dx2_BSD = dy2_BSD + dx_BSD
        if needs_x and not step.is_first:
            span.rebuilt = (y1_BSD - f_BSD, x2_BSD)
        del f_BSD, x2_BSD, y1_BSD, dx_BSD
        found = iter([_added(a, b) for a, b in zip(by_f, by_g, strict=True)])
        gradients = [next(found) if leaf.requires_grad else None for leaf in leaves]
        return None, None, torch.cat((dx1_BSD, dx2_BSD), dim=-1) if needs_x else None, *gradients


def _through(
    coupling: Coupling, x_BSD: Tensor, dy_BSD: Tensor, wanted: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Sequence[Tensor | None]]:
    """Run f or g once: give its value, the gradient of x, and those of the tensors wanted (None where it has none)."""
    with torch.enable_grad():
        x_BSD = x_BSD.detach().requires_grad_()
        y_BSD = coupling(x_BSD)
    dx_BSD, *gradients = torch.autograd.grad(y_BSD, (x_BSD, *wanted), dy_BSD.to(y_BSD.dtype), allow_unused=True)
    return y_BSD.detach(), dx_BSD, gradients


def _added(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Sum two gradients, either of which may be missing."""
    if a is None or b is None:
        return b if a is None else a
    return a + b
