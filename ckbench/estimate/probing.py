"""Probe a trial for the planner, in a process of its own: a request as JSON in, its chain as JSON out."""

import json
import warnings
from collections.abc import Iterable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from ckbench.card_speeds import card_speed
from ckbench.cards import card_name
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
from ckbench.planner.costs import StepCosts, recorded, roofline, tail_s
from ckbench.planner.letters import FULL, PLAIN, SEGMENTS, Letter, extra_s, letters, root
from ckbench.planner.link import exposed_s
from ckbench.planner.nested import EqualBlock, Way, nested_letters
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
    costs = _with_link(_costs(config, request, operations), request)
    n_layers = len(operations.blocks)
    profiler = Profiler(config, kind, request["workspace_bytes"], n_layers)
    may_span = profiler.may_span and n_layers <= MAX_SPANNED
    tried = _Tried(profiler, operations, costs)
    tried.add(letters(operations, costs, n_layers, spans=may_span, all_lengths=profiler.is_short))
    if may_span and profiler.is_short and FULL in tried.tiles:
        tried.add(nested_letters(tried.block(), [SEGMENTS[-1], root(n_layers)], tried.tiles))
    rest = profiler.rest
    return {
        "n_blocks": n_layers,
        "letters": tried.packed,
        "start_bytes": rest.start_bytes,
        "head_peak_bytes": rest.head_peak_bytes + profiler.shared_bytes,
        "head_backward_peak_bytes": rest.head_backward_peak_bytes + profiler.shared_bytes,
        "later_bytes": [n_bytes + profiler.shared_bytes for n_bytes in rest.later_bytes],
        "fixed_peak_bytes": rest.fixed_peak_bytes,
        "plain_s": costs.plain_s,
        "source": costs.source,
        "left_out": tried.left_out,
    }


class _Tried:
    """Letters with what they take, as a probe sends them; those that do not add up are left out and named."""

    def __init__(self, profiler: Profiler, operations: StepOperations, costs: StepCosts) -> None:
        self.profiler, self.operations, self.costs = profiler, operations, costs
        self.packed: list[dict[str, Any]] = []
        self.left_out: list[str] = []
        self.tiles: dict[Letter, dict[int, Tile]] = {}

    def add(self, letters: Iterable[Letter]) -> None:
        """Replay letters. Raises NotAChain where keeping everything does not add up."""
        for letter in letters:
            if letter.offload and letter.n_blocks > 1 and replace(letter, n_blocks=1) not in self.tiles:
                continue  # is left out already
            try:
                self.tiles[letter] = self.profiler.tiles(letter)
            except CkbenchError as error:
                if letter is PLAIN:
                    raise
                self.left_out.append(f"{letter.name}: {error}")
                continue
            self.packed.append(
                pack(letter, {start: self._figures(letter, start, tile) for start, tile in self.tiles[letter].items()})
            )

    def block(self) -> EqualBlock:
        """Give a block in the middle of a stack of equal ones, and the ways to run it that have been tried."""
        middle = self.profiler.n_layers // 2
        ways = {letter: tiles[middle] for letter, tiles in self.tiles.items() if letter.n_blocks == 1}
        costs, operations = self.costs.blocks[middle], self.operations.blocks[middle]
        later = self.profiler.rest.later_bytes
        return EqualBlock(
            output_bytes=ways[FULL].kept_bytes,
            plain_peak_bytes=ways[FULL].forward_peak_bytes,
            gradient_bytes=later[middle] - later[middle + 1],
            forward_s=costs.forward_s,
            tail_s=tail_s(costs, operations),
            ways=tuple(
                Way(
                    region=letter.region,
                    kept_bytes=tile.kept_bytes,
                    forward_peak_bytes=tile.forward_peak_bytes,
                    backward_peak_bytes=tile.backward_peak_bytes,
                    extra_s=extra_s(letter, middle, self.operations, self.costs),
                )
                for letter, tile in ways.items()
                if not letter.offload
            ),
        )

    def _figures(self, letter: Letter, start: int, tile: Tile) -> tuple[int, int, int, int, float]:
        seconds = extra_s(letter, start, self.operations, self.costs) + self._waits_s(letter, start)
        return tile.kept_bytes, tile.forward_peak_bytes, tile.backward_peak_bytes, tile.released_bytes, seconds

    def _waits_s(self, letter: Letter, start: int) -> float:
        """Give how long a step waits for what a span sends to the host, which its blocks then keep less."""
        link, n = self.costs.link_bytes_per_s, self.operations.n_micro_batches
        if not letter.offload or link is None:
            return 0.0
        stays, moves = (self.tiles[replace(letter, n_blocks=1, offload=offload)] for offload in (False, True))
        blocks = range(start, start + letter.n_blocks)
        alone = replace(letter, n_blocks=1, offload=False)
        return exposed_s(
            [n * max(0, stays[i].kept_bytes - moves[i].kept_bytes) for i in blocks],
            [self.costs.blocks[i].forward_s for i in blocks],
            [self.costs.blocks[i].backward_s + extra_s(alone, i, self.operations, self.costs) for i in blocks],
            link,
        )


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
    made = roofline(operations, named or DEFAULT_CARD, config.train.precision)
    return made if named else replace(made, source=f"no card is named, so: {made.source}")


def _with_link(costs: StepCosts, request: dict[str, Any]) -> StepCosts:
    """Add the speed of the link to the host, where a card is named that has one."""
    card = card_name(request["costs"]) or request["card"]
    if request["kind"] != "cuda" or card is None:
        return costs
    link = card_speed(card)[1].host_bytes_per_s
    return replace(costs, link_bytes_per_s=link, source=f"{costs.source}; {link / 1e9:.3g} GB/s to the host by PCIe")


def check(config: RunConfig, request: dict[str, Any]) -> dict[str, Any]:
    """Replay the trial under a plan and give its estimate.

    A stack deeper than ``limit`` is replayed short. The estimate is None where even that is deeper, or is no chain.
    """
    plan, limit = plan_from_json(request["plan"]), request["limit"]
    if plan.n_layers <= limit:
        replayed = replay(config, request["kind"], request["workspace_bytes"], plan=plan)
        return {"estimate": vars(figures_of(config.strategy.label, replayed, request["kind"]))}
    try:
        if shorten(plan).plan.n_layers > limit:
            return {"estimate": None}
        return {"estimate": vars(estimate_chain(config, request["kind"], request["workspace_bytes"], plan))}
    except NotAChain:
        return {"estimate": None}
