"""Other people's harnesses beside ckbench on the same tiny GPT-2: step time, cost of a trial, figures of memory.

    python benchmarks/peers.py --venv optimum-benchmark=VENV --venv trainer=VENV [--repeats 3]

Each harness runs as its users run it, in an interpreter of its own: optimum-benchmark and ckbench by their commands,
with two trials (without checkpointing, and per block) in one; Hugging Face's Trainer and PyTorch's Timer in a script.
Everything alternates over the repetitions of one run, on one thread, with AdamW and as many steps. Each is compared
with a bare loop over the model that it runs, timed just before or after it in the same interpreter: GPT2LMHeadModel
of transformers, or ckbench's gpt, which has the same layers, widths and parameters.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
MIB_BYTES, MB_BYTES = 2**20, 10**6
LR, WEIGHT_DECAY = 1e-4, 0.01
MODEL = {"n_layers": 2, "d_model": 64, "n_heads": 2, "vocab_size": 256}
SIZES = {**MODEL, "batch": 2, "seq_len": 64, "warm_up": 10, "steps": 50}
TIMER_S = 1.0
PEERS = {
    "optimum-benchmark": (
        "optimum_benchmark",
        "torch==2.13.0 optimum-benchmark==0.6.0 transformers==4.57.6 accelerate==1.15.0 datasets==5.0.1",
    ),  # with transformers 5 it ends in: cannot import name 'SpecialTokensMixin'
    "trainer": ("accelerate", "torch==2.13.0 transformers==5.24.0 accelerate==1.15.0"),
}
"""By name: the module to look for, and what to install."""
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "OVERRIDE_BENCHMARKS": "1",
    "PYTHONWARNINGS": "ignore",
}

Request = dict[str, Any]


class Trial(NamedTuple):
    """What one harness said in one repetition."""

    step_s: float
    first_s: float
    """From the start of the command to the end of its first trial."""
    further_s: float | None = None
    """One more trial in the same command, everything measured; None where a trial is a command."""
    round_s: float | None = None
    """One more round of the same strategy, time alone."""
    memory: dict[str, tuple[float, float]] = {}
    """Bytes without checkpointing and with, by the name of the figure."""


def main() -> None:
    """Measure what is installed, name what is not, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", action="append", default=[], metavar="NAME=PATH", help=f"NAME: {', '.join(PEERS)}")
    parser.add_argument("--repeats", type=int, default=3)
    for name, value in SIZES.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=value)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        name, text = options.child
        print(json.dumps(CHILDREN[name](json.loads(text))))
        return
    request = {name: getattr(options, name) for name in SIZES} | {"checkpointing": False, "memory": False}
    with tempfile.TemporaryDirectory() as folder:
        compare(find(options.venv), request, options.repeats, Path(folder))


def find(given: list[str]) -> dict[str, str]:
    """Give the interpreter of each peer that is installed; say of the rest how to install them."""
    places = {name: path for name, _, path in (item.partition("=") for item in given)}
    for name, path in places.items():
        if name not in PEERS or not Path(path).exists() or not path:
            sys.exit(
                f"--venv takes NAME=PATH: NAME is {' or '.join(PEERS)}, PATH a virtual environment, not {name}={path}"
            )
    interpreters = {}
    for name, (module, packages) in PEERS.items():
        place = Path(places.get(name, sys.executable)).absolute()
        python = str(place / "bin" / "python" if place.is_dir() else place)
        looked = subprocess.run(
            [python, "-c", f"import importlib.util as u, sys; sys.exit(not u.find_spec({module!r}))"], env=ENVIRONMENT
        )
        if looked.returncode == 0:
            interpreters[name] = python
        else:
            print(f"{name}: not installed, left out. To have it, in a virtual environment of its own:")
            print(f"    pip install {packages}\n    and --venv {name}=PATH")
    return interpreters


def compare(interpreters: dict[str, str], request: Request, repeats: int, folder: Path) -> None:
    """Alternate over the harnesses and print what came out."""
    (folder / "study.yaml").write_text(study_text(request))
    arms: dict[str, tuple[str, str, Callable[[], Trial]]] = {
        "ckbench": (sys.executable, "bare-gpt", lambda: run_ckbench(folder)),
        "Timer": (sys.executable, "bare-gpt", lambda: run_script(sys.executable, "timer", request)),
    }
    if "optimum-benchmark" in interpreters:
        python = interpreters["optimum-benchmark"]
        child(python, "save-gpt2", {**request, "to": str(folder / "model")})
        (folder / "optimum.yaml").write_text(json.dumps(optimum_config(request, folder)))  # JSON is YAML
        arms["optimum-benchmark"] = (python, "bare-gpt2", lambda: run_optimum(python, folder))
    if "trainer" in interpreters:
        trainer = interpreters["trainer"]
        arms["Trainer"] = (trainer, "bare-gpt2", lambda: run_script(trainer, "trainer", request))
    said: dict[str, list[Trial]] = {name: [] for name in arms}
    ratios: dict[str, list[float]] = {name: [] for name in arms}
    parameters: dict[str, int] = {}
    for repetition in range(repeats):
        for name in list(arms) if repetition % 2 == 0 else list(arms)[::-1]:
            python_of, bare, run = arms[name]
            loop, _ = child(python_of, bare, request) if repetition % 2 == 0 else ({}, 0.0)
            trial = run()
            if repetition % 2:
                loop, _ = child(python_of, bare, request)
            parameters[bare] = loop["parameters"]
            said[name].append(trial)
            ratios[name].append(trial.step_s / loop["step_s"])
    print_times(said, ratios, parameters, request)
    step_s = statistics.median(trial.step_s for trial in said["Trainer"]) if "Trainer" in said else 0.0
    if "Trainer" in said:
        said["Trainer"].append(trainer_memory(interpreters["trainer"], request))
    print_memory(said)
    if "Trainer" in said:
        slower = said["Trainer"][-1].step_s / step_s
        print(f"    (Trainer watches it in a loop without a pause; with that a step takes {slower:.1f} x as long)")


def print_times(
    said: dict[str, list[Trial]], ratios: dict[str, list[float]], parameters: dict[str, int], request: Request
) -> None:
    """Print step times over the bare loop and what a trial costs."""
    counts = ", ".join(f"{name.removeprefix('bare-')} {number}" for name, number in parameters.items())
    shape = "{n_layers} layers of width {d_model}, batch {batch} x {seq_len}, {warm_up} + {steps} steps"
    print(f"\n{shape.format(**request)}, one thread of {os.cpu_count()} cores; parameters: {counts}")
    print("step time as the harness gives it, over a bare loop; wall seconds of a trial, process start included")
    print(f"{'harness':>18}  {'step / bare':>11}  {'range':>13}  {'first':>6}  {'further':>7}  {'round':>6}")
    for name, trials in said.items():
        middle, low, high = statistics.median(ratios[name]), min(ratios[name]), max(ratios[name])
        cells = [middle_of([getattr(t, key) for t in trials]) for key in ("first_s", "further_s", "round_s")]
        print(
            f"{name:>18}  {middle:11.3f}  {low:5.3f}..{high:5.3f}  "
            f"{show(cells[0], 6)}  {show(cells[1] or cells[0], 7)}  {show(cells[2], 6)}"
        )
    if "optimum-benchmark" in said:
        theirs, ours = (middle_of([t.further_s for t in said[name]]) for name in ("optimum-benchmark", "ckbench"))
        again = middle_of([t.round_s for t in said["ckbench"]])
        assert theirs and ours and again
        print(
            f"one more trial: optimum-benchmark {theirs:.2f} s, ckbench {ours:.2f} s with memory, counts and parity "
            f"(1/{theirs / ours:.1f}), {again:.2f} s for a further round (1/{theirs / again:.1f})"
        )


def middle_of(values: list[float | None]) -> float | None:
    """Give the median of what is known."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def show(value: float | None, width: int) -> str:
    """Write seconds, or a dash."""
    return f"{value:{width}.2f}" if value is not None else f"{'-':>{width}}"


def print_memory(said: dict[str, list[Trial]]) -> None:
    """Print every memory figure without checkpointing and with."""
    print(f"\n{'memory':>44}  {'none':>11}  {'per block':>11}  change")
    for name, trials in said.items():
        figures = trials[-1].memory
        for figure, (plain, saving) in figures.items():
            change = f"{saving / plain - 1:+.1%}" if plain else "n/a"
            cells = "  ".join(f"{n / MIB_BYTES:7.2f} MiB" for n in (plain, saving))
            print(f"{name + ': ' + figure:>44}  {cells}  {change}")
        if not figures:
            print(f"{name + ': none':>44}")


def child(python: str, name: str, request: Request) -> tuple[dict[str, Any], float]:
    """Run a function of this file in another interpreter; give its answer and the wall seconds of the process."""
    begun = time.perf_counter()
    done = subprocess.run(
        [python, "-P", __file__, "--child", name, json.dumps(request)],
        env=ENVIRONMENT, cwd=tempfile.gettempdir(), capture_output=True, text=True,
    )  # fmt: skip
    wall_s = time.perf_counter() - begun
    if done.returncode:
        sys.exit(f"{name} failed in {python}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1]), wall_s


def run_script(python: str, name: str, request: Request) -> Trial:
    """Run a harness that is a script: each trial is a process."""
    answer, wall_s = child(python, name, request)
    return Trial(step_s=answer["step_s"], first_s=wall_s)


def command(arguments: list[str], folder: Path) -> float:
    """Run a harness that is a command; give the time of day at its start."""
    begun = time.time()
    done = subprocess.run(arguments, env=ENVIRONMENT, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{arguments[0]} failed:\n{(done.stdout + done.stderr)[-2000:]}")
    return begun


def run_optimum(python: str, folder: Path) -> Trial:
    """Run the two trials in one command; a trial ends when its report is there."""
    out = tempfile.mkdtemp(dir=folder)
    values = "scenario.training_arguments.gradient_checkpointing=false,true"
    begun = command(
        [
            str(Path(python).with_name("optimum-benchmark")), "--config-dir", str(folder), "--config-name", "optimum",
            "--multirun", values, f"hydra.sweep.dir={out}", "hydra.sweep.subdir=${hydra.job.num}",
            "hydra.job.chdir=true",
        ],
        folder,
    )  # fmt: skip
    reports = [Path(out) / number / "benchmark_report.json" for number in ("0", "1")]
    ends = [report.stat().st_mtime for report in reports]
    trains = [json.loads(report.read_text())["train"] for report in reports]
    plain, saving = (train["memory"]["max_ram"] * MB_BYTES for train in trains)
    return Trial(
        step_s=statistics.median(trains[0]["latency"]["values"]),
        first_s=ends[0] - begun,
        further_s=ends[1] - ends[0],
        memory={"max_ram (resident size)": (plain, saving)},
    )


def optimum_config(request: Request, folder: Path) -> dict[str, Any]:
    """Write the training scenario with the step of the bare loop: no clipping, no schedule, no logging."""
    return {
        "defaults": ["benchmark", {"scenario": "training"}, {"launcher": "process"}, {"backend": "pytorch"}, "_self_"],
        "name": "peers",
        "launcher": {"device_isolation": False},
        "backend": {
            "device": "cpu", "model": str(folder / "model"), "task": "text-generation", "library": "transformers",
            "model_type": "gpt2",
        },
        "scenario": {
            "memory": True, "max_steps": request["warm_up"] + request["steps"], "warmup_steps": request["warm_up"],
            "dataset_shapes": {"dataset_size": 512, "sequence_length": request["seq_len"]},
            "training_arguments": arguments_of(request),
        },
    }  # fmt: skip


def arguments_of(request: Request) -> dict[str, Any]:
    """Give the TrainingArguments that make Trainer's step that of the bare loop."""
    return {
        "per_device_train_batch_size": request["batch"], "learning_rate": LR, "weight_decay": WEIGHT_DECAY,
        "optim": "adamw_torch", "max_grad_norm": 0.0, "lr_scheduler_type": "constant", "logging_strategy": "no",
        "disable_tqdm": True, "gradient_checkpointing": request["checkpointing"],
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    }  # fmt: skip


def study_text(request: Request) -> str:
    """Write the same for ckbench: two strategies, two rounds."""
    steps = request["steps"]
    study = {
        "model": {"family": "gpt", "tie_embeddings": True, **{key: request[key] for key in MODEL}},
        "train": {"batch_size": request["batch"], "seq_len": request["seq_len"], "optimizer": "adamw", "lr": LR},
        "strategies": ["none", "per-block"],
        "run": {
            "rounds": 2, "warmup_steps": request["warm_up"], "min_steps": steps, "max_steps": steps, "threads": 1,
            "max_seconds": 600.0,
        },
    }  # fmt: skip
    return json.dumps(study)


def run_ckbench(folder: Path) -> Trial:
    """Run the study in one command: none and per-block in full, then a second round of each."""
    out = tempfile.mkdtemp(dir=folder)
    arguments = [sys.executable, "-m", "ckbench", "run", str(folder / "study.yaml"), "--device", "cpu", "--out", out]
    begun = command(arguments, ROOT)
    lines = [line for path in Path(out).glob("*.jsonl") for line in path.read_text().splitlines()]
    records = [record for record in map(json.loads, lines) if "started_at" in record]
    records.sort(key=lambda record: record["started_at"])
    ends = [datetime.fromisoformat(record["started_at"]).timestamp() + record["trial_s"] for record in records]
    plain, saving = records[0], records[1]
    figures = {"peak_allocated_bytes (exact)": "peak_allocated_bytes", "host_peak_bytes (resident)": "host_peak_bytes"}
    return Trial(
        step_s=plain["step_s_median"],
        first_s=ends[0] - begun,
        further_s=ends[1] - ends[0],
        round_s=ends[3] - ends[2],
        memory={name: (plain[key], saving[key]) for name, key in figures.items()},
    )


def trainer_memory(python: str, request: Request) -> Trial:
    """Ask Trainer for its memory figures, without checkpointing and with."""
    plain, saving = (
        child(python, "trainer", {**request, "memory": True, "checkpointing": checkpointing})[0]
        for checkpointing in (False, True)
    )
    figures = {"train_mem_cpu (growth of resident)": (plain["memory"], saving["memory"])}
    return Trial(step_s=plain["step_s"], first_s=0.0, memory=figures)


def make_gpt2(request: Request) -> Any:
    """Build GPT-2 from its configuration, without dropout."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=request["n_layers"], n_embd=request["d_model"], n_head=request["n_heads"], use_cache=False,
        n_positions=request["seq_len"], vocab_size=request["vocab_size"], bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def time_loop(model: Any, loss_of: Callable[[], Any], request: Request) -> dict[str, Any]:
    """Time the loop that a person would write."""
    step = make_step(model, loss_of)
    seconds = []
    for _ in range(request["warm_up"] + request["steps"]):
        begun = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begun)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"step_s": statistics.median(seconds[request["warm_up"] :]), "parameters": parameters}


def make_step(model: Any, loss_of: Callable[[], Any]) -> Callable[[], None]:
    """Give one training step with AdamW."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)

    def step() -> None:
        loss_of().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def bare_gpt2(request: Request) -> dict[str, Any]:
    """Loop over GPT2LMHeadModel."""
    import torch

    model = make_gpt2(request).train()
    tokens = torch.randint(request["vocab_size"], (request["batch"], request["seq_len"]))
    mask = torch.ones_like(tokens)  # optimum-benchmark's data have one
    return time_loop(model, lambda: model(input_ids=tokens, attention_mask=mask, labels=tokens).loss, request)


def save_gpt2(request: Request) -> dict[str, Any]:
    """Write the model where optimum-benchmark loads it from."""
    make_gpt2(request).save_pretrained(request["to"])
    return {}


def make_gpt(request: Request) -> tuple[Any, Callable[[], Any]]:
    """Build ckbench's gpt and what gives its loss."""
    sys.path.insert(0, str(ROOT))
    import torch
    from torch.nn import functional as F

    from ckbench import registry
    from ckbench.config import ModelConfig

    sizes = {key: request[key] for key in MODEL}
    model = registry.load("models", "gpt")(ModelConfig(**sizes, tie_embeddings=True), request["seq_len"]).module.train()
    tokens = torch.randint(request["vocab_size"], (request["batch"], request["seq_len"]))
    return model, lambda: F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def bare_gpt(request: Request) -> dict[str, Any]:
    """Loop over ckbench's gpt."""
    return time_loop(*make_gpt(request), request)


def timer(request: Request) -> dict[str, Any]:
    """Time a step with torch.utils.benchmark, which warms up and takes the median by itself."""
    from torch.utils.benchmark import Timer

    step = make_step(*make_gpt(request))
    return {"step_s": Timer("step()", globals={"step": step}).blocked_autorange(min_run_time=TIMER_S).median}


def trainer(request: Request) -> dict[str, Any]:
    """Train with Hugging Face's Trainer and read its speed, and its memory where asked."""
    import torch
    from transformers import Trainer, TrainingArguments

    n_steps = request["warm_up"] + request["steps"]
    rows = torch.randint(request["vocab_size"], (request["batch"] * n_steps, request["seq_len"]))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=n_steps, use_cpu=True, report_to="none", save_strategy="no",
            skip_memory_metrics=not request["memory"], **arguments_of(request),
        )  # fmt: skip
        data = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in rows]
        metrics = Trainer(model=make_gpt2(request), args=arguments, train_dataset=data).train().metrics  # type: ignore[arg-type]
    memory = [metrics.get(f"train_mem_cpu_{part}_delta", 0) for part in ("alloc", "peaked")]
    return {"step_s": 1 / metrics["train_steps_per_second"], "memory": sum(memory)}


CHILDREN: dict[str, Callable[[Request], dict[str, Any]]] = {
    "bare-gpt2": bare_gpt2,
    "save-gpt2": save_gpt2,
    "bare-gpt": bare_gpt,
    "timer": timer,
    "trainer": trainer,
}


if __name__ == "__main__":
    main()
