"""One local process: started in a session of its own, logged to a file, stopped with everything it started."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_TAIL_LINES = 20
_TAIL_BYTES = 16384


class MissingProgram(OSError):
    """A program that is to be run was not found."""


def find_program(name: str, folder: Path | None) -> str:
    """Path of a program: in `folder`, else beside this Python, else on PATH. Raises MissingProgram."""
    candidates = [folder / name] if folder else [Path(sys.executable).parent / name]
    for candidate in candidates:
        if os.access(candidate, os.X_OK):
            return str(candidate)
    found = None if folder else shutil.which(name)
    if not found:
        raise MissingProgram(f"{name} was not found beside {candidates[0].parent}; install headrace[engine]")
    return found


class LocalProcess:
    """A running program. Make one with `start`."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self.log = log

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str], log: Path) -> LocalProcess:
        """Run `command` with `environment` over ours, its output appended to `log`."""
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                env={**os.environ, **environment},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=functools.partial(_end_with_parent, os.getpid()),
            )
        return cls(process, log)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.returncode

    def signal(self, number: int) -> None:
        """Send a signal to the process and all that it started."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            pass  # gone already

    async def wait(self) -> None:
        """Until it has ended; then what it left behind is killed."""
        await self._process.wait()
        self.signal(signal.SIGKILL)

    def tail(self) -> str:
        """The last lines of its log."""
        with self.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-_TAIL_LINES:])


def _end_with_parent(parent: int) -> None:
    """Linux: get SIGTERM when the parent dies without stopping us, so that nothing is left running."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)  # it died before the kernel was asked
