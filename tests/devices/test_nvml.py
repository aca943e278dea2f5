"""NVML through the real binding, pynvml, against a stand-in library: each scenario ends in values or None."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckbench.devices import _nvml

ROOT = Path(__file__).parents[2]
GIB_BYTES = 2**30

CARD = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
OTHER_CARD = "GPU-0a1b2c3d-0000-1111-2222-333344445555"
PART = "MIG-377e6a3c-9c5b-5c1b-8d2e-0c4a7b3f1d2e"
FIGURES = ("process_bytes", "device_bytes", "total_bytes", "sm_clock_mhz", "max_sm_clock_mhz", "temperature_c")
ALL_FIGURES = (*FIGURES, "power_w", "throttle_reasons", "n_other_processes")

READER = """
import ctypes, dataclasses, json, sys
from ckbench.devices import _nvml
assert "pynvml" not in sys.modules, "pynvml must not be imported with the module"
reading = dataclasses.asdict(_nvml.read(sys.argv[1]))
try:
    reading["sessions"] = ctypes.CDLL("libnvidia-ml.so.1").stub_sessions()
except (OSError, AttributeError):
    reading["sessions"] = None
print(json.dumps(reading))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Compile the stand-in and give its folder."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    compiler = shutil.which("gcc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs gcc and Linux to build the stand-in for libnvidia-ml.so.1")
    folder = tmp_path_factory.mktemp("nvml")
    source = Path(__file__).with_name("nvml_stub.c")
    command = [compiler, "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o"]
    subprocess.run([*command, str(folder / "libnvidia-ml.so.1"), str(source)], check=True, timeout=60)
    yield folder


def read(library: Path | None, uuid: str, program: str = READER, **settings: str) -> dict[str, Any]:
    """Read one device in a process of its own, under the given settings of the stand-in."""
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES" and not k.startswith("NVML_STUB")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    if library is not None:
        environment["LD_LIBRARY_PATH"] = str(library)
    environment |= {"NVML_STUB_DEVICES": CARD, **settings}
    command = [sys.executable, "-c", program, uuid]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    reading: dict[str, Any] = json.loads(done.stdout)
    assert len(reading["warnings"]) <= 1
    assert reading["sessions"] in (0, None), "what was initialised must be shut down"
    for figure in FIGURES:
        assert reading[figure] is None or reading[figure] < 2**40, "no figure may be NVML's mark for unknown"
    return reading


def test_reads_every_figure_of_a_listed_process(library: Path) -> None:
    processes = f"compute:0:self:{3 * GIB_BYTES},compute:0:77:{GIB_BYTES},graphics:0:77:{GIB_BYTES}"
    reading = read(library, CARD, NVML_STUB_PROCESSES=processes, NVML_STUB_REASONS="36")
    assert reading == {
        "uuid": CARD,
        "driver_version": "580.95.05",
        "process_bytes": 3 * GIB_BYTES,
        "device_bytes": GIB_BYTES,
        "total_bytes": 80 * GIB_BYTES,
        "sm_clock_mhz": 1000,
        "max_sm_clock_mhz": 1980,
        "temperature_c": 41,
        "power_w": 123.456,
        "throttle_reasons": ["sw_power_cap", "sw_thermal_slowdown"],
        "n_other_processes": 1,
        "warnings": [],
        "sessions": 0,
    }


def test_a_process_in_both_lists_counts_once(library: Path) -> None:
    processes = f"compute:0:self:{GIB_BYTES},graphics:0:self:{GIB_BYTES}"
    reading = read(library, CARD, NVML_STUB_PROCESSES=processes)
    assert (reading["process_bytes"], reading["n_other_processes"]) == (GIB_BYTES, 0)


def test_a_process_in_the_graphics_list_only_is_found(library: Path) -> None:
    assert read(library, CARD, NVML_STUB_PROCESSES="graphics:0:self:4096")["process_bytes"] == 4096


def test_a_process_that_is_not_listed_has_no_figure(library: Path) -> None:
    """In a container the list is empty, or holds the host's PIDs."""
    reading = read(library, CARD, NVML_STUB_PROCESSES=f"compute:0:1:{6 * GIB_BYTES}")
    assert (reading["process_bytes"], reading["n_other_processes"]) == (None, 1)
    assert reading["device_bytes"] == GIB_BYTES
    assert (read(library, CARD)["process_bytes"], read(library, CARD)["n_other_processes"]) == (None, 0)


@pytest.mark.parametrize("visible", ["1", OTHER_CARD, "GPU-0a1b", PART, "1,0", "", "-1", '" 0, 1 "'])
def test_the_uuid_decides_whatever_cuda_may_see(library: Path, visible: str) -> None:
    """Torch numbers what CUDA_VISIBLE_DEVICES leaves; the UUID that it reports names the second card here."""
    processes = f"compute:0:self:{GIB_BYTES},compute:1:self:{2 * GIB_BYTES}"
    settings = {"NVML_STUB_DEVICES": f"{CARD},{OTHER_CARD},{PART}", "NVML_STUB_PROCESSES": processes}
    reading = read(library, OTHER_CARD.removeprefix("GPU-"), CUDA_VISIBLE_DEVICES=visible, **settings)
    assert (reading["uuid"], reading["device_bytes"], reading["sm_clock_mhz"]) == (OTHER_CARD, 2 * GIB_BYTES, 1001)
    assert (reading["process_bytes"], reading["warnings"]) == (2 * GIB_BYTES, [])


@pytest.mark.parametrize(
    ("uuid", "found"),
    [
        (CARD, CARD),
        (CARD.removeprefix("GPU-"), CARD),
        ("GPU-8932", CARD),
        ("8932F937", CARD),
        (PART, PART),
        (PART.removeprefix("MIG-"), PART),
        ("MIG-377e", PART),
        ("377e", PART),
        ("MIG-8932", None),  # a card is not a partition
        ("GPU-ffff", None),
        ("GPU-", None),
        ("", None),
        ("0", None),  # two devices begin so; and never an index
    ],
)
def test_every_form_of_a_uuid_resolves_or_gives_nothing(library: Path, uuid: str, found: str | None) -> None:
    twin = "GPU-0fffffff-0000-1111-2222-333344445555"
    reading = read(library, uuid, NVML_STUB_DEVICES=f"{CARD},{PART},{OTHER_CARD},{twin}")
    assert reading["uuid"] == found
    if found is None:
        assert all(reading[figure] is None for figure in ALL_FIGURES)
        assert reading["warnings"] and "UUID" in reading["warnings"][0]
        assert reading["driver_version"] == "580.95.05"


@pytest.mark.parametrize(
    ("function", "figure", "words"),
    [
        ("nvmlDeviceGetPowerUsage", "power_w", "power"),
        ("nvmlDeviceGetTemperature", "temperature_c", "temperature"),
        ("nvmlDeviceGetClockInfo", "sm_clock_mhz", "SM clock"),
        ("nvmlDeviceGetMaxClockInfo", "max_sm_clock_mhz", "maximum SM clock"),
        ("nvmlDeviceGetComputeRunningProcesses_v3", "n_other_processes", "compute processes"),
        ("nvmlSystemGetDriverVersion", "driver_version", "driver version"),
        ("nvmlDeviceGetUUID", "uuid", "UUID"),
    ],
)
@pytest.mark.parametrize(
    ("code", "reason"),
    [("3", "Not Supported"), ("4", "Insufficient Permissions"), ("999", "Unknown Error"), ("15", "GPU is lost")],
)
def test_one_refused_figure_leaves_the_others(
    library: Path, function: str, figure: str, words: str, code: str, reason: str
) -> None:
    reading = read(library, CARD, NVML_STUB_REFUSE=f"{function}={code}")
    assert reading[figure] is None
    assert reading["warnings"] == [f"NVML does not give {words} ({reason})"]
    assert sum(reading[f] is None for f in ALL_FIGURES if f != "process_bytes") <= 1


def test_an_error_code_the_binding_does_not_know(library: Path) -> None:
    reading = read(library, CARD, NVML_STUB_REFUSE="nvmlDeviceGetPowerUsage=777")
    assert reading["warnings"] == ["NVML does not give power (an error of the stub)"]


def test_many_refusals_make_one_sentence(library: Path) -> None:
    refused = "nvmlDeviceGetPowerUsage=3,nvmlDeviceGetTemperature=3,nvmlDeviceGetClockInfo=4"
    reading = read(library, CARD, NVML_STUB_REFUSE=refused)
    expected = "NVML does not give power, temperature (Not Supported); SM clock (Insufficient Permissions)"
    assert reading["warnings"] == [expected]
    assert reading["device_bytes"] == GIB_BYTES


def test_older_names_of_a_call_are_tried(library: Path) -> None:
    lacking = "nvmlDeviceGetMemoryInfo_v2=13,nvmlDeviceGetCurrentClocksEventReasons=13"
    reading = read(library, CARD, NVML_STUB_REFUSE=lacking, NVML_STUB_REASONS="1")
    assert reading["device_bytes"] == GIB_BYTES * 3 // 2
    assert (reading["throttle_reasons"], reading["warnings"]) == (["gpu_idle"], [])


def test_both_names_refused(library: Path) -> None:
    refused = "nvmlDeviceGetMemoryInfo_v2=3,nvmlDeviceGetMemoryInfo=3"
    reading = read(library, CARD, NVML_STUB_REFUSE=refused)
    assert (reading["device_bytes"], reading["total_bytes"]) == (None, None)
    assert reading["warnings"] == ["NVML does not give device memory (Not Supported)"]


@pytest.mark.parametrize(
    ("function", "figure"),
    [
        ("nvmlDeviceGetPowerUsage", "power_w"),
        ("nvmlDeviceGetTemperature", "temperature_c"),
        ("nvmlDeviceGetClockInfo", "sm_clock_mhz"),
        ("nvmlDeviceGetMemoryInfo_v2", "device_bytes"),
        ("nvmlDeviceGetMemoryInfo_v2", "total_bytes"),
        ("nvmlDeviceGetCurrentClocksEventReasons", "throttle_reasons"),
    ],
)
def test_a_value_that_is_not_available_is_none(library: Path, function: str, figure: str) -> None:
    reading = read(library, CARD, NVML_STUB_NA=function)
    assert reading[figure] is None
    assert "(N/A)" in reading["warnings"][0]


def test_process_memory_that_is_not_available_is_none(library: Path) -> None:
    reading = read(library, CARD, NVML_STUB_PROCESSES="compute:0:self:na,graphics:0:self:na")
    assert (reading["process_bytes"], reading["n_other_processes"]) == (None, 0)
    assert reading["warnings"] == ["NVML does not give process memory (N/A)"]


def test_driver_and_library_of_different_versions(library: Path) -> None:
    assert_nothing_read(read(library, CARD, NVML_STUB_REFUSE="nvmlInitWithFlags=18"), "mismatch")


@pytest.mark.parametrize(("code", "words"), [("9", "Driver Not Loaded"), ("4", "Permissions"), ("999", "Unknown")])
def test_an_nvml_that_does_not_start(library: Path, code: str, words: str) -> None:
    assert_nothing_read(read(library, CARD, NVML_STUB_REFUSE=f"nvmlInitWithFlags={code}"), words)


def test_no_library(tmp_path: Path) -> None:
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    # An empty file by the library's name stands before a real one, so that this holds on a GPU machine too.
    (tmp_path / "libnvidia-ml.so.1").touch()
    assert_nothing_read(read(tmp_path, CARD), "Library Not Found")


def test_no_module(tmp_path: Path) -> None:
    program = READER.replace("reading = ", "sys.modules['pynvml'] = None\nreading = ", 1)
    assert_nothing_read(read(tmp_path, CARD, program=program), "nvidia-ml-py")


def assert_nothing_read(reading: dict[str, Any], words: str) -> None:
    """Assert that every figure is None and that one sentence says why."""
    assert all(reading[figure] is None for figure in (*ALL_FIGURES, "uuid", "driver_version"))
    (warning,) = reading["warnings"]
    assert warning.startswith("NVML figures are n/a: ") and words in warning


def test_a_broken_binding_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of that name which is something else altogether."""
    monkeypatch.setitem(sys.modules, "pynvml", sys)
    reading = _nvml.read(CARD)
    assert reading.process_bytes is None
    assert len(reading.warnings) == 1


def test_throttle_reasons_as_words() -> None:
    assert _nvml.throttle_words(0) == ()
    assert _nvml.throttle_words(0x48) == ("hw_slowdown", "hw_thermal_slowdown")
    assert _nvml.throttle_words(1 << 20) == ("bit_0x100000",)
