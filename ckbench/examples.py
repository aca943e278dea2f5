"""The example studies: where they lie, in a source tree and in an installed wheel."""

from pathlib import Path

from ckbench.errors import CkbenchError, StoreError

SUFFIXES = (".yaml", ".json", ".md")


def root() -> Path:
    """Give the folder of the examples: inside the installed package, or beside it in a source tree."""
    package = Path(__file__).parent
    for folder in (package / "_configs", package.parent / "configs"):
        if (folder / "smoke.yaml").is_file():
            return folder
    raise CkbenchError("the example studies are missing from this installation; reinstall ckbench")


def path(name: str) -> Path:
    """Give one example."""
    return root() / name


def write(folder: Path) -> list[str]:
    """Copy the examples into ``folder`` and say so, a line per file; existing files are left alone.

    Raises StoreError where the folder cannot be written.
    """
    lines = []
    source = root()
    try:
        for file in sorted(source.rglob("*")):
            if file.suffix not in SUFFIXES:
                continue
            target = folder / file.relative_to(source)
            if target.exists():
                lines.append(f"{target}: exists, left alone")
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
            lines.append(f"{target}: written")
    except OSError as error:
        raise StoreError(f"{folder}: cannot be written ({error.strerror})") from None
    return lines
