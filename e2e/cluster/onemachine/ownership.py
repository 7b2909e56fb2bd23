"""One cluster per machine: a lock while a command changes it, and a record of which cache folder it belongs to."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .console import ClusterError, Progress
from .daemons import Daemons
from .files import write_if_changed
from .layout import COMMAND_LOCK, OWNER_RECORD, Layout

LOCK_TIMEOUT_SECONDS = 1800  # another command may be building everything


@contextmanager
def command_lock(
    progress: Progress, path: Path = COMMAND_LOCK, timeout_seconds: float = LOCK_TIMEOUT_SECONDS
) -> Iterator[None]:
    """Commands that change the machine run one at a time. Raises ClusterError after timeout_seconds of waiting."""
    with path.open("a") as lock:
        deadline, announced = time.monotonic() + timeout_seconds, False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ClusterError(f"another cluster command has held {path} for {timeout_seconds:.0f} s") from None
                if not announced:
                    progress("waiting for another cluster command to end")
                    announced = True
                time.sleep(0.2)
        yield  # closing the file unlocks it


def owner() -> Path | None:
    """The cache folder whose cluster was last started on this machine and not stopped."""
    try:
        return Path(OWNER_RECORD.read_text().strip())
    except FileNotFoundError:
        return None


def require_not_foreign(layout: Layout) -> None:
    """Raises ClusterError if a cluster of another cache folder is running here."""
    other = owner()
    if other is None or other == layout.cache:
        return
    foreign = Layout(other)
    daemons = Daemons(foreign.run, foreign.logs)
    if any(daemons.is_alive(name) for name in daemons.names()):
        raise ClusterError(
            f"the cluster of {other} is running, and a machine has room for one. Use it (HEADRACE_CACHE={other}) or "
            f"stop it (HEADRACE_CACHE={other} make cluster-down)"
        )


def claim(layout: Layout) -> None:
    write_if_changed(OWNER_RECORD, f"{layout.cache}\n")


def release() -> None:
    OWNER_RECORD.unlink(missing_ok=True)
