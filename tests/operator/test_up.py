"""`headrace up`, with stand-ins for the engine and the router: real processes, real signals, real ports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.operator.rule_cases import resource

ENGINE = """#!{python}
import http.server, json, os, signal, sys, time
flags = dict(zip(sys.argv[2::1], sys.argv[3::1]))
signal.signal(signal.SIGTERM, lambda *_: {on_term})
if {fails}:
    print('bad flag: the checkpoint is not there', flush=True)
    sys.exit(2)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps([sys.argv, dict(os.environ)]).encode() if self.path == '/argv' else b'')
    def log_message(self, *_): pass
print('up', flush=True)
http.server.HTTPServer((flags['--host'], int(flags['--port'])), Handler).serve_forever()
"""
# One pod of one group of one rank, and a decode group of two pods.
CHANGES = {"spec.roles.1.parallelism": {"data": 2, "dataLocal": 1, "expert": True}, "spec.drainTimeoutSeconds": 1}


class Up:
    """A running `headrace up`."""

    def __init__(self, directory: Path, body: dict[str, Any], engine: str, router: str) -> None:
        for name, text in (("headrace-engine", engine), ("headrace-router", router)):
            (directory / name).write_text(text)
            (directory / name).chmod(0o755)
        file = directory / "dd.yaml"
        file.write_text(yaml.safe_dump(body))
        command = [sys.executable, "-m", "headrace_operator.cli", "up", str(file), "--base-port", "0"]
        command += ["--bin-dir", str(directory)]
        environment = {**os.environ, "TMPDIR": str(directory)}
        self.errors = directory / "stderr"
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment, text=True)
        self.description: dict[str, Any] = {}

    def wait_ready(self) -> None:
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, self.errors.read_text()
        self.description = json.loads(line)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=30)

    def pod(self, role: str, index: int = 0) -> dict[str, Any]:
        return next(p for p in self.description["pods"] if p["role"] == role and p["index"] == index)


def engine(fails: str = "False", on_term: str = "os._exit(0)") -> str:
    return ENGINE.format(python=sys.executable, fails=fails, on_term=on_term)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    started: list[Up] = []

    def run(changes: dict[str, Any] | None = None, engine_text: str | None = None) -> Up:
        router = engine().replace("flags = dict(zip(sys.argv[2::1]", "flags = dict(zip(sys.argv[1::1]")
        router = router.replace("sys.argv[3::1]", "sys.argv[2::1]")
        up = Up(tmp_path, resource({**CHANGES, **(changes or {})}), engine_text or engine(), router)
        started.append(up)
        return up

    yield run
    for up in started:
        if up.process.poll() is None:
            up.process.kill()
            up.process.wait()
        if up.process.stdout:
            up.process.stdout.close()


def fetch(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=5) as response:
        return json.load(response)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def eventually(check: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_it_runs_the_rendered_pods_and_says_where(start: Callable[..., Up]) -> None:
    up = start()
    up.wait_ready()
    assert [(p["role"], p["group"], p["index"]) for p in up.description["pods"]] == [
        ("prefill", 0, 0),
        ("decode", 0, 0),
        ("decode", 0, 1),
    ]
    argv, environment = fetch(up.pod("decode", 1)["url"] + "/argv")
    text = " ".join(argv)
    assert "serve --tiny v4:0 --served-model-name tiny --role decode --data 2 --data-local 1 --pod-index 1" in text
    leader_argv, _ = fetch(up.pod("decode", 0)["url"] + "/argv")
    for flag in ("--control-port", "--rendezvous-port", "--leader-host"):
        assert argv[argv.index(flag) + 1] == leader_argv[leader_argv.index(flag) + 1]
    assert environment["LWS_WORKER_INDEX"] == "1"
    assert environment["HEADRACE_POD_IP"] == "127.0.0.1"
    assert environment["HEADRACE_POD_NAME"] == up.pod("decode", 1)["name"]
    router_argv, _ = fetch(up.description["router"] + "/argv")
    leaders = [router_argv[i + 1] for i, word in enumerate(router_argv) if word == "--static"]
    assert leaders == [f"prefill={up.pod('prefill')['url']}", f"decode={up.pod('decode')['url']}"]
    assert up.stop() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_everything(start: Callable[..., Up], number: int) -> None:
    up = start()
    up.wait_ready()
    pids = [p["pid"] for p in up.description["pods"]]
    assert up.stop(number) == 0
    assert not [pid for pid in pids if is_alive(pid)]


@pytest.mark.slow
def test_a_pod_that_ignores_the_signal_is_killed_after_the_drain_time(
    start: Callable[..., Up], monkeypatch: pytest.MonkeyPatch
) -> None:
    up = start({"spec.drainTimeoutSeconds": 0}, engine(on_term="None"))
    up.wait_ready()
    pids = [p["pid"] for p in up.description["pods"]]
    up.process.send_signal(signal.SIGTERM)
    time.sleep(1)
    assert any(map(is_alive, pids))
    assert up.stop() == 0  # the second signal: at once
    assert not [pid for pid in pids if is_alive(pid)]


@pytest.mark.slow
def test_two_signals_at_once_end_it_at_once(start: Callable[..., Up]) -> None:
    up = start({"spec.drainTimeoutSeconds": 600}, engine(on_term="None"))
    up.wait_ready()
    pids = [p["pid"] for p in up.description["pods"]]
    up.process.send_signal(signal.SIGTERM)
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(timeout=20) == 0
    assert not [pid for pid in pids if is_alive(pid)]


@pytest.mark.slow
def test_a_template_reaches_local_processes_as_it_would_a_pod(start: Callable[..., Up]) -> None:
    template = {
        "env": [{"name": "A", "value": "at $(HEADRACE_POD_IP)"}],
        "podSpec": {"containers": [{"name": "mesh", "image": "mesh:1"}]},
    }
    up = start(
        {
            "spec.roles.1.template": template,
            "spec.router": {"template": {"env": [{"name": "B", "value": "2"}]}},
            "spec.engine": {"extraArgs": ["--a=$(A)", "--b=$(UNKNOWN)", "--c=$$(A)"]},
        }
    )
    up.wait_ready()
    argv, environment = fetch(up.pod("decode")["url"] + "/argv")
    assert environment["A"] == "at 127.0.0.1"
    assert argv[-3:] == ["--a=at 127.0.0.1", "--b=$(UNKNOWN)", "--c=$(A)"]
    assert fetch(up.description["router"] + "/argv")[1]["B"] == "2"
    assert "decode: containers besides the engine are not run here: mesh" in up.errors.read_text()
    assert up.stop() == 0


def test_a_pod_that_cannot_start_ends_all_with_its_last_words(start: Callable[..., Up]) -> None:
    up = start(engine_text=engine(fails="flags['--role'] == 'decode'"))
    assert up.process.wait(timeout=30) == 1
    text = up.errors.read_text()
    assert "exited with code 2" in text
    assert "bad flag: the checkpoint is not there" in text


@pytest.mark.slow
def test_a_group_that_loses_a_process_later_is_started_again_as_a_whole(start: Callable[..., Up]) -> None:
    up = start()
    up.wait_ready()
    os.kill(up.pod("decode", 1)["pid"], signal.SIGKILL)
    eventually(lambda: not is_alive(up.pod("decode", 0)["pid"]))
    eventually(lambda: up.errors.read_text().count("-0-0 is ready after") == 3)
    assert is_alive(up.pod("prefill")["pid"])
    assert "decode group 0 is made again (failure 1 in a row)" in up.errors.read_text()
    assert up.stop() == 0


@pytest.mark.slow
def test_a_router_that_ends_ends_all(start: Callable[..., Up]) -> None:
    up = start()
    up.wait_ready()
    pids = [p["pid"] for p in up.description["pods"]]
    port = up.description["router"].rsplit(":", 1)[1]
    listening = subprocess.run(["pgrep", "-f", f"headrace-router .*--port {port} "], capture_output=True, text=True)
    os.kill(int(listening.stdout.split()[0]), signal.SIGKILL)
    assert up.process.wait(timeout=30) == 1
    assert "the router exited" in up.errors.read_text()
    assert not [pid for pid in pids if is_alive(pid)]


@pytest.mark.slow
def test_nothing_is_left_when_it_is_killed_itself(start: Callable[..., Up]) -> None:
    up = start()
    up.wait_ready()
    pids = [p["pid"] for p in up.description["pods"]]
    up.stop(signal.SIGKILL)
    eventually(lambda: not any(map(is_alive, pids)))
