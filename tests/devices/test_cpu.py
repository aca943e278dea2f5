"""cpu: a scripted subject whose allocations are known is weighed to the byte; the clock's phases add up."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ckbench import registry
from ckbench.config import RunConfig
from ckbench.devices.base import Holdings, Observer, OutOfMemory
from ckbench.devices.cpu import Cpu
from ckbench.engine.trial import Trial

MakeRun = Callable[..., RunConfig]


def block(n_bytes: int) -> Tensor:
    return torch.empty(n_bytes, dtype=torch.uint8)


def storages(*tensors: Tensor | None) -> dict[int, int]:
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}


class Scripted:
    """A step that allocates what the test says it does, and nothing else."""

    executed_steps = 1
    skipped_steps = 0
    phase = "build"

    def __init__(self, *, keeps_gradient: bool = False) -> None:
        self.weight = block(10_000)
        self.batch = block(2_000)
        self.gradient: Tensor | None = block(5_000) if keeps_gradient else None
        self.keeps_gradient = keeps_gradient

    def step(self, observer: Observer) -> None:
        observer.at("forward")
        kept = block(1_000_000)
        block(400_000)
        observer.at("head")
        logits = block(300_000)
        observer.at("turn")
        block(90_000)
        del logits
        observer.at("blocks")
        if self.gradient is None:
            self.gradient = block(5_000)
        block(700_000)
        del kept
        observer.at("optimizer")
        block(100)
        if not self.keeps_gradient:
            self.gradient = None
        observer.at("end")

    observed_step = step

    def holdings(self) -> Holdings:
        return Holdings(static=storages(self.weight), gradients=storages(self.gradient), inputs=storages(self.batch))

    def describe(self) -> dict[str, Any]:
        return {}

    count = parity = describe


@pytest.fixture
def cpu() -> Cpu:
    return Cpu("cpu", 1)


def test_known_allocations_to_the_byte(cpu: Cpu) -> None:
    start = 12_000
    got = cpu.weigh(Scripted())
    timeline = got.pop("live_bytes_timeline")
    assert max(n_bytes for _, n_bytes, _ in timeline) == start + 1_705_000
    assert [timeline[0], timeline[-1][0]] == [[0.0, start, 0], 1.0]
    assert got == {
        "static_bytes": 10_000,
        "gradient_bytes": 5_000,
        "saved_bytes": 1_300_000,
        "peak_allocated_bytes": start + 1_705_000,
        "peak_phase": "backward",
        "peak_forward_bytes": start + 1_400_000,
        "peak_loss_bytes": start + 1_390_000,
        "peak_backward_bytes": start + 1_705_000,
        "peak_optimizer_bytes": start + 5_100,
        "activation_peak_bytes": 2_000 + 1_700_000,
    }


def test_gradients_held_from_the_step_before(cpu: Cpu) -> None:
    start = 17_000
    got = cpu.weigh(Scripted(keeps_gradient=True))
    assert got["peak_allocated_bytes"] == start + 1_700_000
    assert got["gradient_bytes"] == 5_000
    assert got["activation_peak_bytes"] == 2_000 + 1_700_000


def test_weighing_twice_gives_the_same(cpu: Cpu) -> None:
    subject = Scripted()
    assert cpu.weigh(subject) == cpu.weigh(subject)


def test_kernel_temporaries_are_seen(cpu: Cpu) -> None:
    """A matrix product of transposed operands copies nothing we hold, yet what it returns and needs is counted."""

    class Product(Scripted):
        def observed_step(self, observer: Observer) -> None:
            observer.at("forward")
            x = torch.ones(100, 100)
            (x.t() + x).softmax(0)
            observer.at("turn")
            observer.at("optimizer")
            observer.at("end")

    got = cpu.weigh(Product())
    assert got["saved_bytes"] == 40_000
    assert got["peak_forward_bytes"] >= 12_000 + 120_000


def test_weighing_a_real_trial_is_repeatable(cpu: Cpu, tiny_run: MakeRun) -> None:
    trial = Trial(tiny_run("per-block", model={"dropout": 0.1}), cpu.torch_device)
    trial.step(cpu.clock())
    first, second = cpu.weigh(trial), cpu.weigh(trial)
    assert first == second
    parameters = 4 * sum(p.numel() for p in trial.module.parameters())
    n_steps = len(list(trial.module.parameters()))
    assert first["static_bytes"] == 3 * parameters + 4 * n_steps, "weights, two moments, and a step count each"
    assert first["gradient_bytes"] == parameters
    assert set(first) == {
        "static_bytes",
        "gradient_bytes",
        "saved_bytes",
        "peak_allocated_bytes",
        "peak_phase",
        "peak_forward_bytes",
        "peak_loss_bytes",
        "peak_backward_bytes",
        "peak_optimizer_bytes",
        "activation_peak_bytes",
        "live_bytes_timeline",
    }
    shares, live, phases = zip(*first["live_bytes_timeline"], strict=True)
    assert len(shares) <= 200 and list(shares) == sorted(shares)
    assert max(live) == first["peak_allocated_bytes"], "the peak is among the points"
    assert list(phases) == sorted(phases) and set(phases) == {0, 1, 2, 3}


def test_a_part_of_the_step_in_the_head_is_the_heads(cpu: Cpu, tiny_run: MakeRun) -> None:
    """A large vocabulary moves the peak to head and loss; a small one leaves it in the blocks."""
    owners = []
    for vocab_size in (16, 4096):
        config = tiny_run("per-block", model={"vocab_size": vocab_size}, train={"optimizer": "sgd"})
        trial = Trial(config, cpu.torch_device)
        trial.step(cpu.clock())
        owners.append(cpu.weigh(trial)["peak_phase"])
    assert owners == ["backward", "loss"]


def test_clock_phases_add_up_to_the_step(cpu: Cpu, tiny_run: MakeRun) -> None:
    for micro_batches in (1, 3):
        trial = Trial(tiny_run("per-block", train={"grad_accumulation": micro_batches}), cpu.torch_device)
        clock = cpu.clock()
        trial.step(clock)
        assert len(clock.collect()) == 1
        begin = time.perf_counter()
        for _ in range(5):
            trial.step(clock)
        wall = time.perf_counter() - begin
        times = clock.collect()
        assert len(times) == 5 and clock.collect() == []
        for step in times:
            parts = (step.forward_s, step.backward_s, step.optimizer_s)
            assert all(part > 0 for part in parts)
            assert sum(parts) == pytest.approx(step.step_s, rel=0.01)
        assert sum(step.step_s for step in times) <= wall


def test_clock_books_each_phase_where_it_was_spent(cpu: Cpu) -> None:
    clock = cpu.clock()
    for event, wait in (("forward", 0.01), ("turn", 0.03), ("forward", 0.01), ("turn", 0.03), ("optimizer", 0.005)):
        clock.at(event)
        time.sleep(wait)
    clock.at("end")
    (step,) = clock.collect()
    assert 0.02 <= step.forward_s < step.backward_s
    assert step.backward_s >= 0.06 and step.optimizer_s >= 0.005
    assert step.step_s == pytest.approx(step.forward_s + step.backward_s + step.optimizer_s)


GIB = 2**30


@pytest.mark.parametrize(
    ("error", "numbers"),
    [
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: "
                "you tried to allocate 4398046511104 bytes. Error code 12 (Cannot allocate memory)"
            ),
            OutOfMemory(requested_bytes=4398046511104),
        ),
        (
            RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 123456 bytes."),
            OutOfMemory(requested_bytes=123456),
        ),
        (MemoryError(), OutOfMemory()),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
        (ValueError("you tried to allocate 5 bytes"), None),
        (KeyboardInterrupt(), None),
    ],
)
def test_out_of_memory_is_recognised(cpu: Cpu, error: BaseException, numbers: OutOfMemory | None) -> None:
    assert cpu.out_of_memory(error) == numbers


def test_a_real_allocation_that_cannot_be(cpu: Cpu) -> None:
    with pytest.raises(RuntimeError) as told:
        torch.empty(2**46, dtype=torch.float64)
    found = cpu.out_of_memory(told.value)
    assert found is not None
    assert found.requested_bytes == 2**49


def test_threads_name_and_label(cpu: Cpu) -> None:
    assert torch.get_num_threads() == 1
    assert cpu.label() == "cpu"
    assert cpu.name() and cpu.facts()["cpu_capability"]
    assert cpu.device_used_bytes() is None
    assert registry.load("devices", "cpu") is Cpu


def test_resident_size_is_reported_beside(cpu: Cpu) -> None:
    cpu.reset_peaks()
    peaks = cpu.peaks()
    assert set(peaks) == {"host_peak_bytes"}
    assert peaks["host_peak_bytes"] is None or peaks["host_peak_bytes"] > 50 * 2**20


def test_the_subject_is_a_trial_on_this_device(cpu: Cpu, tiny_run: MakeRun) -> None:
    subject = cpu.subject(tiny_run("sqrt"), 0)
    subject.step(cpu.clock())
    assert subject.executed_steps == 1
