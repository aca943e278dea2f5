"""Replays without data against real steps: the same bytes, storage by storage; and what CUDA does otherwise."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ckbench.config import RunConfig
from ckbench.devices.cpu import Cpu
from ckbench.engine.trial import NoObserver
from ckbench.estimate.explain import explain
from ckbench.estimate.replay import replay
from ckbench.estimate.worker import estimate

MakeRun = Callable[..., RunConfig]
FIGURES = ("peak_allocated_bytes", "saved_bytes", "static_bytes", "gradient_bytes", "peak_phase")
WRAPPED_NUMBERS_BYTES = 64
"""Python numbers become tensors of eight bytes inside of operations, below what a dispatch mode sees."""
SCRATCH_RATIO = 0.01
"""What kernels take for themselves at the peak: some norms' and losses' backward a few KiB, bf16 products more."""


def both(config: RunConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Give a steady step's figures, replayed and real."""
    device = Cpu("cpu", 1)
    subject = device.subject(config, 0)
    subject.step(NoObserver())
    return replay(config, "cpu").steady, device.weigh(subject)


@pytest.mark.parametrize(
    "spec", ["none", "per-block", "every-k:3", "nested:2", "recursive", "ffn-only", "attn-only", "full"]
)
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_fp32_is_exact(tiny_run: MakeRun, family: str, spec: str) -> None:
    replayed, real = both(tiny_run(spec, model={"family": family, "n_layers": 4}))
    assert replayed["peak_phase"] == real["peak_phase"]
    for key in FIGURES[:-1]:
        assert abs(replayed[key] - real[key]) <= WRAPPED_NUMBERS_BYTES, key


@pytest.mark.parametrize(
    "settings",
    [
        {"train": {"optimizer": "sgd"}},
        {"train": {"optimizer_implementation": "foreach"}},
        {"train": {"grad_accumulation": 2}},
        {"train": {"set_to_none": False}},
        {"train": {"loss": "chunked_cross_entropy", "loss_chunks": 3}},
        {"model": {"dropout": 0.1}},
        {"model": {"attention": "eager"}},
        {"model": {"attention": "math"}},
        {"model": {"norm_position": "post"}},
        {"model": {"tie_embeddings": True}},
        {"model": {"n_kv_heads": 2}},
        {"model": {"d_ff": (16, 64, 32, 48)}},
    ],
    ids=str,
)
@pytest.mark.parametrize("spec", ["none", "per-block"])
def test_other_models_and_steps(tiny_run: MakeRun, spec: str, settings: dict[str, dict[str, Any]]) -> None:
    replayed, real = both(tiny_run(spec, model=settings.get("model"), train=settings.get("train")))
    assert abs(replayed["saved_bytes"] - real["saved_bytes"]) <= WRAPPED_NUMBERS_BYTES
    peak = real["peak_allocated_bytes"]
    assert -WRAPPED_NUMBERS_BYTES <= peak - replayed["peak_allocated_bytes"] <= SCRATCH_RATIO * peak
    assert replayed["static_bytes"] == real["static_bytes"]


@pytest.mark.parametrize("spec", ["offload", "per-block+offload", "ffn-only+offload"])
@pytest.mark.parametrize("settings", [{}, {"model": {"dropout": 0.1}}, {"train": {"grad_accumulation": 2}}], ids=str)
def test_what_waits_on_the_host_is_not_counted(
    tiny_run: MakeRun, spec: str, settings: dict[str, dict[str, Any]]
) -> None:
    replayed, real = both(tiny_run(spec, model=settings.get("model"), train=settings.get("train")))
    assert abs(replayed["saved_bytes"] - real["saved_bytes"]) <= WRAPPED_NUMBERS_BYTES
    peak = real["peak_allocated_bytes"]
    assert abs(peak - replayed["peak_allocated_bytes"]) <= SCRATCH_RATIO * peak


@pytest.mark.parametrize(
    "train", [{"optimizer_on_host": True}, {"optimizer_in_backward": True}, {"optimizer": "adafactor"}]
)
def test_other_places_and_kinds_of_optimizers(tiny_run: MakeRun, train: dict[str, Any]) -> None:
    replayed, real = both(tiny_run("per-block", train=train))
    assert replayed["static_bytes"] == real["static_bytes"]
    peak = real["peak_allocated_bytes"]
    assert abs(peak - replayed["peak_allocated_bytes"]) <= SCRATCH_RATIO * peak


def test_a_strategy_that_measures_the_blocks_first_is_replayed_too(tiny_run: MakeRun) -> None:
    for kind in ("cpu", "cuda"):
        made = estimate(tiny_run("largest-n:1", model={"family": "llama"}), kind)
        assert made.reason is None and made.saved_bytes


def test_the_mean_squared_loss_holds_on_to_its_differences(tiny_run: MakeRun) -> None:
    """PyTorch makes the mean in the memory of the squared differences, B·S·D numbers, which the scalar then keeps."""
    replayed, real = both(tiny_run("none", model={"head": "none", "vocab_size": None}, train={"loss": "mse"}))
    assert real["saved_bytes"] - replayed["saved_bytes"] == 4 * (2 * 16 * 32 - 1)


@pytest.mark.parametrize("precision", ["bf16", "bf16-pure"])
def test_short_types_keep_exactly_what_is_estimated_and_peak_higher_by_kernels_scratch(
    tiny_run: MakeRun, precision: str
) -> None:
    replayed, real = both(tiny_run("none", model={"family": "llama"}, train={"precision": precision}))
    assert replayed["static_bytes"] == real["static_bytes"]
    assert abs(replayed["saved_bytes"] - real["saved_bytes"]) <= WRAPPED_NUMBERS_BYTES
    assert 0 <= real["peak_allocated_bytes"] - replayed["peak_allocated_bytes"] <= 0.2 * real["peak_allocated_bytes"]


@pytest.mark.parametrize("spec", ["none", "per-block", "nested:2", "ffn-only"])
def test_an_explanation_without_data_is_that_of_a_real_step(tiny_run: MakeRun, spec: str) -> None:
    config = tiny_run(spec, model={"dropout": 0.1})
    assert explain(config, "cpu") == explain(config, "real")


def cuda(config: RunConfig) -> dict[str, Any]:
    return replay(config, "cuda").steady


def test_flash_attention_keeps_no_scores_on_cuda_and_eager_does(tiny_run: MakeRun) -> None:
    """Per block: eager keeps masked scores' softmax (and what dropout-free code keeps of it), B·H·S·S each."""
    B, H, S = 2, 4, 64
    sizes = {"n_layers": 4, "d_model": 32, "n_heads": H}
    step = {"batch_size": B, "seq_len": S, "precision": "bf16-pure"}
    fused = cuda(tiny_run("none", model=sizes, train=step))["saved_bytes"]
    eager = cuda(tiny_run("none", model={**sizes, "attention": "eager"}, train=step))["saved_bytes"]
    assert eager - fused >= 4 * B * H * S * S * 2
    row_sums = 4 * B * H * S * 4
    math_path = cuda(tiny_run("none", model={**sizes, "attention": "math"}, train=step))["saved_bytes"]
    assert math_path > fused + 4 * B * H * S * S * 2 - row_sums


def test_dropout_keeps_one_byte_per_element_on_cuda(tiny_run: MakeRun) -> None:
    """After the FFN, attention's output and the embedding; flash attention keeps no mask."""
    step = {"batch_size": 2, "seq_len": 64, "precision": "bf16-pure"}
    with_, without = (
        cuda(tiny_run("none", model={"n_layers": 4, "d_model": 32, "dropout": p}, train=step)) for p in (0.1, 0.0)
    )
    masks = (2 * 4 + 1) * 2 * 64 * 32
    assert with_["saved_bytes"] - without["saved_bytes"] == masks


def test_autocast_keeps_short_weights_until_it_ends_and_short_products(tiny_run: MakeRun) -> None:
    step = {"batch_size": 2, "seq_len": 64, "optimizer": "sgd"}
    sizes = {"n_layers": 4, "d_model": 64, "vocab_size": 64}
    short, full = (cuda(tiny_run("none", model=sizes, train={**step, "precision": p})) for p in ("bf16", "fp32"))
    assert short["static_bytes"] == full["static_bytes"], "weights stay fp32"
    assert short["gradient_bytes"] == full["gradient_bytes"]
    assert 0.5 * full["saved_bytes"] < short["saved_bytes"] < full["saved_bytes"]
    per_block = cuda(tiny_run("per-block", model=sizes, train={**step, "precision": "bf16"}))
    assert per_block["saved_bytes"] < short["saved_bytes"]


@pytest.mark.parametrize(("implementation", "copies"), [("foreach", 1), ("fused", 0)])
def test_optimizer_temporaries(tiny_run: MakeRun, implementation: str, copies: int) -> None:
    """AdamW foreach takes one copy of the parameters at its peak, fused none."""
    step = {"batch_size": 1, "seq_len": 4, "optimizer_implementation": implementation}
    model = {"n_layers": 4, "d_model": 64}
    steady = cuda(tiny_run("none", model=model, train=step))
    parameter_bytes = steady["gradient_bytes"]
    assert steady["peak_optimizer_bytes"] - steady["static_bytes"] - steady["gradient_bytes"] == pytest.approx(
        copies * parameter_bytes, abs=0.01 * parameter_bytes + 2048
    )


def test_the_study_s_figures(tiny_run: MakeRun) -> None:
    """GPT-2 of 12 layers, 8 x 1024 tokens, bf16 throughout, AdamW foreach: 5402.0 MiB asked for, 5428.0 allocated, 5734
    reserved; 3236.0 with per-block. An independent replay with another tracker gave the same to 0.1 MiB."""
    config = tiny_run(
        "none",
        model={"n_layers": 12, "d_model": 768, "n_heads": 12, "vocab_size": 50257, "tie_embeddings": True},
        train={"batch_size": 8, "seq_len": 1024, "precision": "bf16-pure"},
    )
    made = estimate(config, "cuda")
    mib = [
        round(n_bytes / 2**20, 1)
        for n_bytes in (made.peak_requested_bytes, made.peak_allocated_bytes, made.peak_reserved_bytes)
        if n_bytes is not None
    ]
    assert mib == [5402.0, 5428.0, 5734.0]


def test_bytes_of_a_block_follow_the_formula(tiny_run: MakeRun) -> None:
    """Without dropout a GPT block keeps in bf16, flash attention: 34·s·b·h less the three dropout masks and parts that
    Korthikanti et al. count (arXiv 2205.05198), plus row statistics: 2·(1 + 1 + 3 + 1 + 1 + 1 + 4 + 4)·B·S·D bytes."""
    B, S, D, H = 2, 64, 128, 4
    kept = {}
    for n_layers in (2, 3):
        config = tiny_run(
            "none",
            model={"n_layers": n_layers, "d_model": D, "n_heads": H},
            train={"batch_size": B, "seq_len": S, "precision": "bf16-pure"},
        )
        kept[n_layers] = cuda(config)["saved_bytes"]
    block = kept[3] - kept[2]
    statistics = 4 * (2 * 2 * B * S + B * H * S) + 2 * 8  # norms' means and roots, log-sum-exp, philox state
    assert block == pytest.approx(2 * 16 * B * S * D + statistics, abs=64)
    assert math.isclose(block / (B * S * D), 32, rel_tol=0.02)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_what_cannot_be_replayed_says_so(tiny_run: MakeRun, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckbench.engine import trial

    def needs_data(*_args: Any) -> Any:
        raise RuntimeError("Tensor.item() cannot be called on meta tensors")

    monkeypatch.setattr(trial, "build_loss", lambda *_args: needs_data)
    made = estimate(tiny_run("none"), kind)
    assert made.peak_allocated_bytes is None
    assert made.reason == "RuntimeError: Tensor.item() cannot be called on meta tensors"


def test_nothing_is_left_behind(tiny_run: MakeRun) -> None:
    state, get_state = torch.get_rng_state(), torch.get_rng_state
    replay(tiny_run("per-block", model={"dropout": 0.1}), "cpu")
    assert torch.get_rng_state is get_state
    del state


def _host_measured(config: RunConfig) -> int:
    from ckbench.engine.trial import Trial

    trial = Trial(config, torch.device("cpu"))
    trial.step(NoObserver())
    return int(trial.count()["host_store_peak_bytes"])


@pytest.mark.parametrize(
    ("spec", "train"),
    [
        ("offload", {}),
        ("per-block+offload", {}),
        ("none", {"optimizer_on_host": True}),
        ("none", {"optimizer_on_host": True, "precision": "bf16-pure"}),
        ("none", {"optimizer_on_host": True, "optimizer": "adafactor"}),
        ("per-block+offload", {"optimizer_on_host": True}),
    ],
    ids=str,
)
def test_bytes_on_the_host_are_those_of_a_real_trial(tiny_run: MakeRun, spec: str, train: dict[str, Any]) -> None:
    config = tiny_run(spec, train=train)
    made = estimate(config, "cpu")
    assert made.reason is None
    assert made.host_bytes == _host_measured(config)
    assert made.host_pinned_bytes is None, "beside a processor nothing is pinned"


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor"])
@pytest.mark.parametrize("precision", ["fp32", "bf16-pure"])
def test_an_optimizer_on_the_host_holds_the_same_beside_cuda(tiny_run: MakeRun, optimizer: str, precision: str) -> None:
    """Masters, gradients and state do not depend on the device that computes; on CUDA their buffers are pinned."""
    config = tiny_run("none", train={"optimizer_on_host": True, "optimizer": optimizer, "precision": precision})
    made = estimate(config, "cuda")
    assert made.reason is None
    assert made.host_bytes == _host_measured(config)
    assert made.host_pinned_bytes is not None and made.host_bytes is not None
    assert made.host_bytes <= made.host_pinned_bytes < 2 * made.host_bytes


def test_what_stays_on_the_device_has_no_bytes_on_the_host(tiny_run: MakeRun) -> None:
    for kind in ("cpu", "cuda"):
        made = estimate(tiny_run("per-block"), kind)
        assert made.host_bytes is None and made.host_pinned_bytes is None


def test_a_product_copies_a_factor_that_is_only_expanded_on_cuda() -> None:
    """The gradient of a sum of logits is one number, expanded to (S, V): cuBLAS cannot read that, and gets a copy."""
    from ckbench.estimate.scratch import aten, cuda_bytes

    weight = torch.empty(5, 3, device="meta")
    expanded = torch.empty((), device="meta").expand(7, 5)
    assert cuda_bytes(aten.mm.default, (expanded, weight), {}) == 4 * 7 * 5
    assert cuda_bytes(aten.addmm.default, (torch.empty(3), expanded, weight), {}) == 4 * 7 * 5
    batch = torch.empty(2, 5, 7, device="meta")
    for plain in (batch, batch.transpose(1, 2), batch[:, :, :4], batch[:, 1:3].transpose(1, 2), batch[:1]):
        assert cuda_bytes(aten.bmm.default, (plain, batch), {}) == 0
    assert cuda_bytes(aten.bmm.default, (batch[:, :, ::2], batch), {}) == 4 * 2 * 5 * 4
    assert cuda_bytes(aten.bmm.default, (batch[0].expand(2, 5, 7), batch), {}) == 0


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(1, 96), (3, 96), (4, 5, 24)], ids=str)
def test_a_layer_norm_on_a_processor_takes_what_its_kernel_takes(threads: int, shape: tuple[int, ...]) -> None:
    """The sums of each thread, against the allocator's own events."""
    from torch.profiler import ProfilerActivity, profile

    from ckbench.estimate.scratch import aten, cpu_bytes

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for dtype in (torch.float32, torch.bfloat16):
            x, width = torch.randn(shape, dtype=dtype), [shape[-1]]
            weight, bias = torch.ones(width, dtype=dtype), torch.zeros(width, dtype=dtype)
            _, mean, root = torch.native_layer_norm(x, width, weight, bias, 1e-5)
            for mask in ([True, True, True], [True, False, False], [False, True, True]):
                args = (torch.ones_like(x), x, width, mean, root, weight, bias, mask)
                with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
                    aten.native_layer_norm_backward.default(*args)
                events = found.profiler.kineto_results.events()
                taken = sorted(e.nbytes() for e in events if e.name() == "[memory]" and e.nbytes() > 0)
                results = [x.nbytes] * mask[0] + [weight.nbytes] * (mask[1] + mask[2])
                extra = cpu_bytes(threads)(aten.native_layer_norm_backward.default, args, {})
                assert taken == sorted([*results, *([extra] if extra else [])])
    finally:
        torch.set_num_threads(before)
