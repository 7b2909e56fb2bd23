"""Commands that this process runs at the moment, so that all of them can be ended at once; work in parallel parts."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any


class Stopped(Exception):
    """A command was ended, or not started, because another part of the same work has failed."""


class Children:
    """Each child is a process group of its own: ending it ends what it has started too (go's compilers, dpkg)."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._live: set[subprocess.Popen[Any]] = set()
        self._is_stopping = False

    @contextmanager
    def child(self, argv: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
        """A process that does not outlive the block. Raises Stopped if `stop` was called before the block's end."""
        with self._guard:
            self._require_not_stopping()
            process: subprocess.Popen[Any] = subprocess.Popen(argv, process_group=0, **options)
            self._live.add(process)
        with process:
            try:
                yield process
            finally:
                with self._guard:
                    self._live.discard(process)
                _kill_group(process)
        self.require_not_stopping()

    def stop(self) -> None:
        """Ends every child with SIGKILL and lets none start until `resume`."""
        with self._guard:
            self._is_stopping = True
            for process in self._live:
                _kill_group(process)

    def resume(self) -> None:
        with self._guard:
            self._is_stopping = False

    def require_not_stopping(self) -> None:
        """Raises Stopped between `stop` and `resume`: for what waits without a child."""
        with self._guard:
            self._require_not_stopping()

    def _require_not_stopping(self) -> None:
        if self._is_stopping:
            raise Stopped


CHILDREN = Children()  # of this process


def together(*parts: Callable[[], object]) -> None:
    """Runs the parts at the same time. When one fails, or this is interrupted, the commands of all are ended; the
    first error is raised once every part has returned."""
    try:
        with ThreadPoolExecutor(len(parts)) as pool:
            try:
                for part in as_completed([pool.submit(part) for part in parts]):
                    part.result()
            except BaseException:
                CHILDREN.stop()
                raise
    finally:
        CHILDREN.resume()


def _kill_group(process: subprocess.Popen[Any]) -> None:
    if process.poll() is not None:
        return  # reaped: its pid may be another's by now
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
