"""Counted work of a step: matrix products by hand, fused attention by formula, recomputation by counting."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ckbench.config import RunConfig
from ckbench.engine.flops import attention_backward_flops, attention_flops, formulas
from ckbench.engine.trial import Trial

MakeRun = Callable[..., RunConfig]
B, S, D, H, V, L = 2, 16, 32, 4, 64, 4
K = D // H
ATTENTION = 2 * B * H * S * S * (K + K)
"""Scores and weighted sum of one block, masks counted as full."""


def counted(tiny_run: MakeRun, spec: str, **model: Any) -> dict[str, int]:

    return Trial(tiny_run(spec, model=model), torch.device("cpu")).count()


def attention_forward(family: str) -> int:
    """Scores and weighted sum of one block; a vit of 8 x 8 pixels has 16 patches and a class token."""
    return 2 * B * H * 17 * 17 * (K + K) if family == "vit" else ATTENTION


def block_forward(family: str, n_kv_heads: int = H) -> int:
    """Products of one block's forward, counted from shapes."""
    ffn = 3 * 96 * D if family == "llama" else 2 * 4 * D * D
    weights = D * (D + 2 * n_kv_heads * K) + D * D + ffn
    return 2 * B * (17 if family == "vit" else S) * weights + attention_forward(family)


HEAD = 2 * B * S * D * V
PATCHES = 2 * B * 16 * (3 * 2 * 2) * D
"""The embedding of a vit; its images need no gradient, so its backward is one product and not two."""
OUTSIDE = {"gpt": HEAD, "llama": HEAD, "bert": HEAD + 2 * B * S * D * D, "vit": PATCHES + 2 * B * D * 10}
"""Products of the forward outside of the blocks, by family of ours."""


@pytest.mark.parametrize("attention", ["eager", "math", "auto", "flash"])
@pytest.mark.parametrize("family", OUTSIDE)
def test_forward_by_hand(tiny_run: MakeRun, family: str, attention: str) -> None:
    """The fused kernels count as much as the plain products they replace."""
    got = counted(tiny_run, "none", family=family, attention=attention)
    assert got["flops_forward"] == L * block_forward(family) + OUTSIDE[family]


@pytest.mark.parametrize("family", OUTSIDE)
def test_backward_by_hand(tiny_run: MakeRun, family: str) -> None:
    """Two products per product; fused attention computes its scores again: five for two instead of four."""
    plain = counted(tiny_run, "none", family=family, attention="eager")
    fused = counted(tiny_run, "none", family=family, attention="auto")
    assert plain["flops_backward"] == 2 * plain["flops_forward"] - (PATCHES if family == "vit" else 0)
    assert fused["flops_backward"] == plain["flops_backward"] + L * attention_forward(family) // 2


def test_grouped_heads_save_projections_not_scores(tiny_run: MakeRun) -> None:
    for attention in ("eager", "auto"):
        got = counted(tiny_run, "none", family="llama", n_kv_heads=2, attention=attention)
        assert got["flops_forward"] == L * block_forward("llama", n_kv_heads=2) + HEAD


@pytest.mark.parametrize("family", OUTSIDE)
@pytest.mark.parametrize("spec", ["per-block", "every-k:3", "full", "one-in-k:2", "nested:2", "recursive"])
def test_recomputation_costs_the_planned_block_forwards(tiny_run: MakeRun, family: str, spec: str) -> None:
    """Without early stop every planned block call is a whole forward."""
    none, other = (counted(tiny_run, s, family=family) for s in ("none", f"{spec},early_stop=false"))
    extra = other["flops_backward"] - none["flops_backward"]
    assert other["flops_forward"] == none["flops_forward"]
    assert extra == other["block_calls_backward"] * block_forward(family)


@pytest.mark.parametrize("family", OUTSIDE)
def test_inverting_costs_one_forward_of_every_block(tiny_run: MakeRun, family: str) -> None:
    """f and g run once in backward, with a graph, both to rebuild the inputs and to give the gradients."""
    model = {"family": family, "residual": "reversible", "norm_position": "pre"}
    none, other = (counted(tiny_run, spec, **model) for spec in ("none", "reversible"))
    assert other["flops_forward"] == none["flops_forward"] == L * block_forward(family) + OUTSIDE[family]
    assert other["flops_backward"] - none["flops_backward"] == L * block_forward(family)


def test_early_stop_spares_the_last_product_of_a_region(tiny_run: MakeRun) -> None:
    """The last product's output is not needed again; with dropout behind it, it is."""
    last_product = 2 * B * S * 4 * D * D
    none, patient, early = (counted(tiny_run, s) for s in ("none", "per-block,early_stop=false", "per-block"))
    assert patient["flops_backward"] - early["flops_backward"] == L * last_product
    extra = early["flops_backward"] - none["flops_backward"]
    assert extra == L * (block_forward("gpt") - last_product)
    dropped = [counted(tiny_run, s, dropout=0.1) for s in ("per-block,early_stop=false", "per-block")]
    assert dropped[0]["flops_backward"] == dropped[1]["flops_backward"]


def test_parts_recompute_their_own_products(tiny_run: MakeRun) -> None:
    none = counted(tiny_run, "none")["flops_backward"]
    ffn = counted(tiny_run, "ffn-only,early_stop=false")["flops_backward"] - none
    attention = counted(tiny_run, "attn-only,early_stop=false")["flops_backward"] - none
    assert ffn == L * 2 * B * S * 2 * 4 * D * D
    assert ffn + attention == L * block_forward("gpt")


def test_attention_formulas() -> None:
    """Queries of 3 heads on 2 batches, 5 by 7 positions, widths 4 and 6."""
    query, key, value = (2, 3, 5, 4), (2, 1, 7, 4), (2, 1, 7, 6)
    scores, weighted = 2 * 2 * 3 * 5 * 7 * 4, 2 * 2 * 3 * 5 * 7 * 6
    assert attention_flops(query, key, value) == scores + weighted
    # scores again; gradients of the values and the weights; gradients of queries and keys
    assert attention_backward_flops((2, 3, 5, 6), query, key, value) == scores + 2 * weighted + 2 * scores


@pytest.mark.parametrize("name", ["flash", "efficient"])
def test_cuda_s_kernels_count_grouped_heads_as_full_ones(name: str) -> None:
    """Every head of the queries has scores of its own, however many share keys and values."""
    B, H, G, S, K = 2, 8, 2, 16, 32
    aten = torch.ops.aten
    q, grad = (torch.empty(B, H, S, K, dtype=torch.bfloat16, device="meta") for _ in range(2))
    for n_groups in (G, H):
        k, v = (torch.empty(B, n_groups, S, K, dtype=torch.bfloat16, device="meta") for _ in range(2))
        forward = formulas()[getattr(aten, f"_scaled_dot_product_{name}_attention")]
        backward = formulas()[getattr(aten, f"_scaled_dot_product_{name}_attention_backward")]
        assert forward(q, k, v, out_val=q) == 2 * B * H * S * S * 2 * K
        assert backward(grad, q, k, v, out_val=(q, k, v)) == 2 * B * H * S * S * 5 * K
