"""One trial as frozen, typed data: model, training step, strategy, how to run.

Pydantic checks types strictly and gives the JSON schema. Nothing here touches a device, the
environment or another file.
"""

import hashlib
import json
import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Count = Annotated[int, Field(ge=1, le=10**12)]
MAX_LAYERS = 10_000
"""Ten times the deepest transformer we know of; a plan may hold a region per block."""

Attention = Literal["auto", "flash", "efficient", "math", "eager"]
Precision = Literal["fp32", "bf16", "fp16", "bf16-pure", "fp16-pure"]
Optimizer = Literal["sgd", "adam", "adamw"]
OptimizerImplementation = Literal["default", "for-loop", "foreach", "fused"]

SECTIONS = ("model", "train", "run")


class Section(BaseModel):
    """Frozen, strict, keyword-only: an unknown key or a wrong type is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class ModelConfig(Section):
    """The transformer: its family, its size and what its blocks are made of."""

    family: str = "gpt"
    """Plug-in of ckbench/models: gpt or llama."""
    n_layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)]
    """Blocks in the stack (L)."""
    d_model: Count
    """Width of the residual stream (D)."""
    n_heads: Count
    """Query heads; must divide d_model."""
    n_kv_heads: Count | None = None
    """Key and value heads; must divide n_heads. Left out: as many as n_heads."""
    d_ff: Count | tuple[Count, ...] | None = None
    """Inner width of the FFN; a list gives each block its own. Left out: the family's rule."""
    vocab_size: Count | None = None
    """Token ids. Left out with head none: the inputs are vectors of d_model numbers, no embedding."""
    head: Literal["lm", "none"] = "lm"
    """lm: logits over the vocabulary. none: the output is the last hidden state."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Drop probability after embedding, attention and FFN, and of attention weights."""
    tie_embeddings: bool = False
    """Whether the head shares the token embedding's weight."""
    attention: Attention = "auto"
    """SDPA backend; eager materialises the scores in plain operations."""
    norm_position: Literal["pre", "post"] = "pre"
    """Norm before each part (GPT-2, Llama) or after the residual sum (the 2017 transformer)."""
    activation: Literal["gelu", "relu", "swiglu"] | None = None
    """FFN activation; swiglu has a third, gating matrix. Left out: gelu for gpt, swiglu for llama."""
    freeze_embedding: bool = False
    """Whether embeddings get no gradient, as in fine-tuning; then the first block's input needs none."""

    @model_validator(mode="after")
    def _check(self) -> "ModelConfig":
        if self.d_model % self.n_heads:
            raise ValueError(f"d_model {self.d_model} is not a multiple of n_heads {self.n_heads}")
        if self.n_kv_heads is not None and self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}")
        if self.family == "llama" and (self.d_model // self.n_heads) % 2:
            raise ValueError(f"rotary positions need an even d_model / n_heads, got {self.d_model // self.n_heads}")
        if isinstance(self.d_ff, tuple) and len(self.d_ff) != self.n_layers:
            raise ValueError(f"d_ff lists {len(self.d_ff)} widths for n_layers {self.n_layers}")
        if self.head == "lm" and self.vocab_size is None:
            raise ValueError("head lm needs vocab_size (or write head: none)")
        if self.tie_embeddings and (self.head != "lm" or self.vocab_size is None):
            raise ValueError("tie_embeddings needs head lm")
        if self.freeze_embedding and self.vocab_size is None:
            raise ValueError("freeze_embedding needs vocab_size: without it there is no embedding")
        if self.freeze_embedding and self.tie_embeddings:
            raise ValueError("freeze_embedding with tie_embeddings would freeze the head too")
        return self

    def ffn_widths(self) -> tuple[int, ...]:
        """Give the inner FFN width of every block, the family's rule where the file names none.

        Two matrices: 4·D. Three matrices (swiglu): 8/3·D rounded up to a multiple of 32, so that the
        parameters stay about the same (Shazeer 2020, arXiv 2002.05202).
        """
        if isinstance(self.d_ff, tuple):
            return self.d_ff
        if self.d_ff is not None:
            return (self.d_ff,) * self.n_layers
        gated = self.ffn_activation() == "swiglu"
        width = math.ceil(self.d_model * 8 / 3 / 32) * 32 if gated else 4 * self.d_model
        return (width,) * self.n_layers

    def ffn_activation(self) -> str:
        """Give the FFN activation, the family's own where the file names none."""
        return self.activation or ("swiglu" if self.family == "llama" else "gelu")


class TrainConfig(Section):
    """One training step: the batch, the arithmetic, the optimizer and the loss."""

    batch_size: Count
    """Sequences per forward (micro-batch)."""
    seq_len: Count
    """Tokens per sequence."""
    precision: Precision = "fp32"
    """bf16 and fp16 are autocast over fp32 weights; -pure keeps weights in the short type too."""
    optimizer: Optimizer = "adamw"
    """sgd has no momentum and so no state; adam and adamw keep two numbers per parameter."""
    optimizer_implementation: OptimizerImplementation = "default"
    """PyTorch's variants; default lets PyTorch choose, and the record says what it chose."""
    lr: Annotated[float, Field(gt=0.0)] = 1e-4
    """Learning rate, constant."""
    grad_accumulation: Count = 1
    """Forward and backward passes per optimizer step."""
    loss: Literal["cross_entropy", "mse"] = "cross_entropy"
    """mse compares the last hidden state with random targets and needs head none."""
    set_to_none: bool = True
    """Whether gradients are freed after the step; false keeps them allocated and zeroes them."""

    def tokens_per_step(self) -> int:
        """Count the tokens behind one optimizer step."""
        return self.batch_size * self.seq_len * self.grad_accumulation


class RunSettings(Section):
    """How to measure; nothing here changes what is measured."""

    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d{1,3})?|replay:.+)$")] = "auto"
    """auto, cpu, cuda or cuda:N; auto takes CUDA where there is one and the record says which it was."""
    warmup_steps: Annotated[int, Field(ge=0, le=10_000)] = 3
    """Untimed steps at least; more follow while steps still get faster. 0 takes none and is flagged."""
    precision_target: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.01
    """Timed steps repeat until the 95 % interval of the median is within this share of it."""
    min_steps: Count = 10
    """Timed steps per trial at least."""
    max_steps: Count = 200
    """Timed steps per trial at most."""
    max_seconds: Annotated[float, Field(gt=0.0)] = 10.0
    """Time cap of the timed steps of a trial; min_steps are done even if they take longer."""
    timeout_s: Annotated[float, Field(gt=0.0)] = 600.0
    """A trial that takes longer is stopped and becomes a row with status timeout."""
    rounds: Annotated[int, Field(ge=1, le=1000)] = 5
    """Fresh processes per strategy; rounds alternate the order and are paired in ratios."""
    max_rounds: Annotated[int, Field(ge=1, le=1000)] | None = None
    """Rounds to go up to while a slowdown is not yet known to precision_target. Left out: no more than rounds."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of weights, tokens and dropout, the same for every strategy."""
    threads: Annotated[int, Field(ge=1, le=4096)] | None = None
    """CPU threads. Left out: what this process may use (affinity and container quota)."""
    pin: bool = False
    """Whether workers are pinned to as many CPUs as they have threads."""
    start_method: Literal["forkserver", "spawn"] = "forkserver"
    """How a trial's process starts; spawn is slower and works everywhere."""
    parity: bool = True
    """Whether each strategy's gradients are compared with those of none, after all figures are read."""

    @model_validator(mode="after")
    def _check(self) -> "RunSettings":
        if self.max_rounds is not None and self.max_rounds < self.rounds:
            raise ValueError(f"max_rounds {self.max_rounds} is below rounds {self.rounds}")
        if self.max_steps < self.min_steps:
            raise ValueError(f"max_steps {self.max_steps} is below min_steps {self.min_steps}")
        return self


class StrategySpec(Section):
    """A strategy with its parameters and options."""

    name: str
    params: dict[str, int] = {}
    options: dict[str, bool] = {}
    repeat: Count = 1
    """1, or 2 and up where a study lists the same strategy again, to be measured by itself."""

    @property
    def label(self) -> str:
        """Write the spec the way it can be typed: ``every-k:4,skip_last,early_stop=false``, ``none#2``."""
        return self.plain_label + (f"#{self.repeat}" if self.repeat > 1 else "")

    @property
    def plain_label(self) -> str:
        """Write the spec without its repeat."""
        text = ":".join([self.name, *(str(value) for value in self.params.values())])
        for key, value in sorted(self.options.items()):
            text += f",{key}" if value else f",{key}=false"
        return text


class RunConfig(Section):
    """Everything one trial needs, and nothing else."""

    study: str
    model: ModelConfig
    train: TrainConfig
    strategy: StrategySpec
    run: RunSettings

    @model_validator(mode="after")
    def _check(self) -> "RunConfig":
        check_together(self.model, self.train)
        return self

    def configuration_id(self) -> str:
        """Name what is measured, not how often: equal for every round of the same configuration."""
        content = self.model_dump(mode="json", include={"model", "train", "strategy"})
        content["seed"], content["threads"] = self.run.seed, self.run.threads
        content["device"] = self.run.device
        return digest(content)


def check_together(model: ModelConfig, train: TrainConfig) -> None:
    """Refuse a model and a training step that do not go together."""
    if train.loss == "mse" and model.head != "none":
        raise ValueError("loss mse needs head: none")
    if train.loss == "cross_entropy" and model.head == "none":
        raise ValueError("loss cross_entropy needs head: lm")


def digest(content: Any) -> str:
    """Hash plain data to 16 hexadecimal digits, the same on every machine."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
