"""Tickets and regions for tests."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace_engine.core import Peer, Region, Ticket, hash_tokens
from headrace_engine.kv.ticket import CacheRegion, num_pushed_blocks
from headrace_engine.models.protocol import GroupKind

REGIONS = (
    CacheRegion(Region("entries", 0x7F0000000000, 4096, 64), GroupKind.PAGED),
    CacheRegion(Region("keys", 0x7F1000000000, 512, 64), GroupKind.PAGED),
    CacheRegion(Region("window", 0x7F2000000000, 2048, 8), GroupKind.STATE),
)
PEER = Peer("decode-0/inc-1", b"metadata", tuple(cache.region for cache in REGIONS))


def token_ids_of(num_tokens: int) -> list[int]:
    return list(range(num_tokens))


def make_ticket(num_tokens: int = 10, block_size: int = 4, **changes: Any) -> Ticket:
    """A valid ticket for `token_ids_of(num_tokens)`, with some fields replaced."""
    ticket = Ticket(
        incarnation="inc-1",
        request_id="r-1",
        generation=1,
        fingerprint="fp",
        num_tokens=num_tokens,
        token_hash=hash_tokens(token_ids_of(num_tokens)),
        num_held_tokens=0,
        block_ids=tuple(range(num_pushed_blocks(num_tokens, block_size))),
        state_slot=3,
        lease_seconds=30.0,
        peer=PEER,
    )
    return msgspec.structs.replace(ticket, **changes)
