"""Background processes: started once with the configuration they should have, again when they die, stopped whole.

Each daemon is one session of two processes: a small shell loop, and the daemon that it runs and runs again. The
session id is the daemon's identity; a record in the run folder holds it with its start time (pids are reused) and a
digest of the command line and configuration (a daemon with an outdated configuration is restarted).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .files import digest_of, write_if_changed

# The loop dies of the same signal as its daemon, as a signal goes to the whole process group.
RESTART_LOOP = 'while :; do "$@"; echo "restart: $1 ended with status $?, starting again" >&2; sleep 1; done'


@dataclass(frozen=True)
class Daemon:
    """What should run: its name, command line, the configuration files it reads at start, and cgroups it starts in."""

    name: str
    argv: Sequence[object]
    config_files: Sequence[Path] = ()
    cgroups: Sequence[Path] = ()
    env: dict[str, str] = field(default_factory=dict)

    def digest(self) -> str:
        return digest_of([*map(str, self.argv), *(path.read_bytes() for path in self.config_files)])


class Daemons:
    """The daemons of one cluster, recorded in `run_folder`, logging to `log_folder`."""

    def __init__(self, run_folder: Path, log_folder: Path) -> None:
        self._run = run_folder
        self._logs = log_folder

    def log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def names(self) -> list[str]:
        """Every daemon with a record, dead or alive."""
        return sorted(path.stem for path in self._run.glob("*.json"))

    def sessions(self) -> set[int]:
        """The live sessions of all daemons with a record."""
        return {session for name in self.names() if (session := self._session(name)) is not None}

    def is_alive(self, name: str) -> bool:
        return self._session(name) is not None

    def start(self, daemon: Daemon) -> bool:
        """Makes the daemon run as described; returns whether it had to be started. Does not wait until it serves."""
        digest = daemon.digest()
        if self.is_alive(daemon.name):
            if self._record(daemon.name).get("digest") == digest:
                return False
            self.stop(daemon.name)
        self._logs.mkdir(parents=True, exist_ok=True)

        def enter_cgroups() -> None:
            for cgroup in daemon.cgroups:
                (cgroup / "cgroup.procs").write_text(str(os.getpid()))

        argv = ["/bin/sh", "-c", RESTART_LOOP, daemon.name, *map(str, daemon.argv)]
        with self.log(daemon.name).open("wb") as log:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **daemon.env},
                start_new_session=True,
                preexec_fn=enter_cgroups if daemon.cgroups else None,
            )
        record = {"pid": process.pid, "started": _start_time(process.pid), "digest": digest}
        write_if_changed(self._run / f"{daemon.name}.json", json.dumps(record))
        return True

    def stop(self, name: str, *, graceful_seconds: float = 5.0) -> None:
        """Ends the daemon with SIGTERM, after graceful_seconds with SIGKILL, and forgets it."""
        session = self._session(name)
        if session is not None:
            _signal_group(session, signal.SIGTERM if graceful_seconds > 0 else signal.SIGKILL)
            if not _gone(lambda: live_in_session(session), graceful_seconds):
                end_sessions([session])
        self.forget(name)

    def forget(self, name: str) -> None:
        (self._run / f"{name}.json").unlink(missing_ok=True)

    def _record(self, name: str) -> dict[str, object]:
        try:
            record = json.loads((self._run / f"{name}.json").read_text())
        except (FileNotFoundError, ValueError):
            return {}
        return record if isinstance(record, dict) else {}

    def _session(self, name: str) -> int | None:
        """The live session id of a daemon, or None."""
        record = self._record(name)
        pid = record.get("pid")
        if not isinstance(pid, int):
            return None
        start_time = _start_time(pid)
        if start_time is not None and start_time != record.get("started"):
            return None  # the pid was given to another process
        return pid if live_in_session(pid) else None


def orphaned_sessions(names: Collection[str], recorded: Collection[int]) -> dict[int, str]:
    """Sessions of daemons called one of `names` that run on this machine and are not `recorded`: name by session."""
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) in recorded or not is_live(int(entry)):
            continue
        try:
            words = Path(f"/proc/{entry}/cmdline").read_bytes().decode(errors="replace").split("\0")
            is_leader = os.getsid(int(entry)) == int(entry)
        except OSError:  # it has ended meanwhile
            continue
        if is_leader and words[:3] == ["/bin/sh", "-c", RESTART_LOOP] and words[3] in names:
            found[int(entry)] = words[3]
    return found


def end_sessions(sessions: Collection[int]) -> None:
    """Ends every process of the sessions with SIGKILL; waits 5 s at most until they are gone."""
    for session in sessions:
        _signal_group(session, signal.SIGKILL)
    _gone(lambda: [pid for session in sessions for pid in live_in_session(session)], 5.0)


def _stat_fields(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the third (state) on; the second may hold spaces."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def is_live(pid: int) -> bool:
    """A zombie is dead: whoever inherits it may never reap it, and signal 0 still reaches it."""
    stat = _stat_fields(pid)
    return stat is not None and stat[0] not in "ZX"


def _start_time(pid: int) -> int | None:
    """In clock ticks since boot."""
    stat = _stat_fields(pid)
    return int(stat[19]) if stat else None


def live_in_session(session: int) -> list[int]:
    """Pids of a session's live processes."""
    pids = []
    for entry in os.listdir("/proc"):
        stat = _stat_fields(int(entry)) if entry.isdigit() else None
        if stat and int(stat[3]) == session and stat[0] not in "ZX":
            pids.append(int(entry))
    return pids


def _signal_group(session: int, number: signal.Signals) -> None:
    try:
        os.killpg(session, number)
    except ProcessLookupError:
        pass


def _gone(pids: Callable[[], list[int]], timeout_seconds: float) -> bool:
    deadline = time.monotonic() + timeout_seconds
    while pids():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
