"""Models and training loops of published measurements, as functions that ckbench's family ``custom`` calls.

What a loop holds on to is part of what was measured: the published loops keep the model's whole answer (logits, and
the keys and values a causal model caches unless told otherwise) in a local variable until the next forward has ended.
"""

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[1]))

from ckbench.engine.optimizers import AfterBackward, Updater
from ckbench.estimate import substitutes
from ckbench.estimate.tracker import StorageTracker

Batch = tuple[Any, Tensor]

HEADS = {
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "classifier": "AutoModelForSequenceClassification",
}


class _SaysYes(TorchDispatchMode):
    """Answers a question to a tensor without data with yes: versions of transformers ask whether a mask is all ones."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return True
        return func(*args, **(kwargs or {}))


class Loop(nn.Module):
    """A model as its published loop calls it; with ``holds`` the last answer lives until the next one is there."""

    def __init__(self, model: nn.Module, *, holds: bool) -> None:
        super().__init__()
        self.model = model
        self.holds = holds
        self.held: list[Any] = []

    def forward(self, **inputs: Tensor) -> Any:
        """Give the library's answer."""
        is_meta = next(self.parameters()).is_meta
        with _SaysYes() if is_meta else contextlib.nullcontext():
            answer = self.model(**inputs)
        if self.holds:
            self.held[:] = [answer]
        return answer


def library_model(
    arch: str,
    config: dict[str, Any],
    head: str = "causal",
    attention: str | None = None,
    checkpointing: bool = False,
    holds: bool = True,
    is_half: bool = False,
) -> nn.Module:
    """Make a model of the installed transformers; ``attention`` None for versions that have one kind only.

    ``is_half``: loaded in fp16 by the library, which leaves tables of rotations in fp32.
    """
    library = importlib.import_module("transformers")
    options: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    if is_half:
        options["torch_dtype"] = torch.float16
    model = getattr(library, HEADS[head]).from_config(library.CONFIG_MAPPING[arch](**config), **options)
    if checkpointing:
        model.gradient_checkpointing_enable()
    return Loop(model, holds=holds)


class _VitBlock(nn.Module):
    """Pre-norm block of torchvision's vision transformer, (B, S, D) in and out."""

    def __init__(self, width: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width, eps=1e-6)
        self.self_attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.ln_2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(width, ffn), nn.GELU(), nn.Linear(ffn, width))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, S, D) to (B, S, D)."""
        normed = self.ln_1(x)
        x = x + self.self_attention(normed, normed, normed, need_weights=False)[0]
        result: Tensor = x + self.mlp(self.ln_2(x))
        return result


class VisionTransformer(nn.Module):
    """The shape of torchvision's ``vit_l_16``: image (B, 3, 224, 224) to class scores (B, 1000)."""

    def __init__(self, layers: int, width: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.conv_proj = nn.Conv2d(3, width, kernel_size=16, stride=16)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.zeros(1, 197, width))
        self.layers = nn.ModuleList(_VitBlock(width, heads, ffn) for _ in range(layers))
        self.ln = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, 1000)

    def forward(self, images: Tensor) -> Tensor:
        """Give class scores."""
        patches = self.conv_proj(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(images.shape[0], -1, -1), patches], dim=1) + self.position
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.head(self.ln(x)[:, 0])
        return scores


def vision_transformer(layers: int, width: int, heads: int, ffn: int) -> nn.Module:
    """Make the vision transformer."""
    return VisionTransformer(layers, width, heads, ffn)


def one_layer(arch: str, config: dict[str, Any], batch_size: int, seq_len: int, tracker: StorageTracker) -> Tensor:
    """Run the first decoder layer of a bf16 model forward, recording from its call on, and give its output.

    Inputs are outside of what is recorded, as the script measures the difference around the call.
    """
    library = importlib.import_module("transformers")
    made = library.CONFIG_MAPPING[arch](**config)
    with torch.device("meta"):
        model = library.AutoModelForCausalLM.from_config(made, attn_implementation="sdpa").to(torch.bfloat16).eval()
        hidden = torch.rand(batch_size, seq_len, made.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        positions = torch.zeros(batch_size, seq_len, dtype=torch.long)
        width = getattr(made, "head_dim", None) or made.hidden_size // made.num_attention_heads
        rotations = tuple(torch.zeros(batch_size, seq_len, width, dtype=torch.bfloat16) for _ in range(2))
    outside = [hidden, positions, *rotations, *model.parameters(), *model.buffers()]
    for tensor in outside:
        tracker.made_elsewhere(partial(_itself, tensor))
    with tracker:
        given = model.model.layers[0](
            hidden_states=hidden, attention_mask=None, position_ids=positions, position_embeddings=rotations
        )
    output: Tensor = given[0] if isinstance(given, tuple) else given
    return output


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def tokens(batch_size: int, seq_len: int, generator: Generator) -> Batch:
    """Draw token ids (B, S) alone."""
    return {"input_ids": _ids(batch_size, seq_len, generator)}, torch.zeros(1)


def labelled_tokens(batch_size: int, seq_len: int, generator: Generator) -> Batch:
    """Draw token ids and labels, both (B, S)."""
    ids = _ids(batch_size, seq_len, generator)
    return {"input_ids": ids, "labels": ids.clone()}, torch.zeros(1)


def classified_tokens(batch_size: int, seq_len: int, generator: Generator) -> Batch:
    """Draw token ids (B, S) with a class for each sequence (B)."""
    labels = torch.zeros(batch_size, dtype=torch.long)
    return {"input_ids": _ids(batch_size, seq_len, generator), "labels": labels}, torch.zeros(1)


def images(batch_size: int, _seq_len: int, generator: Generator) -> Batch:
    """Draw images (B, 3, 224, 224)."""
    return torch.rand(batch_size, 3, 224, 224, generator=generator), torch.zeros(1)


def _ids(batch_size: int, seq_len: int, generator: Generator) -> Tensor:
    return torch.randint(100, 1000, (batch_size, seq_len), generator=generator)


def sum_of_logits(output: Any, _targets: Tensor) -> Tensor:
    """Add up what the model gave."""
    total: Tensor = (output if isinstance(output, Tensor) else output.logits).sum()
    return total


def own_loss(output: Any, _targets: Tensor) -> Tensor:
    """Take the loss that the library computed."""
    loss: Tensor = output.loss
    return loss


class _KeepsInput(torch.autograd.Function):
    """Give a result as it is, and keep what it was made of until backward."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, made_of: Tensor) -> Tensor:
        """Keep the second argument."""
        ctx.save_for_backward(made_of)
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Hand the gradient on."""
        return gradients[0], None


@contextlib.contextmanager
def torch_of(version: str) -> Iterator[None]:
    """Have operations keep what they kept in an older PyTorch; nothing differs where ``version`` is empty.

    Up to 1.10 softmax and log_softmax keep their input besides their result, which backward does not read
    (pytorch/pytorch#64000, changed by #65242).
    """
    if version != "1.10":
        yield
        return
    known = dict(substitutes._SUBSTITUTES)
    for function in (*substitutes.SOFTMAX, *substitutes.LOG_SOFTMAX):
        substitutes._SUBSTITUTES[function] = partial(_with_input_kept, known[function])
    try:
        yield
    finally:
        substitutes._SUBSTITUTES.update(known)


def _with_input_kept(soft: Callable[..., Tensor], mode: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    kept: Tensor = _KeepsInput.apply(soft(mode, input, *args, **kwargs), input.detach())
    return kept


class NoOptimizer:
    """Forward and backward alone; gradients are let go before each forward, as the loops do."""

    implementation = "none"

    def __init__(self, parameters: Any) -> None:
        self.parameters = list(parameters)

    def step(self, scaler: Any) -> bool:
        """Update nothing."""
        return True

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Let gradients go."""
        for parameter in self.parameters:
            parameter.grad = None

    def device_tensors(self) -> list[Tensor]:
        """Hold no state."""
        return []

    def figures(self) -> dict[str, Any]:
        """Give nothing."""
        return {}


class EightBitAdam(torch.optim.Optimizer):
    """State of bitsandbytes' Adam8bit: two bytes per number and two fp32 scales per 2048 numbers; no temporaries.

    Tensors below 4096 numbers keep fp32 state. Source: bitsandbytes/optim/optimizer.py (Optimizer2State).
    """

    BLOCK = 2048
    LEAST = 4096

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Make the state where there is none."""
        del closure
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if state or parameter.grad is None:
                continue
            is_short = parameter.numel() >= self.LEAST
            for name in ("state1", "state2"):
                state[name] = torch.zeros_like(parameter, dtype=torch.uint8 if is_short else torch.float32)
                if is_short:
                    n_blocks = -(-parameter.numel() // self.BLOCK)
                    state[f"absmax_{name}"] = torch.zeros(n_blocks, device=parameter.device)


def optimizer(name: str, module: nn.Module) -> Updater:
    """Make one that ckbench does not have: ``none``, ``hf-adamw``, ``hf-adafactor`` or ``adam-8bit``.

    The library's own classes are taken where the row used them, with the settings of its Trainer.
    """
    parameters = list(module.parameters())
    if name == "none":
        return NoOptimizer(parameters)
    if name == "adam-8bit":
        return AfterBackward(EightBitAdam(parameters), name)
    library = importlib.import_module("transformers.optimization")
    if name == "hf-adafactor":
        return AfterBackward(library.Adafactor(parameters, lr=1e-4, scale_parameter=False, relative_step=False), name)
    return AfterBackward(library.AdamW(parameters, lr=1e-4), name)
