"""Studies of real keys and hostile values: each is measured or refused in plain lines."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from tests.prove import hostile
from tests.prove.test_fuzz_studies import check

CALM = {"suppress_health_check": list(HealthCheck)}


@settings(max_examples=60, **CALM)
@given(study=hostile.studies())
def test_hostile_studies(folder: Path, study: bytes) -> None:
    check(study)


@pytest.mark.prove
@settings(max_examples=700, **CALM)
@given(study=hostile.studies())
def test_hostile_studies_at_length(folder: Path, study: bytes) -> None:
    check(study)
