"""Say what can be measured on this machine, what will be n/a, and why."""

from typing import Any

from ckbench import __version__, host, store
from ckbench.errors import CkbenchError, DeviceUnavailable, StoreError
from ckbench.examples import root
from ckbench.launch import Launcher

CUDA_FIGURES = ", ".join(
    (
        "peak_reserved_bytes",
        "peak_active_bytes",
        "peak_requested_bytes",
        "allocator_retries",
        "nvml_process_bytes",
        "nvml_device_bytes",
    )
)


def examine(device: str) -> str:
    """Give the examination of one device as text. Raises ConfigError for a name that is no device."""
    launcher = Launcher()
    lines = [f"ckbench {__version__} (code {host.code_id()})"]
    try:
        found = launcher.probe(device)
    except DeviceUnavailable as error:
        return "\n".join([*lines, f"device {device}: not available: {error}", verified()]) + "\n"
    lines.append(f"device {found['label']}: {found['name']}")
    lines += [f"  {key}: {_show(value)}" for key, value in found["facts"].items() if key not in ("ckbench", "code")]
    if found["label"] == "cpu":
        lines.append(f"will be n/a: {CUDA_FIGURES}: they belong to CUDA devices")
        try:
            launcher.probe("cuda")
        except CkbenchError as error:
            lines.append(f"CUDA: {error}")
    lines.append(verified())
    return "\n".join(lines) + "\n"


def _show(value: Any) -> str:
    if value is None or value == {} or value == []:
        return "n/a"
    return ", ".join(str(item) for item in value) if isinstance(value, list) else str(value)


def verified() -> str:
    """Say when and where the CUDA path was last proven on a GPU, from the published records."""
    try:
        records, _ = store.read(root().parent / "results" / store.PUBLISHED)
    except (StoreError, CkbenchError):
        records = []
    proven = [r for r in records if str(r["device"]).startswith("cuda") and r["status"] == "ok"]
    if not proven:
        return "CUDA path verified: never"
    newest = max(proven, key=lambda r: str(r["started_at"]))
    torch = newest["environment"].get("torch")
    return f"CUDA path verified: {newest['started_at'][:10]} on {newest['device_name']}, torch {torch}"
