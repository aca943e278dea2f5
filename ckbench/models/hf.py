"""hf: a language or image model of the transformers library, from its config with random weights, or from a folder.

Shapes: B batch, S sequence, C channels, H image side.
"""

import importlib
import inspect
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Generator, nn

from ckbench.config import HfConfig, RunConfig
from ckbench.errors import ConfigError
from ckbench.models._locate import Stack, locate, nearest
from ckbench.models._output import LogitsByKeyword
from ckbench.models.base import IGNORED, Batch, BuiltModel, Counted

MASKED_SHARE = 0.15
"""Tokens to be guessed in a masked language model (Devlin et al. 2018, arXiv 1810.04805)."""
PROBE_TOKENS = 8
"""Length of the one sequence that shows how the modules connect."""
HEADS = {
    # what a model is for: (the library's map of configs that have it, the class that builds it)
    "masked": ("MODEL_FOR_MASKED_LM_MAPPING", "AutoModelForMaskedLM"),
    "causal": ("MODEL_FOR_CAUSAL_LM_MAPPING", "AutoModelForCausalLM"),
    "image": ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", "AutoModelForImageClassification"),
}
SAID_ELSEWHERE = {
    "attn_implementation": "write model.attention",
    "dtype": "write train.precision",
    "torch_dtype": "write train.precision",
    "use_cache": "caches are for generating and stay off",
}
"""Keys of the library's config that are ours to set."""

MakeBatch = Callable[[int, int, Generator, torch.dtype], Batch]
"""Draws one micro-batch of so many sequences of such a length."""


def build(config: HfConfig, seq_len: int) -> BuiltModel:
    """Make the model with random weights, or load it from its folder, in fp32 on the default device.

    Nothing is downloaded. Raises ConfigError where the library is not installed, or has no such model or key, and
    where the model turns out other than the study says.
    """
    library = _library()
    asked = _from_folder(library, config) if config.path is not None else _from_arch(library, config)
    head = _head(library, asked)
    model = _model(library, asked, head, config)
    make_batch, expected = _batches(asked, head, seq_len)
    probe_len = min(seq_len, PROBE_TOKENS)
    device = next(model.parameters()).device
    with torch.device("cpu"):
        inputs, _ = make_batch(1, probe_len, torch.Generator().manual_seed(0), torch.float32)
    module = LogitsByKeyword(model, model.main_input_name)
    projected: list[Any] = []
    projection = model.get_output_embeddings()
    handle = projection.register_forward_hook(lambda *call: projected.append(call[2])) if projection else None
    try:
        stack = locate(model, lambda: module(inputs.to(device)))
    except (RuntimeError, ValueError) as error:  # keys of one config that do not go together, found out when it runs
        text = " / ".join(str(error).splitlines())
        raise ConfigError(
            f"this {asked.model_type} cannot run, so keys of its config do not go together: {text}"
        ) from error
    if handle is not None:
        handle.remove()
    _check(config, stack, probe_len if expected is None else expected, seq_len)
    is_last = len(projected) == 1 and projected[0] is stack.output
    return BuiltModel(
        module=module,
        blocks=stack.blocks,
        parts=stack.parts,
        apart=stack.apart,
        draw=partial(_draw, make_batch),
        head=projection if is_last else None,
        enable_native=partial(_enable_native, model, stack.blocks) if _has_native(model, stack.blocks) else None,
    )


def _library() -> Any:
    """Import transformers, told to stay offline. Raises ConfigError where it is not installed."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ConfigError("family hf needs the transformers library: pip install ckbench[hf]") from None


def _from_arch(library: Any, config: HfConfig) -> Any:
    """Make the library's config of an architecture, from its defaults and the study's keys."""
    classes = library.CONFIG_MAPPING
    if config.arch not in classes:
        raise ConfigError(
            f"model.arch: transformers {library.__version__} has no model type {config.arch!r}"
            f"{nearest(str(config.arch), classes.keys())}"
        )
    cls = classes[config.arch]
    _check_keys(cls, config)
    keys = dict(config.config)
    if config.n_layers is not None:
        name = cls.attribute_map.get("num_hidden_layers", "num_hidden_layers")
        if name not in _known_keys(cls):
            raise ConfigError(
                f"{cls.__name__} has no number of layers of its own; leave n_layers out and write it in model.config"
            )
        for other in {name, "num_hidden_layers"} & keys.keys():
            if keys.pop(other) != config.n_layers:
                raise ConfigError(
                    f"model.n_layers {config.n_layers} and model.config.{other} differ; write one of them"
                )
        keys[name] = config.n_layers
    try:
        return cls(**keys)
    except Exception as error:  # the library checks types and values by classes of its own, which change
        raise ConfigError(f"model.config does not make a {cls.__name__}: {_sentence(error)}") from None


def _from_folder(library: Any, config: HfConfig) -> Any:
    """Read the config of a saved model; keys of the study replace those of the folder."""
    folder = Path(str(config.path))
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.path: {str(folder)!r} is no folder of a saved model: it has no config.json")
    try:
        asked = library.AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise ConfigError(f"model.path: {str(folder)!r} cannot be read: {_sentence(error)}") from None
    _check_keys(type(asked), config)
    for key, value in config.config.items():
        setattr(asked, key, value)
    return asked


def _known_keys(cls: Any) -> set[str]:
    """List what a config class declares; the library itself takes any key in silence."""
    declared = set(getattr(cls, "__dataclass_fields__", ()))
    for parent in cls.__mro__[:-1]:  # before the library's configs were dataclasses
        declared |= set(inspect.signature(parent.__init__).parameters) - {"self", "args", "kwargs"}
    aliases = set(cls.attribute_map)
    settable = {
        name
        for name in dir(cls)
        if isinstance(getattr(cls, name, None), property) and getattr(cls, name).fset is not None
    }
    return {name for name in declared | aliases | settable if not name.startswith("_")} - set(SAID_ELSEWHERE)


def _check_keys(cls: Any, config: HfConfig) -> None:
    known = _known_keys(cls)
    for key in config.config:
        if key in SAID_ELSEWHERE:
            raise ConfigError(f"model.config.{key} is not a key here: {SAID_ELSEWHERE[key]}")
        if key not in known:
            raise ConfigError(f"model.config: {cls.__name__} has no key {key!r}{nearest(key, sorted(known))}")


def _head(library: Any, asked: Any) -> str:
    """Choose what the model is for: masked before causal, since encoders have a causal class too."""
    name = asked.model_type
    if getattr(asked, "is_encoder_decoder", False):
        raise ConfigError(f"{name} has an encoder and a decoder, two stacks; ckbench measures models of one stack")
    has = {head for head, (mapping, _) in HEADS.items() if type(asked) in getattr(library, mapping)}
    if getattr(asked, "is_decoder", False):
        has.discard("masked")
    for head in HEADS:
        if head in has:
            return head
    raise ConfigError(f"{name} has no head for language modelling or image classification in transformers")


def _model(library: Any, asked: Any, head: str, config: HfConfig) -> Any:
    auto = getattr(library, HEADS[head][1])
    asked.use_cache = False
    options = {} if config.attention == "auto" else {"attn_implementation": config.attention}
    if config.path is None:
        return auto.from_config(asked, dtype=torch.float32, **options)
    device = torch.get_default_device()
    with torch.device("cpu"):
        model = auto.from_pretrained(config.path, config=asked, dtype=torch.float32, local_files_only=True, **options)
    return model.to(device)


def _batches(asked: Any, head: str, seq_len: int) -> tuple[MakeBatch, int | None]:
    """Give what draws inputs and targets, and the sequence length where the study has to agree with the model."""
    if head == "image":
        side, channels, classes = asked.image_size, asked.num_channels, asked.num_labels
        height, width = (side, side) if isinstance(side, int) else side
        return partial(_images, (channels, height, width), classes), seq_len
    text = asked.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if isinstance(limit, int) and 0 < limit < seq_len:
        raise ConfigError(
            f"seq_len {seq_len} is above this model's max_position_embeddings {limit}; raise it in model.config"
        )
    return partial(_masked_tokens if head == "masked" else _tokens, text.vocab_size), None


def _tokens(vocab_size: int, batch_size: int, seq_len: int, generator: Generator, _dtype: torch.dtype) -> Batch:
    """Draw tokens and targets (B, S), uniform over the vocabulary."""
    shape = (batch_size, seq_len)
    return torch.randint(vocab_size, shape, generator=generator), torch.randint(vocab_size, shape, generator=generator)


def _masked_tokens(vocab_size: int, batch_size: int, seq_len: int, generator: Generator, _dtype: torch.dtype) -> Batch:
    """Draw tokens (B, S) of which some are masked by the last id, and targets that are ignored elsewhere."""
    shape = (batch_size, seq_len)
    tokens = torch.randint(max(1, vocab_size - 1), shape, generator=generator)
    is_masked = torch.rand(shape, generator=generator) < MASKED_SHARE
    is_masked[:, 0] = True  # a short sequence might have none, and the mean over none is no number
    return tokens.masked_fill(is_masked, vocab_size - 1), tokens.masked_fill(~is_masked, IGNORED)


def _images(
    shape: tuple[int, int, int],
    n_classes: int,
    batch_size: int,
    _seq_len: int,
    generator: Generator,
    dtype: torch.dtype,
) -> Batch:
    """Draw normal images (B, C, H, H) and classes (B)."""
    images = torch.randn((batch_size, *shape), generator=generator).to(dtype)
    return images, torch.randint(n_classes, (batch_size,), generator=generator)


def _draw(make_batch: MakeBatch, config: RunConfig, generator: Generator, dtype: torch.dtype) -> Batch:
    return make_batch(config.train.batch_size, config.train.seq_len, generator, dtype)


def _check(config: HfConfig, stack: Stack, expected_len: int, seq_len: int) -> None:
    """Refuse a model that is not what the study says of it."""
    found = len(stack.blocks)
    if config.n_layers is not None and found != config.n_layers:
        raise ConfigError(f"n_layers is {config.n_layers}, but the model has {found} blocks ({stack.path})")
    if len(stack.hidden_shape) == 3 and stack.hidden_shape[1] != expected_len:
        raise ConfigError(
            f"this model makes sequences of {stack.hidden_shape[1]} itself; write that for train.seq_len, not {seq_len}"
        )


def _has_native(model: Any, blocks: tuple[nn.Module, ...]) -> bool:
    return bool(model.supports_gradient_checkpointing) and all(hasattr(b, "gradient_checkpointing") for b in blocks)


def _enable_native(model: Any, blocks: tuple[nn.Module, ...], counted: Counted) -> Callable[[], None]:
    """Switch the library's checkpointing on and give what switches it off.

    The library checkpoints from inside a block's forward or around it, by version; what it recomputes goes through
    ``_gradient_checkpointing_func``, so starts are counted there.
    """
    arguments = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=arguments)
        disable = model.activation_checkpointing_disable
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
        disable = model.gradient_checkpointing_disable
    for i, block in enumerate(blocks):
        library: Any = block._gradient_checkpointing_func
        object.__setattr__(block, "_gradient_checkpointing_func", partial(_count_inside, library, partial(counted, i)))

    def disable_native() -> None:
        disable()
        if getattr(model, "_require_grads_hooks", None) or getattr(model, "_require_grads_hook", None):
            model.disable_input_require_grads()

    return disable_native


def _count_inside(
    library: Callable[..., Any], counted: Callable[[Callable[..., Any]], Callable[..., Any]], body: Any, *args: Any
) -> Any:
    """Checkpoint as the library does, with a body whose starts are counted."""
    return library(counted(body), *args)


def _sentence(error: BaseException) -> str:
    """Give an error of the library as one line."""
    return " ".join(str(error).split())[:300]


PLUGIN = build
