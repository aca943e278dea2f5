"""What each published row measured, as a trial of ours, or why it cannot be one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ckbench import specs
from ckbench.cards import MEASURED_CONTEXTS_MIB, workspace_bytes
from ckbench.config import AnyModel, CustomConfig, ModelConfig, RunConfig, RunSettings, TrainConfig
from ckbench.units import MIB_BYTES

Row = dict[str, str]

WORKSPACE_BYTES = workspace_bytes(None)
"""cuBLAS has a handle, and PyTorch a workspace for it, in each thread that multiplies: forward's and backward's."""
AMP = {"fp16 AMP": "fp16"}
GPT2 = {"n_layer": "layers", "n_embd": "d_model", "n_head": "heads", "vocab_size": "vocab"}
BERT = {
    "num_hidden_layers": "layers",
    "hidden_size": "d_model",
    "num_attention_heads": "heads",
    "intermediate_size": "d_ff",
    "vocab_size": "vocab",
}
LLAMA = BERT | {"num_key_value_heads": "kv_heads"}
KEYS: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    # the row's model: the library's model type, its keys by our columns, and what the columns do not say
    "gpt2": ("gpt2", GPT2, {}),
    "gpt2-large": ("gpt2", GPT2, {}),
    "bert-large-uncased": ("bert", BERT, {}),
    "bert-base-uncased": ("bert", BERT, {}),
    "pythia-410m-deduped": (
        "gpt_neox",
        BERT,
        {"rotary_pct": 0.25, "max_position_embeddings": 2048, "use_parallel_residual": True},
    ),
    "opt-350m": (
        "opt",
        {**BERT, "ffn_dim": "d_ff"},
        {
            "word_embed_proj_dim": 512,
            "do_layer_norm_before": False,
            "max_position_embeddings": 2048,
            "activation_function": "relu",
        },
    ),
}
LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    # sizes that the rows' models have by their own config files
    "SmolLM2-360M": ("llama", {"hidden_size": 960, "heads": 15, "kv": 5, "intermediate_size": 2560}),
    "Llama-3.1-8B": ("llama", {"hidden_size": 4096, "heads": 32, "kv": 8, "intermediate_size": 14336}),
    "Mistral-7B-v0.3": ("mistral", {"hidden_size": 4096, "heads": 32, "kv": 8, "intermediate_size": 14336}),
    "DeepSeek-R1-0528-Qwen3-8B": (
        "qwen3",
        {"hidden_size": 4096, "heads": 32, "kv": 8, "intermediate_size": 12288, "head_dim": 128},
    ),
    "Qwen3-4B": (
        "qwen3",
        {"hidden_size": 2560, "heads": 32, "kv": 8, "intermediate_size": 9728, "head_dim": 128},
    ),
    "gemma-1.1-2b-it": (
        "gemma",
        {"hidden_size": 2048, "heads": 8, "kv": 1, "intermediate_size": 16384, "head_dim": 256},
    ),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A published row as a trial of ours."""

    config: RunConfig
    figure: str
    """What of the replay is compared: a name in ``FIGURES`` of published.py."""
    library: str = ""
    """Version of transformers that the row ran; empty where it runs none."""
    torch: str = ""
    """Version of PyTorch that keeps other things than the installed one does, see ``torch_of``."""
    optimizer: str = ""
    """One that ckbench does not have: none, hf-adamw, hf-adafactor, adam-8bit."""
    workspace_bytes: int = WORKSPACE_BYTES
    outside_bytes: int = 0
    """What the figure holds besides PyTorch's allocator: a CUDA context."""


@dataclass(frozen=True, kw_only=True)
class LayerCase:
    """One decoder layer's forward by itself."""

    arch: str
    config: dict[str, Any]
    seq_len: int
    batch_size: int
    library: str


@dataclass(frozen=True, kw_only=True)
class RatioCase:
    """Two trials, compared."""

    first: Case
    second: Case
    library: str = ""


AnyCase = Case | LayerCase | RatioCase


def case_of(row: Row) -> AnyCase | str:
    """Express a row, or say why not."""
    source = row["id"].partition("-")[0]
    make = SOURCES.get(source)
    if make is None:
        return REASONS.get(row["id"]) or REASONS.get(source) or "no reason is known; the script does not express it"
    return REASONS.get(row["id"]) or make(row)


def _run(model: AnyModel, strategy: str = "none", **train: Any) -> RunConfig:
    return RunConfig(
        study="published",
        model=model,
        train=TrainConfig(**train),
        strategy=specs.parse(strategy),
        run=RunSettings(device="cuda"),
    )


def _library(row: Row, batch: str, loss: str, **arguments: Any) -> CustomConfig:
    arch, columns, more = KEYS[row["model"]]
    config = {key: int(row[column]) for key, column in columns.items() if row[column]} | more
    return CustomConfig(
        build="_published_models:library_model",
        args={"arch": arch, "config": config, **arguments},
        batch=f"_published_models:{batch}",
        loss=f"_published_models:{loss}",
    )


def _gpt2_tutorial(row: Row) -> AnyCase | str:
    """Sum of the tutorial's categories, as its table adds them: without what lay there before the recording."""
    figures = {
        "peak allocated (memory snapshot)": "recorded",
        "activation part of peak": "recorded in forward",
        "backward/gradient part of peak": "recorded in backward",
        "optimizer state": "optimizer state",
    }
    is_full = row["strategy"].startswith("full")
    model = _library(row, "labelled_tokens", "own_loss", attention="sdpa", checkpointing=is_full)
    config = _run(model, batch_size=int(row["batch"]), seq_len=int(row["seq"]))
    return Case(config=config, figure=figures[row["measured_quantity"]], library="4.57.6", workspace_bytes=0)


def _summed_logits(row: Row, library: str) -> AnyCase | str:
    """Forward and backward of the sum of the logits, the answer held: the loop of the sdpa benchmarks."""
    is_half = row["dtype"] == "fp16 (whole model)"
    model = _library(row, "tokens", "sum_of_logits", attention=row["attention"], is_half=is_half)
    config = _run(model, batch_size=int(row["batch"]), seq_len=int(row["seq"]))
    return Case(config=config, figure="allocated", library=library, optimizer="none")


def _trainer(row: Row) -> AnyCase | str:
    """The library's Trainer: gradients are zeroed, not freed; answers are not held; figures are the driver's."""
    model = _library(
        row,
        "classified_tokens",
        "own_loss",
        head="classifier",
        checkpointing=row["strategy"].startswith("full"),
        holds=False,
    )
    batch, _, accumulation = row["batch"].partition(" (grad accum ")
    optimizers = {"AdamW (HF implementation)": "hf-adamw", "Adafactor": "hf-adafactor", "8-bit Adam": "adam-8bit"}
    config = _run(
        model,
        batch_size=int(batch),
        grad_accumulation=int(accumulation.rstrip(")")),
        seq_len=int(row["seq"]),
        precision=AMP.get(row["autocast"], "fp32"),
        set_to_none=False,
    )
    return Case(
        config=config,
        figure="reserved",
        library="4.16.2",
        torch="1.10",
        optimizer=optimizers[row["optimizer"]],
        workspace_bytes=0,
        outside_bytes=MEASURED_CONTEXTS_MIB["V100, PyTorch 1.10, CUDA 11.2"] * MIB_BYTES,
    )


def _torchvision(row: Row) -> AnyCase | str:
    model = CustomConfig(
        build="_published_models:vision_transformer",
        args={"layers": int(row["layers"]), "width": int(row["d_model"]), "heads": int(row["heads"])}
        | {"ffn": int(row["d_ff"])},
        batch="_published_models:images",
        loss="_published_models:sum_of_logits",
    )
    in_backward = "in backward" in row["optimizer"]
    config = _run(
        model,
        batch_size=int(row["batch"]),
        seq_len=197,
        optimizer="adam",
        optimizer_implementation="for-loop" if in_backward else "default",
        optimizer_in_backward=in_backward,
    )
    return Case(config=config, figure="allocated")


def _one_layer(row: Row) -> AnyCase | str:
    if row["model"] not in LAYERS:
        return REASONS["context"]
    arch, sizes = LAYERS[row["model"]]
    config = {"num_hidden_layers": 1, "vocab_size": 1000, "max_position_embeddings": 131072}
    config |= {"num_attention_heads": sizes["heads"], "num_key_value_heads": sizes["kv"]}
    config |= {key: value for key, value in sizes.items() if key not in ("heads", "kv")}
    return LayerCase(arch=arch, config=config, seq_len=int(row["seq"]), batch_size=int(row["batch"]), library="4.52.4")


def _tutorial_ratio(row: Row) -> AnyCase | str:
    del row
    sizes = {"model": "gpt2", "layers": "12", "d_model": "768", "heads": "12", "vocab": "50257"}
    sizes |= {"batch": "4", "seq": "512", "measured_quantity": "peak allocated (memory snapshot)"}
    first, second = (_gpt2_tutorial(sizes | {"strategy": strategy}) for strategy in ("full", "none"))
    assert isinstance(first, Case) and isinstance(second, Case)
    return RatioCase(first=first, second=second, library="4.57.6")


def _gpt3_ratio(row: Row) -> AnyCase | str:
    """Kept bytes of GPT-3's layers with and without the core of attention, dropout and scores as in the paper."""
    del row
    cases = []
    for strategy in ("core-attn", "none"):
        model = ModelConfig(
            n_layers=96,
            d_model=12288,
            n_heads=96,
            vocab_size=51200,
            dropout=0.1,
            attention="eager",
            tie_embeddings=True,
        )
        config = _run(model, strategy, batch_size=1, seq_len=2048, precision="fp16-pure", optimizer="sgd")
        cases.append(Case(config=config, figure="kept by blocks", optimizer="none"))
    return RatioCase(first=cases[0], second=cases[1])


SOURCES: dict[str, Callable[[Row], AnyCase | str]] = {
    "S01": _gpt2_tutorial,
    "S02": _torchvision,
    "S03": _trainer,
    "S04a": lambda row: _summed_logits(row, "4.42.4"),
    "S15": _one_layer,
    "R01": _tutorial_ratio,
    "R07": _gpt3_ratio,
    "N1": lambda row: _summed_logits(row, "4.42.4"),
    "N2": lambda row: _summed_logits(row, "4.46.3"),
    "N3": lambda row: _summed_logits(row, "4.42.4"),
}

_TIME = "a time, not memory"
REASONS = {
    "S08": "sharded over 8 devices by FSDP2, whose gathered weights and buffers are not modelled",
    "S08-11": "the model's sizes are not published beside the figure",
    "S08-12": "the model's sizes are not published beside the figure",
    "S13": _TIME,
    "context": "the size of a CUDA context: a source of ckbench/cards.py, nothing to estimate",
    "R03": _TIME,
    "R05": _TIME,
    "R09": "the parallel layout of the job is not stated",
    "R11": _TIME,
    "R13": _TIME,
    "R15": _TIME,
    "R17": "what counts as an activation is not stated, nor how the library attended",
    "R19": _TIME,
    "R21": "llm.c is no PyTorch program",
    "R23": "the batch size is not stated",
    "R25": "a throughput in fp8 on 32 devices",
    "R27": "neither model nor batch is stated",
    "R29": "a throughput on 8 devices",
}
