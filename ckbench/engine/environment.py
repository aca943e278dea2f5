"""The environment of a trial: versions, threads, allocator settings, and what may disturb timing."""

import os
import platform
import sys
from typing import Any

from ckbench import __version__, host
from ckbench.devices.base import Device
from ckbench.estimate.allocator import SETTINGS

ALLOCATOR_VARIABLES = (*SETTINGS, "CUBLAS_WORKSPACE_CONFIG")


def environment(device: Device) -> dict[str, Any]:
    """Give the facts that decide whether two records may be compared, and those that explain noise."""
    facts: dict[str, Any] = {
        "ckbench": __version__,
        "code": host.code_id(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "allocator": {name: os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ},
        **host.facts(),
        **device.facts(),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        facts.update(torch=str(torch.__version__), threads=torch.get_num_threads())
    return facts
