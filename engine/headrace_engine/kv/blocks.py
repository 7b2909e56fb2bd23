"""One rank's cache space: blocks, state slots, what is cached of them and what is in quarantine. Pure.

A *block* id is valid in every paged cache group, a *slot* id in every state group. Everything that has a block holds
a counted reference: sequences (one per block of their table), prefix hits, quarantines. The prefix index keeps blocks
whose last reference is gone until allocation needs them.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace_engine.kv.items import ItemPool
from headrace_engine.kv.prefix import PrefixHit, PrefixIndex
from headrace_engine.kv.quarantine import Quarantine


class OutOfCacheError(Exception):
    """More blocks or slots were asked for than are free or can be evicted; nothing was allocated."""


class BlockPool:
    """Allocates blocks and slots, evicting cached prefixes as needed.

    needs_snapshots: whether a cached prefix is usable only with a copy of its state (see `prefix`). False on a decode
    engine, which receives the state of every request from its peer.
    """

    def __init__(self, num_blocks: int, num_slots: int, block_size: int, needs_snapshots: bool = True) -> None:
        self._blocks = ItemPool(num_blocks)
        self._slots = ItemPool(num_slots)
        self._prefixes = PrefixIndex(self._blocks, self._slots, block_size, needs_snapshots)
        self._quarantine = Quarantine(self._blocks, self._slots)
        self.block_size = block_size

    @property
    def num_blocks(self) -> int:
        return self._blocks.num_items

    @property
    def num_free_blocks(self) -> int:
        """Blocks that a request could get now, cached but idle ones included."""
        return self._blocks.num_available

    @property
    def num_free_slots(self) -> int:
        """Slots that a request could get now, idle snapshots included."""
        return self._slots.num_available

    @property
    def num_cached_blocks(self) -> int:
        return len(self._prefixes)

    @property
    def num_quarantined_blocks(self) -> int:
        return self._quarantine.num_blocks

    def can_allocate(self, num_blocks: int, num_slots: int = 0) -> bool:
        return num_blocks <= self._blocks.num_available and num_slots <= self._slots.num_available

    def allocate_blocks(self, num_blocks: int) -> list[int]:
        """That many blocks with one reference each; raises OutOfCacheError and takes nothing if there are fewer."""
        if num_blocks > self._blocks.num_available:
            raise OutOfCacheError(f"{num_blocks} blocks asked, {self._blocks.num_available} available")
        while self._blocks.num_free < num_blocks:
            self._prefixes.evict_block()
        return self._blocks.take(num_blocks)

    def share_blocks(self, block_ids: Sequence[int]) -> list[int]:
        """The same blocks with one more reference each, for a sequence that begins with the same tokens."""
        self._blocks.retain(block_ids)
        return list(block_ids)

    def allocate_slot(self) -> int:
        """A state slot with one reference. Its content is whatever its last owner left."""
        if self._slots.num_available == 0:
            raise OutOfCacheError(f"all {self._slots.num_items} state slots are in use")
        if self._slots.num_free == 0:
            self._prefixes.evict_snapshot()
        return self._slots.take(1)[0]

    def free_blocks(self, block_ids: Sequence[int]) -> None:
        """Give back one reference on each block."""
        self._blocks.release(block_ids)

    def free_slot(self, slot: int) -> None:
        """Give back one reference on a slot: a sequence's own, or a hit's snapshot once it is copied."""
        self._slots.release([slot])

    def match_prefix(self, token_ids: Sequence[int], max_tokens: int) -> PrefixHit:
        """The longest cached prefix of at most `max_tokens` tokens.

        The hit holds a reference on each of its blocks (they start the sequence's block table and are freed with it)
        and on its snapshot slot: copy that into the sequence's own slot, then `free_slot` it.
        """
        return self._prefixes.match(token_ids, max_tokens)

    def count_prefix(self, token_ids: Sequence[int], max_tokens: int) -> int:
        """How many tokens `match_prefix` would find now, without holding them."""
        return self._prefixes.count(token_ids, max_tokens)

    def cache_prefix(self, token_ids: Sequence[int], block_ids: Sequence[int]) -> int | None:
        """Keep a sequence's full blocks for others. Its state must be that of exactly `token_ids`.

        Returns the slot into which the caller must copy the sequence's state before the pool is used again, or None
        if there is nothing to copy: cached already, no slot to be had (then nothing is cached), or no snapshots here.
        """
        if self._prefixes.has(token_ids):
            return None
        if not self._prefixes.needs_snapshots:
            self._prefixes.insert(token_ids, block_ids, None)
            return None
        if self._slots.num_available == 0:
            return None
        snapshot = self.allocate_slot()
        self._prefixes.insert(token_ids, block_ids, snapshot)
        self._slots.release([snapshot])
        return snapshot

    def quarantine(self, generation: int, block_ids: Sequence[int], slot: int | None) -> None:
        """Instead of freeing them: the holder of the ticket of this generation may still write into these."""
        self._quarantine.hold(generation, block_ids, slot)

    def end_quarantine(self, generation: int) -> bool:
        """No write of this generation can come any more. False if nothing is held for it."""
        return self._quarantine.end(generation)

    def check_integrity(self) -> None:
        """Raise AssertionError on any lost, doubled or miscounted block or slot. For tests and debugging."""
        self._blocks.check_integrity()
        self._slots.check_integrity()
        self._prefixes.check_integrity()
