"""Thousands of broken study files through the real entry point: each is measured or refused in plain lines."""

import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.prove import entry, mutations

SOURCES = [path.read_bytes() for path in mutations.STUDIES]
N_FAST, N_PROVE = 60, 1_200


def check(data: bytes) -> int:
    """Feed one file to `ckbench run`; give the exit code."""
    Path("study.yaml").write_bytes(data)
    answer = entry.call("run", "study.yaml", "--device", "replay:script.json", *entry.CAPS)
    entry.check_manners(answer, data)
    if answer.code == 2:
        assert entry.records_below(Path()) == [], data
    shutil.rmtree("results", ignore_errors=True)
    return answer.code


def run_mutants(numbers: range) -> None:
    codes = []
    for number in numbers:
        try:
            codes.append(check(mutations.mutant(number, SOURCES)))
        except BaseException as error:
            error.add_note(f"mutant {number}")
            raise
    assert codes.count(2) > len(codes) // 4 and len(set(codes)) > 1, "some are refused and some are still studies"
    assert not Path("hacked").exists()
    print(f"{len(codes)} files; exit codes {dict(sorted(Counter(codes).items()))}")


def test_mutants_of_the_shipped_studies(folder: Path) -> None:
    run_mutants(range(N_FAST))


@pytest.mark.prove
def test_mutants_of_the_shipped_studies_at_length(folder: Path) -> None:
    run_mutants(range(N_PROVE))
