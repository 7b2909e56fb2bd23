"""Progress on stderr: what is being done and how long it has taken. stdout is kept for results."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Found = TypeVar("Found")
_started = time.monotonic()


def say(message: str) -> None:
    elapsed_seconds = time.monotonic() - _started
    print(f"[{elapsed_seconds:6.1f}s] {message}", file=sys.stderr, flush=True)


@contextmanager
def stage(title: str) -> Iterator[None]:
    """Announce a stage and say how long it took."""
    say(f"{title} ...")
    began = time.monotonic()
    yield
    say(f"{title}: done in {time.monotonic() - began:.1f} s")


def wait_for(
    what: str,
    probe: Callable[[], Found | None],
    *,
    timeout_seconds: float,
    every_seconds: float = 0.5,
    report: Callable[[], str] | None = None,
    report_every_seconds: float = 10.0,
) -> Found:
    """Call `probe` until it returns something true; raise TimeoutError naming `what` and the last report."""
    deadline = time.monotonic() + timeout_seconds
    next_report = time.monotonic() + report_every_seconds
    while True:
        found = probe()
        if found:
            return found
        now = time.monotonic()
        if now >= deadline:
            detail = f": {report()}" if report else ""
            raise TimeoutError(f"{what}: not within {timeout_seconds:.0f} s{detail}")
        if report and now >= next_report:
            say(f"  waiting for {what}: {report()}")
            next_report = now + report_every_seconds
        time.sleep(every_seconds)
