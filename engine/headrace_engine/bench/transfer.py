"""`headrace-engine bench transfer`: GB/s of the whole push protocol beside bare NIXL writes of the same blocks.

Two processes on this machine, decode and prefill, with caches of the given size. Each repetition writes the same
blocks twice: *bare*, one NIXL write timed from its start to its completion at the writer; and *push*, timed from asking
decode for a ticket to decode's word that the KV has arrived. Their order alternates; medians are reported.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from headrace_engine.core import Peer, Region, Ticket
from headrace_engine.kv.events import PushFailed
from headrace_engine.kv.nixl import NixlTransport, WriteState
from headrace_engine.kv.notices import Done as DoneMessage
from headrace_engine.kv.notices import encode_notice
from headrace_engine.kv.receive import Received
from headrace_engine.kv.ticket import CacheRegion
from headrace_engine.kv.transfer import TransferAgent
from headrace_engine.models.protocol import GroupKind

BLOCK_SIZE = 1  # tokens; the prompt has one token more than there are blocks
POLL_SECONDS = 0.0005
TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True)
class Row:
    """One way to lay out the same blocks."""

    layout: str  # contiguous | scattered
    num_bytes: int
    bare_seconds: float
    push_seconds: float

    @property
    def bare_gb_per_second(self) -> float:
        return self.num_bytes / self.bare_seconds / 1e9

    @property
    def push_gb_per_second(self) -> float:
        return self.num_bytes / self.push_seconds / 1e9

    @property
    def ratio(self) -> float:
        return self.bare_seconds / self.push_seconds


class _Rank:
    """One process's cache, its transfer agent, and a bare NIXL agent over the same memory."""

    def __init__(self, name: str, num_blocks: int, block_bytes: int, slot_bytes: int, fill: int) -> None:
        self.blocks = np.full((num_blocks, block_bytes), fill, dtype=np.uint8)  # filled: every page is resident
        self.slots = np.full((1, slot_bytes), fill, dtype=np.uint8)
        regions = [
            CacheRegion(Region("blocks", self.blocks.ctypes.data, block_bytes, num_blocks), GroupKind.PAGED),
            CacheRegion(Region("state", self.slots.ctypes.data, slot_bytes, 1), GroupKind.STATE),
        ]
        self.bare = NixlTransport(f"{name}-bare/{uuid.uuid4().hex}", regions)
        self.agent = TransferAgent(
            name, uuid.uuid4().hex, regions, block_size=BLOCK_SIZE, fingerprint="bench", lease_seconds=TIMEOUT_SECONDS
        )

    def close(self) -> None:
        self.agent.close()
        self.bare.close()


def _serve_decode(pipe: Connection, num_blocks: int, block_bytes: int, slot_bytes: int) -> None:
    """The child: hands out tickets, reports what has arrived, lets bare writes land. Ends when the pipe closes."""
    rank = _Rank("bench-decode", num_blocks, block_bytes, slot_bytes, fill=0)
    pipe.send(rank.bare.peer)
    try:
        while True:
            if pipe.poll(POLL_SECONDS):
                token_ids, block_ids = pipe.recv()
                pipe.send(rank.agent.issue_ticket("bench", token_ids, 0, block_ids, 0))
            rank.bare.notifications()
            for event in rank.agent.poll_events():
                pipe.send(event)
    except EOFError:
        rank.close()


class _Bench:
    """The parent: the prefill side, and the clock."""

    def __init__(self, pipe: Connection, num_blocks: int, block_bytes: int, slot_bytes: int) -> None:
        self._pipe = pipe
        self._rank = _Rank("bench-prefill", num_blocks, block_bytes, slot_bytes, fill=7)
        self._token_ids = list(range(num_blocks + 1))
        self._bare_peer: Peer = _receive(pipe)
        self._rank.bare.connect(self._bare_peer)

    def bare_seconds(self, local: Sequence[int], remote: Sequence[int]) -> float:
        transport, name = self._rank.bare, self._bare_peer.agent_name
        notification = encode_notice(DoneMessage("bench", 1, 0))
        start = time.perf_counter()
        handle = transport.write(name, local, remote, (0, 0), notification)
        while transport.poll(handle) is WriteState.RUNNING:
            if time.perf_counter() - start > TIMEOUT_SECONDS:
                raise TimeoutError(f"a bare write has not ended in {TIMEOUT_SECONDS:g} s")
            time.sleep(POLL_SECONDS / 5)
        if handle.state is not WriteState.DONE:
            raise RuntimeError("a bare write failed")
        return time.perf_counter() - start

    def push_seconds(self, local: Sequence[int], remote: Sequence[int]) -> float:
        agent = self._rank.agent
        start = time.perf_counter()
        self._pipe.send((self._token_ids, list(remote)))
        ticket: Ticket = _receive(self._pipe)
        key = agent.open_push(ticket, self._token_ids)
        agent.push_blocks(key, 0, local)
        agent.finish_push(key, 0, 0)
        outcome = _receive(self._pipe)
        seconds = time.perf_counter() - start
        if not isinstance(outcome, Received):
            raise RuntimeError(f"the push failed: {outcome}")
        self._expect_push_event()
        return seconds

    def _expect_push_event(self) -> None:
        give_up_at = time.perf_counter() + TIMEOUT_SECONDS
        while not (events := self._rank.agent.poll_events()):
            if time.perf_counter() > give_up_at:
                raise TimeoutError("the push has no outcome")
            time.sleep(POLL_SECONDS)
        if isinstance(events[0], PushFailed):
            raise RuntimeError(f"the push failed: {events[0].error}")

    def close(self) -> None:
        self._rank.close()


def _receive(pipe: Connection) -> Any:
    if not pipe.poll(TIMEOUT_SECONDS):
        raise TimeoutError(f"the decode process has not answered in {TIMEOUT_SECONDS:g} s")
    return pipe.recv()


def run(num_blocks: int, block_bytes: int, slot_bytes: int, repeats: int) -> list[Row]:
    """Measure both layouts; see the module."""
    context = multiprocessing.get_context("spawn")
    pipe, child_pipe = context.Pipe()
    child = context.Process(target=_serve_decode, args=(child_pipe, num_blocks, block_bytes, slot_bytes), daemon=True)
    child.start()
    child_pipe.close()
    bench: _Bench | None = None
    try:
        bench = _Bench(pipe, num_blocks, block_bytes, slot_bytes)
        in_order = list(range(num_blocks))
        shuffled = random.Random(0).sample(in_order, num_blocks)
        return [
            _measure(bench, "contiguous", in_order, in_order, num_blocks * block_bytes + slot_bytes, repeats),
            _measure(bench, "scattered", in_order, shuffled, num_blocks * block_bytes + slot_bytes, repeats),
        ]
    finally:
        if bench is not None:
            bench.close()
        pipe.close()
        child.join(TIMEOUT_SECONDS)
        if child.is_alive():
            child.kill()


def _measure(
    bench: _Bench, layout: str, local: Sequence[int], remote: Sequence[int], num_bytes: int, repeats: int
) -> Row:
    bench.bare_seconds(local, remote)  # the first contact connects and maps memory
    bench.push_seconds(local, remote)
    bare: list[float] = []
    push: list[float] = []
    for repeat in range(repeats):
        for measure, seconds in ((bench.bare_seconds, bare), (bench.push_seconds, push))[:: 1 if repeat % 2 else -1]:
            seconds.append(measure(local, remote))
    return Row(layout, num_bytes, statistics.median(bare), statistics.median(push))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; prints a table, or with --json one JSON object."""
    parser = argparse.ArgumentParser(prog="headrace-engine bench transfer", description=__doc__)
    parser.add_argument("--blocks", type=int, default=4096, help="blocks a push (default 4096)")
    parser.add_argument("--block-bytes", type=int, default=64 << 10, help="bytes of a block (default 65536)")
    parser.add_argument("--slot-bytes", type=int, default=1 << 20, help="bytes of the state slot (default 1048576)")
    parser.add_argument("--repeats", type=int, default=9, help="repetitions of each measurement (default 9)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    args = parser.parse_args(argv)
    for name in ("blocks", "block_bytes", "slot_bytes", "repeats"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be positive, not {getattr(args, name)}")
    rows = run(args.blocks, args.block_bytes, args.slot_bytes, args.repeats)
    if args.json:
        print(json.dumps({"transfer": [_as_json(row) for row in rows]}))
        return 0
    print(f"{args.blocks} blocks of {args.block_bytes} bytes, median of {args.repeats}")
    print(f"{'layout':<12} {'bare GB/s':>10} {'push GB/s':>10} {'push/bare':>10} {'bare ms':>9} {'push ms':>9}")
    for row in rows:
        print(
            f"{row.layout:<12} {row.bare_gb_per_second:>10.2f} {row.push_gb_per_second:>10.2f} {row.ratio:>10.2f}"
            f" {row.bare_seconds * 1e3:>9.1f} {row.push_seconds * 1e3:>9.1f}"
        )
    return 0


def _as_json(row: Row) -> dict[str, Any]:
    rates = {"bare_gb_per_second": row.bare_gb_per_second, "push_gb_per_second": row.push_gb_per_second}
    return {**asdict(row), **rates, "ratio": row.ratio}
