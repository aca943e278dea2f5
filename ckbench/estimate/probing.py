"""Probe a trial for the planner, in a process of its own: a request as JSON in, its chain as JSON out."""

import json
import warnings
from multiprocessing.connection import Connection
from typing import Any

import torch

from ckbench.config import RunConfig
from ckbench.errors import CkbenchError, reason_of
from ckbench.estimate.chain import estimate_chain
from ckbench.estimate.profile import Profiler, Tile
from ckbench.estimate.repeats import NotAChain, shorten
from ckbench.estimate.replay import replay
from ckbench.estimate.timed import measured
from ckbench.estimate.traced import trace_step
from ckbench.estimate.worker import figures_of
from ckbench.plan import plan_from_json
from ckbench.planner.costs import StepCosts, recorded, roofline
from ckbench.planner.letters import PLAIN, extra_s, letters
from ckbench.planner.operations import StepOperations
from ckbench.planner.wire import pack
from ckbench.records import Record

MAX_SPANNED = 256
"""Deepest stack in which spans of several blocks are choices: the search over them takes minutes beyond."""
DEFAULT_CARD = "A100 80GB"
"""Whose peaks seconds are counted by where no card is named and no device is there; what is printed names it."""


def serve(connection: Connection, text: str) -> None:
    """Answer one request of kind ``probe`` or ``check``; an error becomes a reason."""
    request = json.loads(text)
    config = RunConfig.model_validate_json(json.dumps(request["config"]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about devices that are not there
        try:
            answer = {"probe": probe, "check": check}[request["task"]](config, request)
        except Exception as error:
            answer = {"reason": reason_of(error)}
    connection.send_bytes(json.dumps(answer).encode())
    connection.close()


def probe(config: RunConfig, request: dict[str, Any]) -> dict[str, Any]:
    """Replay every way to run a span of blocks, and give bytes and seconds of each: planner.wire.unpack reads it.

    Ways whose bytes do not add up over a stack are left out and named. Raises NotAChain where even keeping everything
    does not add up, and NotEstimated where a step cannot be replayed.
    """
    kind = request["kind"]
    operations = trace_step(config, kind)
    costs = _costs(config, request, operations)
    n_layers = len(operations.blocks)
    profiler = Profiler(config, kind, request["workspace_bytes"], n_layers)
    packed, left_out = [], []
    may_span = profiler.may_span and n_layers <= MAX_SPANNED
    for letter in letters(operations, costs, n_layers, spans=may_span, all_lengths=profiler.is_short):
        try:
            tiles = profiler.tiles(letter)
        except CkbenchError as error:
            if letter is PLAIN:
                raise
            left_out.append(f"{letter.name}: {error}")
            continue
        figures = {start: (*_bytes(tile), extra_s(letter, start, operations, costs)) for start, tile in tiles.items()}
        packed.append(pack(letter, figures))
    rest = profiler.rest
    return {
        "n_blocks": n_layers,
        "letters": packed,
        "start_bytes": rest.start_bytes,
        "head_peak_bytes": rest.head_peak_bytes,
        "head_backward_peak_bytes": rest.head_backward_peak_bytes,
        "later_bytes": list(rest.later_bytes),
        "fixed_peak_bytes": rest.fixed_peak_bytes,
        "plain_s": costs.plain_s,
        "source": costs.source,
        "left_out": left_out,
    }


def _bytes(tile: Tile) -> tuple[int, int, int, int]:
    return tile.kept_bytes, tile.forward_peak_bytes, tile.backward_peak_bytes, tile.released_bytes


def _costs(config: RunConfig, request: dict[str, Any], operations: StepOperations) -> StepCosts:
    """Take seconds from where the request says; ``auto`` measures where the device is there, and else counts.

    Raises DeviceUnavailable where ``measured`` finds no device, and ConfigError where records do not suit.
    """
    wanted, kind = request["costs"], request["kind"]
    if request["records"] is not None:
        return recorded(operations, [Record(**record) for record in request["records"]], config, request["card"])
    if wanted == "measured" or (wanted == "auto" and (kind == "cpu" or torch.cuda.is_available())):
        run = config.run.model_copy(update={"device": kind})
        return measured(config.model_copy(update={"run": run}), operations)
    named = request["card"] if wanted in ("auto", "measured") else wanted
    return roofline(operations, named or DEFAULT_CARD, config.train.precision)


def check(config: RunConfig, request: dict[str, Any]) -> dict[str, Any]:
    """Replay the trial under a plan and give its estimate.

    A stack deeper than ``limit`` is replayed short. The estimate is None where even that is deeper, or is no chain.
    """
    plan, limit = plan_from_json(request["plan"]), request["limit"]
    if plan.n_layers <= limit:
        replayed = replay(config, request["kind"], request["workspace_bytes"], plan=plan)
        return {"estimate": vars(figures_of(config.strategy.label, replayed, request["kind"]))}
    if shorten(plan).plan.n_layers > limit:
        return {"estimate": None}
    try:
        return {"estimate": vars(estimate_chain(config, request["kind"], request["workspace_bytes"], plan))}
    except NotAChain:
        return {"estimate": None}
