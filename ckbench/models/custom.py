"""custom: a module of your own, built by a function of yours from the current directory.

The function's code is run by the worker alone; the tool itself never imports it. Shapes: B batch, S sequence.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.utils._pytree import tree_map

from ckbench.config import CustomConfig, RunConfig
from ckbench.errors import ConfigError
from ckbench.models._locate import Stack, locate, nearest
from ckbench.models._output import Logits, logits_of
from ckbench.models.base import Batch, BuiltModel, call

MakeBatch = Callable[[int, int, Generator], Batch]


def build(config: CustomConfig, seq_len: int) -> BuiltModel:
    """Call the user's function and find the stack of what it gives, on the default device.

    Raises ConfigError where a name of the study is not there, or the module is not what the study says.
    """
    function = load("build", config.build)
    _check_arguments(f"model.args do not fit {config.build}", function, config.args)
    try:
        module = function(**config.args)
    except Exception as error:
        text = " / ".join(str(error).splitlines())
        raise ConfigError(f"model.build: {config.build} failed with {type(error).__name__}: {text}") from error
    if not isinstance(module, nn.Module):
        raise ConfigError(f"model.build: {config.build} gave a {type(module).__name__}, not an nn.Module")
    make_batch = _batches(config)
    inputs = _probe(module, make_batch, seq_len)
    stack = locate(
        module,
        lambda: call(module, inputs),
        blocks=config.blocks,
        parts={"attention": config.attention_part, "ffn": config.ffn_part},
    )
    _check(config, stack)
    loss: Any = load("loss", config.loss) if config.loss is not None else None
    if loss is not None:
        _check_arguments(f"model.loss: {config.loss} is called with output and targets", loss, {}, None, None)
    else:
        logits_of(stack.output)  # refuses here what the first step would
    return BuiltModel(
        module=module if loss is not None or isinstance(stack.output, Tensor) else Logits(module),
        blocks=stack.blocks,
        parts=stack.parts,
        apart=stack.apart,
        draw=partial(_draw, make_batch),
        loss=loss,
    )


def load(key: str, name: str) -> Callable[..., Any]:
    """Give ``package.module:function``, the current directory before everything else that can be imported.

    Raises ConfigError naming the study's ``key`` where there is no such thing.
    """
    here = os.getcwd()
    if sys.path[:1] != [here]:
        sys.path.insert(0, here)
    module_name, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(f"model.{key}: {module_name} cannot be imported: {error}") from None
        raise ConfigError(f"model.{key}: no module {error.name!r} in the current directory or installed") from None
    except Exception as error:
        where = f"{type(error).__name__}: {error}"
        raise ConfigError(f"model.{key}: {module_name} cannot be imported: {where}") from None
    for part in path.split("."):
        if not hasattr(found, part):
            public = [other for other in vars(found) if not other.startswith("_")] if hasattr(found, "__dict__") else []
            raise ConfigError(f"model.{key}: {module_name} has no {path!r}{nearest(path, public)}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"model.{key}: {name} is a {type(found).__name__}, not a function")
    function: Callable[..., Any] = found
    return function


def _check_arguments(told: str, function: Callable[..., Any], keywords: dict[str, Any], *given: Any) -> None:
    """Refuse arguments that a function does not take, before it is called."""
    try:
        inspect.signature(function).bind(*given, **keywords)
    except TypeError as error:
        raise ConfigError(f"{told}: {error}") from None
    except ValueError:
        pass  # a function of C may have no signature; then the call itself tells


def _batches(config: CustomConfig) -> MakeBatch:
    if config.batch is not None:
        function = load("batch", config.batch)
        _check_arguments(
            f"model.batch: {config.batch} is called with batch_size, seq_len and a generator", function, {}, 1, 1, None
        )
        return partial(_batch_of_the_user, config.batch, function)
    assert config.vocab_size is not None, "the config asks for one of them"
    return partial(_tokens, config.vocab_size)


def _batch_of_the_user(
    name: str, function: Callable[..., Any], batch_size: int, seq_len: int, generator: Generator
) -> Batch:
    batch = function(batch_size, seq_len, generator)
    if not isinstance(batch, tuple | list) or len(batch) != 2 or not isinstance(batch[1], Tensor):
        raise ConfigError(f"model.batch: {name} must give two things, inputs and a tensor of targets")
    return batch[0], batch[1]


def _tokens(vocab_size: int, batch_size: int, seq_len: int, generator: Generator) -> Batch:
    """Draw tokens and targets (B, S), uniform over the vocabulary."""
    shape = (batch_size, seq_len)
    return torch.randint(vocab_size, shape, generator=generator), torch.randint(vocab_size, shape, generator=generator)


def _probe(module: nn.Module, make_batch: MakeBatch, seq_len: int) -> Any:
    """Draw inputs of one sequence, where the module is."""
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    with torch.device("cpu"):
        inputs, _ = make_batch(1, seq_len, torch.Generator().manual_seed(0))
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, inputs)


def _draw(make_batch: MakeBatch, config: RunConfig, generator: Generator, dtype: torch.dtype) -> Batch:
    """Draw a micro-batch; inputs that are no whole numbers come in the weights' type."""
    inputs, targets = make_batch(config.train.batch_size, config.train.seq_len, generator)

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return tree_map(cast, inputs), targets


def _check(config: CustomConfig, stack: Stack) -> None:
    found = len(stack.blocks)
    if config.n_layers is not None and found != config.n_layers:
        raise ConfigError(f"n_layers is {config.n_layers}, but the model has {found} blocks ({stack.path})")


PLUGIN = build
