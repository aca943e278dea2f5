"""Every strategy has a page, whose diagram and figures are drawn from its Plan: `--update-golden` renews them."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from ckbench import registry, specs
from ckbench.diagrams import PART_WORDS, describe, draw, shape
from ckbench.plan import Plan
from ckbench.planfile import read_plan

PAGES = Path(__file__).parents[2] / "docs" / "strategies"
BEGIN = re.compile(r"<!-- plan: (\S+) -->\n(.*?)<!-- plan: end -->", flags=re.DOTALL)
N_DRAWN = 8
DEPTHS = (8, 24, 96)
FROM_FILES = {"budget:60%": "example.yaml", "plan:example.yaml": "example.yaml"}
"""Specs whose plan is found or stored, for one depth, with the file beside the pages that holds it."""


def plan_of(spec: str, n_layers: int) -> Plan:
    if spec in FROM_FILES:
        return read_plan(PAGES / FROM_FILES[spec])
    return specs.resolve(specs.parse(spec), shape(n_layers))


def picture_name(spec: str) -> str:
    """Name a picture by its spec: ``every-k-3.svg``."""
    return re.sub(r"[^a-z0-9]+", "-", spec.lower()).strip("-") + ".svg"


def picture(spec: str) -> str:
    return draw(plan_of(spec, N_DRAWN), title=f"{spec} over {N_DRAWN} blocks")


def predicted(spec: str) -> str:
    """Say what a strategy costs, in its plan's own words: forwards in backward for three depths."""
    plan = plan_of(spec, N_DRAWN)
    if spec in FROM_FILES:
        return f"Block forwards in backward: {sum(plan.block_calls_backward())} at {plan.n_layers} blocks.\n"
    if plan.compile_budget is not None:
        return "What runs again is decided inside the compiled blocks; the plan predicts no count.\n"
    if not plan.is_active or (plan.offload and not plan.regions):
        return "Block forwards in backward: 0, whatever the depth.\n"
    part = plan.regions[0].part if plan.regions else "block"
    if part != "block":
        counts = ", ".join(f"{plan_of(spec, n).part_calls_backward(part)} at {n} blocks" for n in DEPTHS)
        return f"Block forwards in backward: 0. Forwards of the {PART_WORDS[part]} part in backward: {counts}.\n"
    has_early_stop = bool(plan.regions) and plan.regions[0].mode == "recompute"
    heads = ["blocks", "regions", "block forwards in backward", "of one forward pass"]
    heads += ["with `early_stop=false`"] * has_early_stop
    lines = [f"| {' | '.join(heads)} |", f"|{' --: |' * len(heads)}"]
    for n in DEPTHS:
        plan = plan_of(spec, n)
        calls = sum(plan.block_calls_backward())
        cells = [f"{n}", f"{n if plan.native else plan.n_regions}", f"{calls}", f"{calls / n:.2f}"]
        if has_early_stop:
            cells.append(f"{sum(replace(plan, early_stop=False).block_calls_backward())}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def generated(spec: str) -> str:
    told = describe(plan_of(spec, N_DRAWN))
    return f"![{spec}: {told}]({picture_name(spec)})\n\n{predicted(spec)}"


def page_of(name: str) -> Path:
    return PAGES / f"{name}.md"


def specs_of(page: Path) -> list[str]:
    return [match[1] for match in BEGIN.finditer(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("name", registry.names("strategies"))
def test_the_page_of_a_strategy_shows_its_plan(name: str, request: pytest.FixtureRequest) -> None:
    page = page_of(name)
    assert page.is_file(), f"write docs/strategies/{name}.md, with the lines <!-- plan: SPEC --> and <!-- plan: end -->"
    text = page.read_text(encoding="utf-8")
    shown = specs_of(page)
    assert shown, f"docs/strategies/{name}.md has no <!-- plan: SPEC --> ... <!-- plan: end -->"
    assert specs.parse(shown[0]).name == name, "the first picture of a page is of its own strategy"
    wanted = BEGIN.sub(lambda match: f"<!-- plan: {match[1]} -->\n{generated(match[1])}<!-- plan: end -->", text)
    if request.config.getoption("--update-golden"):
        page.write_text(wanted, encoding="utf-8")
        for spec in shown:
            (PAGES / picture_name(spec)).write_text(picture(spec), encoding="utf-8")
    assert page.read_text(encoding="utf-8") == wanted, "run pytest with --update-golden and read the diff"
    for spec in shown:
        assert (PAGES / picture_name(spec)).read_text(encoding="utf-8") == picture(spec), "run with --update-golden"


def test_no_page_and_no_picture_is_left_over() -> None:
    pages = sorted(PAGES.glob("*.md"))
    assert {page.stem for page in pages} == {*registry.names("strategies"), "index"}
    shown = {picture_name(spec) for page in pages for spec in specs_of(page)}
    assert {path.name for path in PAGES.glob("*.svg")} == shown


def test_the_overview_links_every_page() -> None:
    text = (PAGES / "index.md").read_text(encoding="utf-8")
    for name in registry.names("strategies"):
        assert f"({name}.md)" in text, f"docs/strategies/index.md leaves out {name}"


def test_a_page_says_what_only_its_plan_knows() -> None:
    """The generated part moves with the plan: other depths, other options and other plans give other words."""
    assert "| 8 | 10 | 14 | 1.75 | 16 |" in predicted("nested:4")
    assert "| 8 | 8 | 8 | 1.00 |" in predicted("hf-native")
    assert predicted("per-block") != predicted("per-block,skip_last")
    assert "FFN part in backward: 8 at 8 blocks" in predicted("ffn-only")
    assert picture("every-k:3") != picture("every-k:4")
