"""The documentation site builds strictly without a network, every internal link resolves, and no page loads from afar."""

import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from ckbench import registry

ROOT = Path(__file__).parents[2]
DOCS, CONFIG = ROOT / "docs", ROOT / "zensical.toml"
BEGIN, END = "# pages: begin\n", "# pages: end\n"
LOADING = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src"}
LINK_KINDS_THAT_LOAD = ("stylesheet", "icon", "preload", "prefetch", "preconnect", "dns-prefetch", "modulepreload")
LIMIT_S = 120

MENU: dict[str, dict[str, str] | str] = {
    "Home": "index.md",
    "Guide": "guide.md",
    "How to read the table": "reading.md",
    "Strategies": {
        "Overview": "strategies/index.md",
        **{name: f"strategies/{name}.md" for name in registry.names("strategies")},
    },
    "Planning": {"Planner": "planner.md", "Estimator": "estimator.md"},
    "Evidence": {
        "Method": "method.md",
        "Limits": "limits.md",
        "Claims put to the test": "claims.md",
        "Benchmarks": "benchmarks.md",
        "Reliability": "reliability.md",
        "Known reports": "known-reports.md",
    },
    "Reference": {
        "Python API": "api.md",
        "Records": "records.md",
        "Extending": "extend.md",
        "Glossary": "glossary.md",
    },
}
"""The order of pages. A page that is not written yet is left out; one that is not named here comes last."""


def written() -> list[str]:
    return sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def menu() -> str:
    """Write the list of pages of the site's settings, from the pages that exist."""
    left = written()

    def entry(title: str, page: str) -> Iterator[str]:
        if page in left:
            left.remove(page)
            yield f'{{ "{title}" = "{page}" }}'

    lines: list[str] = []
    for title, pages in MENU.items():
        if isinstance(pages, str):
            lines += [f"  {item}," for item in entry(title, pages)]
        elif inner := [item for name, page in pages.items() for item in entry(name, page)]:
            lines += [f'  {{ "{title}" = [', *(f"    {item}," for item in inner), "  ] },"]
    lines += [f'  "{page}",' for page in list(left)]
    return "\n".join(["nav = [", *lines, "]"]) + "\n"


def test_the_menu_has_every_page(request: pytest.FixtureRequest) -> None:
    text = CONFIG.read_text(encoding="utf-8")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    wanted = f"{before}{BEGIN}{menu()}{END}{after}"
    if request.config.getoption("--update-golden"):
        CONFIG.write_text(wanted, encoding="utf-8")
    assert CONFIG.read_text(encoding="utf-8") == wanted, (
        "pages came or went: pytest tests/house/test_site.py --update-golden"
    )


def offline() -> list[str]:
    """Give what runs a command in a network of its own that leads nowhere; nothing where that is not allowed."""
    prefix = ["unshare", "--user", "--map-root-user", "--net"]
    if shutil.which("unshare") is None:
        return []
    return prefix if subprocess.run([*prefix, "true"], capture_output=True, timeout=LIMIT_S).returncode == 0 else []


def run_cut_off(script: str, *arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python code that reaches no server: in a network that leads nowhere where that is allowed, and everywhere
    told of a proxy that nobody listens at."""
    nobody = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
    environment = {name: value for name, value in os.environ.items() if name.lower() not in (*nobody, "no_proxy")}
    return subprocess.run(
        [*offline(), sys.executable, "-c", script, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**environment, **nobody, "NO_COLOR": "1"},
    )


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    """Build the docs that lie in a folder, as `make docs` does, cut off from all servers."""
    return run_cut_off("from zensical.main import cli; cli()", "build", "--clean", "--strict", folder=folder)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the docs and their settings."""
    folder = tmp_path_factory.mktemp("source")
    shutil.copytree(DOCS, folder / "docs")
    shutil.copy(CONFIG, folder)
    return folder


@pytest.fixture(scope="module")
def site(source: Path) -> Path:
    """The built site."""
    done = build(source)
    assert done.returncode == 0, done.stdout + done.stderr
    return source / "site"


@dataclass
class Page(HTMLParser):
    """What a page loads, where its links lead, and which places in it have a name."""

    loads: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def __hash__(self) -> int:
        return id(self)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {key: value or "" for key, value in attrs}
        self.names.update(given[key] for key in ("id", "name") if given.get(key))
        if tag in LOADING and given.get(LOADING[tag]):
            self.loads.append(given[LOADING[tag]])
        if tag == "link" and any(kind in LINK_KINDS_THAT_LOAD for kind in given.get("rel", "").split()):
            self.loads.append(given.get("href", ""))
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if "srcset" in given:
            self.loads += [part.split()[0] for part in given["srcset"].split(",")]
        self.loads += addresses_of_style(given.get("style", ""))


def addresses_of_style(text: str) -> list[str]:
    """Give what a style sheet loads."""
    found = re.findall(r"url\(\s*['\"]?([^'\")]+)", text) + re.findall(r"@import\s+['\"]([^'\"]+)", text)
    return [address for address in found if not address.startswith(("data:", "#"))]


def pages_of(site: Path) -> dict[Path, Page]:
    pages = {}
    for path in sorted(site.rglob("*.html")):
        pages[path] = Page()
        pages[path].feed(path.read_text(encoding="utf-8"))
    return pages


def is_far(address: str) -> bool:
    return bool(urlsplit(address).scheme or urlsplit(address).netloc)


def broken(site: Path) -> list[str]:
    """List internal links and loaded files that lead nowhere."""
    pages = pages_of(site)
    found = []
    for path, page in pages.items():
        if path.name == "404.html":  # the server gives it at any address, so its links hold where it is given
            continue
        for address in [*page.links, *page.loads]:
            if is_far(address):
                continue
            parts = urlsplit(address)
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.is_file():
                found.append(f"{path.relative_to(site)}: {address}")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].names:
                found.append(f"{path.relative_to(site)}: {address} names no place")
    return found


def from_afar(site: Path) -> list[str]:
    """List what pages and style sheets load from other hosts."""
    found = [f"{path.name}: {item}" for path, page in pages_of(site).items() for item in page.loads if is_far(item)]
    for path in site.rglob("*.css"):
        found += [f"{path.name}: {item}" for item in addresses_of_style(path.read_text("utf-8")) if is_far(item)]
    for path in site.rglob("*.svg"):
        loaded = re.findall(r"(?:href|src)=\"([^\"#]+)", path.read_text("utf-8"))
        found += [f"{path.name}: {item}" for item in loaded if is_far(item) and not item.startswith("data:")]
    return found


def test_every_page_is_built(site: Path) -> None:
    built = {path.relative_to(site).with_suffix(".md").as_posix() for path in site.rglob("*.html")}
    assert built - {"404.md"} == set(written())


def test_internal_links_resolve(site: Path) -> None:
    assert sum(len(page.links) for page in pages_of(site).values()) > 500, "the parser finds no links"
    assert broken(site) == []


def test_no_page_loads_from_the_network(site: Path) -> None:
    assert sum(len(page.loads) for page in pages_of(site).values()) > 100, "the parser finds nothing loaded"
    assert from_afar(site) == []


@pytest.mark.parametrize("has_namespace", [True, False])
def test_the_build_needs_no_network(monkeypatch: pytest.MonkeyPatch, site: Path, has_namespace: bool) -> None:
    """A server that others reach is out of reach for what builds the site, also where no namespace is allowed."""
    if not has_namespace:
        monkeypatch.setattr(sys.modules[__name__], "offline", list)
    probe = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=5).status)"
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/"
        bare = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        reached = subprocess.run([sys.executable, "-c", probe, address], capture_output=True, text=True, env=bare)
        cut_off = run_cut_off(probe, address)
        server.shutdown()
    assert reached.stdout == "200\n", reached.stderr
    assert cut_off.returncode != 0 and "URLError" in cut_off.stderr
    assert (site / "index.html").is_file(), "and so it was built"


def test_search_finds_pages(site: Path) -> None:
    index = (site / "search.json").read_text(encoding="utf-8")
    assert "reversible" in index and "strategies/nested.html" in index


def test_a_warning_ends_the_build(source: Path, tmp_path: Path) -> None:
    shutil.copytree(source / "docs", tmp_path / "docs")
    shutil.copy(source / "zensical.toml", tmp_path)
    page = tmp_path / "docs" / "index.md"
    page.write_text(page.read_text(encoding="utf-8") + "\n[nowhere](nowhere.md)\n", encoding="utf-8")
    done = build(tmp_path)
    assert done.returncode != 0
    assert "page does not exist" in done.stdout + done.stderr


def test_the_checks_can_fail(tmp_path: Path) -> None:
    """A page with one broken link of each kind, and one load from afar of each kind."""
    text = (
        '<a href="gone.html">a</a><a href="#gone">b</a><a href="https://example.org/">fine</a><p id="here">c</p>'
        '<a href="#here">fine</a><img src="https://example.org/x.png"><script src="//example.org/x.js"></script>'
        '<link rel="stylesheet" href="https://example.org/x.css"><link rel="canonical" href="https://example.org/">'
    )
    (tmp_path / "page.html").write_text(text, encoding="utf-8")
    (tmp_path / "page.css").write_text("@import 'https://example.org/a.css'; a { b: url(//example.org/c) }", "utf-8")
    assert broken(tmp_path) == ["page.html: gone.html", "page.html: #gone names no place"]
    assert len(from_afar(tmp_path)) == 5
