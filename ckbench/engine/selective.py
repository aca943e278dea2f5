"""Keep the results of named operations, or of single calls of them, inside a region that is otherwise recomputed.

PyTorch's selective checkpointing does the keeping. Two things are added: a policy that finds nothing to keep is an
error, and an operation that draws random numbers may be kept. It is not run again, so the draws behind it would come
from another place of the random sequence; the generator is moved to where the operation left it.
"""

import contextlib
import ctypes
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, create_selective_checkpoint_contexts

from ckbench import registry
from ckbench.errors import PlanError
from ckbench.plan import Region, split_save_op

UNASKED = frozenset(SAC_IGNORED_OPS)
"""Operations that no policy is asked about."""
NAMED_OPS = 8
"""Operations that an error names at most."""

Op = Any
Contexts = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]


def resolve_op(name: str) -> frozenset[Op]:
    """Give every overload of an operation named like ``aten.mm``, or the one of ``aten.mm.default``.

    Raises PlanError naming the nearest operation where this PyTorch has none of that name.
    """
    namespace, _, rest = name.partition(".")
    base, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), base, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        known = {each.partition(".")[0].replace("::", ".") for each in torch._C._dispatch_get_all_op_names()}
        near = registry.did_you_mean(f"{namespace}.{base}", known)
        raise PlanError(f"this PyTorch has no operation {name!r}{near if near.startswith('; did') else ''}")
    overloads = packet.overloads()
    if overload and overload not in overloads:
        raise PlanError(f"operation {namespace}.{base} has no overload {overload!r}; have: {', '.join(overloads)}")
    return frozenset(getattr(packet, each) for each in ([overload] if overload else overloads))


class _Named:
    """What ``save_ops`` name: operations with all their calls, and single calls, counted by the name that was given."""

    def __init__(self, save_ops: tuple[str, ...]) -> None:
        self.whole: set[Op] = set()
        self.singles: dict[Op, list[str]] = {}
        """The names under which an operation's calls are counted."""
        self.calls: dict[str, set[int]] = {}
        for text in save_ops:
            name, call = split_save_op(text)
            ops = resolve_op(name)
            if call is None:
                self.whole |= ops
            else:
                self.calls.setdefault(name, set()).add(call)
                for op in ops:
                    if name not in self.singles.setdefault(op, []):
                        self.singles[op].append(name)
        self.ops = frozenset(self.whole | self.singles.keys())


class Selection:
    """What one region keeps: resolves the names once, and makes the contexts of each call of the region."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.named = _Named(region.save_ops)
        self.drawing = frozenset(op for op in self.named.ops if torch.Tag.nondeterministic_seeded in op.tags)
        self._policy: _Policy | None = None
        self._is_proven = False

    def contexts(self) -> Contexts:
        """Give the contexts of one forward of the region and of its replay."""
        policy, (forward, replay) = self._new()
        if not self.drawing:
            return forward, replay
        draws: list[tuple[torch.Generator, Tensor] | None] = []
        return (
            _both(forward, _NoteDraws(self.drawing, policy, draws)),
            _both(replay, _RepeatDraws(self.drawing, draws)),
        )

    def compiled_contexts(self) -> Contexts:
        """Give the contexts that torch.compile traces; it keeps random numbers apart by itself."""
        return self._new()[1]

    def check(self) -> None:
        """Refuse a selection that kept nothing in the region's forward, or that names a call which was not there.

        Costs nothing after the first call.
        """
        if self._is_proven or self._policy is None:
            return
        policy, block = self._policy, self.region.start
        if not policy.n_found and not policy.forward.n_calls:
            named = self.region.save_ops
            wanted = " or ".join(named[:2]) + (f" or {len(named) - 2} like them" if len(named) > 2 else "")
            ran = ", ".join(list(policy.ran)[:NAMED_OPS])
            raise PlanError(f"block {block} ran no {wanted}, so nothing would be kept; it ran {ran}, ...")
        for name, calls in self.named.calls.items():
            n_calls, last = policy.forward.n_calls[name], max(calls)
            if last > n_calls:
                times = f"{n_calls} time{'' if n_calls == 1 else 's'}"
                raise PlanError(f"block {block} ran {name} {times}, so there is no {name}@{last} to keep")
        self._is_proven, self._policy = True, None

    def _new(self) -> tuple["_Policy", Contexts]:
        policy = _Policy(self.named, self.region.save_every, notes_ops=not self._is_proven)
        if not self._is_proven:
            self._policy = policy
        return policy, create_selective_checkpoint_contexts(policy)


@dataclass
class _Count:
    """What a forward, or its replay, has run so far."""

    n_results: int = 0
    """Calls of operations that are kept whole, for every second one and the like."""
    n_calls: Counter[str] = field(default_factory=Counter)


class _Policy:
    """Decides per operation, counting forward and replay apart; lives for one call of the region.

    PyTorch before 2.13 asks again in the replay, later versions remember. Either way both count alike.
    """

    def __init__(self, named: _Named, every: int, *, notes_ops: bool) -> None:
        self.named = named
        self.every = every
        self.notes_ops = notes_ops
        self.forward = _Count()
        self.replay = _Count()
        self.n_found = 0
        """Results that forward kept or could have kept."""
        self.kept_last = False
        self.ran: dict[str, None] = {}

    def __call__(self, context: Any, op: Op, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if op not in self.named.ops:
            if self.notes_ops and not _is_view(op):
                self.ran[str(op).removesuffix(".default")] = None
            return CheckpointPolicy.PREFER_RECOMPUTE
        count = self.replay if context.is_recompute else self.forward
        keeps = False
        for name in self.named.singles.get(op, ()):
            count.n_calls[name] += 1
            keeps |= count.n_calls[name] in self.named.calls[name]
        if op in self.named.whole:
            keeps |= count.n_results % self.every == 0
            count.n_results += 1
        if not context.is_recompute:
            self.n_found += keeps or op in self.named.whole
        self.kept_last = keeps
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


class _NoteDraws(TorchDispatchMode):
    """Notes, for each call of a drawing operation whose result is kept, where it left its generator."""

    def __init__(
        self, drawing: frozenset[Op], policy: _Policy, draws: list[tuple[torch.Generator, Tensor] | None]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawing = drawing
        self.policy = policy
        self.draws = draws

    def __torch_dispatch__(self, op: Op, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op not in self.drawing:
            return op(*args, **kwargs)
        generator = _generator(args, kwargs)
        before = generator.get_state()
        result = op(*args, **kwargs)
        after = generator.get_state()
        drew = _bytes_of(before) != _bytes_of(after)
        self.draws.append((generator, after) if drew and self.policy.kept_last else None)
        return result


class _RepeatDraws(TorchDispatchMode):
    """Moves the generator on where a drawing operation is answered from what was kept."""

    def __init__(self, drawing: frozenset[Op], draws: list[tuple[torch.Generator, Tensor] | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawing = drawing
        self.draws = draws
        self.n_calls = 0

    def __torch_dispatch__(self, op: Op, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        if op in self.drawing:
            drawn = self.draws[self.n_calls]
            self.n_calls += 1
            if drawn is not None:
                generator, after = drawn
                generator.set_state(after)
        return result


@contextlib.contextmanager
def _both(outer: Any, inner: Any) -> Iterator[None]:
    with outer, inner:
        yield


def _bytes_of(state: Tensor) -> bytes:
    """Read a generator's state past all dispatch: comparing tensors would be one more operation to be looked at."""
    return ctypes.string_at(state.data_ptr(), state.numel())


def _generator(args: Any, kwargs: dict[str, Any]) -> torch.Generator:
    """Give the generator that an operation with these arguments draws from."""
    own = kwargs.get("generator")
    if isinstance(own, torch.Generator):
        return own
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor):
            if leaf.device.type == "cuda":
                return torch.cuda.default_generators[leaf.device.index]
            break
    return torch.default_generator


def _is_view(op: Op) -> bool:
    """Tell whether an operation only looks at its input in another way."""
    return isinstance(op, torch._ops.OpOverload) and bool(op.is_view)
