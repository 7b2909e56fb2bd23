"""BlockPool: what is allocated, cached, evicted and quarantined, as small stories."""

from __future__ import annotations

import pytest

from headrace_engine.kv.blocks import BlockPool, OutOfCacheError

BLOCK = 4


def make_pool(num_blocks: int = 8, num_slots: int = 4, needs_snapshots: bool = True) -> BlockPool:
    return BlockPool(num_blocks, num_slots, BLOCK, needs_snapshots)


def run_and_cache(pool: BlockPool, token_ids: list[int]) -> list[int]:
    """A sequence of full blocks that is computed, cached and ends; returns its blocks."""
    block_ids = pool.allocate_blocks(len(token_ids) // BLOCK)
    pool.cache_prefix(token_ids, block_ids)
    pool.free_blocks(block_ids)
    pool.check_integrity()
    return block_ids


def tokens(num_blocks: int, start: int = 0) -> list[int]:
    return list(range(start, start + num_blocks * BLOCK))


def test_allocation_gives_distinct_blocks_and_takes_nothing_when_there_are_too_few() -> None:
    pool = make_pool(num_blocks=4)
    first = pool.allocate_blocks(3)
    assert len(set(first)) == 3
    with pytest.raises(OutOfCacheError, match="2 blocks asked, 1 available"):
        pool.allocate_blocks(2)
    assert pool.num_free_blocks == 1
    pool.free_blocks(first)
    assert pool.num_free_blocks == 4


def test_freeing_a_block_twice_is_an_error() -> None:
    pool = make_pool()
    blocks = pool.allocate_blocks(1)
    pool.free_blocks(blocks)
    with pytest.raises(ValueError, match="more often than it was taken"):
        pool.free_blocks(blocks)


def test_a_cached_prefix_is_found_with_its_blocks_and_its_snapshot() -> None:
    pool = make_pool()
    block_ids = pool.allocate_blocks(2)
    snapshot = pool.cache_prefix(tokens(2), block_ids)
    hit = pool.match_prefix([*tokens(2), 99], max_tokens=8)
    assert (hit.num_tokens, list(hit.block_ids), hit.snapshot_slot) == (8, block_ids, snapshot)


def test_a_prefix_is_usable_only_where_a_snapshot_of_its_state_exists() -> None:
    pool = make_pool()
    run_and_cache(pool, tokens(3))
    assert pool.match_prefix(tokens(2), max_tokens=8).num_tokens == 0  # blocks are there, the state at 8 is not
    assert pool.match_prefix(tokens(3), max_tokens=11).num_tokens == 0
    assert pool.match_prefix(tokens(3), max_tokens=12).num_tokens == 12


def test_without_snapshots_any_chain_of_blocks_is_usable() -> None:
    pool = make_pool(needs_snapshots=False)
    run_and_cache(pool, tokens(3))
    hit = pool.match_prefix(tokens(3), max_tokens=11)
    assert (hit.num_tokens, hit.snapshot_slot) == (8, None)


def test_a_prefix_is_not_cached_twice() -> None:
    pool = make_pool()
    run_and_cache(pool, tokens(2))
    second = pool.allocate_blocks(2)
    assert pool.cache_prefix(tokens(2), second) is None
    pool.free_blocks(second)
    assert (pool.num_cached_blocks, pool.num_free_blocks) == (2, 8)


def test_the_least_recently_used_prefix_goes_first() -> None:
    pool = make_pool(num_blocks=4)
    run_and_cache(pool, tokens(2, start=0))
    run_and_cache(pool, tokens(2, start=100))
    used = pool.match_prefix(tokens(2, start=0), max_tokens=8)
    pool.free_blocks(used.block_ids)
    assert used.snapshot_slot is not None
    pool.free_slot(used.snapshot_slot)
    pool.allocate_blocks(1)
    assert pool.match_prefix(tokens(2, start=100), max_tokens=8).num_tokens == 0
    assert pool.match_prefix(tokens(2, start=0), max_tokens=8).num_tokens == 8
    pool.check_integrity()


def test_a_prefix_in_use_is_not_evicted_and_its_blocks_are_not_handed_out() -> None:
    pool = make_pool(num_blocks=4)
    run_and_cache(pool, tokens(2))
    hit = pool.match_prefix(tokens(2), max_tokens=8)
    assert set(pool.allocate_blocks(2)).isdisjoint(hit.block_ids)
    assert not pool.can_allocate(1)
    pool.check_integrity()


def test_a_shared_prefix_outlives_the_eviction_of_one_branch() -> None:
    pool = make_pool(num_blocks=6, num_slots=4)
    run_and_cache(pool, tokens(1))
    for branch in (50, 60):
        hit = pool.match_prefix(tokens(1), max_tokens=4)
        own = pool.allocate_blocks(1)
        chain = [*hit.block_ids, *own]
        pool.cache_prefix([*tokens(1), *tokens(1, start=branch)], chain)
        pool.free_blocks(chain)
        assert hit.snapshot_slot is not None
        pool.free_slot(hit.snapshot_slot)
    assert pool.num_cached_blocks == 3
    pool.free_blocks(pool.allocate_blocks(4))
    assert pool.num_cached_blocks == 2
    assert pool.match_prefix([*tokens(1), *tokens(1, start=60)], max_tokens=8).num_tokens == 8
    pool.check_integrity()


def test_a_sequence_takes_a_slot_from_the_oldest_snapshot_and_its_blocks_go_with_it() -> None:
    pool = make_pool(num_blocks=8, num_slots=2)
    run_and_cache(pool, tokens(2, start=0))
    run_and_cache(pool, tokens(2, start=100))
    pool.allocate_slot()
    assert pool.match_prefix(tokens(2, start=0), max_tokens=8).num_tokens == 0
    assert pool.num_cached_blocks == 2
    pool.check_integrity()


def test_a_snapshot_that_is_being_copied_is_not_overwritten() -> None:
    pool = make_pool(num_slots=2)
    run_and_cache(pool, tokens(2))
    hit = pool.match_prefix(tokens(2), max_tokens=8)
    assert pool.allocate_slot() != hit.snapshot_slot
    with pytest.raises(OutOfCacheError, match="all 2 state slots"):
        pool.allocate_slot()
    assert hit.snapshot_slot is not None
    pool.free_slot(hit.snapshot_slot)
    assert pool.allocate_slot() == hit.snapshot_slot


def test_when_every_slot_is_in_use_nothing_is_cached() -> None:
    pool = make_pool(num_slots=1)
    pool.allocate_slot()
    block_ids = pool.allocate_blocks(2)
    assert pool.cache_prefix(tokens(2), block_ids) is None
    assert pool.num_cached_blocks == 0
    pool.check_integrity()


def test_quarantined_blocks_are_unusable_until_the_terminal_notification() -> None:
    pool = make_pool(num_blocks=4)
    block_ids, slot = pool.allocate_blocks(3), pool.allocate_slot()
    pool.quarantine(7, block_ids, slot)
    assert (pool.num_quarantined_blocks, pool.num_free_blocks) == (3, 1)
    assert pool.end_quarantine(6) is False  # another generation frees nothing
    assert pool.end_quarantine(7) is True
    assert pool.end_quarantine(7) is False  # a second terminal frees nothing
    assert (pool.num_quarantined_blocks, pool.num_free_blocks, pool.num_free_slots) == (0, 4, 4)


def test_one_generation_is_quarantined_once() -> None:
    pool = make_pool(num_blocks=4)
    pool.quarantine(1, pool.allocate_blocks(1), None)
    with pytest.raises(ValueError, match="generation 1 is in quarantine already"):
        pool.quarantine(1, pool.allocate_blocks(1), None)


def test_prefix_blocks_shared_with_a_quarantined_request_stay_cached() -> None:
    pool = make_pool(needs_snapshots=False)
    run_and_cache(pool, tokens(2))
    hit = pool.match_prefix(tokens(2), max_tokens=8)
    pool.quarantine(1, hit.block_ids, None)
    pool.end_quarantine(1)
    assert pool.match_prefix(tokens(2), max_tokens=8).num_tokens == 8
    pool.check_integrity()


def test_allocating_does_not_search_through_the_blocks_of_running_sequences_each_time() -> None:
    pool = BlockPool(num_blocks=1000, num_slots=1, block_size=BLOCK, needs_snapshots=False)
    for sequence in range(5):  # long ones that run on: their cached blocks are the oldest, and in use
        block_ids = pool.allocate_blocks(100)
        pool.cache_prefix([sequence * 1000 + i for i in range(100 * BLOCK)], block_ids)
    for sequence in range(400):
        run_and_cache(pool, [-1 - sequence] * BLOCK)
    pool.allocate_blocks(100)  # what is free
    num_looks = 0
    is_used = pool._blocks.is_used

    def counting(item: int) -> bool:
        nonlocal num_looks
        num_looks += 1
        return is_used(item)

    pool._blocks.is_used = counting  # type: ignore[method-assign]
    for _ in range(300):
        pool.allocate_blocks(1)
    assert num_looks < 1000
    pool.check_integrity()
