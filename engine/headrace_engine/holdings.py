"""What sequences hold of a `BlockPool`, and which copies that takes. Pure: no torch.

A sequence that runs holds a block for every `block_size` tokens and one state slot. It begins with what the prefix
cache has of its prompt, and leaves in the cache what the next one may begin with (see `kv.prefix`). The rank copies
slots and blocks in the order in which it was asked to, before anything else writes them.
"""

from __future__ import annotations

from headrace_engine.core import Leg
from headrace_engine.kv.blocks import BlockPool
from headrace_engine.kv.prefix import PrefixHit
from headrace_engine.sequence import Sequence

Copies = list[tuple[int, int]]  # (from, to)


class Holdings:
    """Blocks and state slots of all sequences of one rank: `block_ids` and `state_slot` of each are written here."""

    def __init__(self, pool: BlockPool, *, has_snapshots: bool) -> None:
        """has_snapshots: as the pool's `needs_snapshots`: cached prefixes come with a copy of the state."""
        self._pool = pool
        self._has_snapshots = has_snapshots
        self._slot_copies: Copies = []
        self._block_copies: Copies = []
        self._failed: tuple[str, int, int] | None = None  # the request and free blocks, slots when it got nothing

    def take_slot_copies(self) -> Copies:
        """State slots to copy now: those that no call has returned yet."""
        copies, self._slot_copies = self._slot_copies, []
        return copies

    def take_block_copies(self) -> Copies:
        """Blocks to copy now: those that no call has returned yet."""
        copies, self._block_copies = self._block_copies, []
        return copies

    def num_expected_cached(self, sequence: Sequence) -> int:
        """Prompt tokens that need no computing, as the cache is now; 0 where the state of a prefix is not kept."""
        if not self._has_snapshots or sequence.leg is Leg.DECODE:
            return 0
        return self._pool.count_prefix(sequence.token_ids, sequence.num_prompt_tokens - 1)

    def reserve(self, sequence: Sequence) -> PrefixHit | None:
        """Blocks for every token known so far and a state slot, or None if there are not enough now."""
        state = (sequence.request_id, self._pool.num_free_blocks, self._pool.num_free_slots)
        if state == self._failed:
            return None  # nothing was freed since: do not walk the prefix index for nothing
        num_blocks = self._num_blocks(sequence.num_target)
        hit = PrefixHit()
        # Without snapshots a cached prefix has no state: of use only to a sequence whose state is pushed.
        can_use = self._has_snapshots or (sequence.leg is Leg.DECODE and not sequence.was_admitted)
        if can_use and not sequence.scores_prompt:
            hit = self._pool.match_prefix(sequence.token_ids, len(sequence.token_ids) - 1)
        num_new = num_blocks - len(hit.block_ids)
        if not self._pool.can_allocate(num_new, 1):
            self._give_back(hit)
            self._failed = (sequence.request_id, self._pool.num_free_blocks, self._pool.num_free_slots)
            return None
        self._failed = None
        sequence.block_ids = [*hit.block_ids, *self._pool.allocate_blocks(num_new)]
        sequence.state_slot = self._pool.allocate_slot()
        sequence.num_computed = hit.num_tokens
        if hit.snapshot_slot is not None:
            # Copies run in order before anything else writes a slot, so the snapshot may be given back now.
            self._slot_copies.append((hit.snapshot_slot, sequence.state_slot))
            self._pool.free_slot(hit.snapshot_slot)
        return hit

    def share(self, leader: Sequence, follower: Sequence) -> bool:
        """Give the follower, which has the same prompt, the leader's state: a copy of its slot and of the block that is
        not full, the other blocks themselves. False: there is no room for the copies."""
        if not self._pool.can_allocate(1, 1):
            return False
        num_full, num_in_last = divmod(leader.num_computed, self._pool.block_size)
        (block,) = self._pool.allocate_blocks(1)
        follower.block_ids = [*self._pool.share_blocks(leader.block_ids[:num_full]), block]
        follower.state_slot = self._pool.allocate_slot()
        self._slot_copies.append((leader.state_slot, follower.state_slot))
        if num_in_last:
            self._block_copies.append((leader.block_ids[num_full], block))
        return True

    def grow(self, sequence: Sequence) -> bool:
        """Blocks for the tokens that have come since; False: there are not enough, and it has what there was."""
        while len(sequence.block_ids) < self._num_blocks(sequence.num_target):
            if not self._pool.can_allocate(1):
                return False
            sequence.block_ids += self._pool.allocate_blocks(1)
        return True

    def free(self, sequence: Sequence) -> None:
        """Take back all that the sequence holds."""
        self._pool.free_blocks(sequence.block_ids)
        if sequence.state_slot >= 0:
            self._pool.free_slot(sequence.state_slot)
        sequence.block_ids, sequence.state_slot = [], -1

    def quarantine(self, sequence: Sequence) -> None:
        """Take back what a peer may still write into, for nobody's use until its ticket has ended."""
        held = sequence.block_ids[: sequence.num_held_blocks]
        self._pool.quarantine(sequence.generation, sequence.block_ids[len(held) :], sequence.state_slot)
        sequence.block_ids, sequence.state_slot = held, -1

    # --- prefix cache ------------------------------------------------------------------------------------------------

    def up_to_boundary(self, sequence: Sequence, num_tokens: int) -> int:
        """How many of its next `num_tokens` may be computed at once, where the state at the boundary is to be kept."""
        boundary = self._prompt_boundary(sequence)
        if self._has_snapshots and sequence.num_computed < boundary < sequence.num_computed + num_tokens:
            return boundary - sequence.num_computed
        return num_tokens

    def cache_prompt_boundary(self, sequence: Sequence) -> None:
        """Cache the prompt's full blocks with a copy of the state, if it is computed just up to their end."""
        boundary = self._prompt_boundary(sequence)
        if self._has_snapshots and 0 < boundary == sequence.num_computed:
            block_ids = sequence.block_ids[: boundary // self._pool.block_size]
            snapshot = self._pool.cache_prefix(sequence.token_ids[:boundary], block_ids)
            if snapshot is not None:
                self._slot_copies.append((sequence.state_slot, snapshot))

    def cache_full_blocks(self, sequence: Sequence) -> None:
        """Cache all full blocks, where a cached prefix needs no state."""
        num_blocks = sequence.num_computed // self._pool.block_size
        if not self._has_snapshots and num_blocks:
            token_ids = sequence.token_ids[: num_blocks * self._pool.block_size]
            self._pool.cache_prefix(token_ids, sequence.block_ids[:num_blocks])

    def _prompt_boundary(self, sequence: Sequence) -> int:
        """The last block boundary that leaves a prompt token to compute."""
        return (sequence.num_prompt_tokens - 1) // self._pool.block_size * self._pool.block_size

    def _give_back(self, hit: PrefixHit) -> None:
        self._pool.free_blocks(hit.block_ids)
        if hit.snapshot_slot is not None:
            self._pool.free_slot(hit.snapshot_slot)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._pool.block_size)
