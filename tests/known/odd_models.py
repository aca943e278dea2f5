"""Models with what the reports stumbled over and no study can ask for. Shapes: B batch, S sequence, D width.

Each builds the map the engine needs, ``BuiltModel``; vectors (B, S, D) go in and come out.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ckbench.models.base import BuiltModel

D = 16
N_BLOCKS = 3


class Stack(nn.Module):
    """A linear layer, so that the first block's input needs a gradient, then the blocks."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(D, D)
        self.blocks = nn.ModuleList(dict.fromkeys(blocks))
        self.order = tuple(blocks)

    def arguments(self) -> dict[str, Any]:
        """Give what each block is called with besides the hidden state."""
        return {}

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Run the blocks in order."""
        x_BSD = self.first(x_BSD)
        arguments = self.arguments()
        for block in self.order:
            x_BSD = block(x_BSD, **arguments)
        return x_BSD


def built(module: Stack) -> BuiltModel:
    """Map a stack whose blocks may have an ``ffn``."""
    parts = tuple({"ffn": (block.ffn,)} if hasattr(block, "ffn") else {} for block in module.order)
    return BuiltModel(module=module, blocks=module.order, parts=parts)


class BatchNormBlock(nn.Module):
    """Keeps running statistics, which every forward moves on."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(D)
        self.linear = nn.Linear(D, D)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Normalise over batch and sequence."""
        return x_BSD + self.linear(self.norm(x_BSD.flatten(0, 1)).view_as(x_BSD))


class InplaceFfn(nn.Module):
    """An FFN whose ReLU writes into its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Widen, cut off in place, narrow."""
        return self.down(F.relu_(self.up(x_BSD)))


class InplaceBlock(nn.Module):
    """A residual block around ``InplaceFfn``."""

    def __init__(self) -> None:
        super().__init__()
        self.ffn = InplaceFfn()

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Add the FFN."""
        return x_BSD + self.ffn(x_BSD)


class InputInplaceBlock(InplaceBlock):
    """Writes into its own input, which a checkpoint has kept to run again from."""

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Scale the input in place, then go on."""
        return super().forward(x_BSD.mul_(1.5))


class MixtureBlock(nn.Module):
    """Sends each token to two of four experts, chosen with noise, so that the sizes of what is kept vary."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, 4)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(4))

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Route, run the experts on their tokens, add up."""
        x_ND = x_BSD.flatten(0, 1)
        scores = self.router(x_ND)
        weights, chosen = (scores + 0.5 * torch.randn_like(scores)).softmax(-1).topk(2)
        y_ND = torch.zeros_like(x_ND)
        for i, expert in enumerate(self.experts):
            rows, slots = (chosen == i).nonzero(as_tuple=True)
            y_ND = y_ND.index_add(0, rows, torch.tanh(expert(x_ND[rows])) * weights[rows, slots, None])
        return x_BSD + y_ND.view_as(x_BSD)


class CacheBlock(nn.Module):
    """Attention that appends its keys to a cache, as models for inference do by default."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)

    def forward(self, x_BSD: Tensor, cache: dict["CacheBlock", Tensor] | None = None) -> Tensor:
        """Attend to the cache and to this call's tokens."""
        q_BSD, k_BSD, v_BSD = self.qkv(x_BSD).chunk(3, -1)
        kv = torch.stack((k_BSD, v_BSD))
        if cache is not None:
            cache[self] = kv = torch.cat((cache[self], kv), 2) if self in cache else kv
        return x_BSD + F.scaled_dot_product_attention(q_BSD, kv[0], kv[1])


class CacheStack(Stack):
    """Makes a new cache for every forward."""

    use_cache = True

    def arguments(self) -> dict[str, Any]:
        """Give an empty cache, or none."""
        return {"cache": {} if self.use_cache else None}


class KeywordBlock(nn.Module):
    """Takes its mask by keyword, and may get none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x_BSD: Tensor, *, attention_mask: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """Mask and shift."""
        y_BSD = torch.tanh(self.linear(x_BSD))
        if attention_mask is not None:
            y_BSD = y_BSD * attention_mask
        return x_BSD + (y_BSD if bias is None else y_BSD + bias)


class KeywordStack(Stack):
    """Calls its blocks with a mask by keyword and a bias of None."""

    def arguments(self) -> dict[str, Any]:
        """Give a mask that needs no gradient."""
        return {"attention_mask": torch.linspace(0, 1, D), "bias": None}


class MixingBlock(nn.Module):
    """Drops out, so that two calls of one shared block are told apart by their masks."""

    def __init__(self) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Dropout(0.2))

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Add the mixed input."""
        return x_BSD + self.ffn(x_BSD)


def batch_norm() -> BuiltModel:
    """Build blocks with running statistics."""
    return built(Stack([BatchNormBlock() for _ in range(N_BLOCKS)]))


def inplace() -> BuiltModel:
    """Build blocks with an in-place ReLU."""
    return built(Stack([InplaceBlock() for _ in range(N_BLOCKS)]))


def input_inplace() -> BuiltModel:
    """Build blocks that write into their input."""
    return built(Stack([InputInplaceBlock() for _ in range(N_BLOCKS)]))


def mixture() -> BuiltModel:
    """Build mixture-of-experts blocks with a noisy router."""
    return built(Stack([MixtureBlock() for _ in range(N_BLOCKS)]))


def cached(use_cache: bool) -> BuiltModel:
    """Build blocks with a key and value cache, used or not."""
    module = CacheStack([CacheBlock() for _ in range(N_BLOCKS)])
    module.use_cache = use_cache
    return built(module)


def keyword() -> BuiltModel:
    """Build blocks that take a mask by keyword."""
    return built(KeywordStack([KeywordBlock() for _ in range(N_BLOCKS)]))


def shared() -> BuiltModel:
    """Build one block that stands at every place of the stack."""
    return built(Stack([MixingBlock()] * N_BLOCKS))


class TransposedBlock(nn.Module):
    """Multiplies a square hidden state by its own transpose: autograd saves one storage under two layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Take S = D."""
        y_BSD = self.linear(x_BSD)
        return x_BSD + 0.1 * (y_BSD @ y_BSD.transpose(-1, -2))


def transposed() -> BuiltModel:
    """Build blocks that use a tensor and its transpose."""
    return built(Stack([TransposedBlock() for _ in range(N_BLOCKS)]))
