"""Cache tensors and their sizes, and what the fingerprint depends on."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from headrace_engine.kv.layout import allocate_cache, block_bytes, fingerprint, item_bytes, slot_bytes
from headrace_engine.models.protocol import CacheGroup, GroupKind, Holds

PAGED = CacheGroup("entries", GroupKind.PAGED, (1, 3), 16, "bfloat16", tokens_per_entry=4, holds=Holds.COMPRESSED)
RING = CacheGroup("ring", GroupKind.STATE, (0, 1, 3), 8, "float32", rows=5, holds=Holds.WINDOW)


def test_sizes() -> None:
    assert item_bytes(PAGED, 32) == 2 * 8 * 16 * 2
    assert block_bytes([PAGED, RING], 32) == item_bytes(PAGED, 32)
    assert slot_bytes([PAGED, RING]) == 3 * 5 * 8 * 4


def test_tensors_are_contiguous_items() -> None:
    cache = allocate_cache([PAGED, RING], block_size=32, num_blocks=7, num_slots=3)
    assert cache["entries"].shape == (7, 2, 8, 16)
    assert cache["ring"].shape == (3, 3, 5, 8)
    for group in (PAGED, RING):
        tensor = cache[group.name]
        assert tensor.is_contiguous()
        assert tensor.stride(0) * tensor.element_size() == item_bytes(group, 32)
        assert tensor.dtype == getattr(torch, group.dtype)


def test_a_block_that_cuts_an_entry_is_refused() -> None:
    with pytest.raises(ValueError, match="block size 30 is no multiple of entries's ratio 4"):
        allocate_cache([PAGED], block_size=30, num_blocks=1, num_slots=1)


@pytest.mark.parametrize(("num_blocks", "num_slots"), [(0, 1), (1, 0)])
def test_an_empty_cache_is_refused(num_blocks: int, num_slots: int) -> None:
    with pytest.raises(ValueError, match="at least one block and one slot"):
        allocate_cache([PAGED, RING], block_size=32, num_blocks=num_blocks, num_slots=num_slots)


def test_the_fingerprint_depends_on_everything_that_decides_the_bytes() -> None:
    base = fingerprint([PAGED, RING], 32, "weights")
    assert fingerprint([PAGED, RING], 32, "weights") == base
    others = [
        fingerprint([PAGED, RING], 64, "weights"),
        fingerprint([PAGED, RING], 32, "other weights"),
        fingerprint([PAGED], 32, "weights"),
        fingerprint([RING, PAGED], 32, "weights"),
        *(
            fingerprint([dataclasses.replace(PAGED, **{field: value}), RING], 32, "weights")
            for field, value in [("dtype", "float32"), ("layers", (1, 2)), ("entry_dim", 8), ("tokens_per_entry", 8)]
        ),
    ]
    assert len({base, *others}) == len(others) + 1
