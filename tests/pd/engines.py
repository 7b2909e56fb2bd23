"""Real engine processes on free loopback ports, and the legs between them as the router would drive them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

MODEL = "tiny"
BLOCK = 8  # small, so that short prompts cross many boundaries
START_SECONDS = 240  # four processes import torch; on a busy machine of two cores that alone takes a minute
TIMEOUT = httpx.Timeout(60)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def end(process: subprocess.Popen[bytes]) -> None:
    """As a kubelet would: asked first, killed if it does not listen."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(40)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Engine:
    """One pod's process."""

    def __init__(
        self,
        *flags: str,
        port: int | None = None,
        control: int | None = None,
        store: int | None = None,
        family: str = "v4",
    ):
        free = free_ports(3)
        self.port = port or free[0]
        self.control = control or free[1]
        self.store = store or free[2]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_file = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115
        command = [sys.executable, "-m", "headrace_engine.cli", "serve", "--tiny", f"{family}:0"]
        command += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--control-port", str(self.control), "--rendezvous-port", str(self.store)]
        command += ["--block-size", str(BLOCK), "--threads", "1", "--max-model-len", "4096", *flags]
        self._scratch = tempfile.TemporaryDirectory()  # what a killed engine leaves is removed with it
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": self._scratch.name}
        self.process = subprocess.Popen(command, stdout=self.log_file, stderr=subprocess.STDOUT, env=environment)

    @property
    def scratch(self) -> str:
        """Its TMPDIR."""
        return self._scratch.name

    def log(self) -> str:
        return Path(self.log_file.name).read_text()

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the engine ended with {self.process.returncode}:\n{self.log()}")
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/ready", timeout=5).status_code == 200:
                    return
            time.sleep(0.1)
        raise TimeoutError(f"the engine is not ready:\n{self.log()}")

    def state(self) -> dict[str, Any]:
        return dict(httpx.get(f"{self.url}/state", timeout=10).json())

    def metric(self, name: str) -> float:
        """Sum of a metric's samples over the ranks, as its exposition writes them."""
        lines = httpx.get(f"{self.url}/metrics", timeout=TIMEOUT).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0] == name)

    def rank_pids(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in children.split()]

    def stop(self) -> int:
        """End it as a kubelet would; its exit code."""
        end(self.process)
        self.log_file.close()
        self._scratch.cleanup()
        return self.process.returncode

    def wait_all_free(self, seconds: float = 10) -> None:
        """No request is left and every block is free, on every rank."""
        deadline = time.monotonic() + seconds
        while True:
            ranks = self.state()["ranks"]
            names = ("num_running", "num_waiting", "num_waiting_for_kv", "num_pushing", "num_quarantined_blocks")
            if all(
                rank["num_free_blocks"] == rank["num_blocks"]
                and rank["live_requests"] == 0
                and not any(rank[name] for name in names)
                for rank in ranks
            ):
                return
            assert time.monotonic() < deadline, f"not everything is free: {ranks}"
            time.sleep(0.1)


@contextlib.contextmanager
def running(*engines: Engine) -> Iterator[None]:
    try:
        for engine in engines:
            engine.wait_ready()
        yield
    finally:
        for engine in engines:
            if engine.process.poll() is None:
                engine.process.send_signal(signal.SIGTERM)  # all at once: the pods of a group end together
        for engine in engines:
            engine.stop()


def group(pods: int, *flags: str) -> list[Engine]:
    """The pods of one expert-parallel group, one rank each; the leader first."""
    leader = Engine("--data", str(pods), "--data-local", "1", "--expert-parallel", *flags)
    followers = [
        Engine(
            *("--data", str(pods), "--data-local", "1", "--pod-index", str(index), "--expert-parallel", *flags),
            control=leader.control,
            store=leader.store,
        )
        for index in range(1, pods)
    ]
    return [leader, *followers]


def completion(prompt: Sequence[int] | str, max_tokens: int = 8, **fields: Any) -> dict[str, Any]:
    """A greedy request for token ids."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return {**body, "return_token_ids": True, **fields}


def generate(url: str, prompt: Sequence[int], max_tokens: int = 8, **fields: Any) -> list[int]:
    reply = httpx.post(f"{url}/v1/completions", json=completion(prompt, max_tokens, **fields), timeout=TIMEOUT)
    assert reply.status_code == 200, reply.text
    return list(reply.json()["choices"][0]["token_ids"])


@dataclass
class Events:
    """A stream of server-sent events, read one by one: (name, data)."""

    response: httpx.Response

    def __iter__(self) -> Iterator[tuple[str, str]]:
        name = ""
        for line in self.response.iter_lines():
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                yield name, line[6:]
                name = ""


def prefill_body(body: dict[str, Any], ticket: str) -> bytes:
    """The client's body with the ticket spliced in after the first brace, as the router does it."""
    return b'{"headrace_ticket": ' + ticket.encode() + b"," + json.dumps(body).encode()[1:]


def post_prefill(
    url: str, body: dict[str, Any], ticket: str, path: str = "/v1/completions", timeout: httpx.Timeout = TIMEOUT
) -> httpx.Response:
    headers = {"x-headrace-leg": "prefill", "x-request-id": "test"}
    return httpx.post(f"{url}{path}", content=prefill_body(body, ticket), headers=headers, timeout=timeout)


def round_trip(prefill: str, decode: str, body: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
    """Both legs of one request that is not streamed; the client's body, with a prefill leg's answer under `leg`.

    A request with several prompts has several prefill legs.
    """
    headers = {"x-headrace-leg": "decode", "x-request-id": "test"}
    legs: list[httpx.Response] = []
    with httpx.stream("POST", f"{decode}{path}", json=body, headers=headers, timeout=TIMEOUT) as response:
        assert response.status_code == 200, response.read()
        threads = []
        for name, data in Events(response):
            if name != "ticket":
                break
            threads.append(threading.Thread(target=lambda t=data: legs.append(post_prefill(prefill, body, t, path))))
            threads[-1].start()
        for thread in threads:
            thread.join()
    outcome = json.loads(data)
    assert threads, outcome
    assert name == "response", (outcome, [leg.text for leg in legs])
    assert [leg.status_code for leg in legs] == [200] * len(threads), [leg.text for leg in legs]
    return {**outcome["body"], "leg": legs[0].json()}


def pd_tokens(prefill: str, decode: str, prompt: Sequence[int], max_tokens: int = 8) -> list[int]:
    return list(round_trip(prefill, decode, completion(prompt, max_tokens))["choices"][0]["token_ids"])


def prompts_of(lengths: Sequence[int], first: int = 0) -> list[list[int]]:
    """One prompt of each length; no two begin alike."""
    return [
        [(37 * (first + index) + 11 * i + i * i % 7) % 250 + 16 for i in range(n)] for index, n in enumerate(lengths)
    ]


class Routed:
    """A router's process in front of engines that are ready. `engines`: by role."""

    def __init__(self, engines: dict[str, list[Engine]], *flags: str):
        self.engines = engines
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        self._log_file = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115
        command = [
            sys.executable,
            "-m",
            "headrace_engine.router.cli",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            *flags,
        ]
        for role, several in engines.items():
            for engine in several:
                command += ["--static", f"{role}={engine.url}"]
        self.process = subprocess.Popen(command, stdout=self._log_file, stderr=subprocess.STDOUT)

    def wait_ready(self) -> None:
        """Until the router knows that every engine of `engines` is ready."""
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(httpx.TransportError):
                roles = httpx.get(f"{self.url}/state", timeout=5).json()["roles"]
                ready = {group["url"] for groups in roles.values() for group in groups if group["ready"]}
                if ready >= {engine.url for several in self.engines.values() for engine in several}:
                    return
            assert time.monotonic() < deadline, f"the router does not see every engine:\n{self.log()}"
            time.sleep(0.1)

    def log(self) -> str:
        return Path(self._log_file.name).read_text()

    def stop(self) -> None:
        end(self.process)
        self._log_file.close()
