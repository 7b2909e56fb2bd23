"""A benchmark leaves no process behind, and says why a server did not start."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.bench.processes import ProcessTree, StartError, free_ports

# A server whose child has left its process group, as multiprocessing pools and daemons do.
PARENT_OF_A_STRAY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(60)
"""


def _tree(tmp_path: Path, source: str) -> ProcessTree:
    return ProcessTree("server", [sys.executable, "-c", source], {}, tmp_path / "log")


def _wait_for(condition: Callable[[], object], limit_seconds: float = 10.0) -> None:
    deadline = time.monotonic() + limit_seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_stop_ends_the_whole_tree_even_strays(tmp_path: Path) -> None:
    tree = _tree(tmp_path, PARENT_OF_A_STRAY)
    try:
        _wait_for(lambda: (tmp_path / "log").read_text().strip())
        stray = Path(f"/proc/{(tmp_path / 'log').read_text().strip()}/stat")
        assert tree.pss_bytes() > 0
    finally:
        tree.stop()
    _wait_for(lambda: not stray.exists() or " Z " in stray.read_text())
    tree.stop()  # harmless when there is nothing left


def test_server_that_ends_early_shows_its_last_words(tmp_path: Path) -> None:
    tree = _tree(tmp_path, "import sys; sys.exit('no such checkpoint')")
    with pytest.raises(StartError, match=r"ended with 1\n.*no such checkpoint"):
        tree.wait_until_ok("http://127.0.0.1:9/ready", 10)
    tree.stop()


def test_server_that_never_answers_is_given_up(tmp_path: Path) -> None:
    tree = _tree(tmp_path, "import time; time.sleep(60)")
    (port,) = free_ports(1)
    try:
        with pytest.raises(StartError, match="not ready in 0 s"):
            tree.wait_until_ok(f"http://127.0.0.1:{port}/ready", 0.2)
    finally:
        tree.stop()
