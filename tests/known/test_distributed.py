"""Reports of jobs of several processes: the mechanism is proven on two ranks; a launch of ranks is refused today."""

from pathlib import Path
from typing import Any

import pytest

from tests.known import odd_models
from tests.known.conftest import Run
from tests.known.two_ranks import compare


def refused(ckbench: Run, section: str, line: str) -> str:
    """Give what is said of a study that asks for several processes."""
    sections = {"model": "n_layers: 2, d_model: 32, n_heads: 4, vocab_size: 64", "train": "batch_size: 2, seq_len: 16"}
    sections["run"] = "device: cpu"
    sections[section] += f", {line}"
    Path("study.yaml").write_text("".join(f"{name}: {{{text}}}\n" for name, text in sections.items()))
    outcome = ckbench("run", "study.yaml")
    assert (outcome.code, outcome.out) == (2, "")
    assert "Traceback" not in outcome.err and not Path("results").exists()
    return outcome.err


@pytest.fixture(scope="module")
def on_two_ranks() -> list[dict[str, Any]]:
    """Run both models in one job."""
    keyword = ("per-block", "every-k:2", "per-block,reentrant")
    shared = ("per-block", "every-k:2", "nested:2", "ffn-only")  # one block that stands at three places
    return compare({"keyword": (odd_models.keyword, keyword), "shared": (odd_models.shared, shared)})


@pytest.mark.dist
def test_dst_01_gradients_under_data_parallelism_are_those_of_none(
    ckbench: Run, on_two_ranks: list[dict[str, Any]]
) -> None:
    for rank in on_two_ranks:
        for spec in ("per-block", "every-k:2"):
            assert rank["keyword"][spec] == {"equal": True, "error": None}
        assert "marked as ready twice" in rank["keyword"]["per-block,reentrant"]["error"]  # PyTorch's, with its hint
    assert refused(ckbench, "run", "ddp: 2, backend: gloo, find_unused: true").count("unknown key") == 3


@pytest.mark.dist
def test_dst_03_a_block_used_again_and_again_is_reduced_once(on_two_ranks: list[dict[str, Any]]) -> None:
    assert len(on_two_ranks) == 2
    for rank in on_two_ranks:
        assert len(rank["shared"]) == 4
        assert rank["shared"] == dict.fromkeys(rank["shared"], {"equal": True, "error": None})


def test_dst_05_sharding_is_refused(ckbench: Run) -> None:
    assert "unknown key 'fsdp' in run" in refused(ckbench, "run", "fsdp: 2, wrap_order: checkpoint_outside")


def test_dst_07_a_launcher_of_another_library_is_refused(ckbench: Run) -> None:
    assert "unknown key 'launcher' in run" in refused(ckbench, "run", "launcher: deepspeed_zero3")


def test_dst_09_a_number_of_ranks_is_refused(ckbench: Run) -> None:
    assert "unknown key 'ddp' in run" in refused(ckbench, "run", "ddp: 2")


def test_dst_10_a_number_of_ranks_is_refused_on_a_cpu_too(ckbench: Run) -> None:
    assert "unknown key 'ddp' in train" in refused(ckbench, "train", "ddp: 2")
