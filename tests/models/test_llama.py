"""llama: RMSNorm, SwiGLU, rotary positions, grouped key heads, no biases."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ckbench import registry
from ckbench.config import ModelConfig
from ckbench.models._attention import rotate
from ckbench.models.llama import rotation_table

MakeModel = Callable[..., ModelConfig]


def n_parameters(config: ModelConfig, seq_len: int) -> int:
    with torch.device("meta"):
        module: nn.Module = registry.load("models", "llama")(config, seq_len).module
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("n_layers", [1, 4])
def test_parameter_count(tiny_model: MakeModel, n_layers: int, n_kv_heads: int) -> None:
    D, V, K, F = 32, 64, 8, 96  # F: 8/3 of D, rounded up to a multiple of 32
    attention = D * (D + 2 * n_kv_heads * K) + D * D
    ffn = 3 * D * F
    config = tiny_model(family="llama", n_layers=n_layers, n_kv_heads=n_kv_heads)
    assert config.ffn_widths() == (F,) * n_layers
    assert n_parameters(config, 16) == n_layers * (2 * D + attention + ffn) + V * D + D + V * D


def test_llama_7b_has_6_7_billion_parameters(tiny_model: MakeModel) -> None:
    """6,738,415,616: Touvron et al. 2023, table 2 (6.7B)."""
    config = tiny_model(family="llama", n_layers=32, d_model=4096, n_heads=32, vocab_size=32000, d_ff=11008)
    assert n_parameters(config, 2048) == 6_738_415_616


def test_what_it_is_made_of(tiny_model: MakeModel) -> None:
    built = registry.load("models", "llama")(tiny_model(family="llama", n_layers=2), 16)
    assert sum(isinstance(m, nn.RMSNorm) for m in built.module.modules()) == 2 * 2 + 1
    assert all(m.bias is None for m in built.module.modules() if isinstance(m, nn.Linear))
    assert built.blocks[0].ffn.gate is not None
    assert {tuple(buffer.shape) for buffer in built.module.buffers()} == {(16, 8)}
    assert not [name for name in built.module.state_dict() if "cos" in name or "sin" in name]


def test_scores_depend_on_distance_alone() -> None:
    """Turning queries and keys by their positions makes their product a function of the distance."""
    S, K = 12, 8
    cos, sin = rotation_table(S, K)
    q, k = torch.randn(K), torch.randn(K)
    scores = rotate(q.expand(S, K), cos, sin) @ rotate(k.expand(S, K), cos, sin).T
    for distance in range(S):
        diagonal = scores.diagonal(distance)
        assert torch.allclose(diagonal, diagonal[0].expand_as(diagonal), atol=1e-4)
    assert float(scores[0, 0]) == pytest.approx(float(q @ k), abs=1e-5)


def test_every_block_gets_the_cosines_and_sines_of_its_positions(tiny_model: MakeModel) -> None:
    built = registry.load("models", "llama")(tiny_model(family="llama", n_layers=2), 16)
    given: list[tuple[torch.Tensor, torch.Tensor]] = []
    for block in built.blocks:
        block.attention.register_forward_pre_hook(lambda _m, args: given.append(args[1]))
    built.module(torch.zeros(1, 5, dtype=torch.long))
    cos, sin = rotation_table(16, 8)
    assert len(given) == 2
    for got_cos, got_sin in given:
        assert torch.equal(got_cos, cos[:5]) and torch.equal(got_sin, sin[:5])
    assert torch.equal(cos[0], torch.ones(8)) and torch.equal(sin[0], torch.zeros(8))
    assert float(cos[1, 0]) == pytest.approx(0.540302, abs=1e-6), "the first pair turns by one radian per position"


def test_rotation_keeps_lengths() -> None:
    x = torch.randn(2, 4, 16, 8)
    turned = rotate(x, *rotation_table(16, 8))
    assert torch.allclose(turned.norm(dim=-1), x.norm(dim=-1), atol=1e-5)
    assert torch.equal(turned[..., 0, :], x[..., 0, :]), "position 0 is not turned"
