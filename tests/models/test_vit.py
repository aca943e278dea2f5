"""vit: image patches and a class token; the parameter count of ViT-B/16, and studies that leave seq_len to it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ckbench import registry, study
from ckbench.config import RunConfig, VitConfig
from ckbench.engine.losses import build_loss
from ckbench.engine.trial import NoObserver, Trial
from ckbench.errors import ConfigError
from ckbench.models.base import BuiltModel
from ckbench.models.vit import cut
from tests.models.reference import encoder_twin

MakeModel = Callable[..., VitConfig]
MakeRun = Callable[..., RunConfig]
Write = Callable[[str], Any]
CPU = torch.device("cpu")
B, D, S, N = 2, 32, 17, 10

STUDY = """
model: {family: vit, n_layers: 2, d_model: 32, n_heads: 4, image_size: 8, patch_size: 2, n_classes: 10}
train: {batch_size: 2}
"""


def built(config: VitConfig) -> BuiltModel:
    model: BuiltModel = registry.load("models", "vit")(config, config.own_seq_len())
    return model


def n_parameters(config: VitConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in built(config).module.parameters())


@pytest.mark.parametrize(("image_size", "patch_size", "n_channels"), [(8, 2, 3), (12, 4, 1), (8, 8, 3)])
@pytest.mark.parametrize("n_layers", [1, 4])
def test_parameter_count(
    tiny_model: MakeModel, n_layers: int, image_size: int, patch_size: int, n_channels: int
) -> None:
    n_patches = (image_size // patch_size) ** 2
    norm = 2 * D
    block = 2 * norm + (4 * D * D + 4 * D) + (8 * D * D + 5 * D)
    embedding = n_channels * patch_size**2 * D + D + D + (n_patches + 1) * D
    sizes = {"image_size": image_size, "patch_size": patch_size, "n_channels": n_channels}
    config = tiny_model(family="vit", n_layers=n_layers, **sizes)
    assert config.own_seq_len() == n_patches + 1
    wanted = embedding + n_layers * block + norm + D * N + N
    assert n_parameters(config) == wanted
    headless = tiny_model(family="vit", n_layers=n_layers, head="none", **sizes)
    assert n_parameters(headless) == wanted - D * N - N


def test_vit_base_has_86_million_parameters() -> None:
    """86,567,656: ViT-B/16 at 224 pixels with 1000 classes, as torchvision counts its vit_b_16."""
    config = VitConfig(n_layers=12, d_model=768, n_heads=12)
    assert config.own_seq_len() == 197
    assert n_parameters(config) == 86_567_656


def test_patches_and_projection_are_a_strided_convolution() -> None:
    C, P = 3, 4
    images, weight = torch.randn(B, C, 12, 8), torch.randn(D, C, P, P)
    convolved = F.conv2d(images, weight, stride=P).flatten(2).transpose(1, 2)
    assert torch.allclose(cut(images, P) @ weight.flatten(1).T, convolved, atol=1e-4)


@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_blocks_compute_what_pytorchs_encoder_layer_does(tiny_model: MakeModel, norm_position: str) -> None:
    model = built(tiny_model(family="vit", norm_position=norm_position))
    x = torch.randn(2, S, D)
    for block in model.blocks:
        twin = encoder_twin(block, norm_first=norm_position == "pre", eps=1e-6)
        assert torch.allclose(block(x), twin(x), atol=1e-5)


def test_the_whole_model_by_hand(tiny_model: MakeModel) -> None:
    model = built(tiny_model(family="vit"))
    state = dict(model.module.named_parameters())
    torch.nn.init.normal_(state["class_token"])
    images = torch.randn(B, 3, 8, 8)
    patches = [images[:, :, r : r + 2, c : c + 2].flatten(1) for r in range(0, 8, 2) for c in range(0, 8, 2)]
    embedded = [patch @ state["patches.weight"].T + state["patches.bias"] for patch in patches]
    x = torch.stack([state["class_token"].expand(B, D), *embedded], dim=1) + state["positions.weight"]
    for block in model.blocks:
        x = block(x)
    x = F.layer_norm(x, (D,), state["norm.weight"], state["norm.bias"], 1e-6)
    logits = x[:, 0] @ state["head.weight"].T + state["head.bias"]
    assert torch.allclose(model.module(images), logits, atol=1e-5)


def drawn(tiny_run: MakeRun, **settings: Any) -> tuple[Tensor, Tensor]:
    config = tiny_run("none", model={"family": "vit", **settings.get("model", {})}, train=settings.get("train"))
    draw = built(config.model).draw
    assert draw is not None
    inputs, targets = draw(config, torch.Generator().manual_seed(0), torch.float32)
    return inputs, targets


def test_a_batch_is_images_and_labels(tiny_run: MakeRun) -> None:
    images, labels = drawn(tiny_run, train={"batch_size": 500})
    assert images.shape == (500, 3, 8, 8) and images.dtype == torch.float32
    assert labels.shape == (500,) and set(labels.tolist()) == set(range(N))
    assert float(images.mean()) == pytest.approx(0.0, abs=0.02) and float(images.std()) == pytest.approx(1.0, abs=0.02)


def test_without_a_head_hidden_states_are_compared(tiny_run: MakeRun) -> None:
    images, targets = drawn(tiny_run, model={"head": "none"}, train={"loss": "mse"})
    assert images.shape == (2, 3, 8, 8) and targets.shape == (2, S, D)
    trial = Trial(tiny_run("none", model={"family": "vit", "head": "none"}, train={"loss": "mse"}), CPU)
    ((images, targets),) = trial.batches
    output = trial.module(images)
    assert output.shape == (2, S, D)
    assert torch.allclose(trial.loss(output, targets), (output - targets).square().mean())


@pytest.mark.parametrize("precision", ["bf16", "bf16-pure"])
def test_images_come_in_the_type_of_the_weights(tiny_run: MakeRun, precision: str) -> None:
    trial = Trial(tiny_run("none", model={"family": "vit"}, train={"precision": precision}), CPU)
    assert trial.batches[0][0].dtype == (torch.float32 if precision == "bf16" else torch.bfloat16)
    trial.step(NoObserver())
    assert trial.executed_steps == 1


def test_losses_whole_and_in_pieces_agree(tiny_run: MakeRun) -> None:
    config = tiny_run("none", model={"family": "vit"}, train={"batch_size": 5})
    trial = Trial(config, CPU)
    ((images, labels),) = trial.batches
    logits = trial.module(images)
    whole = trial.loss(logits, labels)
    assert torch.allclose(whole, -logits.log_softmax(-1)[torch.arange(5), labels].mean())
    pieces = config.train.model_copy(update={"loss": "chunked_cross_entropy", "loss_chunks": 3})
    assert torch.allclose(build_loss(trial.model, pieces)(trial.module(images), labels), whole, atol=1e-6)


def test_a_study_leaves_the_sequence_to_the_model(write_study: Write) -> None:
    (point,) = study.load(write_study(STUDY + "strategies: [none, per-block]\n")).points("cpu")
    assert point.train.seq_len == S
    trial = Trial(point.config(point.strategies[1]), CPU)
    trial.step(NoObserver())
    assert trial.executed_steps == 1
    (same,) = study.load(write_study(STUDY.replace("batch_size: 2", "batch_size: 2, seq_len: 17"))).points("cpu")
    assert same.train.seq_len == S


def test_patches_that_vary_take_their_sequence_along(write_study: Write) -> None:
    points = study.load(write_study(STUDY + "vary: {model.patch_size: [2, 4, 8]}\n")).points("cpu")
    assert {point.model.patch_size: point.train.seq_len for point in points} == {2: 17, 4: 5, 8: 2}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (
            ("batch_size: 2", "batch_size: 2, seq_len: 16"),
            "this model makes sequences of 17 itself; leave seq_len out or write 17",
        ),
        (("patch_size: 2", "patch_size: 3"), "image_size 8 is not a multiple of patch_size 3"),
        (("n_classes: 10", "vocab_size: 10"), "vocab_size"),
        (("n_classes: 10", "tie_embeddings: true"), "tie_embeddings needs vocab_size"),
        (("n_classes: 10", "freeze_embedding: true"), "freeze_embedding needs vocab_size"),
        (("n_classes: 10", "head: none"), "loss cross_entropy needs head: lm"),
        (
            ("n_classes: 10", "residual: reversible, norm_position: post"),
            "residual reversible needs norm_position: pre",
        ),
    ],
    ids=lambda x: x[1] if isinstance(x, tuple) else "",
)
def test_what_a_study_of_images_cannot_be(write_study: Write, change: tuple[str, str], fault: str) -> None:
    with pytest.raises(ConfigError) as told:
        study.load(write_study(STUDY.replace(*change)))
    first = told.value.faults[0]
    assert fault in first and first.startswith("study.yaml:")
