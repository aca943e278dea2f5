"""Every example study loads, says what it asks and how to run it, and reaches an editor's schema."""

from pathlib import Path

import pytest

from ckbench import registry, study

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
FILES = sorted(CONFIGS.rglob("*.yaml"))
SCHEMA_COMMENT = "# yaml-language-server: $schema="


def label(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def header(path: Path) -> list[str]:
    """Give the comment lines a file begins with."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))]


def test_there_are_studies() -> None:
    assert len(FILES) > 10
    assert any(path.parent.name == "articles" for path in FILES), "sub-folders are walked too"


@pytest.mark.parametrize("path", FILES, ids=label)
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_study_loads(path: Path, kind: str) -> None:
    points = study.load(path).points(kind)
    assert points
    for point in points:
        specs = [spec.label for spec, _, _ in point.plans()]
        assert specs[0] == "none", "ratios need their baseline, and the first rows are there first"
        assert len(specs) > 1


@pytest.mark.parametrize("path", FILES, ids=label)
def test_study_fits_every_machine(path: Path) -> None:
    """A file written for a GPU runs on a CPU too, in a short type only where that is its question."""
    loaded = study.load(path)
    assert loaded.device() == "auto"
    asked = "train.precision" in (loaded.marked.data.get("vary") or {})
    assert asked or {point.train.precision for point in loaded.points("cpu")} == {"fp32"}


@pytest.mark.parametrize("path", FILES, ids=label)
def test_study_points_to_the_schema(path: Path) -> None:
    first = header(path)[0]
    assert first.startswith(SCHEMA_COMMENT)
    target = path.parent / first.removeprefix(SCHEMA_COMMENT)
    assert target.resolve() == CONFIGS / "ckbench.schema.json"
    assert target.is_file(), "ckbench schema writes it"


@pytest.mark.parametrize("path", FILES, ids=label)
def test_header_gives_question_command_hardware_and_outcome(path: Path) -> None:
    lines = header(path)
    for key in ("Question:", "Command:", "Hardware:", "Expected:"):
        assert sum(line.startswith(f"# {key}  ") for line in lines) == 1, f"{key} is missing"
    assert any(f"ckbench run {label(path)}" in line for line in lines), "the command names another file, or none"
    assert study.load(path).description


def test_readme_lists_every_study_once() -> None:
    text = (CONFIGS / "README.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| [")]
    listed = [line.partition("](")[2].partition(")")[0] for line in rows]
    assert sorted(listed) == sorted(path.relative_to(CONFIGS).as_posix() for path in FILES)


HAS_ITS_OWN = {"hf-native": "hf_gpt2.yaml", "reversible": "reversible.yaml", "budget": "budget.yaml"}
"""Strategies that need another model, or a budget that suits one, with their studies."""
NEEDS_A_FILE = ("plan",)


def test_everything_names_the_whole_shelf() -> None:
    for kind in ("cpu", "cuda"):
        (point,) = study.load(CONFIGS / "everything_cpu.yaml").points(kind)
        apart = {*HAS_ITS_OWN, *NEEDS_A_FILE}
        assert {spec.name for spec in point.strategies} == set(registry.names("strategies")) - apart
        assert [spec.label for spec, _, alias in point.plans() if alias] == [], "no two rows with one plan"
    for name, file in HAS_ITS_OWN.items():
        (point,) = study.load(CONFIGS / file).points("cpu")
        assert name in {spec.name for spec in point.strategies}


def test_every_family_has_a_study() -> None:
    families = {point.model.family for path in FILES for point in study.load(path).points("cpu")}
    assert families >= set(registry.names("models")) - {"custom"}, "a custom model's study is in examples/"


def test_the_built_in_sweep_goes_from_2_to_48_layers() -> None:
    swept = {"model.n_layers": list(range(2, 49))}
    points = study.load(CONFIGS / "sweep_base.yaml", swept=swept).points("cpu")
    assert sorted(point.model.n_layers for point in points) == list(range(2, 49))
    assert {len(point.strategies) for point in points} == {5}
