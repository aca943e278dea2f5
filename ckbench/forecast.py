"""What the trials of a session will take, estimated point by point just before they start."""

from collections.abc import Iterable
from typing import Any

from ckbench.cards import CARDS_MIB, usable_bytes
from ckbench.config import RunConfig
from ckbench.estimates import Estimate
from ckbench.estimating import estimate_configs
from ckbench.launch import Launcher
from ckbench.planning import Planner
from ckbench.units import format_bytes


class Forecast:
    """Estimates by configuration, for a device that a replay can imitate; others get none."""

    def __init__(self, device: dict[str, Any], launcher: Launcher, planner: Planner | None = None) -> None:
        kind = str(device["label"]).partition(":")[0]
        self.kind = kind if kind in ("cpu", "cuda") else None
        self.card = card_of(str(device["name"]))
        self.total_bytes: int | None = device["facts"].get("device_total_bytes")
        self.launcher = launcher
        self.planner = planner or planner_for(device, launcher)
        self._known: dict[str, Estimate] = {}

    def of(self, config: RunConfig, beside: Iterable[RunConfig]) -> Estimate | None:
        """Give the estimate of a config; others of the same model and step are made along with it."""
        if self.kind is None:
            return None
        if config.configuration_id() not in self._known:
            together = {
                other.configuration_id(): other
                for other in beside
                if other.model == config.model and other.train == config.train
            }
            together[config.configuration_id()] = config
            missing = {key: other for key, other in together.items() if key not in self._known}
            todo = list(missing.values())
            made = estimate_configs(todo, self.kind, self.launcher, self.card, lambda _made: None, planner=self.planner)
            self._known.update(zip(missing, made, strict=True))
        return self._known[config.configuration_id()]

    def known(self, key: str) -> Estimate | None:
        """Give the estimate of the configuration with this id, if it has been made."""
        return self._known.get(key)

    def warning(self, estimate: Estimate | None) -> str | None:
        """Say why a trial cannot fit the device; None where it can, or nobody knows."""
        needed = estimate.needed_bytes() if estimate is not None else None
        if needed is None or self.total_bytes is None:
            return None
        there = usable_bytes(self.total_bytes)
        if needed <= there:
            return None
        return f"needs about {format_bytes(needed)}, the device has {format_bytes(there)} for tensors"


def planner_for(device: dict[str, Any], launcher: Launcher) -> Planner:
    """Give a planner whose seconds are measured on the device, and whose bytes are in its semantics."""
    kind = str(device["label"]).partition(":")[0]
    return Planner(kind if kind in ("cpu", "cuda") else "cpu", launcher, card=card_of(str(device["name"])))


def card_of(device_name: str) -> str | None:
    """Find the card of a device by the name its driver gives it.

    >>> card_of("NVIDIA A100-SXM4-80GB"), card_of("NVIDIA H200"), card_of("NVIDIA GeForce RTX 4090")
    ('A100 80GB', 'H200', 'RTX 4090')
    """
    words = device_name.replace("-", " ").split()
    for card in sorted(CARDS_MIB, key=len, reverse=True):
        if all(part in words for part in card.split()):
            return card
    return None
