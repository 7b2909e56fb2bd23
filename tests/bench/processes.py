"""Process trees for benchmarks: start one, wait for it over HTTP, weigh it, end it whole."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

STOP_LIMIT_SECONDS = 20.0
NUM_LOG_LINES = 30


class StartError(RuntimeError):
    """A server ended before it was ready, or was not ready in time; the message ends with its last log lines."""


class ProcessTree:
    """One command with all that it starts, in a process group of its own, its output in `log`."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.command = list(command)
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                self.command,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the benchmark alone, which then stops the servers in order
            )

    def raise_if_ended(self) -> None:
        if self._process.poll() is not None:
            raise StartError(f"{self.name} ended with {self._process.returncode}\n{self._last_lines()}")

    def wait_until_ok(self, url: str, limit_seconds: float, also_alive: Sequence[ProcessTree] = ()) -> None:
        """Poll `url` until it answers 200. Raises StartError if this or another tree ends, or after `limit_seconds`."""
        deadline = time.monotonic() + limit_seconds
        while not _answers_ok(url):
            for tree in (self, *also_alive):
                tree.raise_if_ended()
            if time.monotonic() > deadline:
                raise StartError(f"{self.name}: {url} not ready in {limit_seconds:.0f} s\n{self._last_lines()}")
            time.sleep(0.05)

    def pss_bytes(self) -> int:
        """Proportional set size of the tree: pages that its processes share count once."""
        return sum(_pss_bytes(pid) for pid in _descendants(self._process.pid))

    def cpu_seconds(self) -> float:
        """User and system time of the tree so far."""
        return sum(_cpu_seconds(pid) for pid in _descendants(self._process.pid))

    def stop(self) -> None:
        """SIGTERM, then SIGKILL for whatever of the tree is left. May be called twice."""
        members = _descendants(self._process.pid)
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_LIMIT_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(STOP_LIMIT_SECONDS)
        # Children may have made a session of their own, which the group's signal does not reach.
        for pid, started in members.items():
            if _start_ticks(pid) == started:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _last_lines(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-NUM_LOG_LINES:]
        return "\n".join(f"  {line}" for line in lines) + f"\n  (whole log: {self._log})"


def free_ports(count: int) -> list[int]:
    """Loopback ports that are free now; all are held while the list is made, so that they differ."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _answers_ok(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _descendants(root: int) -> dict[int, int | None]:
    """The process `root` and everything below it: process id to start time, to tell a reused id."""
    found = [root]
    for pid in found:  # grows while it is walked
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found.extend(int(child) for child in children.read_text().split())
    return {pid: _start_ticks(pid) for pid in found}


def _stat_fields(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat after the name, which may itself hold spaces and parentheses; None: no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _start_ticks(pid: int) -> int | None:
    fields = _stat_fields(pid)
    return int(fields[19]) if fields else None


def _cpu_seconds(pid: int) -> float:
    fields = _stat_fields(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def _pss_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
