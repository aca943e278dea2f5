"""The loss of a micro-batch: the study's, whole or in pieces, or the model's own."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ckbench.config import TrainConfig
from ckbench.engine.checkpointing import recomputed
from ckbench.errors import ConfigError
from ckbench.models.base import IGNORED, BuiltModel

Loss = Callable[[Any, Tensor], Tensor]


def build_loss(model: BuiltModel, train: TrainConfig) -> Loss:
    """Give the loss of a micro-batch as a function of the module's output and the targets.

    ``chunked_cross_entropy`` takes the head out of the module: it then gives hidden states, and the loss makes their
    logits piece by piece. Raises ConfigError where the model has no head to take.
    """
    if model.loss is not None:
        return model.loss
    if train.loss == "mse":
        return mean_squared
    if train.loss == "cross_entropy":
        return cross_entropy
    if model.head is None:
        raise ConfigError("chunked_cross_entropy needs a model whose head is known; this one names none")
    project = model.head.forward
    object.__setattr__(model.head, "forward", _pass_on)
    return partial(chunked_cross_entropy, project, train.loss_chunks)


def mean_squared(output: Tensor, targets: Tensor) -> Tensor:
    """Give the mean squared distance of hidden states and targets (B, S, D)."""
    return F.mse_loss(output, targets.to(output.dtype))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Give the mean over all targets that are not ``IGNORED``; logits (..., V), targets (...)."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED)


def chunked_cross_entropy(
    project: Callable[[Tensor], Tensor], n_chunks: int, hidden: Tensor, targets: Tensor
) -> Tensor:
    """Give the same mean from hidden states (..., D), with the logits of one of ``n_chunks`` pieces at a time.

    Each piece's logits are made again in backward, so V numbers per token exist for a piece only: 2·n·D·V more
    floating-point operations for n tokens, and logits, their gradient and the softmax shrink by ``n_chunks``.
    Source: Wijmans et al. 2024 (Cut Your Losses, arXiv 2411.09009) describe the trade; torchtune calls it the same.
    """
    hidden, targets = hidden.flatten(0, -2), targets.flatten()
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    for piece, aims in zip(hidden.chunk(n_chunks), targets.chunk(n_chunks), strict=True):
        total = total + recomputed(partial(_sum_of_piece, project), piece, aims)
    return total / (targets != IGNORED).sum()


def _sum_of_piece(project: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(project(hidden).float(), targets, reduction="sum", ignore_index=IGNORED)


def _pass_on(hidden: Tensor) -> Tensor:
    """Stand in for the head's forward."""
    return hidden
