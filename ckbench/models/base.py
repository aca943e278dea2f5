"""What a model family gives back: the module, where its blocks are, and what each block is made of."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Generator, Tensor, nn

from ckbench.config import ModelConfig, RunConfig
from ckbench.plan import StackShape

IGNORED = -100
"""Target that the cross entropy leaves out, as in torch.nn.functional.cross_entropy."""

Batch = tuple[Any, Tensor]
"""Inputs (a tensor, or a tuple or mapping of them, as the module takes them) and targets."""

Counted = Callable[[int, Callable[..., Any]], Callable[..., Any]]
"""Makes a forward of block i one whose starts are counted."""


@dataclass(frozen=True, kw_only=True)
class BuiltModel:
    """A model and the map of its stack.

    ``parts`` names, per block, the chain of modules of a part in the order they run, each feeding only
    the next: ``{"ffn": (norm, ffn), "attention": (norm, attention), "core": (core,)}``. A norm whose output
    also goes elsewhere, or that comes after the residual sum, is left out of the chain.
    """

    module: nn.Module
    blocks: tuple[nn.Module, ...]
    parts: tuple[dict[str, tuple[nn.Module, ...]], ...]
    notes: tuple[str, ...] = field(default=())
    draw: "Callable[[RunConfig, Generator, torch.dtype], Batch] | None" = None
    """Makes one synthetic micro-batch on the host, in the weights' type; None: ``draw_tokens``."""
    head: nn.Module | None = None
    """The last projection, whose output are the logits; the chunked loss calls it piece by piece."""
    loss: Callable[[Any, Tensor], Tensor] | None = None
    """Loss of output and targets; None: the mean over the micro-batch of the study's loss."""
    enable_native: Callable[[Counted], Callable[[], None]] | None = None
    """Switches the library's own checkpointing on, of counted forwards, and gives what switches it off again."""
    apart: str = ""
    """Why no region can span several blocks (they give tuples, say); empty where one can."""

    def shape(self) -> StackShape:
        """Describe the stack as it was built."""
        common = frozenset.intersection(*(frozenset(parts) for parts in self.parts)) if self.parts else frozenset()
        return StackShape(
            n_layers=len(self.blocks),
            parts=frozenset(common),
            is_invertible=bool(self.blocks) and all(isinstance(block, Invertible) for block in self.blocks),
            has_native=self.enable_native is not None,
        )


class Invertible(nn.Module, ABC):
    """A block of two coupled streams, x (B, S, 2·D): y1 = x1 + f(x2), y2 = x2 + g(y1).

    Sources: Gomez et al. 2017 (RevNet, arXiv 1707.04585); Kitaev et al. 2020 (Reformer, arXiv 2001.04451).
    """

    draws: bool = True
    """Whether f or g draw random numbers; where they do, backward needs the states of the generators."""

    @abstractmethod
    def couplings(self, *args: Any, **kwargs: Any) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        """Give f and g for one call with these further arguments; each maps (B, S, D) to (B, S, D)."""

    def forward(self, x_BS2D: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Couple the streams."""
        f, g = self.couplings(*args, **kwargs)
        x1_BSD, x2_BSD = x_BS2D.chunk(2, dim=-1)
        y1_BSD = x1_BSD + f(x2_BSD)
        return torch.cat((y1_BSD, x2_BSD + g(y1_BSD)), dim=-1)


class Family(Protocol):
    """One file of this shelf. The module maps tokens (B, S), or vectors (B, S, D) where the config
    has no vocabulary, to logits (B, S, V), or to hidden states (B, S, D) with head none. A family may draw
    inputs of its own; its logits then have the targets' shape and one more axis, the last."""

    def build(self, config: ModelConfig, seq_len: int) -> BuiltModel:
        """Make the model with random weights from the global generator, on the default device."""
        ...


def draw_tokens(config: RunConfig, generator: Generator, dtype: torch.dtype) -> Batch:
    """Draw inputs and targets of a language model.

    Tokens and targets are uniform over the vocabulary, (B, S). Without a vocabulary inputs are normal
    vectors (B, S, D), in the weights' type. Targets of the mean-squared loss are normal (B, S, D).
    """
    model, train = config.model, config.train
    assert isinstance(model, ModelConfig), "other families draw for themselves"
    shape = (train.batch_size, train.seq_len)
    vocab_size = model.vocab_size

    def vectors() -> Tensor:
        return torch.randn((*shape, model.d_model), generator=generator).to(dtype)

    def tokens() -> Tensor:
        assert vocab_size is not None
        return torch.randint(vocab_size, shape, generator=generator)

    inputs = tokens() if vocab_size is not None else vectors()
    return inputs, vectors() if train.loss == "mse" else tokens()


def call(module: nn.Module, inputs: Any) -> Any:
    """Call a module with a tensor, a tuple of arguments or a mapping of keywords."""
    if isinstance(inputs, dict):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, tuple) else module(inputs)
