"""Every model family: shapes, variants, causality, and a map of its parts that tells the truth."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckbench import registry
from ckbench.config import ModelConfig
from ckbench.models.base import BuiltModel

MakeModel = Callable[..., ModelConfig]
FAMILIES = registry.names("models")
B, S, V, D = 2, 16, 64, 32

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "one block": {"n_layers": 1},
    "post-norm": {"norm_position": "post"},
    "relu": {"activation": "relu"},
    "gelu": {"activation": "gelu"},
    "swiglu": {"activation": "swiglu"},
    "grouped": {"n_kv_heads": 2},
    "one key head": {"n_kv_heads": 1},
    "widths by block": {"d_ff": (16, 64, 32, 48)},
    "dropout": {"dropout": 0.1},
    "tied": {"tie_embeddings": True},
    "frozen": {"freeze_embedding": True},
    "eager": {"attention": "eager"},
    "headless": {"head": "none"},
    "vectors in": {"head": "none", "vocab_size": None},
}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def built(config: ModelConfig) -> BuiltModel:
    torch.manual_seed(3)
    model: BuiltModel = registry.load("models", config.family)(config, S)
    return model


def inputs_for(config: ModelConfig) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    if config.vocab_size is None:
        return torch.randn(B, S, D, generator=generator)
    return torch.randint(config.vocab_size, (B, S), generator=generator)


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


@pytest.mark.parametrize("variant", VARIANTS)
def test_shapes_and_gradients(tiny_model: MakeModel, family: str, variant: str) -> None:
    config = tiny_model(family=family, **VARIANTS[variant])
    model = built(config)
    output = model.module(inputs_for(config))
    assert output.shape == (B, S, V if config.head == "lm" else D)
    assert output.dtype == torch.float32
    output.square().mean().backward()
    for name, parameter in model.module.named_parameters():
        frozen = config.freeze_embedding and name.split(".")[0] in ("tokens", "positions")
        assert (parameter.grad is None) == frozen, name
        assert frozen or bool(parameter.grad.isfinite().all())  # type: ignore[union-attr]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_map_names_every_block_in_order(tiny_model: MakeModel, family: str, variant: str) -> None:
    config = tiny_model(family=family, **VARIANTS[variant])
    model = built(config)
    assert len(model.blocks) == len(model.parts) == config.n_layers
    assert model.notes == ()
    with calls_of(list(model.blocks)) as calls:
        output = model.module(inputs_for(config))
    assert [module for module, _, _ in calls] == list(model.blocks)
    for (_, _, before), (_, args, _) in zip(calls, calls[1:], strict=False):
        assert args[0] is before, "each block takes the output of the one before"
    assert calls[-1][2].shape == (B, S, D)
    assert output.grad_fn is not None


@pytest.mark.parametrize("variant", VARIANTS)
def test_parts_are_chains(tiny_model: MakeModel, family: str, variant: str) -> None:
    """The modules of a part run one after the other, each on the output of the one before, attention first."""
    config = tiny_model(family=family, **VARIANTS[variant])
    model = built(config)
    for block, parts in zip(model.blocks, model.parts, strict=True):
        assert set(parts) == {"attention", "ffn"}
        lengths = {name: len(chain) for name, chain in parts.items()}
        wanted = 2 if config.norm_position == "pre" else 1
        assert lengths == {"attention": wanted, "ffn": wanted}, "a norm after the sum feeds more than the part"
        inside = set(block.modules())
        assert all(module in inside for chain in parts.values() for module in chain)
    chains = [chain for parts in model.parts for chain in (parts["attention"], parts["ffn"])]
    order = [module for chain in chains for module in chain]
    with calls_of(order) as calls:
        model.module(inputs_for(config))
    assert [module for module, _, _ in calls] == order
    outcome = {module: (args, out) for module, args, out in calls}
    for chain in chains:
        for first, second in zip(chain, chain[1:], strict=False):
            assert outcome[second][0][0] is outcome[first][1]


def test_the_norm_of_a_chain_feeds_nothing_else(tiny_model: MakeModel, family: str) -> None:
    """Cutting the gradient where the norm's output enters its part leaves the norm without any."""
    model = built(tiny_model(family=family))
    for parts in model.parts:
        for norm, part in parts.values():
            handle = part.register_forward_pre_hook(lambda _m, args: (args[0].detach(), *args[1:]))
            model.module.zero_grad()
            model.module(inputs_for(tiny_model(family=family))).sum().backward()
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
    tokens = inputs_for(tiny_model())
    assert torch.allclose(grouped.module(tokens), spread.module(tokens), atol=1e-5)
    widths = [p.numel() for n, p in grouped.module.named_parameters() if n.endswith("qkv.weight")]
    assert widths == [D * (D + 2 * 2 * d_head)] * 4


@pytest.mark.parametrize("attention", ["auto", "eager", "math", "flash"])
@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_later_tokens_do_not_change_earlier_logits(
    tiny_model: MakeModel, family: str, attention: str, norm_position: str
) -> None:
    config = tiny_model(family=family, attention=attention, norm_position=norm_position)
    module = built(config).module.eval()
    tokens = inputs_for(config)
    changed = tokens.clone()
    changed[:, 10] = (changed[:, 10] + 1) % V
    with torch.no_grad():
        before, after = module(tokens), module(changed)
    assert torch.allclose(before[:, :10], after[:, :10], atol=1e-6)
    assert not torch.allclose(before[:, 10:], after[:, 10:], atol=1e-4)


def test_positions_matter(tiny_model: MakeModel, family: str) -> None:
    """The same token in every place still gets other logits in other places, unless nothing tells them apart."""
    config = tiny_model(family=family)
    module = built(config).module.eval()
    tokens = inputs_for(config)
    turned = tokens.clone()
    turned[:, :2] = tokens[:, :2].flip(1)
    with torch.no_grad():
        assert not torch.allclose(module(tokens)[:, -1], module(turned)[:, -1], atol=1e-6)


def test_a_shorter_sequence_is_the_beginning_of_a_longer_one(tiny_model: MakeModel, family: str) -> None:
    config = tiny_model(family=family)
    module = built(config).module.eval()
    tokens = inputs_for(config)
    with torch.no_grad():
        assert torch.allclose(module(tokens)[:, :7], module(tokens[:, :7]), atol=1e-5)


def test_tied_embeddings_are_one_parameter(tiny_model: MakeModel, family: str) -> None:
    tied, free = (built(tiny_model(family=family, tie_embeddings=tie)).module for tie in (True, False))

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
    module = built(tiny_model(family=family, head="none", vocab_size=None)).module
    assert not any(isinstance(child, nn.Embedding) for child in module.modules())
    linears = [child for child in module.modules() if isinstance(child, nn.Linear)]
    assert all(child.out_features != V for child in linears)


def test_dropout_drops_in_training_only(tiny_model: MakeModel, family: str) -> None:
    for attention in ("auto", "eager", "math"):
        config = tiny_model(family=family, dropout=0.3, attention=attention)
        module = built(config).module
        tokens = inputs_for(config)
        module.train()
        assert not torch.equal(module(tokens), module(tokens))
        module.eval()
        assert torch.equal(module(tokens), module(tokens))


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
