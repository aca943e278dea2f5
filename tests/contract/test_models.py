"""Every model family of ours: shapes, variants, who sees whom, and a map of its parts that tells the truth."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckbench import registry
from ckbench.config import ModelConfig, VitConfig, model_class
from ckbench.models.base import BuiltModel

MakeModel = Callable[..., ModelConfig]
FAMILIES = [name for name in registry.names("models") if issubclass(model_class(name), ModelConfig)]
"""Families built from keys of ours; those with model sections of another kind have tests of their own."""
OF_TOKENS = [name for name in FAMILIES if model_class(name) is not VitConfig]
IS_CAUSAL = {"gpt": True, "llama": True, "bert": False, "vit": False}
B, S, V, D = 2, 16, 64, 32

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "one block": {"n_layers": 1},
    "pre-norm": {"norm_position": "pre"},
    "post-norm": {"norm_position": "post"},
    "reversible": {"residual": "reversible", "norm_position": "pre"},
    "relu": {"activation": "relu"},
    "gelu": {"activation": "gelu"},
    "swiglu": {"activation": "swiglu"},
    "grouped": {"n_kv_heads": 2},
    "one key head": {"n_kv_heads": 1},
    "widths by block": {"d_ff": (16, 64, 32, 48)},
    "dropout": {"dropout": 0.1},
    "eager": {"attention": "eager"},
    "headless": {"head": "none"},
}
VARIANTS_OF_TOKENS: dict[str, dict[str, Any]] = {
    "tied": {"tie_embeddings": True},
    "frozen": {"freeze_embedding": True},
    "frozen and reversible": {"freeze_embedding": True, "residual": "reversible", "norm_position": "pre"},
    "vectors in": {"head": "none", "vocab_size": None},
}
CASES = [
    *((family, name, settings) for family in FAMILIES for name, settings in VARIANTS.items()),
    *((family, name, settings) for family in OF_TOKENS for name, settings in VARIANTS_OF_TOKENS.items()),
]
every_case = pytest.mark.parametrize(
    ("family", "settings"),
    [(family, settings) for family, _, settings in CASES],
    ids=[f"{family}-{name}" for family, name, _ in CASES],
)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=OF_TOKENS)
def family_of_tokens(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def built(config: ModelConfig) -> BuiltModel:
    torch.manual_seed(3)
    model: BuiltModel = registry.load("models", config.family)(config, config.own_seq_len() or S)
    return model


def inputs_for(config: ModelConfig) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    if isinstance(config, VitConfig):
        return torch.randn(B, config.n_channels, config.image_size, config.image_size, generator=generator)
    if config.vocab_size is None:
        return torch.randn(B, S, D, generator=generator)
    return torch.randint(config.vocab_size, (B, S), generator=generator)


def changed_at(config: ModelConfig, inputs: Tensor, position: int) -> Tensor:
    """Change the token, or for images the patch, at one position of the sequence."""
    changed = inputs.clone()
    if isinstance(config, VitConfig):
        P, side = config.patch_size, config.image_size // config.patch_size
        row, column = divmod(position - 1, side)
        changed[:, :, row * P : (row + 1) * P, column * P : (column + 1) * P] += 1
    else:
        changed[:, position] = (changed[:, position] + 1) % V
    return changed


def swapped(config: ModelConfig, inputs: Tensor) -> Tensor:
    """Swap the first two tokens, or the first two patches."""
    turned = inputs.clone()
    if isinstance(config, VitConfig):
        P = config.patch_size
        turned[..., :P, : 2 * P] = inputs[..., :P, : 2 * P].roll(P, dims=-1)
    else:
        turned[:, :2] = inputs[:, :2].flip(1)
    return turned


def output_shape(config: ModelConfig) -> tuple[int, ...]:
    if config.head == "none":
        return (B, config.own_seq_len() or S, D)
    return (B, config.n_classes) if isinstance(config, VitConfig) else (B, S, V)


@contextmanager
def calls_of(modules: list[nn.Module]) -> Iterator[list[tuple[nn.Module, tuple[Any, ...], Any]]]:
    """Note module, inputs and output of every call, in order of completion."""
    calls: list[tuple[nn.Module, tuple[Any, ...], Any]] = []
    handles = [m.register_forward_hook(lambda m, args, out: calls.append((m, args, out))) for m in modules]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


@every_case
def test_shapes_and_gradients(tiny_model: MakeModel, family: str, settings: dict[str, Any]) -> None:
    config = tiny_model(family=family, **settings)
    model = built(config)
    output = model.module(inputs_for(config))
    assert output.shape == output_shape(config)
    assert output.dtype == torch.float32
    output.square().mean().backward()
    for name, parameter in model.module.named_parameters():
        frozen = config.freeze_embedding and name.split(".")[0] in ("tokens", "positions", "embedding_norm")
        assert (parameter.grad is None) == frozen, name
        assert frozen or bool(parameter.grad.isfinite().all())  # type: ignore[union-attr]


@every_case
def test_the_map_names_every_block_in_order(tiny_model: MakeModel, family: str, settings: dict[str, Any]) -> None:
    config = tiny_model(family=family, **settings)
    model = built(config)
    assert len(model.blocks) == len(model.parts) == config.n_layers
    assert model.notes == ()
    assert model.shape().is_invertible == (config.residual == "reversible")
    with calls_of(list(model.blocks)) as calls:
        output = model.module(inputs_for(config))
    assert [module for module, _, _ in calls] == list(model.blocks)
    for (_, _, before), (_, args, _) in zip(calls, calls[1:], strict=False):
        assert args[0] is before, "each block takes the output of the one before"
    n_streams = 2 if config.residual == "reversible" else 1
    assert calls[-1][2].shape == (B, config.own_seq_len() or S, n_streams * D)
    assert output.grad_fn is not None
    assert not config.freeze_embedding or not calls[0][1][0].requires_grad


@every_case
def test_parts_are_chains(tiny_model: MakeModel, family: str, settings: dict[str, Any]) -> None:
    """The modules of a part run one after the other, each on the output of the one before, attention first."""
    config = tiny_model(family=family, **settings)
    model = built(config)
    for block, parts in zip(model.blocks, model.parts, strict=True):
        lengths = {name: len(chain) for name, chain in parts.items()}
        wanted = 2 if config.norms_first() else 1
        assert lengths == {"attention": wanted, "ffn": wanted, "core": 1}, "a norm after the sum feeds more"
        inside = set(block.modules())
        assert all(module in inside for chain in parts.values() for module in chain)
        assert parts["core"][0] in set(parts["attention"][-1].modules())
    chains = [chain for parts in model.parts for chain in (parts["attention"], parts["ffn"])]
    order = [module for chain in chains for module in chain]
    with calls_of(order) as calls:
        model.module(inputs_for(config))
    assert [module for module, _, _ in calls] == order
    outcome = {module: (args, out) for module, args, out in calls}
    for chain in chains:
        for first, second in zip(chain, chain[1:], strict=False):
            assert outcome[second][0][0] is outcome[first][1]


@pytest.mark.parametrize("residual", ["standard", "reversible"])
def test_the_norm_of_a_chain_feeds_nothing_else(tiny_model: MakeModel, family: str, residual: str) -> None:
    """Cutting the gradient where the norm's output enters its part leaves the norm without any."""
    config = tiny_model(family=family, norm_position="pre", residual=residual)
    model = built(config)
    for parts in model.parts:
        for norm, part in (parts["attention"], parts["ffn"]):
            handle = part.register_forward_pre_hook(lambda _m, args: (args[0].detach(), *args[1:]))
            model.module.zero_grad()
            model.module(inputs_for(config)).sum().backward()
            handle.remove()
            assert all(p.grad is None for p in norm.parameters())
            assert all(p.grad is not None for p in part.parameters())


@pytest.mark.parametrize("norm_position", ["pre", "post"])
@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
def test_attention_backends_agree(tiny_model: MakeModel, family: str, n_kv_heads: int, norm_position: str) -> None:
    outputs, gradients = {}, {}
    for attention in ("eager", "math", "auto", "flash"):
        config = tiny_model(family=family, attention=attention, n_kv_heads=n_kv_heads, norm_position=norm_position)
        model = built(config)
        outputs[attention] = model.module(inputs_for(config))
        outputs[attention].square().mean().backward()
        gradients[attention] = [p.grad for p in model.module.parameters()]
    for attention in ("math", "auto", "flash"):
        assert torch.allclose(outputs["eager"], outputs[attention], atol=1e-5, rtol=0)
        for a, b in zip(gradients["eager"], gradients[attention], strict=True):
            assert a is not None and b is not None and torch.allclose(a, b, atol=1e-5, rtol=0)


def test_grouped_heads_are_shared_key_heads(tiny_model: MakeModel, family: str) -> None:
    """Two key heads for four query heads equal four key heads of which pairs are the same."""
    grouped = built(tiny_model(family=family, n_kv_heads=2, attention="eager"))
    spread = built(tiny_model(family=family, n_kv_heads=4, attention="eager"))
    d_head = D // 4
    state = dict(grouped.module.state_dict())
    for name in [n for n in state if ".qkv." in n]:
        query, key, value = state[name].split((D, 2 * d_head, 2 * d_head))
        twice = [x.unflatten(0, (2, d_head)).repeat_interleave(2, dim=0).flatten(0, 1) for x in (key, value)]
        state[name] = torch.cat((query, *twice))
    spread.module.load_state_dict(state)
    inputs = inputs_for(tiny_model(family=family))
    assert torch.allclose(grouped.module(inputs), spread.module(inputs), atol=1e-5)
    widths = [p.numel() for n, p in grouped.module.named_parameters() if n.endswith("qkv.weight")]
    assert widths == [D * (D + 2 * 2 * d_head)] * 4


@pytest.mark.parametrize("attention", ["auto", "eager", "math", "flash"])
@pytest.mark.parametrize(
    "settings",
    [{"norm_position": "pre"}, {"norm_position": "post"}, {"norm_position": "pre", "residual": "reversible"}],
    ids=["pre", "post", "reversible"],
)
def test_who_sees_whom(tiny_model: MakeModel, family: str, attention: str, settings: dict[str, Any]) -> None:
    """A later token changes no earlier output of a causal family, and every output of a bidirectional one."""
    config = tiny_model(family=family, attention=attention, head="none", **settings)
    module = built(config).module.eval()
    inputs = inputs_for(config)
    with torch.no_grad():
        before, after = module(inputs), module(changed_at(config, inputs, 10))
    moved = (before - after).abs().amax(dim=(0, 2))
    assert bool((moved[10:] > 1e-4).all())
    if IS_CAUSAL[family]:
        assert float(moved[:10].max()) <= 1e-6
    else:
        assert bool((moved[:10] > 1e-6).all())


def test_positions_matter(tiny_model: MakeModel, family: str) -> None:
    """The same token in every place still gets other logits in other places, unless nothing tells them apart."""
    config = tiny_model(family=family)
    module = built(config).module.eval()
    inputs = inputs_for(config)
    with torch.no_grad():
        straight, turned = module(inputs), module(swapped(config, inputs))
    if not isinstance(config, VitConfig):
        straight, turned = straight[:, -1], turned[:, -1]
    assert not torch.allclose(straight, turned, atol=1e-6)


@pytest.mark.parametrize("causal_family", [name for name in FAMILIES if IS_CAUSAL[name]])
def test_a_shorter_sequence_is_the_beginning_of_a_longer_one(tiny_model: MakeModel, causal_family: str) -> None:
    config = tiny_model(family=causal_family)
    module = built(config).module.eval()
    tokens = inputs_for(config)
    with torch.no_grad():
        assert torch.allclose(module(tokens)[:, :7], module(tokens[:, :7]), atol=1e-5)


def test_tied_embeddings_are_one_parameter(tiny_model: MakeModel, family_of_tokens: str) -> None:
    tied, free = (built(tiny_model(family=family_of_tokens, tie_embeddings=tie)).module for tie in (True, False))

    def count(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters())

    assert count(free) - count(tied) == V * D
    assert tied.head.weight is tied.tokens.weight
    storages = {p.untyped_storage().data_ptr() for p in tied.parameters()}
    assert sum(p.untyped_storage().nbytes() for p in tied.parameters()) == 4 * count(tied)
    assert len(storages) == len(list(tied.parameters()))


def test_a_list_of_widths_gives_each_block_its_own(tiny_model: MakeModel, family: str) -> None:
    widths = (16, 64, 32, 48)
    model = built(tiny_model(family=family, d_ff=widths))
    assert tuple(parts["ffn"][-1].down.in_features for parts in model.parts) == widths


def test_headless_models_end_at_the_last_hidden_state(tiny_model: MakeModel, family: str) -> None:
    for residual in ("standard", "reversible"):
        config = tiny_model(family=family, head="none", vocab_size=None, norm_position="pre", residual=residual)
        model = built(config)
        assert model.head is None
        outside = {m for m in model.module.modules() if isinstance(m, nn.Linear | nn.Embedding)}
        outside -= {m for block in model.blocks for m in block.modules()}
        assert len(outside) == (2 if isinstance(config, VitConfig) else 0), "patches and positions alone"


def test_a_reversible_model_has_the_parameters_of_its_twin(tiny_model: MakeModel, family: str) -> None:
    """Two streams are wider activations, not more weights; so the two can start from the same numbers."""
    standard, coupled = (
        built(tiny_model(family=family, norm_position="pre", residual=residual)).module
        for residual in ("standard", "reversible")
    )
    names = [(name, tuple(p.shape)) for name, p in standard.named_parameters()]
    assert names == [(name, tuple(p.shape)) for name, p in coupled.named_parameters()]
    assert all(torch.equal(a, b) for a, b in zip(standard.parameters(), coupled.parameters(), strict=True))


def test_two_streams_start_as_the_embedding_and_end_as_their_mean(tiny_model: MakeModel, family: str) -> None:
    config = tiny_model(family=family, norm_position="pre", residual="reversible", head="none")
    model = built(config)
    first, last, norm = model.blocks[0], model.blocks[-1], model.module.norm
    with calls_of([first, last, norm]) as calls:
        model.module(inputs_for(config))
    outcome = {module: (args[0], out) for module, args, out in calls}
    x1, x2 = outcome[first][0].chunk(2, dim=-1)
    assert torch.equal(x1, x2)
    y1, y2 = outcome[last][1].chunk(2, dim=-1)
    assert not torch.allclose(y1, y2, atol=1e-3)
    assert torch.allclose(outcome[norm][0], torch.stack((y1, y2)).mean(0), atol=1e-7)


def test_dropout_drops_in_training_only(tiny_model: MakeModel, family: str) -> None:
    for attention in ("auto", "eager", "math"):
        config = tiny_model(family=family, dropout=0.3, attention=attention)
        module = built(config).module
        inputs = inputs_for(config)
        module.train()
        assert not torch.equal(module(inputs), module(inputs))
        module.eval()
        assert torch.equal(module(inputs), module(inputs))


def test_equal_seeds_make_equal_weights(tiny_model: MakeModel, family: str) -> None:
    first, second = (built(tiny_model(family=family)).module for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_models_are_built_on_the_default_device(tiny_model: MakeModel, family: str) -> None:
    """Deep or wide models can be laid out without memory, for estimates."""
    with torch.device("meta"):
        module = built(tiny_model(family=family, d_model=4096, n_heads=32)).module
    assert all(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def test_models_know_nothing_of_checkpointing(tiny_model: MakeModel, family: str) -> None:
    for module in built(tiny_model(family=family)).module.modules():
        assert not [name for name in dir(module) if "checkpoint" in name.lower()]
