"""vit: vision transformer over image patches and a class token (Dosovitskiy et al. 2020, arXiv 2010.11929).

Shapes: B batch, C channels, H and W pixels, P pixels per side of a patch, S patches + 1, D d_model, N classes.
"""

from functools import partial

import torch
from torch import Generator, Tensor, nn

from ckbench.config import ModelConfig, RunConfig, VitConfig
from ckbench.models._block import build_blocks, enter_streams, leave_streams, parts_of, small_normal
from ckbench.models.base import Batch, BuiltModel

build_norm = partial(nn.LayerNorm, eps=1e-6)


class Vit(nn.Module):
    """Embed patches, run the stack, classify by the class token."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        D = config.d_model
        self.patch_size = config.patch_size
        self.patches = nn.Linear(config.n_channels * config.patch_size**2, D)
        self.class_token = nn.Parameter(torch.zeros(D))
        self.positions = nn.Embedding(config.own_seq_len(), D)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = build_blocks(config, build_norm, bias=True, causal=False)
        self.norm = build_norm(D) if config.norms_first() else nn.Identity()
        self.head = nn.Linear(D, config.n_classes) if config.head == "lm" else None
        self.apply(small_normal)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Map images to class logits (B, N), or to the hidden states (B, S, D) of class token and patches."""
        x_BSD = self.patches(cut(images_BCHW, self.patch_size))
        token_B1D = self.class_token.to(x_BSD.dtype).expand(x_BSD.shape[0], 1, -1)
        x_BSD = torch.cat((token_B1D, x_BSD), dim=1) + self.positions.weight
        x_BSD = enter_streams(self.blocks, self.dropout(x_BSD))
        for block in self.blocks:
            x_BSD = block(x_BSD)
        x_BSD = self.norm(leave_streams(self.blocks, x_BSD))
        return x_BSD if self.head is None else self.head(x_BSD[:, 0])


def cut(images_BCHW: Tensor, patch_size: int) -> Tensor:
    """Flatten the patches of images, row by row, to (B, patches, C·P·P).

    With a linear layer behind it this is the paper's equation 1; a strided convolution computes the same.
    """
    B, C, H, W = images_BCHW.shape
    P = patch_size
    patches = images_BCHW.reshape(B, C, H // P, P, W // P, P).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(B, (H // P) * (W // P), C * P * P)


def draw_images(config: RunConfig, generator: Generator, dtype: torch.dtype) -> Batch:
    """Draw normal pixels (B, C, H, W) and uniform labels (B,), or normal targets (B, S, D) of the mean-squared loss."""
    model, train = config.model, config.train
    assert isinstance(model, VitConfig)
    shape = (train.batch_size, model.n_channels, model.image_size, model.image_size)
    images = torch.randn(shape, generator=generator).to(dtype)
    if train.loss == "mse":
        hidden = (train.batch_size, model.own_seq_len(), model.d_model)
        return images, torch.randn(hidden, generator=generator).to(dtype)
    return images, torch.randint(model.n_classes, (train.batch_size,), generator=generator)


def build(config: ModelConfig, seq_len: int) -> BuiltModel:
    """Make a model with random weights from the global generator, on the default device."""
    assert isinstance(config, VitConfig) and seq_len == config.own_seq_len(), "the loader sees to it"
    model = Vit(config)
    blocks = tuple(model.blocks)
    return BuiltModel(
        module=model, blocks=blocks, parts=tuple(map(parts_of, blocks)), head=model.head, draw=draw_images
    )


PLUGIN = build
