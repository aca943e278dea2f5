"""Reports of wrong or misread memory: every figure means one thing, repeats, and is the one the formula expects."""

import gc
import json
import math
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ckbench.engine.trial as trial_module
from ckbench import host, reporting
from ckbench.compare import compare, group_id
from ckbench.devices import _nvml
from ckbench.devices.cuda import Cuda
from ckbench.doubts import doubts
from ckbench.engine.trial import NoObserver
from ckbench.engine.worker import blank_record
from ckbench.estimate.replay import replay as replay_without_data
from ckbench.estimate.worker import estimate
from ckbench.table import build
from tests.known.conftest import Run
from tests.known.fake_cuda import FakeCuda
from tests.known.trials import MIB, config, guard, guard_flops, record_of, trial, weigh
from tests.sample_records import record, study

CLOSE = 0.01
"""Tolerance of guard figures where our model is that of the report."""
NEAR = 0.10
"""Tolerance where we measure up to a tenth less than was reported; the loop behind those figures is not known."""


def test_mem_01_allocated_reserved_process_and_device_are_four_columns() -> None:
    """Their order on a GPU: the check `allocated <= reserved <= NVML` of tests/gpu/gpu_check.py."""
    bytes_ = {"peak_reserved_bytes": 100 * MIB, "nvml_process_bytes": 600 * MIB, "nvml_device_bytes": 900 * MIB}
    table = build(compare([record("none", **bytes_, nvml_device_before_bytes=200 * MIB)]))
    shown = dict(zip([column.head for column in table.columns], table.cells()[0], strict=True))
    heads = ("peak MiB", "reserved MiB", "NVML process MiB", "NVML device MiB", "NVML grown MiB")
    assert [shown[head] for head in heads] == ["80.0", "100.0", "600.0", "900.0", "700.0"]


def test_mem_02_a_reset_keeps_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda(monkeypatch)
    device = Cuda("cuda", None)
    fake.hold(0, current=30 * MIB, peak=37 * MIB)
    device.reset_peaks()
    assert device.peaks()["peak_allocated_bytes"] == 30 * MIB
    fields = weigh(trial("none", optimizer="adamw"))
    assert fields["peak_allocated_bytes"] >= fields["static_bytes"] + fields["gradient_bytes"] > 0


def test_mem_03_an_earlier_trial_leaves_nothing_in_a_later_peak(ckbench: Run, replay: Callable[..., str]) -> None:
    replay()  # writes study.yaml
    quick = ("-s", "none", "--device", "cpu", "--rounds", "1")
    quick = (
        *quick,
        "--set=run.min_steps=2",
        "--set=run.max_steps=2",
        "--set=run.parity=false",
        "--set=run.warmup_steps=0",
    )

    def peaks(layers: str) -> dict[int, int]:
        out = ckbench("sweep", "study.yaml", "--layers", layers, *quick, "--out", layers, "--format", "json").out
        return {row["model"]["n_layers"]: row["peak_allocated_bytes"] for row in json.loads(out)}

    both, alone = peaks("8,2"), peaks("2")
    assert both[2] == alone[2] < both[8]


def test_mem_05_adamw_state_is_in_the_steady_peak_to_the_byte() -> None:
    fields = {name: weigh(trial("none", optimizer=name)) for name in ("adamw", "sgd")}
    parameters = [p for p in trial().module.parameters()]
    state = 2 * 4 * sum(p.numel() for p in parameters)
    counters = 4 * len(parameters)  # a step number for each
    assert fields["adamw"]["static_bytes"] - fields["sgd"]["static_bytes"] == state + counters
    assert fields["adamw"]["peak_allocated_bytes"] >= fields["sgd"]["peak_allocated_bytes"] + state
    measured = record_of("none")
    assert measured.warmup_steps_done == 1  # the peak is taken after one whole step, asked for or not
    assert measured.first_step_peak_bytes is not None and measured.peak_allocated_bytes is not None
    assert measured.first_step_peak_bytes <= measured.peak_allocated_bytes


def test_mem_07_a_multi_tensor_optimizer_needs_the_parameters_once_more() -> None:
    """On a GPU the default is foreach; which one ran is in every record."""
    above = {}
    for implementation in ("for-loop", "foreach", "fused"):
        size = {"d_model": 64, "n_layers": 2, "batch_size": 1}
        built = trial("none", **size, optimizer="adamw", optimizer_implementation=implementation)
        assert built.describe()["optimizer_implementation"] == implementation
        fields = weigh(built)
        above[implementation] = fields["peak_optimizer_bytes"] - fields["static_bytes"] - fields["gradient_bytes"]
    parameters = 4 * sum(p.numel() for p in built.module.parameters())
    assert above["foreach"] == pytest.approx(parameters, rel=0.01)
    assert above["fused"] < above["for-loop"] < 0.5 * parameters
    assert record_of("none").optimizer_implementation == "for-loop"


def test_mem_08_a_peak_in_the_optimizer_is_said_to_be_out_of_reach() -> None:
    size = {"d_model": 256, "n_layers": 2, "batch_size": 1, "seq_len": 8, "optimizer": "adamw"}
    comparison = compare([record_of(spec, **size).to_json() for spec in ("none", "per-block")])
    for row in comparison.rows:
        assert row.values["peak_phase"] == "optimizer"
    assert comparison.rows[1].values["peak_change_ratio"] == 0
    told = [str(doubt) for doubt in doubts(comparison)]
    assert any(t.startswith("per-block: the peak belongs to the optimizer; activation strategies cannot") for t in told)


def test_mem_09_gradients_that_are_kept_cost_their_bytes() -> None:
    fields = {kept: weigh(trial("none", vocab_size=2048, optimizer="sgd", set_to_none=not kept)) for kept in (0, 1)}
    assert fields[0]["peak_phase"] == fields[1]["peak_phase"] == "loss"
    more = fields[1]["peak_allocated_bytes"] - fields[0]["peak_allocated_bytes"]
    assert more == fields[1]["gradient_bytes"] == fields[0]["gradient_bytes"]
    assert record_of().train["set_to_none"] is True
    built = trial()
    built.step(NoObserver())
    assert all(p.grad is None for p in built.module.parameters())


def test_mem_10_no_logits_live_into_the_next_step() -> None:
    built = trial("none", vocab_size=2048)
    logits: list[weakref.ref[Tensor]] = []
    alive_at_start: list[int] = []
    built.module.head.register_forward_hook(lambda module, args, output: logits.append(weakref.ref(output)))

    class Watcher:
        def at(self, event: str) -> None:
            if event == "forward":
                alive_at_start.append(sum(ref() is not None for ref in logits))

    for _ in range(4):
        built.step(Watcher())
    assert (len(logits), alive_at_start) == (4, [0, 0, 0, 0])
    assert len({weigh(built, 0)["peak_allocated_bytes"] for _ in range(3)}) == 1


def test_mem_11_a_large_vocabulary_owns_the_peak() -> None:
    none, per_block = guard("none", vocab_size=32000), guard("per-block", vocab_size=32000)
    assert (none["peak_phase"], per_block["peak_phase"]) == ("loss", "loss")
    assert none["above_static"] / MIB == pytest.approx(213.2, rel=CLOSE)
    assert per_block["above_static"] / MIB == pytest.approx(198.1, rel=CLOSE)
    assert 1 - per_block["above_static"] / none["above_static"] == pytest.approx(0.07, abs=0.005)
    figures = {key: per_block[key] for key in ("peak_phase", "saved_bytes", "activation_peak_bytes")}
    told = [str(doubt) for doubt in doubts(compare([record("none"), record("per-block", **figures)]))]
    assert any("the peak belongs to the head and loss" in t and "cannot lower that" in t for t in told)


def test_mem_12_a_lower_peak_counts_only_with_the_gradients_of_none() -> None:
    records = [record_of(spec, freeze_embedding=True) for spec in ("none", "per-block", "per-block,reentrant")]
    assert [r.status for r in records] == ["ok", "ok", "error"]
    lost = compare([r.to_json() for r in records]).rows[-1]
    assert lost.label == "per-block,reentrant"
    assert lost.values["peak_allocated_bytes"] is None and lost.values["peak_change_ratio"] is None
    for spec, mib, tolerance in (("none", 18.35, CLOSE), ("per-block", 5.58, NEAR)):
        fields = guard(spec, tie_embeddings=False, freeze_embedding=True)
        assert fields["above_static"] / MIB == pytest.approx(mib, rel=tolerance)


def test_mem_14_recomputed_tensors_are_dropped() -> None:
    none, per_block = guard("none")["above_static"], guard("per-block")["above_static"]
    assert none / MIB == pytest.approx(18.35, rel=CLOSE)
    assert per_block / MIB == pytest.approx(5.58, rel=NEAR)
    assert none / per_block > 2.5


def test_mem_15_one_region_over_the_whole_stack_saves_nothing() -> None:
    none, full = guard("none"), guard("full")
    assert full["above_static"] / MIB == pytest.approx(18.36, rel=CLOSE)
    assert f"{full['above_static'] / none['above_static'] - 1:+.1%}" == "+0.0%"
    assert full["saved_bytes"] < 0.1 * none["saved_bytes"]  # the other column: what is held at the turn
    assert guard_flops("full") / guard_flops("none") == pytest.approx(1.32, rel=CLOSE)


@pytest.mark.parametrize("n_layers", [7, 8])
def test_mem_17_recomputing_the_last_block_frees_nothing(n_layers: int) -> None:
    all_blocks = guard("per-block", n_layers=n_layers)
    but_last = guard("per-block,skip_last", n_layers=n_layers)
    assert but_last["above_static"] == pytest.approx(all_blocks["above_static"], rel=0.002)
    assert (all_blocks["block_calls_backward"], but_last["block_calls_backward"]) == (n_layers, n_layers - 1)
    if n_layers == 7:
        assert all_blocks["above_static"] / MIB == pytest.approx(5.20, rel=NEAR)


def test_mem_19_one_block_in_k_and_k_blocks_in_one_region_are_two_strategies() -> None:
    one_in_two, two_in_one = guard("one-in-k:2")["above_static"], guard("every-k:2")["above_static"]
    assert one_in_two / MIB == pytest.approx(10.85, rel=CLOSE)
    assert two_in_one / MIB == pytest.approx(7.41, rel=NEAR)
    per_block = trial("per-block").applied.plan
    assert trial("one-in-k:1").applied.plan == trial("every-k:1").applied.plan == per_block
    spans = {
        spec: [(r.start, r.stop) for r in trial(spec).applied.plan.regions] for spec in ("one-in-k:9", "every-k:9")
    }
    assert spans == {"one-in-k:9": [(0, 1)], "every-k:9": [(0, 3)]}
    spans = {
        spec: [(r.start, r.stop) for r in trial(spec).applied.plan.regions] for spec in ("one-in-k:2", "every-k:2")
    }
    assert spans == {"one-in-k:2": [(0, 1), (2, 3)], "every-k:2": [(0, 2), (2, 3)]}


def _estimated_block_bytes(spec: str = "none", **size: object) -> int:
    """Give what one block keeps in a CUDA step, replayed without data."""
    kept = [
        replay_without_data(config(spec, n_layers=n, optimizer="sgd", precision="fp16-pure", **size), "cuda")
        for n in (2, 3)
    ]
    return int(kept[1].steady["saved_bytes"] - kept[0].steady["saved_bytes"])


def test_mem_20_what_a_block_keeps_is_counted_and_formulas_are_compared_with_it() -> None:
    """34 sbh + 5 a s s b bytes (arXiv 2205.05198): true of eager attention with dropout, and of nothing else."""
    B, S, D, H = 2, 128, 64, 4
    size = {"batch_size": B, "seq_len": S, "d_model": D, "n_heads": H, "vocab_size": 64}
    formula = 34 * S * B * D + 5 * H * S * S * B
    norms = 2 * 2 * 4 * B * S  # mean and reciprocal root of two norms in fp32, which the formula leaves out
    left_out = norms + S * S  # and the causal mask
    assert _estimated_block_bytes(**size, attention="eager", dropout=0.1) == formula + left_out
    without_dropout = formula + left_out - 3 * H * S * S * B - 2 * S * B * D
    assert _estimated_block_bytes(**size, attention="eager") == without_dropout
    fused = _estimated_block_bytes(**size, dropout=0.1)
    row_sums = 4 * B * H * S
    assert 0 <= fused - (34 * S * B * D + norms + row_sums) < 0.001 * fused, "fused attention keeps nothing of S x S"
    assert _estimated_block_bytes("core-attn", **size, attention="eager", dropout=0.1) < 0.5 * formula


@pytest.mark.parametrize(("attention", "ratios"), [("auto", (2.00, 2.00)), ("eager", (2.41, 2.68))])
def test_mem_23_fused_attention_is_linear_in_the_sequence(attention: str, ratios: tuple[float, float]) -> None:
    size = {"d_model": 64, "n_heads": 4, "attention": attention, "optimizer": "sgd"}

    def of_a_block(seq_len: int) -> int:
        one, two = (weigh(trial("none", n_layers=n, seq_len=seq_len, **size), 0)["saved_bytes"] for n in (1, 2))
        return int(two - one)

    kept = [of_a_block(seq_len) for seq_len in (64, 128, 256)]
    assert (kept[1] / kept[0], kept[2] / kept[1]) == pytest.approx(ratios, abs=0.005)


@pytest.mark.parametrize(("attention", "is_linear"), [("auto", True), ("eager", False)])
def test_mem_23_so_is_an_estimate_for_a_gpu(attention: str, is_linear: bool) -> None:
    size = {"batch_size": 2, "d_model": 64, "n_heads": 4, "vocab_size": 64, "attention": attention}
    kept = [_estimated_block_bytes(**size, seq_len=seq_len) for seq_len in (128, 256)]
    assert (kept[1] / kept[0] == pytest.approx(2.0, abs=0.005)) is is_linear


def test_mem_25_a_tied_embedding_is_counted_once() -> None:
    size = {"vocab_size": 128, "d_model": 32, "optimizer": "sgd"}
    tied, apart = (trial("none", **size, tie_embeddings=is_tied) for is_tied in (True, False))
    assert apart.describe()["n_parameters"] - tied.describe()["n_parameters"] == 45344 - 41248 == 128 * 32
    static = [sum(each.holdings().static.values()) for each in (tied, apart)]
    assert static[1] - static[0] == 4 * 128 * 32
    assert tied.count()["flops_forward"] == apart.count()["flops_forward"]


def test_mem_27_reserved_bytes_of_two_allocator_settings_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the settings in force stand beside them: allocator_settings of the environment."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    allocator = record_of().environment["allocator"]
    assert allocator == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    comparison = compare([*study(), record("per-block", session_id="s2", environment__allocator=allocator)])
    odd = next(row for row in comparison.rows if row.values["environment"]["allocator"])
    assert odd.values["baseline"] == "per-block" and len(comparison.baselines) == 2
    assert any("different allocator settings" in str(doubt) for doubt in doubts(comparison))


@pytest.mark.parametrize("spec", ["per-block", "nested:2"])
def test_mem_32_nothing_waits_for_the_cyclic_collector(spec: str) -> None:
    built = trial(spec)
    alive: list[weakref.ref[Tensor]] = []
    for module in built.module.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda module, args, output: alive.append(weakref.ref(output)))
    built.step(NoObserver())
    gc.collect()
    gc.disable()
    try:
        first = weigh(built, 0)["peak_allocated_bytes"]
        for _ in range(48):  # 50 with the weighed ones
            alive.clear()
            built.step(NoObserver())
            assert len(alive) > 10 and all(ref() is None for ref in alive)
        assert weigh(built, 0)["peak_allocated_bytes"] == first
    finally:
        gc.enable()


def test_mem_33_every_read_names_the_device_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda(monkeypatch)
    monkeypatch.setattr(_nvml, "read", lambda uuid: _nvml.Reading())
    device = Cuda("cuda:1", None)
    device.reset_peaks()
    fake.hold(1, current=MIB, peak=5 * MIB)
    fields = device.peaks()
    assert (device.label(), fields["peak_allocated_bytes"]) == ("cuda:1", 5 * MIB)
    assert set(fake.asked) == {1}


def test_mem_34_what_a_cpu_has_not_is_unknown_and_never_zero() -> None:
    records = [record_of(spec, parity=False).to_json() for spec in ("none", "per-block")]
    fields = [key for key in records[0] if key.startswith(("nvml_", "peak_reserved", "peak_active", "allocator_"))]
    assert len(fields) >= 6
    assert all(r[key] is None for r in records for key in fields)
    assert "reserved" not in reporting.draw(records) and "NVML" not in reporting.draw(records)
    row = json.loads(reporting.draw(records, format_="json"))[1]
    assert row["peak_reserved_bytes"] is None and row["nvml_device_grown_bytes"] is None
    assert row["peak_change_ratio"] < 0


def test_mem_35_the_resident_size_is_read_in_the_units_of_the_system() -> None:
    assert host.rss_bytes(1048576, "darwin") == MIB
    assert host.rss_bytes(1048576, "linux") == 1024 * MIB


def test_mem_44_without_an_executed_update_there_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    def scale_from(scale: float) -> None:
        monkeypatch.setattr(trial_module, "_build_scaler", lambda *_: torch.amp.GradScaler("cpu", init_scale=scale))

    scale_from(2.0**40)  # too large for fp16; it is halved until the gradients are finite
    record = record_of("none", precision="fp16", parity=False)
    assert record.status == "ok" and (record.skipped_optimizer_steps or 0) > 10
    assert record.warmup_steps_done == (record.skipped_optimizer_steps or 0) + 1
    scale_from(2.0**120)
    record = record_of("none", precision="fp16")
    assert (record.status, record.peak_allocated_bytes, record.step_s_median) == ("error", None, None)
    assert "no optimizer step was executed in 50 warm-up steps" in (record.message or "")


def test_mem_29_compiled_and_eager_runs_are_apart_and_only_eager_ones_are_estimated() -> None:
    eager, compiled = config("per-block"), config("per-block", compile=True)
    assert group_id(blank_record(eager, 0).to_json()) != group_id(blank_record(compiled, 0).to_json())
    assert eager.configuration_id() != compiled.configuration_id()
    told = estimate(compiled, "cuda")
    assert told.peak_allocated_bytes is None
    assert told.reason == "what compiled blocks keep is decided by the compiler, which needs the device"


def test_mem_36_pinned_buffers_take_the_next_power_of_two() -> None:
    """Widths of 48: three quarters of a power of two, or 9/16 of one."""
    size = {"d_model": 48, "n_heads": 4, "vocab_size": 64}
    replayed = replay_without_data(config("none", **size, optimizer="sgd", optimizer_on_host=True), "cuda")
    sizes = [4 * parameter.numel() for parameter in replayed.trial.module.parameters()]
    assert replayed.host_bytes == 2 * sum(sizes), "masters and gradients"
    assert replayed.host_pinned_bytes == 2 * sum(2 ** math.ceil(math.log2(n_bytes)) for n_bytes in sizes)
    assert replayed.host_pinned_bytes > 1.3 * replayed.host_bytes
