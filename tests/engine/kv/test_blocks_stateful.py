"""BlockPool under arbitrary interleavings: nothing is lost, doubled, or served with another prompt's content."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from headrace_engine.kv.blocks import BlockPool

BLOCK = 2
NUM_BLOCKS, NUM_SLOTS = 12, 5


@dataclass(eq=False)
class Sequence:
    token_ids: list[int]
    blocks: list[int]
    slot: int


class BlockPoolMachine(RuleBasedStateMachine):
    """Models the cache's content: what a block or slot holds is the prefix of token ids that was computed into it."""

    sequences = Bundle("sequences")

    @initialize(needs_snapshots=st.booleans())
    def start(self, needs_snapshots: bool) -> None:
        self.needs_snapshots = needs_snapshots
        self.pool = BlockPool(NUM_BLOCKS, NUM_SLOTS, BLOCK, needs_snapshots)
        self.block_content: dict[int, tuple[int, ...]] = {}
        self.slot_content: dict[int, tuple[int, ...]] = {}
        self.live: list[Sequence] = []
        self.quarantined: dict[int, tuple[list[int], int]] = {}
        self.generation = 0

    @rule(target=sequences, token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def begin(self, token_ids: list[int]) -> Sequence | None:
        foreseen = self.pool.count_prefix(token_ids, len(token_ids) - 1)
        hit = self.pool.match_prefix(token_ids, len(token_ids) - 1)
        assert foreseen == hit.num_tokens
        assert hit.num_tokens == len(hit.block_ids) * BLOCK < len(token_ids)
        for index, block in enumerate(hit.block_ids):
            assert self.block_content[block] == tuple(token_ids[: (index + 1) * BLOCK])
        missing = -(-len(token_ids) // BLOCK) - len(hit.block_ids)
        admitted = self.pool.can_allocate(missing, num_slots=1)
        slot = -1
        if admitted:
            slot = self.pool.allocate_slot()
            if hit.snapshot_slot is not None:
                assert self.slot_content[hit.snapshot_slot] == tuple(token_ids[: hit.num_tokens])
                assert slot != hit.snapshot_slot
        if hit.snapshot_slot is not None:
            self.pool.free_slot(hit.snapshot_slot)
        if not admitted:
            self.pool.free_blocks(hit.block_ids)
            return None
        own = self.pool.allocate_blocks(missing)
        others = {block for sequence in self.live for block in sequence.blocks}
        others |= {block for blocks, _ in self.quarantined.values() for block in blocks}
        assert others.isdisjoint(own), "a block in use was handed out"
        blocks = [*hit.block_ids, *own]
        for index in range(len(hit.block_ids), len(blocks)):
            self.block_content[blocks[index]] = tuple(token_ids[: (index + 1) * BLOCK])
        sequence = Sequence(token_ids, blocks, slot)
        self.live.append(sequence)
        return sequence

    @rule(sequence=sequences, num_blocks=st.integers(1, 4))
    def cache(self, sequence: Sequence | None, num_blocks: int) -> None:
        if sequence not in self.live or num_blocks * BLOCK > len(sequence.token_ids):
            return
        prefix = sequence.token_ids[: num_blocks * BLOCK]
        snapshot = self.pool.cache_prefix(prefix, sequence.blocks[:num_blocks])
        if snapshot is not None:
            assert snapshot not in {other.slot for other in self.live}
            self.slot_content[snapshot] = tuple(prefix)

    @rule(sequence=consumes(sequences))
    def finish(self, sequence: Sequence | None) -> None:
        if sequence in self.live:
            self.live.remove(sequence)
            self.pool.free_blocks(sequence.blocks)
            self.pool.free_slot(sequence.slot)

    @rule(sequence=consumes(sequences))
    def abort_with_a_writer_at_work(self, sequence: Sequence | None) -> None:
        if sequence in self.live:
            self.live.remove(sequence)
            self.generation += 1
            self.pool.quarantine(self.generation, sequence.blocks, sequence.slot)
            self.quarantined[self.generation] = (sequence.blocks, sequence.slot)

    @rule(generation=st.integers(1, 8))
    def terminal_notification(self, generation: int) -> None:
        assert self.pool.end_quarantine(generation) == (self.quarantined.pop(generation, None) is not None)

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        in_use = {block for sequence in self.live for block in sequence.blocks}
        in_use |= {block for blocks, _ in self.quarantined.values() for block in blocks}
        assert self.pool.num_free_blocks == NUM_BLOCKS - len(in_use)
        assert self.pool.num_free_slots == NUM_SLOTS - len(self.live) - len(self.quarantined)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for sequence in self.live:
            self.pool.free_blocks(sequence.blocks)
            self.pool.free_slot(sequence.slot)
        for generation in self.quarantined:
            self.pool.end_quarantine(generation)
        # Whatever is cached gives way: the whole space can be had again.
        assert sorted(self.pool.allocate_blocks(NUM_BLOCKS)) == list(range(NUM_BLOCKS))
        assert sorted(self.pool.allocate_slot() for _ in range(NUM_SLOTS)) == list(range(NUM_SLOTS))
        assert self.pool.num_cached_blocks == 0
        self.pool.check_integrity()


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
