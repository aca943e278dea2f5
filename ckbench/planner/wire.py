"""A chain as plain data, and back: it is probed in one process and solved in another."""

from dataclasses import asdict
from typing import Any

from ckbench.plan import Region, region_from_json
from ckbench.planner.chain import Chain, Item
from ckbench.planner.letters import Letter


def pack(letter: Letter, figures: dict[int, tuple[int, int, int, int, float]]) -> dict[str, Any]:
    """Lay one letter out: its figures by first block, equal ones once.

    ``figures``: kept, forward peak, backward peak and released bytes, extra seconds.
    """
    distinct = list(dict.fromkeys(figures.values()))
    place = {value: i for i, value in enumerate(distinct)}
    return {
        "n_blocks": letter.n_blocks,
        "offload": letter.offload,
        "region": None if letter.region is None else asdict(letter.region),
        "figures": [list(value) for value in distinct],
        "starts": [[start, place[value]] for start, value in sorted(figures.items())],
    }


def unpack(data: dict[str, Any]) -> Chain:
    """Make the chain of what a probe sent."""
    items: list[list[Item]] = [[] for _ in range(data["n_blocks"])]
    for packed in data["letters"]:
        region: Region | None = None if packed["region"] is None else region_from_json(packed["region"])
        letter = Letter(n_blocks=packed["n_blocks"], region=region, offload=packed["offload"])
        for start, place in packed["starts"]:
            kept, forward_peak, backward_peak, released, seconds = packed["figures"][place]
            items[start].append(
                Item(
                    start=start,
                    stop=start + letter.n_blocks,
                    region=letter.at(start),
                    offload=letter.offload,
                    kept_bytes=kept,
                    forward_peak_bytes=forward_peak,
                    backward_peak_bytes=backward_peak,
                    released_bytes=released,
                    extra_s=seconds,
                )
            )
    return Chain(
        n_blocks=data["n_blocks"],
        items=tuple(map(tuple, items)),
        start_bytes=data["start_bytes"],
        head_peak_bytes=data["head_peak_bytes"],
        later_bytes=tuple(data["later_bytes"]),
        fixed_peak_bytes=data["fixed_peak_bytes"],
        plain_s=data["plain_s"],
        head_backward_peak_bytes=data["head_backward_peak_bytes"],
    )
