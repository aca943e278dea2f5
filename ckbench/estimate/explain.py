"""Where the bytes of a replayed step are: what autograd keeps, who owns the peak, what recomputation brings back."""

import json
import warnings
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from ckbench.config import RunConfig
from ckbench.errors import reason_of
from ckbench.estimate.replay import Replayed, replay
from ckbench.estimate.tracker import Birth

N_SAMPLES = 400
"""Points of the timeline of live bytes."""
BEFORE = ("parameter", "buffer", "optimizer state", "input")
"""What the tracker calls storages that no operation made."""


@dataclass(frozen=True, kw_only=True)
class Instant:
    """The storages that live at one moment of the steady step, in their groups."""

    index: int
    bytes_by_number: dict[int, int]


def serve(connection: Connection, text: str) -> None:
    """Explain every config of a request: one ``phase`` message each."""
    request = json.loads(text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for config_data in request["configs"]:
            config = RunConfig.model_validate_json(json.dumps(config_data))
            try:
                made = explain(config, request["kind"])
            except Exception as error:
                made = {"reason": reason_of(error)}
            made["strategy"] = config.strategy.label
            connection.send_bytes(json.dumps({"phase": json.dumps(made)}).encode())
    connection.send_bytes(json.dumps({"done": len(request["configs"])}).encode())
    connection.close()


def explain(config: RunConfig, kind: str) -> dict[str, Any]:
    """Replay a trial (``cpu``, ``cuda``) or run it (``real``) and give its explanation as plain data, in bytes.

    ``saved``: groups of storages that autograd holds at the turn from forward to backward. ``peak``: the groups that
    live at the instant of the peak, by category. ``recomputed``: bytes that operations of a forward made during
    backward. ``timeline``: live bytes over the step, with the phase each point is in.
    """
    replayed = replay(config, kind, names_modules=True)
    events = replayed.tracker.timeline.events
    marks = [(at, name) for at, name in replayed.tracker.timeline.marks if at >= replayed.begin]
    turn = next(at for at, name in marks if name == "turn")
    saved = _live_at(replayed, turn)
    held = {n: size for n, size in saved.items() if n not in replayed.static and not _is_before(replayed, n)}
    held = {n: size for n, size in held.items() if n not in replayed.gradients or _born_in_step(replayed, n)}
    peak_index = _peak_index(replayed)
    at_peak = _live_at(replayed, peak_index)
    blocks = _block_names(replayed)
    return {
        "n_layers": len(blocks),
        "peak_bytes": replayed.steady["peak_allocated_bytes"],
        "peak_phase": replayed.steady["peak_phase"],
        "saved_bytes": sum(held.values()),
        "static_bytes": replayed.steady["static_bytes"],
        "saved": _groups(replayed, held, blocks),
        "peak": [
            {**group, "category": category}
            for category, numbers in _by_category(replayed, at_peak, set(held)).items()
            for group in _groups(replayed, numbers, blocks)
        ],
        "peak_op": _op_at(replayed, peak_index),
        "recomputed": _groups(replayed, _recomputed(replayed, turn), blocks),
        "timeline": _timeline(replayed, marks),
        "n_events": len(events) - replayed.begin,
    }


def _is_before(replayed: Replayed, number: int) -> bool:
    birth = replayed.tracker.births.get(number)
    return birth is None or birth.op in BEFORE


def _born_in_step(replayed: Replayed, number: int) -> bool:
    birth = replayed.tracker.births.get(number)
    return birth is not None and birth.at >= replayed.begin


def _live_at(replayed: Replayed, index: int) -> dict[int, int]:
    """Give the storages alive before event ``index``, with their bytes."""
    live: dict[int, int] = {}
    for _, number, n_bytes in replayed.tracker.timeline.events[:index]:
        if n_bytes > 0:
            live[number] = n_bytes
        else:
            live.pop(number, None)
    return live


def _peak_index(replayed: Replayed) -> int:
    """Give the index after the event that reaches the steady step's peak."""
    live, peak, at = 0, -1, replayed.begin
    for index, _, n_bytes in replayed.tracker.timeline.events:
        live += n_bytes
        if index >= replayed.begin and live > peak:
            peak, at = live, index + 1
    return at


def _op_at(replayed: Replayed, index: int) -> str:
    """Name the operation whose result made the peak."""
    _, number, _ = replayed.tracker.timeline.events[index - 1]
    birth = replayed.tracker.births.get(number)
    return "a kernel's own memory" if birth is None else f"{_short(birth.op)} {birth.where}".strip()


def _by_category(replayed: Replayed, live: dict[int, int], saved: set[int]) -> dict[str, dict[int, int]]:
    """Sort storages into what they are for."""
    found: dict[str, dict[int, int]] = defaultdict(dict)
    for number, n_bytes in live.items():
        birth = replayed.tracker.births.get(number)
        if birth is None:
            category = "libraries and kernels"
        elif number in replayed.gradients:
            category = "gradients"
        elif number in replayed.static:
            category = "parameters and buffers" if birth.op in ("parameter", "buffer") else "optimizer state"
        elif birth.op == "input":
            category = "inputs"
        elif number in saved:
            category = "saved"
        else:
            category = "transient"
        found[category][number] = n_bytes
    return dict(sorted(found.items(), key=lambda item: -sum(item[1].values())))


def _recomputed(replayed: Replayed, turn: int) -> dict[int, int]:
    """Give the storages that a module's forward made after the turn, those of backward's own operations left out."""
    return {
        number: birth.n_bytes
        for number, birth in replayed.tracker.births.items()
        if birth.at >= turn and birth.is_forward
    }


def _block_names(replayed: Replayed) -> list[str]:
    names = {module: name for name, module in replayed.trial.module.named_modules()}
    return [names[block] for block in replayed.trial.model.blocks]


def _groups(replayed: Replayed, numbers: dict[int, int], blocks: Iterable[str]) -> list[dict[str, Any]]:
    """Gather equal storages of all blocks: one group per module (within its block), operation, shape and type."""
    prefixes = list(blocks)
    gathered: dict[tuple[Any, ...], list[tuple[int | None, int]]] = defaultdict(list)
    for number, n_bytes in numbers.items():
        birth = replayed.tracker.births.get(number)
        if birth is None:
            gathered[(None, "", "libraries and kernels", (), "")].append((None, n_bytes))
            continue
        block, inside = _place(birth, prefixes)
        key = (block is not None, inside, _short(birth.op), birth.shape, str(birth.dtype).removeprefix("torch."))
        gathered[key].append((block, n_bytes))
    groups = [
        {
            "module": inside,
            "in_blocks": bool(in_blocks),
            "blocks": sorted({block for block, _ in members if block is not None}),
            "op": op,
            "shape": list(shape),
            "dtype": dtype,
            "count": len(members),
            "bytes": sum(n_bytes for _, n_bytes in members),
        }
        for (in_blocks, inside, op, shape, dtype), members in gathered.items()
    ]
    return sorted(groups, key=lambda group: (-group["bytes"], group["module"], group["op"]))


def _place(birth: Birth, prefixes: list[str]) -> tuple[int | None, str]:
    """Give the block a storage was made in, and the module's path inside of it."""
    for index, prefix in enumerate(prefixes):
        if birth.where == prefix:
            return index, "block"
        if birth.where.startswith(f"{prefix}."):
            return index, birth.where.removeprefix(f"{prefix}.")
    return None, birth.where or "model"


def _short(op: str) -> str:
    """Write ``aten.addmm.default`` as ``addmm``."""
    parts = op.split(".")
    return parts[1] if len(parts) == 3 and parts[0] == "aten" else op


def _timeline(replayed: Replayed, marks: list[tuple[int, str]]) -> list[dict[str, Any]]:
    """Thin the step's live bytes to the largest of each stretch."""
    live = sum(n_bytes for _, _, n_bytes in replayed.tracker.timeline.events[: replayed.begin])
    events = replayed.tracker.timeline.events[replayed.begin :]
    stretch = max(1, len(events) // N_SAMPLES)
    phases = {"forward": "forward", "head": "loss", "blocks": "backward", "optimizer": "optimizer"}
    starts = [(at, phases[name]) for at, name in marks if name in phases]
    points: list[dict[str, Any]] = []
    for begin in range(0, len(events), stretch):
        high, at = -1, begin
        for index, _, n_bytes in events[begin : begin + stretch]:
            live += n_bytes
            if live > high:
                high, at = live, index
        phase = next((name for start, name in reversed(starts) if at >= start), "forward")
        points.append({"event": at - replayed.begin, "live_bytes": high, "phase": phase})
    return points
