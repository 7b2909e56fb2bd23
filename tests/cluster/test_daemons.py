"""Daemons: started once, restarted on a crash or a changed configuration, stopped whole. Real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from e2e.cluster.onemachine.daemons import Daemon, Daemons, end_sessions, is_live, live_in_session, orphaned_sessions


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Daemons]:
    daemons = Daemons(tmp_path / "run", tmp_path / "logs")
    yield daemons
    for name in daemons.names():
        daemons.stop(name, graceful_seconds=0)


def sleeper(*config_files: Path) -> Daemon:
    return Daemon("sleeper", ["sleep", "600"], config_files)


def pid_of(daemons: Daemons) -> int:
    pid = daemons._record("sleeper")["pid"]
    assert isinstance(pid, int)
    return pid


def eventually(condition: Callable[[], bool], timeout_seconds: float = 10) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, "not so in time"
        time.sleep(0.02)


def test_starting_a_running_daemon_again_leaves_it_alone(daemons: Daemons) -> None:
    assert daemons.start(sleeper())
    first = pid_of(daemons)
    assert not daemons.start(sleeper())
    assert pid_of(daemons) == first


def test_a_changed_configuration_file_restarts_it(daemons: Daemons, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("one")
    daemons.start(sleeper(config))
    first = pid_of(daemons)
    config.write_text("two")
    assert daemons.start(sleeper(config))
    assert pid_of(daemons) != first
    assert not live_in_session(first)


def test_a_crashed_daemon_comes_back(daemons: Daemons) -> None:
    daemons.start(sleeper())
    session = pid_of(daemons)
    eventually(lambda: len(live_in_session(session)) == 2)
    (child,) = (pid for pid in live_in_session(session) if pid != session)
    os.kill(child, signal.SIGKILL)
    eventually(lambda: any(pid not in (session, child) for pid in live_in_session(session)))
    assert "starting again" in daemons.log("sleeper").read_text()


def test_stop_leaves_no_process_of_the_session(daemons: Daemons) -> None:
    daemons.start(sleeper())
    session = pid_of(daemons)
    daemons.stop("sleeper")
    assert not live_in_session(session)
    assert daemons.names() == []


def test_a_daemon_that_ignores_the_signal_is_killed(daemons: Daemons) -> None:
    daemons.start(Daemon("sleeper", ["sh", "-c", "trap '' TERM; while :; do sleep 1; done"]))
    session = pid_of(daemons)
    eventually(lambda: len(live_in_session(session)) >= 3)
    daemons.stop("sleeper", graceful_seconds=0.3)
    assert not live_in_session(session)


def test_a_pid_that_was_given_to_another_process_does_not_count(daemons: Daemons) -> None:
    daemons.start(sleeper())
    record = daemons._run / "sleeper.json"
    other = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        first = pid_of(daemons)
        daemons.stop("sleeper")
        record.write_text(f'{{"pid": {other.pid}, "started": 1, "digest": ""}}')
        assert first != other.pid
        assert not daemons.is_alive("sleeper")
        daemons.stop("sleeper")
        assert is_live(other.pid)
    finally:
        other.kill()
        other.wait()


def test_a_daemon_whose_record_is_gone_is_found_by_its_name_and_ended(daemons: Daemons) -> None:
    name = f"sleeper-{os.getpid()}"
    daemons.start(Daemon(name, ["sleep", "600"]))
    (session,) = daemons.sessions()
    assert orphaned_sessions([name], daemons.sessions()) == {}, "it has a record"
    assert orphaned_sessions(["another"], ()) == {}
    daemons.forget(name)
    assert orphaned_sessions([name], daemons.sessions()) == {session: name}
    end_sessions([session])
    assert not live_in_session(session)


def test_a_zombie_is_dead() -> None:
    child = subprocess.Popen(["true"])
    eventually(lambda: not is_live(child.pid))
    child.wait()
