"""Start a fresh isolated process per trial, watch it, and make a record of whatever becomes of it.

Workers fork from a warm server that has imported torch and never touched a device (multiprocessing's
forkserver); ``spawn`` starts a cold interpreter instead. The parent imports no torch.
"""

import contextlib
import json
import multiprocessing
import os
import select
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ckbench import host
from ckbench.config import RunConfig
from ckbench.engine import worker
from ckbench.engine.environment import environment
from ckbench.errors import CkbenchError, DeviceUnavailable
from ckbench.records import Record

PRELOAD = "ckbench.engine.warm"
END_GRACE_S = 5.0
STDERR_TAIL_CHARS = 600
POLL_S = 0.2
RESTART_AFTER_S = (0.1, 1.0, 5.0)

Progress = Callable[[str], None]


class Launcher:
    """Runs trials one after the other, each in a process of its own."""

    def __init__(self, start_method: str = "forkserver") -> None:
        if start_method == "forkserver" and "forkserver" not in multiprocessing.get_all_start_methods():
            start_method = "spawn"
        self.start_method = start_method
        self._context: Any = multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            self._context.set_forkserver_preload([PRELOAD])

    def probe(self, device: str) -> dict[str, Any]:
        """Open a device in a child and give its label, name and facts.

        Raises DeviceUnavailable when it is not there.
        """
        if _runs_here(device):
            opened = worker.open_device(device, None)
            return {"label": opened.label(), "name": opened.name(), "facts": environment(opened)}
        answer, process, tail = self.converse(_probe_entry, device, 120.0, lambda phase: None)
        if answer is None:
            raise CkbenchError(f"the device check of {device} ended with exit code {process.exitcode}: {tail}")
        if "error" in answer:
            raise DeviceUnavailable(answer["error"])
        return answer

    def run(self, config: RunConfig, round_number: int, progress: Progress) -> Record:
        """Run one trial and give its record, whatever happened to its process."""
        requested_at = time.time()
        if _runs_here(config.run.device):
            record = worker.run_trial(config, round_number, requested_at, progress)
            record.trial_s = time.time() - requested_at
            return record
        request = {"config": config.model_dump(mode="json"), "round": round_number, "requested_at": requested_at}
        kills_before = host.oom_kills()
        last_phase = "start"

        def follow(phase: str) -> None:
            nonlocal last_phase
            last_phase = phase
            progress(phase)

        answer, process, tail = self.converse(_trial_entry, json.dumps(request), config.run.timeout_s, follow)
        if answer is not None:
            record = Record(**answer["record"])
        else:
            record = _record_of_death(config, round_number, process, last_phase, tail, kills_before)
        record.trial_s = time.time() - requested_at
        record.environment.setdefault("start_method", self.start_method)
        return record

    def converse(
        self, entry: Callable[..., None], text: str, timeout_s: float, progress: Progress
    ) -> tuple[dict[str, Any] | None, BaseProcess, str]:
        """Start a child on ``entry(connection, text, log)``, follow its messages, end its whole process tree.

        Gives its last message, or None if it ended without one; the process; the tail of its output.
        """
        ours, theirs = self._context.Pipe(duplex=False)
        with tempfile.TemporaryDirectory(prefix="ckbench-") as folder:
            log = Path(folder) / "output"
            process = self._context.Process(target=entry, args=(theirs, text, str(log)), daemon=False)
            try:
                self._start(process)
                theirs.close()
                answer, timed_out = _listen(ours, process, timeout_s, progress)
            finally:
                if process.pid is not None:
                    _end_tree(process)
                ours.close()
            tail = _tail(log)
        if timed_out:
            tail = TIMED_OUT
        return answer, process, tail

    def _start(self, process: BaseProcess) -> None:
        """Start a child; Ctrl-C works while it waits for a server that loads torch, and says nothing in there."""
        with _importable(), _ctrl_c_held(), _script_hidden():
            if self.start_method != "forkserver":
                process.start()
                return
        for patience_s in (*RESTART_AFTER_S, None):
            with _importable(), _ctrl_c_held(), _script_hidden():
                forkserver.ensure_running()
            try:
                with _script_hidden():
                    process.start()
                return
            except (EOFError, ConnectionError):  # the server itself was killed just now; there will be another
                if patience_s is None:
                    raise CkbenchError("the server that starts trials is killed again and again") from None
                time.sleep(patience_s)


TIMED_OUT = "timed out"


@contextlib.contextmanager
def _importable() -> Iterator[None]:
    """Let a server that starts now find this package: before Python 3.13 it is not told our ``sys.path``."""
    before = os.environ.get("PYTHONPATH")
    root = str(Path(__file__).parents[1])
    os.environ["PYTHONPATH"] = root if not before else os.pathsep.join([root, before])
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


@contextlib.contextmanager
def _script_hidden() -> Iterator[None]:
    """Keep a child from importing the caller's script, of which no trial needs anything: one that asks for trials
    without ``if __name__ == "__main__"`` would ask for them again in there, and any other costs time."""
    main = sys.modules["__main__"]
    before = {name: vars(main)[name] for name in ("__spec__", "__file__") if name in vars(main)}
    vars(main).update(__spec__=None, __file__=None)
    try:
        yield
    finally:
        for name in ("__spec__", "__file__"):
            if name in before:
                vars(main)[name] = before[name]
            else:
                del vars(main)[name]


@contextlib.contextmanager
def _ctrl_c_held() -> Iterator[None]:
    """Hold Ctrl-C back while a process starts, in it for good: Ctrl-C reaches the whole terminal, and a server
    that is still loading torch would print a traceback of its own. Ending workers is this process's work."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # starts by itself otherwise, and then lets Ctrl-C through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _runs_here(device: str) -> bool:
    """Tell whether a device is scripted answers that need no process; real ones always get their own."""
    return device.startswith("replay:") and not worker.open_device(device, None).isolated


def _listen(
    connection: Connection, process: BaseProcess, timeout_s: float, progress: Progress
) -> tuple[dict[str, Any] | None, bool]:
    deadline = time.monotonic() + timeout_s
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            return None, True
        try:
            if not connection.poll(min(POLL_S, left)):
                if not process.is_alive() and not connection.poll(0):
                    return None, False
                continue
            message = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            process.join(END_GRACE_S)
            return None, False
        if "phase" in message:
            progress(message["phase"])
            continue
        return message, False


def _end_tree(process: BaseProcess) -> None:
    """End a child and everything it started; the child leads a process group of its own."""
    process.join(0.5 if process.exitcode is None else 0)
    pid = process.pid
    if pid is not None and hasattr(os, "killpg"):
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, sign)
            if process.exitcode is None:
                process.join(1.0)
    if process.is_alive():
        process.kill()
    process.join(END_GRACE_S)


def _record_of_death(
    config: RunConfig,
    round_number: int,
    process: BaseProcess,
    last_phase: str,
    tail: str,
    kills_before: int | None,
) -> Record:
    """Say how a process ended that left no record."""
    record = worker.blank_record(config, round_number)
    record.failed_phase = last_phase
    code = process.exitcode
    if tail == TIMED_OUT:
        record.status = "timeout"
        record.message = f"no result within {config.run.timeout_s:g} s (run.timeout_s)"
    elif code is not None and code < 0:
        record.signal = -code
        kills = host.oom_kills()
        by_kernel = -code == signal.SIGKILL and kills is not None and kills_before is not None and kills > kills_before
        record.status = "oom" if by_kernel else "killed"
        name = signal.Signals(-code).name if -code in list(signal.Signals) else f"signal {-code}"
        record.message = f"the kernel killed the process for memory ({name})" if by_kernel else f"ended by {name}"
        if tail and not by_kernel:
            record.message += f"; last output: {tail}"
    else:
        record.status = "error"
        last = f"last output: {tail}" if tail else "it wrote nothing"
        record.message = f"the process ended with exit code {code} and no result; {last}"
    return record


def last_line(tail: str, process: BaseProcess) -> str:
    """Say how a child ended without an answer: the last line of its output, or its exit code."""
    lines = tail.strip().splitlines()
    return lines[-1][:200] if lines else f"exit code {process.exitcode}"


def _tail(log: Path) -> str:
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("USDT:")]
    return " | ".join(lines)[-STDERR_TAIL_CHARS:]


def enter_child(connection: Connection, log: str) -> None:
    """Turn a fresh child into a worker: own process group, output to a file, gone when the parent goes."""
    if hasattr(os, "setsid"):
        os.setsid()
    _die_with_listener(connection)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError:  # its folder is gone, and so is who asked for this process: interrupted while the server loaded
        os._exit(1)
    for stream in (1, 2):
        os.dup2(target, stream)
    os.close(target)


def _die_with_listener(connection: Connection) -> None:
    """End this process and all it started once nobody listens to it any more, even if the tool was killed.

    The fork server cannot be relied on for that: every worker holds the pipe by which the server would
    notice that the tool is gone. A thread that sleeps in poll costs the timed steps nothing.
    """
    if not hasattr(select, "poll"):
        return
    ours = os.dup(connection.fileno())
    poll = select.poll()
    poll.register(ours, 0)  # errors are always reported: here, that the reading end is closed

    def watch() -> None:
        poll.poll()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _trial_entry(connection: Connection, text: str, log: str) -> None:
    enter_child(connection, log)
    worker.serve(connection, text)


def _probe_entry(connection: Connection, text: str, log: str) -> None:
    enter_child(connection, log)
    worker.probe(connection, text)
