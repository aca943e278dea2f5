"""Find the blocks of any module, and the attention and FFN of each, and prove by one forward pass how they connect.

Names tell where to look, the pass tells what is so: a norm joins its part only if its output goes into that part,
as its first argument, and into no other operation of the whole model.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ckbench.errors import ConfigError

NAMES: dict[str, tuple[tuple[str, ...], ...]] = {
    "attention": (("self_attn",), ("self_attention",), ("attn",), ("attention",)),
    "ffn": (("mlp",), ("ffn",), ("feed_forward",), ("feedforward",), ("ff",), ("intermediate", "output")),
}
"""What libraries and people call a part inside a block; BERT's FFN is two modules in a row."""
SHOWN_CHOICES = 12


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The blocks of a module, the chains of their parts, and what one pass showed."""

    path: str
    blocks: tuple[nn.Module, ...]
    parts: tuple[dict[str, tuple[nn.Module, ...]], ...]
    apart: str
    """Why no region can span several blocks; empty where one can."""
    output: Any
    """What the pass gave."""
    hidden_shape: tuple[int, ...]
    """Shape of the first block's input, (B, S, D) in most models."""


@dataclass
class _Seen:
    """What the pass showed of one module."""

    n_calls: int = 0
    given: Any = None
    """Its first argument, as a region takes it."""
    n_given: int = 0
    """How often that argument stands among all of them."""
    output: Any = None
    used_in: list[frozenset[nn.Module]] = field(default_factory=list)
    """For each operation on the output: the watched modules that were running."""


class _Uses(TorchDispatchMode):
    """Watches modules during one pass: who gets whose output, and which operations read it."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = {module: _Seen() for module in modules}
        self.running: list[nn.Module] = []
        self.makers: dict[int, list[nn.Module]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        running = frozenset(self.running)
        for leaf in tree_leaves((args, kwargs or {})):
            if isinstance(leaf, Tensor):
                for maker in self.makers.get(_storage(leaf), ()):
                    self.seen[maker].used_in.append(running)
        return func(*args, **(kwargs or {}))

    def watch(self) -> list[Any]:
        """Put hooks on the modules; give what takes them off."""
        handles = []
        for module in self.seen:
            handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave))
        return handles

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen = self.seen[module]
        seen.n_calls += 1
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        seen.given = args[0] if args else next((value for value in kwargs.values() if isinstance(value, Tensor)), None)
        seen.n_given = sum(1 for tensor in tensors if tensor is seen.given)
        self.running.append(module)

    def _leave(self, module: nn.Module, _args: Any, output: Any) -> None:
        self.running.pop()
        seen = self.seen[module]
        seen.output = output  # held until the pass has ended, so that no other tensor gets its storage
        hidden = hidden_of(output)
        if hidden is not None:
            self.makers.setdefault(_storage(hidden), []).append(module)

    def feeds_only(self, maker: nn.Module, user: nn.Module) -> bool:
        """Tell whether a module's output is the other's first argument, once, and read nowhere else."""
        made, used = self.seen[maker], self.seen[user]
        if made.n_calls != 1 or used.n_calls != 1 or used.n_given != 1:
            return False
        return used.given is hidden_of(made.output) and all(user in running for running in made.used_in)


def locate(
    module: nn.Module,
    run: Callable[[], Any],
    *,
    blocks: str | None = None,
    parts: Mapping[str, str | None] | None = None,
) -> Stack:
    """Find blocks and parts of ``module``; ``run`` calls it once on a small input.

    ``blocks`` is the dotted path of the list of blocks, ``parts`` maps ffn or attention to its path inside a block;
    what is not named is found. Random state, mode and weights stay as they were.
    Raises ConfigError where a named thing is not there, or no blocks are found.
    """
    path, found = find_blocks(module, blocks)
    named = {part: name for part, name in (parts or {}).items() if name}
    bases = [_bases(block, named) for block in found]
    neighbours = [child for block in found for child in block.modules() if child is not block and _is_norm(child)]
    watched = [*found, *(m for base in bases for chain in base.values() for m in chain), *neighbours]
    uses = _Uses(dict.fromkeys(watched))
    output = _pass(module, run, uses)
    chains = tuple(_chains(block, base, uses) for block, base in zip(found, bases, strict=True))
    for part, name in named.items():
        if not all(part in found_parts for found_parts in chains):
            raise ConfigError(f"model.{part}_part: {name!r} is not called exactly once in every block")
    first = uses.seen[found[0]].given
    return Stack(
        path=path,
        blocks=found,
        parts=chains,
        apart=_apart(found, uses),
        output=output,
        hidden_shape=tuple(first.shape) if isinstance(first, Tensor) else (),
    )


def find_blocks(module: nn.Module, path: str | None = None) -> tuple[str, tuple[nn.Module, ...]]:
    """Give the list of blocks with its dotted path: the named one, or the longest list of modules of one class.

    Lists inside another list's modules do not count (experts of a layer), nor do lists of layers without anything
    inside (heads). Of equally long ones the list with the most parameters is taken.
    """
    if path is not None:
        return path, _named_blocks(module, path)
    best: tuple[tuple[int, int], str, tuple[nn.Module, ...]] | None = None
    for name, blocks in _lists(module, ""):
        size = (len(blocks), sum(p.numel() for block in blocks for p in block.parameters()))
        if best is None or size > best[0]:
            best = (size, name, blocks)
    if best is None:
        raise ConfigError(
            f"no blocks found in {type(module).__name__}: it has no nn.ModuleList of modules of one class with "
            "layers inside"
        )
    return best[1], best[2]


def hidden_of(output: Any) -> Tensor | None:
    """Give the hidden state of a module's output: the tensor itself, or the first of a tuple."""
    if isinstance(output, tuple | list) and output:
        output = output[0]
    return output if isinstance(output, Tensor) else None


def nearest(name: str, choices: Iterable[str]) -> str:
    """End an error about an unknown name with the nearest right ones, or with all where they are few."""
    known = list(dict.fromkeys(choices))
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    if near:
        return f"; did you mean {' or '.join(map(repr, near))}?"
    return f"; have: {', '.join(known)}" if 0 < len(known) <= SHOWN_CHOICES else ""


def _named_blocks(module: nn.Module, path: str) -> tuple[nn.Module, ...]:
    found = _submodule(module, path)
    if found is None:
        lists = [name for name, child in module.named_modules() if isinstance(child, nn.ModuleList | nn.Sequential)]
        outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
        raise ConfigError(f"model.blocks: {type(module).__name__} has no {path!r}{nearest(path, outermost)}")
    if not isinstance(found, nn.ModuleList | nn.Sequential) or not len(found):
        raise ConfigError(f"model.blocks: {path!r} is a {type(found).__name__}, not an nn.ModuleList of blocks")
    return tuple(found)


def _submodule(module: nn.Module, path: str) -> nn.Module | None:
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def _lists(module: nn.Module, prefix: str) -> Iterable[tuple[str, tuple[nn.Module, ...]]]:
    """Yield the outermost lists of modules of one class."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, nn.ModuleList | nn.Sequential) and _is_stack(child):
            yield path, tuple(child)
        else:
            yield from _lists(child, f"{path}.")


def _is_stack(children: Iterable[nn.Module]) -> bool:
    members = list(children)
    return len({type(member) for member in members}) == 1 and all(any(m.children()) for m in members)


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _bases(block: nn.Module, named: Mapping[str, str]) -> dict[str, tuple[nn.Module, ...]]:
    """Give the modules of each part by their names, before any norm is joined to them."""
    bases: dict[str, tuple[nn.Module, ...]] = {}
    for part, choices in NAMES.items():
        if part in named:
            child = _submodule(block, named[part])
            if child is None:
                names = [name for name, _ in block.named_modules() if name]
                told = f"model.{part}_part: {type(block).__name__} has no {named[part]!r}"
                raise ConfigError(told + nearest(named[part], names))
            bases[part] = (child,)
            continue
        children = dict(block.named_children())
        for words in choices:
            if all(word in children for word in words):
                bases[part] = tuple(children[word] for word in words)
                break
    return bases


def _pass(module: nn.Module, run: Callable[[], Any], uses: _Uses) -> Any:
    """Run the module once under watch, as in training but without gradients, and put everything back.

    In training: in evaluation a dropout hands its argument on, and what it stands between would look connected.
    """
    modes = {child: child.training for child in module.modules()}
    kept = [(buffer, buffer.clone()) for buffer in module.buffers()]
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    handles = uses.watch()
    module.train()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
            with torch.device("meta" if device.type == "meta" else "cpu"), uses:  # as in a step: no default device
                return run()
    finally:
        for handle in handles:
            handle.remove()
        for child, mode in modes.items():
            child.training = mode
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)


def _chains(
    block: nn.Module, bases: Mapping[str, tuple[nn.Module, ...]], uses: _Uses
) -> dict[str, tuple[nn.Module, ...]]:
    """Keep the parts that ran once, in a row; join the norm before each where it feeds nothing else."""
    chains = {}
    for part, base in bases.items():
        if any(uses.seen[module].n_calls != 1 for module in base):
            continue
        if not all(uses.feeds_only(a, b) for a, b in zip(base, base[1:], strict=False)):
            continue
        norms = (m for m in block.modules() if m is not block and _is_norm(m) and m not in base)
        before = next((norm for norm in norms if uses.feeds_only(norm, base[0])), None)
        chains[part] = base if before is None else (before, *base)
    return chains


def _apart(blocks: tuple[nn.Module, ...], uses: _Uses) -> str:
    """Say why blocks cannot run as one region, where they cannot: a region hands the hidden state straight on."""
    for i, block in enumerate(blocks):
        seen = uses.seen[block]
        if seen.n_calls != 1:
            return f"block {i} runs {seen.n_calls} times in one pass"
        if not isinstance(seen.output, Tensor):
            return f"blocks give a {type(seen.output).__name__}, not a tensor"
    for i, (block, after) in enumerate(zip(blocks, blocks[1:], strict=False)):
        if not uses.feeds_only(block, after):
            return f"what block {i} gives is not handed straight to block {i + 1} and to nothing else"
    return ""


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
