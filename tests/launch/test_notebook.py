"""The notebook in examples/ runs from top to bottom in a real kernel, measures for real, and is stored bare."""

import asyncio
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

import ckbench

ROOT = Path(ckbench.__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "notebook" / "ckbench.ipynb"
TIMEOUT_S = 600
"""Half a minute where nothing else runs."""
MACHINE_PATHS = re.compile(r"/(?:root|home|tmp|work|Users)\b")


def stored() -> dict[str, Any]:
    notebook: dict[str, Any] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return notebook


def test_it_is_stored_without_outputs() -> None:
    """Outputs would be one machine's figures, and a diff at every run."""
    notebook = stored()
    cells = notebook["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 4 and len(cells) > len(code)
    assert all(cell["outputs"] == [] and cell["execution_count"] is None and not cell["metadata"] for cell in code)
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert not MACHINE_PATHS.search(NOTEBOOK.read_text(encoding="utf-8")), "no machine's paths"


@pytest.fixture
def executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the notebook in an empty folder, with Jupyter's own files in another."""
    nbclient = pytest.importorskip("nbclient", reason='the notebook needs pip install -e ".[notebook]"')
    nbformat = pytest.importorskip("nbformat")
    folder, own = tmp_path / "work", tmp_path / "jupyter"
    folder.mkdir()
    own.mkdir()
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(own / name.lower()))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    client = nbclient.NotebookClient(
        notebook, timeout=TIMEOUT_S, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    asyncio.run(client.async_execute())
    notebook["folder"] = folder
    return notebook


def printed(cell: Any) -> str:
    return "".join(output["text"] for output in cell["outputs"] if output["output_type"] == "stream")


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_it_runs_and_decides(executed: Any) -> None:
    code = [cell for cell in executed["cells"] if cell["cell_type"] == "code"]
    measured, table, chart, decision, parity = code
    assert {output["name"] for output in measured["outputs"]} == {"stdout"}, "no stray output of a worker"
    assert printed(measured).startswith("9 trials to run") and printed(measured).count(": ok, ") == 9
    frame = ckbench.load(executed["folder"] / "results", pooled=True)
    assert frame["strategy"].tolist() == ["none", "per-block", "ffn-only"]
    assert (frame["rounds"] == 3).all() and (frame["parity"] == "exact").all()
    for strategy in frame["strategy"]:
        assert strategy in table["outputs"][0]["data"]["text/html"]
    assert "image/png" in chart["outputs"][-1]["data"]
    ok = frame[
        frame["peak_allocated_bytes"]
        <= (frame["peak_allocated_bytes"].min() + frame["peak_allocated_bytes"].max()) // 2
    ]
    best = ok.loc[ok["step_s_median"].idxmin(), "strategy"]
    assert best != "none" and f" MiB use {best}: peak " in printed(decision)
    assert parity["outputs"][0]["data"]["text/plain"].count("exact") == 3
