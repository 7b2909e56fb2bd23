"""A rank in a process of its own, for tests of the transfer agent over the real transport.

`python rank_process.py NAME INCARNATION LEASE_SECONDS` speaks JSON lines: a command on standard input, an answer on
standard output. Its cache has two paged groups and two state groups whose items differ in size.
"""

from __future__ import annotations

import base64
import json
import sys
import time
from typing import Any

import numpy as np

from headrace_engine.core import Region
from headrace_engine.kv.ticket import CacheRegion, ticket_from_json, ticket_to_json
from headrace_engine.kv.transfer import TransferAgent
from headrace_engine.models.protocol import GroupKind

BLOCK_SIZE = 16
NUM_BLOCKS, NUM_SLOTS = 64, 8
ITEM_BYTES = {"entries": 4096, "keys": 512, "window": 2048, "carry": 96}
FINGERPRINT = "test-fingerprint"


class Cache:
    """uint8 arrays [items, item_bytes] of every group."""

    def __init__(self, fill: int, num_blocks: int = NUM_BLOCKS) -> None:
        self.arrays = {
            name: np.full((num_blocks if name in ("entries", "keys") else NUM_SLOTS, size), fill, dtype=np.uint8)
            for name, size in ITEM_BYTES.items()
        }

    @property
    def regions(self) -> list[CacheRegion]:
        return [
            CacheRegion(
                Region(name, array.ctypes.data, array.shape[1], array.shape[0]),
                GroupKind.PAGED if name in ("entries", "keys") else GroupKind.STATE,
            )
            for name, array in self.arrays.items()
        ]


_caches: list[Cache] = []  # an agent's memory must outlive it


def make_agent(cache: Cache, name: str, incarnation: str, lease_seconds: float, **kwargs: Any) -> TransferAgent:
    _caches.append(cache)
    return TransferAgent(
        name,
        incarnation,
        cache.regions,
        block_size=BLOCK_SIZE,
        fingerprint=FINGERPRINT,
        lease_seconds=lease_seconds,
        **kwargs,
    )


def serve(name: str, incarnation: str, lease_seconds: float) -> None:
    cache = Cache(fill=0 if name.startswith("decode") else 1)
    agent = make_agent(cache, name, incarnation, lease_seconds)
    events: list[dict[str, Any]] = []

    def look() -> None:
        for event in agent.poll_events():
            events.append({"type": type(event).__name__, **vars(event)})

    def answer(command: dict[str, Any]) -> Any:
        if command["do"] == "issue":
            return ticket_to_json(agent.issue_ticket(**command["arguments"])).decode()
        if command["do"] == "event":  # the next event, or None after the given time
            give_up_at = time.monotonic() + command["seconds"]
            while not events and time.monotonic() < give_up_at:
                time.sleep(0.001)
                look()
            return events.pop(0) if events else None
        if command["do"] == "read":
            item = cache.arrays[command["group"]][command["item"]]
            return base64.b64encode(item.tobytes()).decode()
        if command["do"] == "abandon":
            return agent.abandon(command["generation"])
        if command["do"] == "open":
            return agent.open_push(ticket_from_json(command["ticket"]), command["token_ids"])
        if command["do"] == "push":
            return agent.push_blocks(tuple(command["key"]), command["first"], command["blocks"])
        if command["do"] == "finish":
            return agent.finish_push(tuple(command["key"]), command["slot"], 0)
        if command["do"] == "stats":
            return vars(agent.stats())
        raise ValueError(command["do"])

    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
    agent.close()


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], float(sys.argv[3]))
