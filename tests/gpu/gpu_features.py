"""What gpu_check tries of strategies, families, training steps and estimates on a real CUDA device."""

import dataclasses
from typing import Any

from ckbench import registry, specs
from ckbench.cards import workspace_bytes
from ckbench.config import ModelConfig, RunConfig, RunSettings, TrainConfig, model_class
from ckbench.forecast import card_of
from ckbench.records import Record
from ckbench.units import format_mib

BLOCKS: dict[str, Any] = {"n_layers": 4, "d_model": 128, "n_heads": 4, "dropout": 0.1}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": {**BLOCKS, "family": "gpt", "vocab_size": 512},
    "llama": {**BLOCKS, "family": "llama", "vocab_size": 512, "n_kv_heads": 2},
    "bert": {**BLOCKS, "family": "bert", "vocab_size": 512},
    "vit": {**BLOCKS, "family": "vit", "image_size": 32, "patch_size": 4, "n_classes": 10},
    "gpt reversible": {**BLOCKS, "family": "gpt", "vocab_size": 512, "residual": "reversible"},
    "hf gpt2": {
        "family": "hf",
        "arch": "gpt2",
        "n_layers": 4,
        "config": {"n_embd": 128, "n_head": 4, "vocab_size": 512, "n_positions": 64},
    },
}
EXTRA_SPECS = ("per-block,skip_last", "per-block,reentrant", "every-k:2,early_stop=false", "per-block+offload")
ARGUMENTS: dict[type, Any] = {int: 2, str: "matmul+attention", float: 0.5}
STEPS: dict[str, dict[str, Any]] = {
    "adamw fused": {"optimizer_implementation": "fused"},
    "adamw foreach": {"optimizer_implementation": "foreach"},
    "adafactor": {"optimizer": "adafactor"},
    "optimizer in backward": {"optimizer_in_backward": True},
    "optimizer on host": {"optimizer_on_host": True},
    "chunked loss": {"loss": "chunked_cross_entropy", "loss_chunks": 3},
    "four micro-batches": {"grad_accumulation": 4},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "tf32": {"precision": "tf32"},
    "bf16-pure": {"precision": "bf16-pure"},
    "compiled": {"compile": True},
    "a cap on what is offloaded": {"offload_cap_bytes": 2**20},
}
AGREED = ("exact", "within_noise", "within_tolerance")
NEAR = 0.02
"""An estimate is near if its allocated peak is within this share of the measured one."""


def require(is_so: bool, complaint: str) -> None:
    """Fail the check that is running, unless it is so."""
    if not is_so:
        raise AssertionError(complaint)


def configure(spec: Any, device: str, model: dict[str, Any], **train: Any) -> RunConfig:
    """Make a trial's configuration."""
    made = model_class(model["family"])(**model)
    step = {"batch_size": 4, "seq_len": made.own_seq_len() or 64, **train}
    return RunConfig(
        study="gpu_check",
        model=made,
        train=TrainConfig(**step),
        strategy=specs.parse(spec),
        run=RunSettings(device=device, timeout_s=120.0, max_seconds=1.0, max_steps=20),
    )


def pairs() -> list[tuple[str, str]]:
    """Pair every strategy with every family it is for; what is compiled is tried by itself."""
    labels = list(EXTRA_SPECS)
    for name in registry.names("strategies"):
        known = dataclasses.fields(registry.load("strategies", name))
        if all(field.type is not float for field in known):
            labels.append(specs.parse({"name": name, **{f.name: ARGUMENTS[f.type] for f in known}}).label)
    return [(family, label) for family in FAMILIES for label in labels if _is_for(specs.parse(label).name, family)]


def _is_for(strategy: str, family: str) -> bool:
    if strategy in ("reversible", "hf-native", "core-attn"):
        return {
            "reversible": family == "gpt reversible",
            "hf-native": family == "hf gpt2",
            "core-attn": family != "hf gpt2",
        }[strategy]
    return True


def strategy_does_no_harm(spec: str, family: str, device: str) -> str:
    """Gradients equal those of none, and what runs again is what the plan says."""
    import torch

    from ckbench.engine.parity import check_parity
    from ckbench.engine.trial import NoObserver, Trial

    torch_device = torch.device(device)
    config = configure(spec, device, FAMILIES[family])
    trial = Trial(config, torch_device)
    trial.step(NoObserver())
    counted, described, plan = trial.count(), trial.describe(), trial.applied.plan
    planned, regions = described["block_calls_backward_planned"], plan.region_calls_backward()
    require(counted["block_calls_backward"] == planned, f"{counted['block_calls_backward']} block calls, not {planned}")
    require(counted["region_calls_backward"] == regions, f"{counted['region_calls_backward']} regions, not {regions}")
    result = check_parity(config, torch_device, trial.release, plan)
    require(result["parity"] in AGREED, result["parity_detail"])
    return f"{result['parity']}, {planned} block calls again"


def step_ends_ok(session: Any, name: str) -> str:
    """A trial of another training step ends ok, with and without a strategy."""
    spec = "per-block+offload" if "offloaded" in name else "per-block"
    record: Record = session.run(configure(spec, session.device, FAMILIES["gpt"], **STEPS[name]))
    require(record.status == "ok", f"{record.status} in {record.failed_phase}: {record.message}")
    require(record.parity in AGREED, str(record.parity_detail))
    host = "" if record.host_store_peak_bytes is None else f", host {format_mib(record.host_store_peak_bytes)} MiB"
    return f"{record.optimizer_implementation}, parity {record.parity}{host}"


def estimates_are_near(records: list[Record], card: str) -> str:
    """The allocated peak of every trial of the study, estimated without the device, is near the measured one."""
    from ckbench.estimate.worker import estimate

    told, far = [], []
    for record in records:
        if record.round != 0 or record.peak_allocated_bytes is None:
            continue
        config = RunConfig(
            study=record.study,
            model=ModelConfig(**record.model),
            train=TrainConfig(**record.train),
            strategy=specs.parse(record.strategy),
            run=RunSettings(device="cuda"),
        )
        made = estimate(config, "cuda", workspace_bytes(card_of(card)))
        require(made.peak_allocated_bytes is not None, f"{record.strategy}: {made.reason}")
        error = (made.peak_allocated_bytes or 0) / record.peak_allocated_bytes - 1
        reserved = (made.peak_reserved_bytes or 0) / (record.peak_reserved_bytes or 1) - 1
        told.append(f"{record.strategy} {error:+.2%} (reserved {reserved:+.1%})")
        if abs(error) > NEAR:
            far.append(told[-1])
    require(not far, f"more than {NEAR:.0%} off: {'; '.join(far)}")
    return "; ".join(told)
