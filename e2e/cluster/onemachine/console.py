"""What the person at the terminal sees: one line per step with the seconds so far, and errors that say what to do."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from .children import CHILDREN


class ClusterError(Exception):
    """Something that the person who ran the command can act on; shown without a traceback."""


class Progress:
    """Progress lines on standard error, so that standard output stays free for results."""

    def __init__(self, part: str = "", start: float | None = None) -> None:
        self._prefix = f"{part}: " if part else ""
        self._start = time.monotonic() if start is None else start

    def __call__(self, text: str) -> None:
        elapsed_seconds = time.monotonic() - self._start
        # One write, so that lines of parts that run at the same time do not mix.
        sys.stderr.write(f"[cluster {elapsed_seconds:6.1f}s] {self._prefix}{text}\n")
        sys.stderr.flush()

    def of_part(self, part: str) -> Progress:
        """For a part that runs beside others: the same clock, and the part's name on each line."""
        return Progress(part, self._start)


def run(argv: Sequence[object], what: str, *, input_text: str | None = None, timeout_seconds: float = 120) -> str:
    """Runs a command (each word is what `str` makes of it) to its end and returns its standard output.

    Raises ClusterError with the command's last lines if it fails, is missing or takes longer than timeout_seconds.
    """
    words = [str(word) for word in argv]
    pipe = subprocess.PIPE
    try:
        with CHILDREN.child(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
            output, errors = process.communicate(input_text or "", timeout=timeout_seconds)
    except FileNotFoundError:
        raise ClusterError(f"{what}: {words[0]} is not installed") from None
    except subprocess.TimeoutExpired:
        raise ClusterError(f"{what}: `{' '.join(words)[:200]}` did not end within {timeout_seconds:.0f} s") from None
    if process.returncode != 0:
        last_lines = "\n  ".join((errors or output).strip().splitlines()[-15:])
        raise ClusterError(f"{what}: `{' '.join(words)[:200]}` ended with status {process.returncode}\n  {last_lines}")
    assert isinstance(output, str)
    return output


def attempt(argv: Sequence[object], *, input_text: str | None = None, timeout_seconds: float = 30) -> str | None:
    """Like `run`, for commands whose failure is an answer: None if the command fails or is missing."""
    try:
        return run(argv, "attempt", input_text=input_text, timeout_seconds=timeout_seconds)
    except ClusterError:
        return None


def wait_until(
    what: str, ready: Callable[[], bool], *, timeout_seconds: float, log: Path | None = None, every_seconds: float = 0.1
) -> None:
    """Polls `ready` until it is true. Raises ClusterError, with the last lines of `log`, after timeout_seconds."""
    deadline = time.monotonic() + timeout_seconds
    while not ready():
        CHILDREN.require_not_stopping()
        if time.monotonic() > deadline:
            raise ClusterError(f"{what}: not so after {timeout_seconds:.0f} s" + _log_tail(log))
        time.sleep(every_seconds)


def _log_tail(log: Path | None) -> str:
    if log is None or not log.exists():
        return ""
    lines = log.read_text(errors="replace").splitlines()[-15:]
    return f"\n  last lines of {log}:\n    " + "\n    ".join(line[:300] for line in lines)
