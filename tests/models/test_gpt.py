"""gpt: LayerNorm, learned positions, biases, GELU; the parameter count of GPT-2 small."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ckbench import registry
from ckbench.config import ModelConfig

MakeModel = Callable[..., ModelConfig]


def n_parameters(config: ModelConfig, seq_len: int) -> int:
    with torch.device("meta"):
        module: nn.Module = registry.load("models", "gpt")(config, seq_len).module
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("vocab_size", [64, 100])
@pytest.mark.parametrize("n_layers", [1, 4])
def test_parameter_count(tiny_model: MakeModel, n_layers: int, vocab_size: int) -> None:
    D, S = 32, 16
    norm = 2 * D
    attention = 3 * D * D + 3 * D + D * D + D
    ffn = D * 4 * D + 4 * D + 4 * D * D + D
    outside = vocab_size * D + S * D + norm + vocab_size * D
    config = tiny_model(n_layers=n_layers, vocab_size=vocab_size)
    assert n_parameters(config, S) == n_layers * (2 * norm + attention + ffn) + outside
    assert (
        n_parameters(tiny_model(n_layers=1, norm_position="post"), S) == n_parameters(tiny_model(n_layers=1), S) - norm
    )


def test_gpt2_small_has_124_million_parameters(tiny_model: MakeModel) -> None:
    """124,439,808: the number of the released model, whose head is tied."""
    config = tiny_model(n_layers=12, d_model=768, n_heads=12, vocab_size=50257, tie_embeddings=True)
    assert n_parameters(config, 1024) == 124_439_808


def test_what_it_is_made_of(tiny_model: MakeModel) -> None:
    built = registry.load("models", "gpt")(tiny_model(n_layers=2), 16)
    assert sum(isinstance(m, nn.LayerNorm) for m in built.module.modules()) == 2 * 2 + 1
    assert built.blocks[0].attention.qkv.bias is not None
    assert built.blocks[0].ffn.activation == "gelu" and built.blocks[0].ffn.gate is None
    assert built.module.positions.num_embeddings == 16
    assert list(built.module.buffers()) == []


def test_initialisation_is_small_and_biases_are_zero(tiny_model: MakeModel) -> None:
    torch.manual_seed(0)
    built = registry.load("models", "gpt")(tiny_model(n_layers=2, d_model=128), 16)
    assert float(built.module.tokens.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert float(built.blocks[0].ffn.up.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert float(built.blocks[0].ffn.up.bias.detach().abs().max()) == 0.0
