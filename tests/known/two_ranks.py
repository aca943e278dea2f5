"""A data-parallel job of two CPU processes (gloo): the gradients of strategies beside those of none, on each rank."""

import multiprocessing
import socket
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel

from ckbench import specs
from ckbench.engine.checkpointing import AppliedPlan
from ckbench.launch import Launcher
from ckbench.models.base import BuiltModel
from ckbench.plan import StackShape

N_RANKS = 2
Build = Callable[[], BuiltModel]
Jobs = dict[str, tuple[Build, tuple[str, ...]]]
"""By name: how to build a model, and the strategies to run it under."""
Result = dict[str, Any]


def compare(jobs: Jobs) -> list[dict[str, dict[str, Result]]]:
    """Give, per rank, model and strategy, whether gradients equal those of none bit by bit, and the error if any."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context: Any = multiprocessing.get_context(Launcher().start_method)  # the fork server has PyTorch loaded
    queue = context.SimpleQueue()
    ranks = [context.Process(target=_rank, args=(rank, port, jobs, queue)) for rank in range(N_RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
        assert process.exitcode == 0
    results = dict(queue.get() for _ in ranks)
    return [results[rank] for rank in range(N_RANKS)]


def _rank(rank: int, port: int, jobs: Jobs, queue: Any) -> None:
    torch.set_num_threads(1)
    store = distributed.TCPStore("127.0.0.1", port, N_RANKS, is_master=rank == 0)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=N_RANKS)
    try:
        queue.put((rank, {name: _beside_none(build, listed, rank) for name, (build, listed) in jobs.items()}))
    finally:
        distributed.destroy_process_group()


def _beside_none(build: Build, listed: tuple[str, ...], rank: int) -> dict[str, Result]:
    reference, _ = _step(build, "none", rank)
    results: dict[str, Result] = {}
    for spec in listed:
        found, error = _step(build, spec, rank)
        equal = len(found) == len(reference) > 0 and all(
            torch.equal(a, b) for a, b in zip(reference, found, strict=True)
        )
        results[spec] = {"equal": equal, "error": error}
    return results


def _step(build: Build, spec: str, rank: int) -> tuple[list[Tensor], str | None]:
    """Run forward and backward on this rank's own batch under data parallelism."""
    torch.manual_seed(7)
    model = build()
    AppliedPlan(model, specs.resolve(specs.parse(spec), StackShape(n_layers=len(model.blocks))))
    parallel = DistributedDataParallel(model.module, find_unused_parameters=True)
    torch.manual_seed(100 + rank)
    try:
        parallel(torch.randn(2, 8, 16)).square().mean().backward()
    except RuntimeError as error:
        return [], str(error)
    return [p.grad for p in model.module.parameters() if p.grad is not None], None
