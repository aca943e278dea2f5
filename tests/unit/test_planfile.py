"""Plan files: what is written is read, and whatever else a file may hold ends in one sentence."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ckbench import planfile
from ckbench.errors import PlanError
from ckbench.plan import Plan, Region
from ckbench.planfile import MAX_BYTES, VERSION, plan_data, read_plan, write_plan

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a file and go to its folder, so that errors name plain ``plan.yaml``."""
    monkeypatch.chdir(tmp_path)

    def make(text: str) -> Path:
        Path("plan.yaml").write_text(text, encoding="utf-8")
        return Path("plan.yaml")

    return make


def told(path: Path) -> str:
    """Give the sentence of the refusal."""
    with pytest.raises(PlanError) as caught:
        read_plan(path)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 400
    assert text.startswith(f"{path}: ")
    return text.removeprefix(f"{path}: ")


PLANS = [
    Plan(n_layers=3),
    Plan(n_layers=3, offload=True),
    Plan(n_layers=4, offload_spans=((0, 1), (1, 3)), regions=(Region(start=0, stop=1),)),
    Plan(n_layers=3, native=True),
    Plan(n_layers=3, compile_budget=0.25),
    Plan(n_layers=2, regions=(Region(start=0, stop=1), Region(start=1, stop=2, save_ops=("aten.mm", "aten.gelu@2")))),
    Plan(n_layers=1, regions=(Region(start=0, stop=1, save_ops=("aten.mm",), save_every=2),), preserve_rng=False),
    Plan(n_layers=9, regions=(Region(start=2, stop=9, children=(Region(start=3, stop=5), Region(start=5, stop=6))),)),
    Plan(n_layers=2, regions=(Region(start=0, stop=1, part="ffn"), Region(start=0, stop=1, part="attention"))),
    Plan(n_layers=2, regions=(Region(start=0, stop=2, mode="invert"),), tolerance=1e-5),
    Plan(n_layers=2, regions=(Region(start=0, stop=2),), early_stop=False),
    Plan(n_layers=2, regions=(Region(start=0, stop=2),), reentrant=True),
]


@pytest.mark.parametrize("plan", PLANS, ids=range(len(PLANS)))
def test_a_round_trip(tmp_path: Path, plan: Plan) -> None:
    path = tmp_path / "plan.yaml"
    write_plan(path, plan, {"budget_bytes": 3})
    again = read_plan(path)
    assert again == plan and again.tolerance == plan.tolerance
    assert yaml.safe_load(path.read_text())["made_for"] == {"budget_bytes": 3}


def drawn_region(draw: random.Random, start: int, stop: int) -> Region:
    children = []
    at = start
    while at < stop and draw.random() < 0.6:
        end = draw.randint(at + 1, stop)
        if (at, end) != (start, stop):
            children.append(drawn_region(draw, at, end))
        at = end
    return Region(start=start, stop=stop, children=tuple(children))


@pytest.mark.parametrize("seed", range(20))
def test_drawn_plans_come_back(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    n_layers = draw.randint(1, 40)
    plan = Plan(n_layers=n_layers, regions=(drawn_region(draw, 0, n_layers),), early_stop=draw.random() < 0.5)
    write_plan(tmp_path / "plan.yaml", plan, {})
    assert read_plan(tmp_path / "plan.yaml") == plan


def test_what_has_its_default_is_left_out() -> None:
    region = Region(start=0, stop=2, children=(Region(start=1, stop=2, save_ops=("aten.mm",)),))
    assert plan_data(Plan(n_layers=2, regions=(region,))) == {
        "n_layers": 2,
        "regions": [{"start": 0, "stop": 2, "children": [{"start": 1, "stop": 2, "save_ops": ["aten.mm"]}]}],
    }


def test_a_thousand_layers_fit_by_far(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    plan = Plan(n_layers=1000, regions=tuple(Region(start=i, stop=i + 1, save_ops=("aten.mm",)) for i in range(1000)))
    write_plan(path, plan, {})
    assert read_plan(path) == plan and path.stat().st_size < MAX_BYTES / 20


HEAD = f"ckbench_plan: {VERSION}\nplan:\n"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "no plan file; `ckbench plan STUDY --budget SIZE --save plan.yaml` writes one"),
        ("[1, 2]", "no plan file; "),
        ("just words", "no plan file; "),
        ("{plan: 3, ckbench_plan: 1}", "no plan file; "),
        ("a: [", "not a YAML file"),
        ("\tx", "not a YAML file"),
        ("a: 2026-13-45", "not a YAML file"),  # a date that there is not
        ("a: " + "9" * 5000, "not a YAML file"),  # more digits than Python reads
        ("{[1]: 2}", "not a YAML file"),
        ("!!python/object/apply:os.system [true]", "not a YAML file"),
        ("[" * 5000, "not a YAML file"),
        ("{plan: {n_layers: 1, regions: []}}", "plan file of version None, this ckbench reads 1"),
        ("{ckbench_plan: 2, plan: {n_layers: 1, regions: []}}", "plan file of version 2, this ckbench reads 1"),
        ("{ckbench_plan: true, plan: {n_layers: 1, regions: []}}", "plan file of version True, this ckbench reads 1"),
        ("{ckbench_plan: [" + "1," * 500 + "], plan: {n_layers: 1, regions: []}}", "plan file of version "),
        (HEAD + "  {n_layers: 1}", "the plan needs regions"),
        (HEAD + "  {regions: []}", "the plan needs n_layers"),
        (HEAD + "  {n_layers: x, regions: []}", "n_layers is a whole number of at least 1, not 'x'"),
        (HEAD + "  {n_layers: 0, regions: []}", "n_layers is a whole number of at least 1, not 0"),
        (HEAD + "  {n_layers: true, regions: []}", "n_layers is a whole number of at least 1, not True"),
        (HEAD + "  {n_layers: 2.0, regions: []}", "n_layers is a whole number of at least 1, not 2.0"),
        (HEAD + "  {n_layers: 1, regions: 3}", "regions is a list, not 3"),
        (HEAD + "  {n_layers: 1, regions: [3]}", "a region is a mapping, not 3"),
        (HEAD + "  {n_layers: 1, regions: [], colour: red}", "the plan has no key 'colour'"),
        (HEAD + "  {n_layers: 1, regions: [], early_stop: 3}", "early_stop is true or false, not 3"),
        (HEAD + "  {n_layers: 1, regions: [], compile_budget: x}", "compile_budget is a share from 0 to 1, not 'x'"),
        (HEAD + "  {n_layers: 1, regions: [], compile_budget: 7}", "compile_budget is a share from 0 to 1, not 7"),
        (HEAD + "  {n_layers: 1, regions: [{start: 0}]}", "a region needs stop"),
        (HEAD + "  {n_layers: 1, regions: [{start: 0, stop: x}]}", "stop is a whole number of at least 1, not 'x'"),
        (HEAD + "  {n_layers: 1, regions: [{start: 0.5, stop: 1}]}", "start is a whole number of at least 0, not 0.5"),
        (HEAD + "  {n_layers: 1, regions: [{start: 0, stop: 1, size: 3}]}", "a region has no key 'size'"),
        (HEAD + "  {n_layers: 1, regions: [{start: 0, stop: 1, save_ops: aten.mm}]}", "save_ops is a list of words, not 'aten.mm'"),
        (HEAD + "  {n_layers: 1, regions: [{start: 0, stop: 1, save_ops: [3]}]}", "save_ops is a list of words, not [3]"),
        (HEAD + "  {n_layers: 1, regions: [{start: 0, stop: 1, save_ops: [aten.mm@0]}]}", "operation 'aten.mm@0': after @ comes"),
        (HEAD + "  {n_layers: 1, regions: [{start: 0, stop: 1, part: 3}]}", "part is a word, not 3"),
        (HEAD + "  {n_layers: 1, regions: [{start: 0, stop: 1, part: head}]}", "a region covers one of block, ffn"),
        (HEAD + "  {n_layers: 1, regions: [{start: 0, stop: 1, mode: undo}]}", "a region's mode is one of recompute, invert"),
        (HEAD + "  {n_layers: 1, regions: [{start: 0, stop: 1, save_every: x}]}", "save_every is a whole number of at least 1, not 'x'"),
        (HEAD + "  {n_layers: 1, regions: [{start: 0, stop: 1, children: x}]}", "children is a list, not 'x'"),
        (HEAD + "  {n_layers: 1, regions: [{start: 0, stop: 2}]}", "region 0 to 2 overlaps another or leaves 0 to 1"),
        (HEAD + "  {n_layers: 3, regions: [{start: 1, stop: 3}, {start: 0, stop: 2}]}", "region 0 to 2 overlaps another"),
        (HEAD + "  {n_layers: 1, regions: [&a {start: 0, stop: 1, children: [*a]}]}", "regions lie deeper in one another than 64"),
        (HEAD + "  {n_layers: 1, regions: [" + "{start: 0, stop: 1, children: [" * 70 + "]}" * 70 + "]}", "regions lie deeper in one another than 64"),
        (HEAD + "  {n_layers: 1, regions: [], tolerance: x}", "tolerance is a number of at least 0, not 'x'"),
        (HEAD + "  {n_layers: 1, regions: [], tolerance: -1}", "tolerance is a number of at least 0, not -1"),
    ],
)  # fmt: skip
def test_what_is_no_plan_is_said_in_a_sentence(write: Write, text: str, sentence: str) -> None:
    assert told(write(text)).startswith(sentence)


def test_an_alias_bomb_is_read_in_no_time(write: Write) -> None:
    """Lists of lists, each ten times the one before: as text ten lines, written out 10^10 items."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 11)]
    text = "\n".join([*lines, HEAD + "  {n_layers: 1, regions: *a10}"])
    assert told(write(text)).startswith("a region is a mapping, not a list of 10")


def test_bytes_that_are_no_text(write: Write) -> None:
    write("").write_bytes(b"\xff\xfe\x00")
    assert told(Path("plan.yaml")) == "not a YAML file"


def test_a_file_that_is_not_there_or_not_to_be_read(write: Write) -> None:
    write("")
    assert told(Path("absent.yaml")) == "cannot read the plan: No such file or directory"
    Path("folder").mkdir()
    assert told(Path("folder")) == "cannot read the plan: Is a directory"
    assert told(Path("plan.yaml/deeper")) == "cannot read the plan: Not a directory"
    with pytest.raises(PlanError, match="^a/b.yaml: cannot write the plan: No such file or directory$"):
        write_plan(Path("a/b.yaml"), Plan(n_layers=1), {})


def test_a_huge_file_is_not_read(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planfile, "MAX_BYTES", 10)
    monkeypatch.setattr(yaml, "safe_load", lambda _text: pytest.fail("read all the same"))
    assert told(write("#" * 11)) == "larger than any plan file (10 bytes)"


def test_one_of_two_files_is_as_another(tmp_path: Path) -> None:
    made_for: dict[str, Any] = {"model": {"n_layers": 2}}
    for name in ("a.yaml", "b.yaml"):
        write_plan(tmp_path / name, PLANS[4], made_for)
    assert (tmp_path / "a.yaml").read_bytes() == (tmp_path / "b.yaml").read_bytes()
