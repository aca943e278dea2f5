"""What every test may ask for: calm torch settings, tiny configs, a folder to write studies in."""

import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from ckbench import specs
from ckbench.config import AnyModel, ModelConfig, RunConfig, RunSettings, TrainConfig, VitConfig, model_class

SEED = 1234
TORCH_THREADS = 1

# A shell that starts the tests in the background has them ignore Ctrl-C, and nohup a closed terminal; what is ignored
# stays so in all children.
for name, action in (("SIGINT", signal.default_int_handler), ("SIGHUP", signal.SIG_DFL)):
    number = getattr(signal, name, None)
    if number is not None and signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, action)

# The same examples in every run, and no verdict on time: machines that run tests are busy.
settings.register_profile("calm", derandomize=True, deadline=None)
settings.load_profile("calm")

Settings = dict[str, Any]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that rewrites kept report texts after a wanted change."""
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden, then read the diff")


@pytest.fixture(autouse=True)
def calm_torch() -> Iterator[None]:
    """Give each test the same seed, dtype and threads; a test that needs no torch does not load it."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    _reset(torch)
    yield
    _reset(torch)


def _reset(torch: Any) -> None:
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(TORCH_THREADS)
    torch.use_deterministic_algorithms(False)
    torch.manual_seed(SEED)


@pytest.fixture
def seed() -> int:
    """The seed that ``calm_torch`` sets, for tests that draw from a generator of their own."""
    return SEED


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., AnyModel]:
    """Make a small model section; keywords replace or add keys."""

    def make(**settings: Any) -> AnyModel:
        cls = model_class(settings.get("family"))
        sizes: Settings = {"n_layers": 4, "d_model": 32, "n_heads": 4, "vocab_size": 64}
        if cls is VitConfig:
            sizes = {"n_layers": 4, "d_model": 32, "n_heads": 4, "image_size": 8, "patch_size": 2, "n_classes": 10}
        return cls(**{**(sizes if issubclass(cls, ModelConfig) else {}), **settings})

    return make


@pytest.fixture(scope="session")
def tiny_run(tiny_model: Callable[..., AnyModel]) -> Callable[..., RunConfig]:
    """Make a whole trial's config from a strategy spec and the keys that differ from the tiny defaults."""

    def make(spec: Any = "none", *, model: Settings | None = None, train: Settings | None = None) -> RunConfig:
        made = tiny_model(**(model or {}))
        step: Settings = {"batch_size": 2, "seq_len": made.own_seq_len() or 16, "lr": 1e-3}
        return RunConfig(
            study="tests",
            model=made,
            train=TrainConfig(**{**step, **(train or {})}),
            strategy=specs.parse(spec),
            run=RunSettings(device="cpu", threads=TORCH_THREADS, seed=7),
        )

    return make


@pytest.fixture
def write_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str | bytes], Path]:
    """Write a study into a folder of its own and go there, so that errors name plain ``study.yaml``."""
    monkeypatch.chdir(tmp_path)

    def write(content: str | bytes) -> Path:
        path = Path("study.yaml")
        path.write_bytes(content if isinstance(content, bytes) else textwrap.dedent(content).encode())
        return path

    return write
