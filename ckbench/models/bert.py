"""bert: bidirectional encoder with a masked-token head (Devlin et al. 2018, arXiv 1810.04805).

Norms come after the residual sum unless norm_position says otherwise. Left out of the paper's model: segment
embeddings and the next-sentence task, which need pairs of texts. Shapes: B batch, S sequence, D d_model, V vocab_size.
"""

from functools import partial

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from ckbench.config import ModelConfig, RunConfig
from ckbench.models._block import build_blocks, enter_streams, leave_streams, parts_of, small_normal
from ckbench.models.base import IGNORED, Batch, BuiltModel, draw_tokens

MASKED_SHARE = 0.15
"""Share of the positions that are to be predicted (Devlin et al. 2018, section 3.1)."""
build_norm = partial(nn.LayerNorm, eps=1e-12)


class Bert(nn.Module):
    """Embed, run the stack, read out."""

    def __init__(self, config: ModelConfig, seq_len: int) -> None:
        super().__init__()
        vocab_size, D = config.vocab_size, config.d_model
        self.tokens = nn.Embedding(vocab_size, D) if vocab_size else None
        self.positions = nn.Embedding(seq_len, D) if vocab_size else None
        self.embedding_norm = build_norm(D) if vocab_size else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = build_blocks(config, build_norm, bias=True, causal=False)
        self.norm = build_norm(D) if config.norms_first() else nn.Identity()
        has_head = config.head == "lm" and vocab_size
        self.transform = MaskedTokenTransform(D) if has_head else nn.Identity()
        self.head = nn.Linear(D, vocab_size) if has_head and vocab_size else None
        self.apply(small_normal)
        if config.tie_embeddings and self.head is not None and self.tokens is not None:
            self.head.weight = self.tokens.weight

    def forward(self, inputs: Tensor) -> Tensor:
        """Map tokens (B, S) or vectors (B, S, D) to logits (B, S, V) or hidden states (B, S, D)."""
        x_BSD = inputs
        if self.tokens is not None and self.positions is not None:
            at = torch.arange(inputs.shape[1], device=inputs.device)
            x_BSD = self.tokens(inputs) + self.positions(at)
        x_BSD = enter_streams(self.blocks, self.dropout(self.embedding_norm(x_BSD)))
        for block in self.blocks:
            x_BSD = block(x_BSD)
        x_BSD = self.transform(self.norm(leave_streams(self.blocks, x_BSD)))
        return x_BSD if self.head is None else self.head(x_BSD)


class MaskedTokenTransform(nn.Module):
    """What the masked-token head does before it projects: dense, GELU, norm."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.dense = nn.Linear(d_model, d_model)
        self.norm = build_norm(d_model)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Turn hidden states (B, S, D) into what the projection reads."""
        y_BSD: Tensor = self.norm(F.gelu(self.dense(x_BSD)))
        return y_BSD


def draw_masked(config: RunConfig, generator: Generator, dtype: torch.dtype) -> Batch:
    """Draw tokens (B, S), of which 15 % are replaced by [MASK], and targets (B, S), which are ``IGNORED`` elsewhere.

    [MASK] is the last token id and is drawn nowhere else. Every sequence has the same number of masks, at least one,
    so that every batch is the same work. The paper leaves a fifth of the chosen tokens legible; that changes what is
    learned and no operation, so all are masked here. Without a head nothing is predicted: ``draw_tokens``.
    """
    model, train = config.model, config.train
    if train.loss == "mse":
        return draw_tokens(config, generator, dtype)
    assert isinstance(model, ModelConfig) and model.vocab_size is not None
    shape = (train.batch_size, train.seq_len)
    mask_id = model.vocab_size - 1
    tokens = torch.randint(max(mask_id, 1), shape, generator=generator)
    n_masked = max(1, round(MASKED_SHARE * train.seq_len))
    places = torch.rand(shape, generator=generator).argsort(dim=1)[:, :n_masked]
    is_masked = torch.zeros(shape, dtype=torch.bool).scatter_(1, places, True)
    return tokens.masked_fill(is_masked, mask_id), tokens.masked_fill(~is_masked, IGNORED)


def build(config: ModelConfig, seq_len: int) -> BuiltModel:
    """Make a model with random weights from the global generator, on the default device."""
    model = Bert(config, seq_len)
    if config.freeze_embedding:
        for module in (model.tokens, model.positions, model.embedding_norm):
            assert module is not None, "the config refuses to freeze what is not there"
            module.requires_grad_(False)
    blocks = tuple(model.blocks)
    return BuiltModel(
        module=model, blocks=blocks, parts=tuple(map(parts_of, blocks)), head=model.head, draw=draw_masked
    )


PLUGIN = build
