"""One trial as frozen, typed data: model, training step, strategy, how to run.

Pydantic checks types strictly and gives the JSON schema. Nothing here touches a device or another file.
"""

import hashlib
import json
import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from ckbench.units import parse_size_bytes

Count = Annotated[int, Field(ge=1, le=10**12)]
MAX_LAYERS = 10_000

Attention = Literal["auto", "flash", "efficient", "math", "eager"]
Precision = Literal["fp32", "tf32", "bf16", "fp16", "bf16-pure", "fp16-pure"]
Optimizer = Literal["sgd", "adam", "adamw", "adafactor", "adamw-8bit"]
OptimizerImplementation = Literal["default", "for-loop", "foreach", "fused"]
Loss = Literal["cross_entropy", "chunked_cross_entropy", "mse"]


def _read_size(value: Any) -> Any:
    """Take a size as text with its unit, as people write it; numbers are bytes."""
    return parse_size_bytes(value) if isinstance(value, str) else value


Size = Annotated[int, BeforeValidator(_read_size, json_schema_input_type=int | str), Field(ge=1, le=10**18)]

SECTIONS = ("model", "train", "run")


class Section(BaseModel):
    """Frozen, strict, keyword-only: an unknown key or a wrong type is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class ModelConfig(Section):
    """A transformer of ours: its family, its size and what its blocks are made of."""

    family: str = "gpt"
    """Plug-in of ckbench/models: gpt, llama, bert, vit, or hf and custom with keys of their own."""
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
    """lm: logits over the vocabulary (vit: over its classes). none: the output is the last hidden state."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Drop probability after embedding, attention and FFN, and of attention weights."""
    tie_embeddings: bool = False
    """Whether the head shares the token embedding's weight."""
    attention: Attention = "auto"
    """SDPA backend; eager materialises the scores in plain operations."""
    norm_position: Literal["pre", "post"] | None = None
    """Norm before each part (GPT-2) or after the sum (the 2017 transformer). Left out: post for bert, else pre."""
    activation: Literal["gelu", "relu", "swiglu"] | None = None
    """FFN activation; swiglu has a third, gating matrix. Left out: swiglu for llama, gelu for the others."""
    freeze_embedding: bool = False
    """Whether embeddings get no gradient, as in fine-tuning; then the first block's input needs none."""
    residual: Literal["standard", "reversible"] = "standard"
    """reversible: two coupled streams, whose inputs can be rebuilt from outputs (RevNet, Reformer); needs pre-norm."""

    def own_seq_len(self) -> int | None:
        """Give the sequence length that the model itself decides, None where it takes any."""
        return None

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
        if self.head == "lm" and self.vocab_size is None and self.family != "vit":
            raise ValueError("head lm needs vocab_size (or write head: none)")
        if self.tie_embeddings and self.head != "lm":
            raise ValueError("tie_embeddings needs head lm")
        if self.vocab_size is None and (self.tie_embeddings or self.freeze_embedding):
            key = "tie_embeddings" if self.tie_embeddings else "freeze_embedding"
            raise ValueError(f"{key} needs vocab_size: without it there is no embedding")
        if self.freeze_embedding and self.tie_embeddings:
            raise ValueError("freeze_embedding with tie_embeddings would freeze the head too")
        if self.residual == "reversible" and not self.norms_first():
            raise ValueError("residual reversible needs norm_position: pre, since a norm after the sum has no inverse")
        return self

    def norms_first(self) -> bool:
        """Tell whether norms come before each part, by the family's rule where the file names none."""
        return (self.norm_position or ("post" if self.family == "bert" else "pre")) == "pre"

    def ffn_widths(self) -> tuple[int, ...]:
        """Give the inner FFN width of every block, the family's rule where the file names none.

        Two matrices: 4·D. Three matrices (swiglu): 8/3·D rounded up to a multiple of 32, so that the
        parameters stay about the same (Shazeer 2020, arXiv 2002.05202).
        """
        if isinstance(self.d_ff, tuple):
            return self.d_ff
        gated = self.ffn_activation() == "swiglu"
        rule = math.ceil(self.d_model * 8 / 3 / 32) * 32 if gated else 4 * self.d_model
        return (self.d_ff or rule,) * self.n_layers

    def ffn_activation(self) -> str:
        """Give the FFN activation, the family's own where the file names none."""
        return self.activation or ("swiglu" if self.family == "llama" else "gelu")


class VitConfig(ModelConfig):
    """A vision transformer: images instead of tokens."""

    family: str = "vit"
    """vit."""
    vocab_size: None = None
    """Images have no token ids; leave it out."""
    image_size: Count = 224
    """Pixels per side; a multiple of patch_size."""
    patch_size: Count = 16
    """Pixels per side of a patch."""
    n_channels: Count = 3
    """Colours of a pixel."""
    n_classes: Count = 1000
    """Classes that the head tells apart."""

    def own_seq_len(self) -> int:
        """Count patches and the class token."""
        return (self.image_size // self.patch_size) ** 2 + 1

    @model_validator(mode="after")
    def _check_image(self) -> "VitConfig":
        if self.image_size % self.patch_size:
            raise ValueError(f"image_size {self.image_size} is not a multiple of patch_size {self.patch_size}")
        return self


class HfConfig(Section):
    """A model of the transformers library, made from its config with random weights, or loaded from a folder."""

    family: Literal["hf"] = "hf"
    """hf."""
    arch: str | None = None
    """Model type as the library calls it: gpt2, llama, bert, vit, qwen3, ..."""
    path: str | None = None
    """Folder of a saved model, instead of arch; nothing is downloaded."""
    config: dict[str, Any] = {}
    """Keys of the library's own config, under its own names."""
    n_layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)] | None = None
    """Blocks, whatever the library calls them. Left out: what config or the library's default says."""
    attention: Literal["auto", "eager", "sdpa"] = "auto"
    """The library's attn_implementation; auto leaves the choice to it."""

    def own_seq_len(self) -> int | None:
        """Count the patches and class token of a vit; other models are checked where they are built."""
        size, patch = self.config.get("image_size", 224), self.config.get("patch_size", 16)
        return (size // patch) ** 2 + 1 if self.arch == "vit" and type(size) is type(patch) is int and patch else None

    @model_validator(mode="after")
    def _check(self) -> "HfConfig":
        if (self.arch is None) == (self.path is None):
            raise ValueError("family hf needs arch (a model type) or path (a folder), one of them")
        return self


class CustomConfig(Section):
    """A user's own model, built by a function of theirs."""

    family: Literal["custom"] = "custom"
    """custom."""
    build: Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")]
    """package.module:function that gives the module; the working directory can be imported from."""
    args: dict[str, Any] = {}
    """Keyword arguments of the function."""
    n_layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)] | None = None
    """Blocks the model must turn out to have. Left out: as many as are found."""
    blocks: str | None = None
    """Dotted path of the ModuleList of blocks. Left out: the longest ModuleList."""
    attention_part: str | None = None
    """Path inside a block of its attention. Left out: found by name."""
    ffn_part: str | None = None
    """Path inside a block of its FFN. Left out: found by name."""
    batch: Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")] | None = None
    """package.module:function (batch_size, seq_len, generator) that gives inputs and targets. Left out: token ids."""
    loss: Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")] | None = None
    """package.module:function (output, targets) that gives the loss. Left out: mean cross entropy."""
    vocab_size: Count | None = None
    """Token ids, where batch is left out."""

    def own_seq_len(self) -> int | None:
        """Take any sequence length."""
        return None

    @model_validator(mode="after")
    def _check(self) -> "CustomConfig":
        if self.batch is None and self.vocab_size is None:
            raise ValueError("family custom needs vocab_size, or batch to make inputs and targets")
        return self


AnyModel = ModelConfig | HfConfig | CustomConfig
MODEL_CLASSES: dict[str, type[AnyModel]] = {"vit": VitConfig, "hf": HfConfig, "custom": CustomConfig}


def model_class(family: Any) -> type[AnyModel]:
    """Give the class that reads a family's model section; families of ours share one."""
    return MODEL_CLASSES.get(family, ModelConfig) if isinstance(family, str) else ModelConfig


def _family_tag(value: Any) -> str:
    family = value.get("family") if isinstance(value, dict) else value.family
    return family if family in MODEL_CLASSES else "ours"


class TrainConfig(Section):
    """One training step: the batch, the arithmetic, the optimizer and the loss."""

    batch_size: Count
    """Sequences per forward (micro-batch)."""
    seq_len: Count
    """Tokens per sequence."""
    precision: Precision = "fp32"
    """bf16 and fp16 are autocast over fp32 weights; -pure keeps weights in the short type too. tf32 lets CUDA round the
    factors of fp32 products."""
    optimizer: Optimizer = "adamw"
    """sgd has no momentum and so no state; adam and adamw keep two numbers per parameter; adafactor keeps row and
    column sums; adamw-8bit keeps two bytes (torchao)."""
    optimizer_implementation: OptimizerImplementation = "default"
    """PyTorch's variants; default lets PyTorch choose, and the record says what it chose."""
    optimizer_in_backward: bool = False
    """Whether each parameter is updated as soon as its gradient is there, and the gradient freed."""
    optimizer_on_host: bool = False
    """Whether optimizer state and master weights stay in host memory and are updated there (ZeRO-Offload)."""
    lr: Annotated[float, Field(gt=0.0)] = 1e-4
    """Learning rate, constant."""
    grad_accumulation: Count = 1
    """Forward and backward passes per optimizer step."""
    loss: Loss = "cross_entropy"
    """mse compares the last hidden state with random targets and needs head none. chunked_cross_entropy makes logits
    and loss piece by piece over the tokens, and the logits of a piece again in backward."""
    loss_chunks: Count = 8
    """Pieces of the chunked loss."""
    compile: bool = False
    """Whether every block is compiled by torch.compile, whatever the strategy."""
    offload_cap_bytes: Size | None = None
    """Most that strategies may move to the host, as 8GiB; what is over it stays on the device. Left out: no cap."""
    set_to_none: bool = True
    """Whether gradients are freed after the step; false keeps them allocated and zeroes them."""

    def tokens_per_step(self) -> int:
        """Count the tokens behind one optimizer step."""
        return self.batch_size * self.seq_len * self.grad_accumulation

    @model_validator(mode="after")
    def _check(self) -> "TrainConfig":
        if self.optimizer_in_backward and self.grad_accumulation > 1:
            raise ValueError("optimizer_in_backward frees each gradient at once, so grad_accumulation must be 1")
        if self.optimizer_in_backward and self.precision == "fp16":
            raise ValueError("optimizer_in_backward updates before fp16's gradient scaling can look; use bf16")
        if self.optimizer_on_host and (self.optimizer_in_backward or self.optimizer == "adamw-8bit"):
            raise ValueError("optimizer_on_host goes neither with optimizer_in_backward nor with adamw-8bit; drop one")
        if self.optimizer_in_backward and not self.set_to_none:
            raise ValueError("optimizer_in_backward frees gradients, so set_to_none cannot be false")
        lacking = {"adafactor": ("fused",), "adamw-8bit": ("for-loop", "foreach", "fused")}
        if self.optimizer_implementation in lacking.get(self.optimizer, ()):
            raise ValueError(f"{self.optimizer} has no {self.optimizer_implementation} implementation")
        return self


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
    """Rounds to go up to while a slowdown is not yet known to precision_target. Left out: no more than rounds.
    The scatter of the first rounds decides (Stein's two stages), so that stopping does not narrow the interval."""
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
        if self.max_rounds is not None and self.rounds == 1 < self.max_rounds:
            raise ValueError(f"max_rounds {self.max_rounds} needs rounds of at least 2: their scatter decides on more")
        if self.max_steps < self.min_steps:
            raise ValueError(f"max_steps {self.max_steps} is below min_steps {self.min_steps}")
        return self


class StrategySpec(Section):
    """A strategy with its parameters and options."""

    name: str
    params: dict[str, int | float | str] = {}
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
        if self.options.get("offload"):
            text += "+offload"
        for key, value in sorted(self.options.items()):
            if key != "offload":
                text += f",{key}" if value else f",{key}=false"
        return text


class RunConfig(Section):
    """Everything one trial needs, and nothing else."""

    study: str
    model: Annotated[
        Annotated[ModelConfig, Tag("ours")]
        | Annotated[VitConfig, Tag("vit")]
        | Annotated[HfConfig, Tag("hf")]
        | Annotated[CustomConfig, Tag("custom")],
        Discriminator(_family_tag),
    ]
    train: TrainConfig
    strategy: StrategySpec
    run: RunSettings
    plan: dict[str, Any] | None = None
    """A planner's plan as data, which the strategy stands for; no part of the configuration's name."""

    @model_validator(mode="after")
    def _check(self) -> "RunConfig":
        check_together(self.model, self.train)
        return self

    def configuration_id(self) -> str:
        """Name what is measured, not how often: equal for every round of the same configuration."""
        content = self.model_dump(mode="json", include={"model", "train", "strategy"})
        content |= {"seed": self.run.seed, "threads": self.run.threads, "device": self.run.device}
        return digest(content)


def check_together(model: AnyModel, train: TrainConfig) -> None:
    """Refuse a model and a training step that do not go together."""
    own = model.own_seq_len()
    if own is not None and train.seq_len != own:
        raise ValueError(f"this model makes sequences of {own} itself; leave seq_len out or write {own}")
    head = model.head if isinstance(model, ModelConfig) else "lm"
    if train.loss == "mse" and head != "none":
        raise ValueError("loss mse needs head: none")
    if train.loss != "mse" and head == "none":
        raise ValueError(f"loss {train.loss} needs head: lm")
    if isinstance(model, CustomConfig) and model.loss is not None and train.loss != "cross_entropy":
        raise ValueError("a loss function of your own leaves train.loss nothing to do; leave one of them out")


def digest(content: Any) -> str:
    """Hash plain data to 16 hexadecimal digits, the same on every machine."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
