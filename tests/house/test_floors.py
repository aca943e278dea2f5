"""Imports go down the stairs, and torch stays where tensors live: read from the source, not from running it."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import ckbench
from ckbench import registry

PACKAGE = Path(ckbench.__file__).parent
SHELVES = frozenset(registry.SHELVES)

FLOOR_OF_ROOM = {
    # ground: leaves
    **dict.fromkeys(("__init__", "errors", "units", "registry", "host", "interrupts"), 0),
    # first: data, no torch
    **dict.fromkeys(("marked_yaml", "config", "faults", "ranges", "specs", "study", "plan", "records"), 1),
    **dict.fromkeys(("store", "compare", "doubts", "statistics", "table", "estimates", "cards", "card_speeds"), 1),
    "planfile": 1,
    # second: the shelves
    **dict.fromkeys(SHELVES, 2),
    # third: where plans meet tensors
    **dict.fromkeys(("engine", "estimate", "planner", "parallel"), 3),
}
TOP_FLOOR = 4  # launch, session, cli, and whatever has no line above

TENSOR_ROOMS = frozenset({"models", "devices", "engine", "estimate", "parallel"})

LATE_IMPORTS = {
    # (file, function, imported room): why it may look up
    ("devices/*", "subject", "engine"): "a device builds the trial it measures, and nothing else of the engine",
}

TORCH_FREE = (
    "devices.base",
    "devices._oom",
    "devices._timeline",
    "devices.replay",
    "engine.measure",
    "engine.worker",
    "engine.environment",
)
"""Modules in the rooms of tensors that say of themselves that they need no torch."""


@dataclass(frozen=True, kw_only=True)
class Import:
    """One import statement: who, from which function (empty at the top of the file), what."""

    file: Path
    line: int
    function: str
    target: str

    @property
    def place(self) -> str:
        return f"{self.file.relative_to(PACKAGE.parent)}:{self.line}"

    @property
    def room(self) -> str:
        return room_of(self.file)

    @property
    def target_room(self) -> str:
        parts = self.target.split(".")
        return parts[1] if len(parts) > 1 else "__init__"


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def is_module(name: str) -> bool:
    path = PACKAGE.parent / Path(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def imports_of(path: Path) -> Iterator[Import]:
    """Yield every import of a file, those inside functions and under TYPE_CHECKING too."""

    def visit(node: ast.AST, function: str) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            inside = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
            for target in targets(child):
                yield Import(file=path, line=child.lineno, function=function, target=target)
            yield from visit(child, inside)

    def targets(node: ast.AST) -> list[str]:
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write the whole module name, not a relative import"
            base = node.module or ""
            inner = [f"{base}.{alias.name}" for alias in node.names]
            return [name if base.startswith("ckbench") and is_module(name) else base for name in inner]
        return []

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), "")


ALL_IMPORTS = [found for path in sources() for found in imports_of(path)]
OURS = [found for found in ALL_IMPORTS if found.target.split(".")[0] == "ckbench"]


def is_late(found: Import) -> bool:
    return (f"{found.room}/*", found.function, found.target_room) in LATE_IMPORTS


def floor(room: str) -> int:
    return FLOOR_OF_ROOM.get(room, TOP_FLOOR)


def complaint(found: Import) -> str | None:
    here, there = found.room, found.target_room
    if here == there or there == "__init__" or is_late(found):
        return None
    if floor(there) > floor(here):
        return f"{found.place}: {here} may not look up to {there}; move the shared part down a floor"
    if here in SHELVES and there in SHELVES:
        return f"{found.place}: shelf {here} imports shelf {there}; shelves know nothing of each other"
    return None


def test_imports_go_down_the_stairs() -> None:
    assert [text for text in map(complaint, OURS) if text] == []


def test_plug_ins_do_not_import_each_other() -> None:
    """A plug-in may lean on its shelf's base and private files, never on a sibling plug-in."""
    found = []
    for item in OURS:
        parts = item.target.split(".")
        if item.room not in SHELVES or item.target_room != item.room or len(parts) < 3:
            continue
        if parts[2] != "base" and not parts[2].startswith("_") and item.file.stem != parts[2]:
            found.append(f"{item.place}: imports its sibling {parts[2]}; move the shared part to a private file")
    assert found == []


def test_no_import_cycle() -> None:
    """Modules of one floor may know each other, but not in a circle."""
    graph: dict[str, set[str]] = {}
    for item in OURS:
        if not item.function:
            graph.setdefault(module_name(item.file), set()).add(item.target)
    done: set[str] = set()

    def follow(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail[trail.index(name) :], name))
        if name in done:
            return
        for target in sorted(graph.get(name, ())):
            follow(target, (*trail, name))
        done.add(name)

    for name in sorted(graph):
        follow(name, ())


def test_the_rules_can_fail() -> None:
    """Each rule above speaks up for an import that breaks it."""

    def example(file: str, target: str, function: str = "") -> str | None:
        return complaint(Import(file=PACKAGE / file, line=1, function=function, target=target))

    assert "may not look up to engine" in str(example("plan.py", "ckbench.engine.trial"))
    assert "may not look up to study" in str(example("units.py", "ckbench.study"))
    assert "shelf models imports shelf devices" in str(example("models/gpt.py", "ckbench.devices.cpu"))
    assert "may not look up to engine" in str(example("devices/cpu.py", "ckbench.engine.trial", "name"))
    assert example("devices/cpu.py", "ckbench.engine.trial", "subject") is None
    assert example("engine/trial.py", "ckbench.models.base") is None


def test_late_imports_are_all_used() -> None:
    """An exception that nothing needs any more is taken off the list."""
    used = {(f"{found.room}/*", found.function, found.target_room) for found in OURS}
    assert set(LATE_IMPORTS) <= used


def test_torch_is_imported_only_where_tensors_live() -> None:
    found = [
        f"{item.place}: {item.room} imports {item.target}"
        for item in ALL_IMPORTS
        if item.target.split(".")[0] == "torch" and item.room not in TENSOR_ROOMS
    ]
    assert found == []


def test_checkpoint_is_called_in_one_file() -> None:
    callers = {
        item.file.relative_to(PACKAGE).as_posix()
        for item in ALL_IMPORTS
        if item.target.startswith("torch.utils.checkpoint")
    }
    made_of = {"engine/checkpointing.py", "engine/inside.py", "engine/selective.py"}
    assert callers - {"engine/warm.py"} == made_of  # warm.py only loads it for forks


def test_no_code_below_the_plan_branches_on_a_strategy_name() -> None:
    """The engine, models and devices read Plans; a strategy's name is for people."""
    spelled = {name for name in registry.names("strategies") if name != "none"}  # none is a word of other keys too
    found = []
    for room in ("engine", "models", "devices", "estimate", "parallel"):
        for path in sorted((PACKAGE / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.Compare):
                    continue
                words = {x.value for x in ast.walk(node) if isinstance(x, ast.Constant) and isinstance(x.value, str)}
                if words & spelled:
                    found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: compares with {words & spelled}")
    assert found == []


def torch_free_modules() -> list[str]:
    light = [module_name(path) for path in sources() if room_of(path) not in TENSOR_ROOMS]
    return [name for name in light if not name.endswith("__main__")] + [f"ckbench.{name}" for name in TORCH_FREE]


def test_importing_what_needs_no_torch_loads_no_torch() -> None:
    """One fresh interpreter imports module after module and says after which one torch was there."""
    script = (
        "import importlib, json, sys\n"
        "guilty = None\n"
        "for name in json.loads(sys.argv[1]):\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules:\n"
        "        guilty = name\n"
        "        break\n"
        "print(json.dumps(guilty))\n"
    )
    names = torch_free_modules()
    assert "ckbench.study" in names and "ckbench.strategies.nested" in names
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(names)],
        capture_output=True,
        text=True,
        cwd=PACKAGE.parent,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) is None


@pytest.mark.parametrize("shelf", sorted(SHELVES))
def test_listing_a_shelf_imports_nothing_from_it(shelf: str) -> None:
    script = (
        "import sys\n"
        "from ckbench import registry\n"
        f"names = registry.names({shelf!r})\n"
        f"assert names, 'the shelf is empty'\n"
        f"loaded = [m for m in sys.modules if m.startswith('ckbench.{shelf}.')]\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=PACKAGE.parent, timeout=60
    )
    assert done.returncode == 0, done.stderr
