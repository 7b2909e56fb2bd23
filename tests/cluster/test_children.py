"""Commands in parallel parts: all end together when one fails. Real processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e.cluster.onemachine import layers
from e2e.cluster.onemachine.children import CHILDREN, Stopped, together
from e2e.cluster.onemachine.console import ClusterError, Progress, run, wait_until
from e2e.cluster.onemachine.daemons import is_live


def fail_once(condition: Callable[[], bool]) -> Callable[[], None]:
    """A part that fails as soon as the condition holds."""

    def part() -> None:
        wait_until("the other part is under way", condition, timeout_seconds=20)
        raise ClusterError("the first error")

    return part


def test_a_failing_part_ends_the_commands_of_the_others_and_what_they_started(tmp_path: Path) -> None:
    started = tmp_path / "pid"
    script = f"sleep 600 & echo $! > {started}.new; mv {started}.new {started}; wait"
    began = time.monotonic()
    with pytest.raises(ClusterError, match="the first error"):
        together(lambda: run(["sh", "-c", script], "sleeping", timeout_seconds=60), fail_once(started.exists))
    assert time.monotonic() - began < 30
    wait_until("its child is dead", lambda: not is_live(int(started.read_text())), timeout_seconds=5)


def test_a_part_that_waits_gives_up_when_another_fails() -> None:
    with pytest.raises(ClusterError, match="the first error"):
        together(
            lambda: wait_until("never", lambda: False, timeout_seconds=60),
            fail_once(lambda: True),
        )


def test_an_interrupt_ends_the_commands_and_is_passed_on(tmp_path: Path) -> None:
    started = tmp_path / "started"

    def interrupted() -> None:
        wait_until("the other part is under way", started.exists, timeout_seconds=20)
        raise KeyboardInterrupt

    script = f"touch {started}; exec sleep 600"
    with pytest.raises(KeyboardInterrupt):
        together(lambda: run(["sh", "-c", script], "sleeping", timeout_seconds=60), interrupted)


def test_parts_that_succeed_run_at_the_same_time_and_leave_commands_possible() -> None:
    meeting = threading.Barrier(2, timeout=10)
    together(meeting.wait, meeting.wait)
    assert run(["echo", "still works"], "echo") == "still works\n"


def test_no_command_starts_while_stopping() -> None:
    CHILDREN.stop()
    try:
        with pytest.raises(Stopped):
            run(["true"], "true")
    finally:
        CHILDREN.resume()


def test_a_command_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    with pytest.raises(ClusterError, match=r"sleeping: .* did not end within 1 s"):
        run(["sh", "-c", f"echo $$ > {pid}; exec sleep 600"], "sleeping", timeout_seconds=1)
    assert not is_live(int(pid.read_text()))


def test_packing_a_layer_gives_up_when_another_part_fails(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with (folder / "holes").open("wb") as file:
        file.truncate(1 << 40)  # hours of zeros
    target = tmp_path / "layer"
    with pytest.raises(ClusterError, match="the first error"):
        together(
            lambda: layers._pack(folder, target),
            fail_once(target.exists),
        )


def test_lines_of_a_part_carry_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress()
    progress("one")
    progress.of_part("images")("two")
    lines = [line.partition("s] ")[2] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["one", "images: two"]
