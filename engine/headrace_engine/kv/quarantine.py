"""Blocks that a peer may still write into, although their request has ended. Pure.

A ticket lets a prefill engine write into our cache by itself; deregistering memory or forgetting the request does not
stop it. So what an ended request's ticket named stays unusable until the receiver (see `receive`) says that no write
can come any more: at the peer's terminal notification, or once lease and longest write are past.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace_engine.kv.items import ItemPool


@dataclass(frozen=True)
class _Held:
    block_ids: tuple[int, ...]
    slot: int | None


class Quarantine:
    """References taken over from ended requests, by the generation of their ticket."""

    def __init__(self, blocks: ItemPool, slots: ItemPool) -> None:
        self._blocks = blocks
        self._slots = slots
        self._held: dict[int, _Held] = {}

    @property
    def num_blocks(self) -> int:
        return sum(len(held.block_ids) for held in self._held.values())

    def __contains__(self, generation: int) -> bool:
        return generation in self._held

    def hold(self, generation: int, block_ids: Sequence[int], slot: int | None) -> None:
        """Take over the caller's reference on each block and on the slot."""
        if generation in self._held:
            raise ValueError(f"generation {generation} is in quarantine already")
        self._held[generation] = _Held(tuple(block_ids), slot)

    def end(self, generation: int) -> bool:
        """No write for this ticket can come any more. False if nothing is held for it."""
        held = self._held.pop(generation, None)
        if held is None:
            return False
        self._blocks.release(held.block_ids)
        if held.slot is not None:
            self._slots.release([held.slot])
        return True
