"""hf: models of the transformers library, from config classes alone; runs without it where it says how to install it."""

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckbench import registry
from ckbench.config import HfConfig, RunConfig
from ckbench.engine import worker
from ckbench.engine.parity import differences, run_steps
from ckbench.engine.trial import Trial
from ckbench.errors import ConfigError
from ckbench.models.base import IGNORED, BuiltModel

MakeRun = Callable[..., RunConfig]
CPU = torch.device("cpu")
S = 16

needs_library = pytest.mark.skipif(find_spec("transformers") is None, reason="the extra hf is not installed")

GPT2 = {"n_embd": 16, "n_head": 2, "vocab_size": 48, "n_positions": 32}
WIDE = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
TEXT = {**WIDE, "vocab_size": 48, "max_position_embeddings": 32}
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "llama": {**TEXT, "num_key_value_heads": 1},
    "qwen3": {**TEXT, "num_key_value_heads": 1, "head_dim": 8},
    "bert": TEXT,
    "vit": {**WIDE, "image_size": 8, "patch_size": 2, "num_labels": 5},
    "gpt_neox": TEXT,
    "gptj": {**GPT2, "rotary_dim": 4},
    "phi": {**TEXT, "num_key_value_heads": 2},
}


def section(arch: str, **keys: Any) -> dict[str, Any]:
    config = {**SIZES.get(arch, {}), **keys.pop("config", {})}
    return {"family": "hf", "arch": arch, "n_layers": 3, "config": config, **keys}


def built(arch: str, seq_len: int = S, **keys: Any) -> BuiltModel:
    model: BuiltModel = registry.load("models", "hf")(HfConfig(**section(arch, **keys)), seq_len)
    return model


def told(arch: str, seq_len: int = S, **keys: Any) -> str:
    with pytest.raises(ConfigError) as error:
        built(arch, seq_len, **keys)
    return str(error.value)


def test_without_the_library_the_row_says_how_to_get_it(tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    record = worker.run_trial(tiny_run("none", model=section("gpt2")), 0, 0.0, lambda phase: None)
    assert (record.status, record.failed_phase) == ("error", "build")
    assert record.message == "ConfigError: family hf needs the transformers library: pip install ckbench[hf]"


@needs_library
@pytest.mark.parametrize("arch", SIZES)
def test_n_layers_is_what_each_library_class_calls_it(arch: str) -> None:
    model = built(arch, seq_len=17 if arch == "vit" else S)
    assert len(model.blocks) == 3
    assert len({type(block) for block in model.blocks}) == 1
    gives_tuples = arch == "gptj" and "not a tensor" in model.apart  # in versions before 5.24
    assert model.apart == "" or gives_tuples
    assert {"attention", "ffn"} <= set(model.parts[0])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.module.modules())
    assert all(m.training for m in model.module.modules())


@needs_library
@pytest.mark.parametrize(
    ("arch", "attention", "ffn"),
    [
        ("gpt2", ["ln_1", "attn"], ["ln_2", "mlp"]),
        ("llama", ["input_layernorm", "self_attn"], ["post_attention_layernorm", "mlp"]),
        ("qwen3", ["input_layernorm", "self_attn"], ["post_attention_layernorm", "mlp"]),
        ("vit", ["layernorm_before", "attention"], ["layernorm_after", "mlp"]),
        ("bert", ["attention"], ["intermediate", "output"]),  # norms come after the sums
        ("gptj", ["attn"], ["mlp"]),  # one norm feeds both
        ("phi", ["self_attn"], ["mlp"]),  # one norm feeds both
        ("gpt_neox", ["input_layernorm", "attention"], ["post_attention_layernorm", "mlp"]),  # parallel, two norms
    ],
)
def test_a_norm_joins_a_part_where_it_feeds_nothing_else(arch: str, attention: list[str], ffn: list[str]) -> None:
    model = built(arch, seq_len=17 if arch == "vit" else S)
    for block, parts in zip(model.blocks, model.parts, strict=True):
        names = {child: name for name, child in block.named_children()}
        assert [names[module] for module in parts["attention"]] == attention
        assert [names[module] for module in parts["ffn"]] == ffn


@needs_library
@pytest.mark.parametrize(
    ("arch", "keys", "sentence"),
    [
        ("gpt_2", {}, "has no model type 'gpt_2'; did you mean 'gpt2'"),
        ("gpt2", {"config": {"n_embed": 8}}, "model.config: GPT2Config has no key 'n_embed'; did you mean 'n_embd'"),
        ("llama", {"config": {"hiden_size": 8}}, "LlamaConfig has no key 'hiden_size'; did you mean 'hidden_size'"),
        (
            "gpt2",
            {"config": {"use_cache": True}},
            "use_cache is not a key here: caches are for generating and stay off",
        ),
        ("gpt2", {"config": {"dtype": "float16"}}, "model.config.dtype is not a key here: write train.precision"),
        ("gpt2", {"config": {"n_layer": 5}}, "model.n_layers 3 and model.config.n_layer differ; write one of them"),
        ("gpt2", {"config": {"num_hidden_layers": 5}}, "model.n_layers 3 and model.config.num_hidden_layers differ"),
        ("gpt2", {"config": {"n_embd": "wide"}}, "model.config does not make a GPT2Config: "),
        ("t5", {"config": {}}, "t5 has an encoder and a decoder, two stacks; ckbench measures models of one stack"),
        ("clip_vision_model", {"config": {}}, "has no head for language modelling or image classification"),
    ],
)
def test_faults(arch: str, keys: dict[str, Any], sentence: str) -> None:
    text = told(arch, **keys)
    assert sentence in text and "\n" not in text


@needs_library
def test_a_sequence_above_the_positions_is_refused() -> None:
    assert told("gpt2", 64) == "seq_len 64 is above this model's max_position_embeddings 32; raise it in model.config"


@needs_library
def test_an_image_model_says_its_sequence_length() -> None:
    assert HfConfig(**section("vit")).own_seq_len() == 17
    assert HfConfig(family="hf", arch="vit").own_seq_len() == 197
    assert told("vit", 16) == "this model makes sequences of 17 itself; write that for train.seq_len, not 16"


@needs_library
def test_layers_are_found_where_the_study_names_no_number() -> None:
    assert len(built("gpt2", n_layers=None, config={"n_layer": 2}).blocks) == 2


@needs_library
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_is_the_library_s_implementation(attention: str) -> None:
    model = built("llama", attention=attention)
    assert model.module.model.config._attn_implementation == attention


@needs_library
def test_caches_stay_off_and_nothing_is_checkpointed_unasked() -> None:
    model = built("gpt2")
    assert model.module.model.config.use_cache is False
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.module.modules())
    given: list[Any] = []
    model.blocks[0].register_forward_pre_hook(
        lambda _m, args, kwargs: given.extend([*args, *kwargs.values()]), with_kwargs=True
    )
    model.module(torch.zeros(1, 4, dtype=torch.long))
    assert not [value for value in given if "Cache" in type(value).__name__]


@needs_library
def test_language_models_draw_tokens_masked_ones_masked_tokens_and_vits_images(tiny_run: MakeRun) -> None:
    tokens, targets = Trial(tiny_run("none", model=section("gpt2")), CPU).batches[0]
    assert tokens.shape == targets.shape == (2, S) and int(tokens.max()) < 48
    assert tokens.unique().numel() > 8 and not torch.equal(tokens, targets)
    masked, guesses = Trial(tiny_run("none", model=section("bert")), CPU).batches[0]
    is_masked = guesses != IGNORED
    assert bool(is_masked.any()) and not bool(is_masked.all())
    assert bool((masked[is_masked] == 47).all()) and bool((guesses[is_masked] < 47).all())
    images, classes = Trial(tiny_run("none", model=section("vit"), train={"precision": "bf16-pure"}), CPU).batches[0]
    assert images.shape == (2, 3, 8, 8) and images.dtype == torch.bfloat16
    assert classes.shape == (2,) and int(classes.max()) < 5


@needs_library
@pytest.mark.parametrize("arch", ["gpt2", "llama", "bert"])
def test_the_chunked_loss_is_the_loss(tiny_run: MakeRun, arch: str) -> None:
    still = {"gpt2": {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}}.get(arch, {})
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0} if arch == "bert" else still
    model = section(arch, config=still)
    whole = run_steps(tiny_run("none", model=model), CPU, 1)
    pieces = run_steps(tiny_run("none", model=model, train={"loss": "chunked_cross_entropy", "loss_chunks": 4}), CPU, 1)
    assert torch.allclose(whole.losses[0], pieces.losses[0], rtol=1e-5)
    for name, gradient in whole.gradients.items():
        other = pieces.gradients[name]
        assert gradient is None or (other is not None and torch.allclose(gradient, other, atol=1e-6)), name


@needs_library
def test_a_head_that_is_not_the_last_operation_is_not_named() -> None:
    """Gemma 2 caps its logits after the head; a loss that calls the head itself would leave that out."""
    sizes = {**TEXT, "num_key_value_heads": 1, "head_dim": 8}
    assert built("gemma2", config={**sizes, "final_logit_softcapping": 30.0}).head is None
    assert isinstance(built("gpt2").head, nn.Linear)


@needs_library
def test_weights_are_the_library_s_from_the_seed_and_the_search_draws_nothing() -> None:
    import transformers

    torch.manual_seed(3)
    plain = transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**GPT2, "n_layer": 3}))
    drawn = torch.get_rng_state()
    torch.manual_seed(3)
    model = built("gpt2")
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(a, b) for a, b in zip(model.module.parameters(), plain.parameters(), strict=True))


@needs_library
def test_a_saved_model_is_loaded_from_its_folder(
    tiny_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = built("llama").module.model
    saved.save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    loaded = registry.load("models", "hf")(HfConfig(path="model"), S)
    assert loaded.module.model.config.use_cache is False
    state = dict(loaded.module.model.named_parameters())
    assert {p.dtype for p in state.values()} == {torch.float32}
    assert all(torch.equal(state[name], p) for name, p in saved.named_parameters())
    model = {"family": "hf", "path": "model", "n_layers": 3}
    reference = run_steps(tiny_run("none", model=model), CPU)
    assert differences(reference, run_steps(tiny_run("every-k:2", model=model), CPU)) == []
    with pytest.raises(ConfigError) as error:
        registry.load("models", "hf")(HfConfig(path="model", n_layers=4), S)
    assert str(error.value) == "n_layers is 4, but the model has 3 blocks (model.layers)"


@needs_library
def test_a_folder_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        registry.load("models", "hf")(HfConfig(path="gpt2"), S)
    assert str(error.value) == "model.path: 'gpt2' is no folder of a saved model: it has no config.json"
