"""bert: bidirectional encoder, norms after the sum, a masked-token head; the parameter count of BERT base."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ckbench import registry, study
from ckbench.config import ModelConfig, RunConfig
from ckbench.engine.losses import build_loss
from ckbench.engine.trial import NoObserver, Trial
from ckbench.errors import ConfigError
from ckbench.models.base import IGNORED, BuiltModel
from tests.models.reference import encoder_twin

MakeModel = Callable[..., ModelConfig]
MakeRun = Callable[..., RunConfig]
CPU = torch.device("cpu")
D, S, V = 32, 16, 64


def built(config: ModelConfig, seq_len: int = S) -> BuiltModel:
    model: BuiltModel = registry.load("models", "bert")(config, seq_len)
    return model


def n_parameters(config: ModelConfig, seq_len: int = S) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in built(config, seq_len).module.parameters())


@pytest.mark.parametrize("vocab_size", [64, 100])
@pytest.mark.parametrize("n_layers", [1, 4])
def test_parameter_count(tiny_model: MakeModel, n_layers: int, vocab_size: int) -> None:
    norm = 2 * D
    attention = 3 * D * D + 3 * D + D * D + D
    ffn = D * 4 * D + 4 * D + 4 * D * D + D
    embedding = vocab_size * D + S * D + norm
    head = D * D + D + norm + D * vocab_size + vocab_size
    config = tiny_model(family="bert", n_layers=n_layers, vocab_size=vocab_size)
    wanted = embedding + n_layers * (2 * norm + attention + ffn) + head
    assert n_parameters(config) == wanted
    pre = tiny_model(family="bert", n_layers=n_layers, vocab_size=vocab_size, norm_position="pre")
    assert n_parameters(pre) == wanted + norm, "with norms first, one more follows the stack"


def test_bert_base_has_109_million_parameters(tiny_model: MakeModel) -> None:
    """109,514,298 in the released model with its masked-token head, of which two segment vectors are not ours."""
    config = tiny_model(family="bert", n_layers=12, d_model=768, n_heads=12, vocab_size=30522, tie_embeddings=True)
    assert n_parameters(config, 512) == 109_514_298 - 2 * 768


def test_norms_come_after_the_sum_unless_said_otherwise(tiny_model: MakeModel) -> None:
    assert not tiny_model(family="bert").norms_first()
    assert tiny_model(family="bert", norm_position="pre").norms_first()
    assert tiny_model(family="gpt").norms_first() and tiny_model(family="llama").norms_first()
    with pytest.raises(ValueError, match="residual reversible needs norm_position: pre"):
        tiny_model(family="bert", residual="reversible")
    assert built(tiny_model(family="bert", residual="reversible", norm_position="pre")).shape().is_invertible


@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_blocks_compute_what_pytorchs_encoder_layer_does(tiny_model: MakeModel, norm_position: str) -> None:
    model = built(tiny_model(family="bert", norm_position=norm_position))
    x = torch.randn(2, S, D)
    for block in model.blocks:
        twin = encoder_twin(block, norm_first=norm_position == "pre", eps=1e-12)
        assert torch.allclose(block(x), twin(x), atol=1e-5)


def test_the_whole_model_by_hand(tiny_model: MakeModel) -> None:
    """Embed, norm, the blocks, dense, GELU, norm, project: written out with the weights of the model."""
    model = built(tiny_model(family="bert", tie_embeddings=True))
    state = dict(model.module.named_parameters())
    nn.init.normal_(state["head.bias"])
    tokens = torch.randint(V, (2, S))

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (D,), state[f"{name}.weight"], state[f"{name}.bias"], 1e-12)

    x = norm(F.embedding(tokens, state["tokens.weight"]) + state["positions.weight"][:S], "embedding_norm")
    for block in model.blocks:
        x = block(x)
    x = F.gelu(x @ state["transform.dense.weight"].T + state["transform.dense.bias"])
    logits = norm(x, "transform.norm") @ state["tokens.weight"].T + state["head.bias"]
    assert torch.allclose(model.module(tokens), logits, atol=1e-5)


def test_frozen_embeddings_leave_the_first_block_an_input_without_gradient(tiny_model: MakeModel) -> None:
    model = built(tiny_model(family="bert", freeze_embedding=True))
    frozen = {name for name, p in model.module.named_parameters() if not p.requires_grad}
    assert frozen == {"tokens.weight", "positions.weight", "embedding_norm.weight", "embedding_norm.bias"}


def drawn(tiny_run: MakeRun, seed: int = 0, **settings: Any) -> tuple[Tensor, Tensor]:
    config = tiny_run("none", model={"family": "bert", **settings.get("model", {})}, train=settings.get("train"))
    draw = built(config.model, config.train.seq_len).draw
    assert draw is not None
    inputs, targets = draw(config, torch.Generator().manual_seed(seed), torch.float32)
    return inputs, targets


@pytest.mark.parametrize(("seq_len", "n_masked"), [(1, 1), (2, 1), (3, 1), (16, 2), (20, 3), (512, 77)])
def test_fifteen_per_cent_of_each_sequence_are_masked(tiny_run: MakeRun, seq_len: int, n_masked: int) -> None:
    inputs, targets = drawn(tiny_run, train={"batch_size": 5, "seq_len": seq_len})
    is_masked = inputs == V - 1
    assert inputs.shape == targets.shape == (5, seq_len)
    assert is_masked.sum(dim=1).tolist() == [n_masked] * 5
    assert torch.equal(targets != IGNORED, is_masked)
    assert int(targets[is_masked].min()) >= 0 and int(targets[is_masked].max()) < V - 1


def test_masks_fall_on_every_position_and_follow_the_seed(tiny_run: MakeRun) -> None:
    inputs, targets = drawn(tiny_run, train={"batch_size": 400})
    per_position = (targets != IGNORED).float().mean(dim=0)
    assert float((per_position - 2 / 16).abs().max()) < 0.07, "two of sixteen places, each as often"
    again, other = drawn(tiny_run, train={"batch_size": 400}), drawn(tiny_run, seed=1, train={"batch_size": 400})
    assert torch.equal(inputs, again[0]) and torch.equal(targets, again[1])
    assert not torch.equal(inputs, other[0])


def test_a_vocabulary_of_one_is_all_masks(tiny_run: MakeRun) -> None:
    inputs, targets = drawn(tiny_run, model={"vocab_size": 1})
    assert int(inputs.max()) == 0 and set(targets.unique().tolist()) == {0, IGNORED}


def test_without_a_head_nothing_is_masked(tiny_run: MakeRun) -> None:
    inputs, targets = drawn(tiny_run, model={"head": "none"}, train={"loss": "mse"})
    assert inputs.shape == (2, S) and targets.shape == (2, S, D)
    inputs, targets = drawn(tiny_run, model={"head": "none", "vocab_size": None}, train={"loss": "mse"})
    assert inputs.shape == targets.shape == (2, S, D)


def test_the_loss_is_the_mean_over_masked_positions(tiny_run: MakeRun) -> None:
    trial = Trial(tiny_run("none", model={"family": "bert"}), CPU)
    ((tokens, targets),) = trial.batches
    logits = trial.module(tokens)
    chosen = targets != IGNORED
    by_hand = -logits.log_softmax(-1)[chosen].gather(1, targets[chosen].unsqueeze(1)).mean()
    assert torch.allclose(trial.loss(logits, targets), by_hand, atol=1e-6)


def test_the_chunked_loss_projects_what_the_transform_gave(tiny_run: MakeRun) -> None:
    config = tiny_run("none", model={"family": "bert"})
    trial = Trial(config, CPU)
    ((tokens, targets),) = trial.batches
    whole = trial.loss(trial.module(tokens), targets)
    chunked = build_loss(trial.model, config.train.model_copy(update={"loss": "chunked_cross_entropy"}))
    assert torch.allclose(chunked(trial.module(tokens), targets), whole, atol=1e-6)


def test_a_study_trains(write_study: Callable[[str], Any]) -> None:
    text = """
    model: {family: bert, n_layers: 2, d_model: 32, n_heads: 4, vocab_size: 64, norm_position: pre}
    train: {batch_size: 2, seq_len: 16}
    strategies: [none, per-block]
    """
    (point,) = study.load(write_study(text)).points("cpu")
    trial = Trial(point.config(point.strategies[1]), CPU)
    trial.step(NoObserver())
    assert trial.executed_steps == 1
    with pytest.raises(ConfigError, match="residual reversible needs norm_position: pre"):
        study.load(write_study(text.replace("norm_position: pre", "residual: reversible")))
