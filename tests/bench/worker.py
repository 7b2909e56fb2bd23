"""A Python process, of another environment perhaps, that answers what it is asked over a connection, one at a time.

Its last command line argument is the file descriptor of its end of a `multiprocessing.connection.Connection`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

NUM_LOG_LINES = 15
END_LIMIT_SECONDS = 10.0
ROOT = Path(__file__).parents[2]  # of the repository: `-m tests.bench...` is found from there


class WorkerError(RuntimeError):
    """It ended, or did not answer in time; the message has the last lines that it printed."""


class Worker:
    """Runs in a session of its own, so that Ctrl-C reaches the benchmark alone. Leaving its context ends it."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        # What our own interpreter is told to import is not for another environment's.
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        with contextlib.ExitStack() as undo:
            ours, theirs = (undo.enter_context(end) for end in socket.socketpair())
            self._log = undo.enter_context(tempfile.TemporaryFile())
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                cwd=ROOT,
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            undo.pop_all()
        theirs.close()  # so that the connection ends when the process does
        self._connection = Connection(ours.detach())

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, question: Any, limit_seconds: float) -> Any:
        """Its answer. Raises WorkerError if there is none within the limit."""
        with self._explained():
            self._connection.send(question)
        return self.receive(limit_seconds)

    def receive(self, limit_seconds: float) -> Any:
        """What it says next, as after its start without being asked."""
        with self._explained():
            if not self._connection.poll(limit_seconds):
                raise WorkerError(f"{self.name}: no answer in {limit_seconds:.0f} s{self._last_lines()}")
            return self._connection.recv()

    def close(self) -> None:
        """It ends when its connection does, and is killed with all that it started if it does not. May be repeated."""
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_LIMIT_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(END_LIMIT_SECONDS)
        self._log.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, ConnectionError) as error:
            raise WorkerError(f"{self.name} ended{self._last_lines()}") from error

    def _last_lines(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()[-NUM_LOG_LINES:]
        return "".join(f"\n  {line}" for line in lines)
