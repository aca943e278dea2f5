"""Estimates against measurements that other people published: every row whose configuration can be expressed.

    python benchmarks/published.py [ROWS.csv ...] [--libraries FOLDER] [--only IDS] [--json FILE] [--plot FILE.svg]

Without arguments the rows of benchmarks/data/ are taken. Printed per row: published, estimated, error; then, by grade,
how many are within 5 % and the median; then what explains each larger miss; then the rows that are not expressed, with
the reason. No constant is fitted to a row.

A row was measured with some version of transformers, and versions keep different things. With ``--libraries`` a row is
estimated with its own version, made by

    pip install --target FOLDER/transformers-4.42.4 transformers==4.42.4 "numpy<2"

(``tokenizers==0.13.3`` as well for 4.16.2); without the folder, with the installed one. The table says which it was.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from _published_rows import AnyCase, Case, LayerCase, RatioCase, case_of

from ckbench.units import MIB_BYTES

HERE = Path(__file__).resolve().parent
DATA = (HERE / "data" / "published_numbers.csv", HERE / "data" / "published_more.csv")
UNIT_BYTES = {
    "GiB": 2**30,
    "MiB": MIB_BYTES,
    "MB (1e6 B)": 10**6,
    "GB (approx.)": 10**9,
    "hidden-size tensors": 1,
    "%": 0.01,
}
GRADE_LIMIT, MEDIAN_LIMIT = 0.05, 0.02
FP16_KERNELS = (
    "likely the kernels of half-precision products, which the driver loads into the context: the four rows in fp16 "
    "lack the same 508 to 528 MiB whatever batch, checkpointing and optimizer, and no row in fp32 does"
)
EXPLAINED: dict[str, str] = dict.fromkeys(("S03-4", "S03-5", "S03-7", "S03-9"), FP16_KERNELS)
"""Mechanism behind a row that misses by more than GRADE_LIMIT; without an entry a miss is unexplained."""


def estimated(case: AnyCase) -> float:
    """Replay a case and give the published figure: bytes, a share, or a count of hidden-size tensors."""
    if isinstance(case, RatioCase):
        return estimated(case.first) / estimated(case.second) - 1
    return _layer(case) if isinstance(case, LayerCase) else _trial(case)


def _trial(case: Case) -> float:
    import _published_models as published

    from ckbench.estimate.replay import replay
    from ckbench.estimate.worker import figures_of

    def prepare(trial: Any) -> None:
        if case.optimizer:
            trial.optimizer = published.optimizer(case.optimizer, trial.module)

    with published.torch_of(case.torch):
        replayed = replay(case.config, "cuda", case.workspace_bytes, prepare=prepare)
    return FIGURES[case.figure](replayed, figures_of("", replayed, "cuda")) + case.outside_bytes


def _layer(case: LayerCase) -> float:
    """Run one decoder layer forward on meta tensors; count what stays allocated, in units of its output."""
    import _published_models as published

    from ckbench.estimate.allocator import CachingAllocator
    from ckbench.estimate.scratch import cuda_bytes
    from ckbench.estimate.substitutes import CudaOperations
    from ckbench.estimate.tracker import StorageTracker

    tracker = StorageTracker("meta", cuda_bytes)
    with CudaOperations(None, raises_rms_norm=False):
        output = published.one_layer(case.arch, case.config, case.batch_size, case.seq_len, tracker)
    allocator = CachingAllocator()
    allocator.replay(tracker.timeline.events)
    return allocator.allocated / output.untyped_storage().nbytes()


def _recorded(in_forward: bool) -> Callable[[Any, Any], float]:
    """Give a figure: requested bytes that live at the peak and were made before backward began, or since."""

    def figure(replayed: Any, _made: Any) -> float:
        from ckbench.estimate.explain import _live_at, _peak_index

        births = replayed.tracker.births
        live = _live_at(replayed, _peak_index(replayed))
        turn = max(at for at, name in replayed.tracker.timeline.marks if name == "turn")
        before = replayed.static | {number for number in live if births[number].op == "input"}
        return sum(size for n, size in live.items() if n not in before and (births[n].at < turn) == in_forward)

    return figure


def _there_before(replayed: Any) -> int:
    module = replayed.trial.module
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def _optimizer_state(replayed: Any, _made: Any) -> float:
    tensors = replayed.trial.optimizer.device_tensors()
    return sum(tensor.nbytes for tensor in tensors if tensor.dim())  # PyTorch keeps its scalars on the host


FIGURES: dict[str, Callable[[Any, Any], float]] = {
    "allocated": lambda replayed, made: made.peak_allocated_bytes,
    "reserved": lambda replayed, made: made.peak_reserved_bytes,
    "recorded": lambda replayed, made: made.peak_allocated_bytes - _there_before(replayed),
    "recorded in forward": _recorded(True),
    "recorded in backward": _recorded(False),
    "optimizer state": _optimizer_state,
    "kept by blocks": lambda replayed, made: made.saved_bytes,
}


def _answer(rows: list[dict[str, str]]) -> None:
    """Estimate rows in this process, one line of JSON each."""
    warnings.simplefilter("ignore")
    for row in rows:
        case = case_of(row)
        assert not isinstance(case, str)
        print(json.dumps({"id": row["id"], "estimated": estimated(case)}), flush=True)


def _asked(rows: list[dict[str, str]], library: Path | None) -> Iterable[dict[str, Any]]:
    """Have rows estimated in a process of their own, with a folder's transformers where one is given."""
    paths = [str(library)] if library is not None else []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    environment |= {"TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, str(Path(__file__).resolve()), "--answer"]
    with subprocess.Popen(
        command, cwd=HERE, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(json.dumps(rows))
        child.stdin.close()
        for line in child.stdout:
            yield json.loads(line)
    if child.returncode:
        raise SystemExit(f"estimating {rows[0]['id']} and on ended with {child.returncode}")


def _compare(rows: list[dict[str, str]], libraries: Path | None) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Estimate what can be expressed, printing as it goes; give the results and the reasons for the rest."""
    reasons: dict[str, str] = {}
    grouped: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        case = case_of(row)
        if isinstance(case, str):
            reasons[row["id"]] = case
        else:
            grouped.setdefault(case.library, []).append(row)
    known = {row["id"]: row for row in rows}
    found = []
    print(f"{'row':9} {'published':>10} {'estimated':>10}  {'unit':19}  {'error':>7}  grade  transformers")
    for version, group in grouped.items():
        folder = libraries / f"transformers-{version}" if libraries is not None and version else None
        if folder is not None and not folder.is_dir():
            folder = None
        used = version if folder is not None else ("installed" if version else "")
        for answer in _asked(group, folder):
            row = known[answer["id"]]
            result = _result(row, answer["estimated"], used)
            found.append(result)
            print(
                f"{row['id']:9} {result['published']:10.2f} {result['estimated']:10.2f}  {row['unit']:19}"
                f"  {result['error']:+7.2%}  {row['grade']:5}  {used}",
                flush=True,
            )
    return found, reasons


def _result(row: dict[str, str], amount: float, used: str) -> dict[str, Any]:
    """Compare in the row's own unit; two changes in percent by what is left."""
    published, ours = float(row["value"]), amount / UNIT_BYTES[row["unit"]]
    error = (100 + ours) / (100 + published) - 1 if row["unit"] == "%" else ours / published - 1
    kept = {key: row[key] for key in ("id", "model", "batch", "seq", "attention", "strategy", "unit", "grade")}
    return {**kept, "published": published, "estimated": ours, "error": error, "transformers": used}


def _summary(found: list[dict[str, Any]], reasons: dict[str, str]) -> None:
    for grade in sorted({result["grade"] for result in found}):
        errors = [abs(result["error"]) for result in found if result["grade"] == grade]
        within = sum(1 for error in errors if error <= GRADE_LIMIT)
        print(
            f"grade {grade}: {len(errors)} rows, {within} within {GRADE_LIMIT:.0%}, "
            f"median error {statistics.median(errors):.2%} (asked: {MEDIAN_LIMIT:.0%}), largest {max(errors):.1%}"
        )
    for result in found:
        if abs(result["error"]) > GRADE_LIMIT:
            told = EXPLAINED.get(result["id"]) or EXPLAINED.get(result["id"].partition("-")[0]) or "unexplained"
            print(f"{result['id']} misses by {result['error']:+.1%}: {told}")
    for reason in sorted(set(reasons.values())):
        print(f"not expressed, {reason}: {', '.join(i for i, r in reasons.items() if r == reason)}")


def _plot(path: Path, found: list[dict[str, Any]]) -> None:
    import _plot as drawing

    names = {
        "S01": "GPT-2",
        "S02": "ViT-L",
        "S03": "BERT\nlarge",
        "S04a": "GPT-2\nlarge",
        "S15": "layers",
        "R01": "ratios",
        "R07": "ratios",
        "N1": "Pythia\n410m",
        "N2": "OPT\n350m",
        "N3": "BERT\nbase",
    }
    groups: dict[str, list[float]] = {}
    for result in found:
        groups.setdefault(names[result["id"].partition("-")[0]], []).append(1 + result["error"])
    drawing.ratios(
        path,
        "Estimated over published",
        groups,
        dict.fromkeys(groups, GRADE_LIMIT),
        labels=("published rows, by source; band: 5 %, bar: the median", "estimated / published"),
    )


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, nargs="*", default=DATA)
    parser.add_argument("--libraries", type=Path, help="folder of transformers' versions")
    parser.add_argument("--only", default="", help="ids that begin so, with commas between")
    parser.add_argument("--json", type=Path, help="also write the figures")
    parser.add_argument("--plot", type=Path, help="also draw the ratios")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        _answer(json.load(sys.stdin))
        return
    rows = []
    for path in options.rows:
        with path.open(newline="", encoding="utf-8") as file:
            rows += list(csv.DictReader(file))
    chosen = [row for row in rows if row["id"].startswith(tuple(options.only.split(",")))]
    found, reasons = _compare(chosen, options.libraries.resolve() if options.libraries else None)
    _summary(found, reasons)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.plot:
        _plot(options.plot, found)


if __name__ == "__main__":
    main()
