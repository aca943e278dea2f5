"""A study or a results file from a stranger is data: nothing in it is run, imported or unpickled."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckbench
from tests.prove import entry

PACKAGE = Path(ckbench.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))

FORBIDDEN_CALLS = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "yaml.load", "yaml.load_all", "yaml.unsafe_load",
    "yaml.full_load", "torch.load", "pandas.read_pickle", "numpy.load", "subprocess.getoutput", "subprocess.getstatusoutput",
    "runpy.run_path", "runpy.run_module",
}  # fmt: skip
FORBIDDEN_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
    "code",
    "pty",
}


def faults(tree: ast.Module) -> Iterator[str]:
    """Yield what in a source could turn data into code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in FORBIDDEN_CALLS or name.rpartition(".")[2] in ("unsafe_load", "full_load"):
                yield f"line {node.lineno}: {name}"
            for keyword in node.keywords:
                if keyword.arg == "shell" and ast.unparse(keyword.value) != "False":
                    yield f"line {node.lineno}: shell="
        elif isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (f"line {node.lineno}: import {m}" for m in modules if m.partition(".")[0] in FORBIDDEN_MODULES)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_no_source_turns_data_into_code(path: Path) -> None:
    assert list(faults(ast.parse(path.read_text(encoding="utf-8")))) == []


IMPORTS_BY_NAME = {
    "__init__.py": "the public names, from a table in the source",
    "registry.py": "a name that was first found among the files of a shelf",
    "optimizers.py": "an optional library, by a name of ours",
    "substitutes.py": "an optional library, by a name of ours",
    "hf.py": "an optional library, by a name of ours",
    "custom.py": "the user's own module, in the worker only: what family custom is for",
}


def test_modules_are_imported_by_name_where_there_is_a_reason() -> None:
    found = {path.name for path in SOURCES if "import_module" in path.read_text(encoding="utf-8")}
    assert found == set(IMPORTS_BY_NAME)


@pytest.mark.parametrize("name", ["optimizers.py", "substitutes.py", "hf.py"])
def test_optional_libraries_are_named_in_the_source(name: str) -> None:
    (path,) = (path for path in SOURCES if path.name == name)
    calls = [
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "import_module"
    ]
    assert calls and all(isinstance(call.args[0], ast.Constant) for call in calls)


def test_the_source_rules_can_fail() -> None:
    bad = (
        "import pickle\nfrom marshal import loads\neval('1')\nyaml.load(x)\nyaml.CLoader.unsafe_load(x)\n"
        "subprocess.run('x', shell=True)\nimport os\nos.system('x')\nmodel.eval()\nsubprocess.run(['x'], shell=False)\n"
    )
    assert len(list(faults(ast.parse(bad)))) == 7


TAGS = (
    "!!python/object/apply:os.system ['touch hacked']",
    "!!python/object/apply:subprocess.check_output [[touch, hacked]]",
    "!!python/object/new:os.system ['touch hacked']",
    "!!python/object:builtins.eval {}",
    "!!python/name:os.system ''",
    "!!python/module:os ''",
    "!!python/tuple [1, 2]",
    '!!python/object/apply:builtins.exec [\'open("hacked", "w")\']',
    "!<tag:yaml.org,2002:python/object/apply:os.system> ['touch hacked']",
    "!!binary aGFja2Vk",
    "!!set {a, b}",
    "!!omap [a: 1]",
    "!!timestamp 2026-11-29",
    "!local x",
)
PLACES = (
    "description: {}",
    "name: {}",
    "model: {}",
    "strategies: [{}]",
    "vary: {{model.n_layers: {}}}",
    "? {}\n: 1",
    "{}",
)
STUDY = "model: {n_layers: 4, d_model: 32, n_heads: 4, vocab_size: 64}\ntrain: {batch_size: 2, seq_len: 16}\n"


@pytest.mark.parametrize("tag", TAGS)
def test_tags_of_other_tools_are_refused_and_not_obeyed(folder: Path, tag: str) -> None:
    for place in PLACES:
        base = "" if place == "{}" else STUDY if not place.startswith("model") else STUDY.partition("\n")[2]
        Path("study.yaml").write_text(base + place.format(tag) + "\n")
        answer = entry.call("run", "study.yaml", "--device", "replay:script.json")
        entry.check_manners(answer)
        assert answer.code == 2 and "study.yaml" in answer.err, (place, answer)
    for option in ("--strategy", "--set"):
        text = "{name: " + tag + "}" if option == "--strategy" else f"train.batch_size={tag}"
        Path("study.yaml").write_text(STUDY)
        answer = entry.call("run", "study.yaml", "--device", "replay:script.json", option, text)
        entry.check_manners(answer)
        assert answer.code == 2
    assert not Path("hacked").exists()


@pytest.mark.parametrize("format_", ["../store", "os", "_private", "base", "json.py", "ckbench.cli", "..", "console\0"])
def test_a_plug_in_name_imports_nothing_from_outside_its_shelf(folder: Path, format_: str) -> None:
    Path("study.yaml").write_text(STUDY)
    for arguments in (
        ("--format", format_),
        ("--device", f"{format_}:x"),
        ("--set", f"model.family={format_}"),
        ("-s", format_),
    ):
        answer = entry.call("run", "study.yaml", *arguments)
        entry.check_manners(answer)
        assert answer.code == 2
