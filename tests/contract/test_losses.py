"""The chunked loss: the same loss and gradients as the whole one, with the logits of one piece at a time."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ckbench.config import RunConfig
from ckbench.devices.cpu import Cpu
from ckbench.engine.losses import build_loss, chunked_cross_entropy, cross_entropy
from ckbench.engine.parity import check_parity, largest_relative_difference, run_steps
from ckbench.engine.trial import NoObserver, Trial
from ckbench.errors import ConfigError
from ckbench.models.base import IGNORED, BuiltModel

MakeRun = Callable[..., RunConfig]
CPU = torch.device("cpu")
CHUNKED = {"loss": "chunked_cross_entropy", "loss_chunks": 3}
HEAVY = {"n_layers": 2, "d_model": 32, "vocab_size": 4096}
"""A model whose logits are far larger than anything else."""


@pytest.mark.parametrize("n_chunks", [1, 3, 8, 100])
def test_value_and_gradients_are_those_of_the_whole(n_chunks: int) -> None:
    head = nn.Linear(8, 50, bias=False).double()
    targets = torch.randint(50, (4, 7))
    targets[0, :5] = IGNORED
    gradients, losses = [], []
    for name in ("whole", "pieces"):
        hidden = torch.randn(4, 7, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        hidden.requires_grad_()
        head.zero_grad()
        if name == "whole":
            loss = cross_entropy(head(hidden), targets)
        else:
            loss = chunked_cross_entropy(head.forward, n_chunks, hidden, targets)
        loss.backward()
        losses.append(loss.detach())
        gradients.append((hidden.grad, head.weight.grad))
    torch.testing.assert_close(losses[1].double(), losses[0], rtol=1e-6, atol=0)
    for ours, theirs in zip(gradients[1], gradients[0], strict=True):
        assert ours is not None and theirs is not None
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_goes_the_same_way(tiny_run: MakeRun, family: str, precision: str) -> None:
    train = {"precision": precision, "optimizer": "sgd"}
    whole = run_steps(tiny_run("none", model={"family": family}, train=train), CPU)
    pieces = run_steps(tiny_run("none", model={"family": family}, train={**train, **CHUNKED}), CPU)
    limit = 1e-5 if precision == "fp32" else 3e-2
    assert 0 < largest_relative_difference(whole, pieces) <= limit
    for ours, theirs in zip(pieces.losses, whole.losses, strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=limit, atol=0)


@pytest.mark.parametrize("spec", ["per-block", "nested:2", "ffn-only"])
def test_strategies_are_bit_identical_under_it(tiny_run: MakeRun, spec: str) -> None:
    config = tiny_run(spec, model={"dropout": 0.1}, train={**CHUNKED, "grad_accumulation": 2})
    assert check_parity(config, CPU, lambda: None)["parity"] == "exact"


def figures(config: RunConfig) -> dict[str, Any]:
    """Weigh a steady step."""
    device = Cpu("cpu", 1)
    trial = Trial(config, device.torch_device)
    trial.step(NoObserver())
    return device.weigh(trial)


def test_the_peak_falls_by_the_logits_and_changes_its_owner(tiny_run: MakeRun) -> None:
    """Whole: logits, log-softmax and gradient of B·S·V numbers. In eight pieces: an eighth of each."""
    base = {"batch_size": 4, "seq_len": 64, "optimizer": "sgd"}
    whole = figures(tiny_run("per-block", model=HEAVY, train=base))
    pieces = figures(
        tiny_run("per-block", model=HEAVY, train={**base, "loss": "chunked_cross_entropy", "loss_chunks": 8})
    )
    logits_bytes = 4 * 64 * 4096 * 4
    assert whole["peak_phase"] == "loss"
    assert pieces["peak_loss_bytes"] < whole["peak_loss_bytes"] - logits_bytes
    assert pieces["saved_bytes"] < whole["saved_bytes"] - logits_bytes * 0.9
    finer = figures(
        tiny_run("per-block", model=HEAVY, train={**base, "loss": "chunked_cross_entropy", "loss_chunks": 64})
    )
    assert finer["peak_loss_bytes"] < pieces["peak_loss_bytes"]


def test_flops_grow_by_the_logits_made_again(tiny_run: MakeRun) -> None:
    counts = {}
    for name, train in (("whole", {}), ("pieces", CHUNKED)):
        counts[name] = Trial(tiny_run("none", train=train), CPU).count()
    config = tiny_run("none")
    again = 2 * 2 * 16 * 32 * 64  # 2·B·S·D·V
    assert (config.train.batch_size, config.train.seq_len) == (2, 16)
    assert counts["pieces"]["flops_forward"] == counts["whole"]["flops_forward"]
    assert counts["pieces"]["flops_backward"] - counts["whole"]["flops_backward"] == again


def test_a_model_without_a_known_head_is_refused(tiny_run: MakeRun) -> None:
    block = nn.Linear(4, 4)
    model = BuiltModel(module=block, blocks=(block,), parts=({},))
    with pytest.raises(ConfigError, match="^chunked_cross_entropy needs a model whose head is known"):
        build_loss(model, tiny_run("none", train=CHUNKED).train)
