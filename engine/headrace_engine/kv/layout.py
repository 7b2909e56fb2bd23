"""Bytes of the cache: item sizes, the tensors themselves, and the fingerprint that two paired engines must share."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

from headrace_engine.models.protocol import CacheGroup, GroupKind

if TYPE_CHECKING:
    import torch

_FORMAT = 1  # counts up when the meaning of cache bytes changes without any field below changing


def item_bytes(group: CacheGroup, block_size: int) -> int:
    """Bytes of one block (paged) or one slot (state) of a group, all its layers together."""
    return len(group.layers) * group.num_entries(block_size) * group.bytes_per_entry


def block_bytes(groups: Iterable[CacheGroup], block_size: int) -> int:
    """Bytes of one block over all paged groups."""
    return sum(item_bytes(group, block_size) for group in groups if group.kind is GroupKind.PAGED)


def slot_bytes(groups: Iterable[CacheGroup]) -> int:
    """Bytes of one sequence's slot over all state groups."""
    return sum(item_bytes(group, block_size=0) for group in groups if group.kind is GroupKind.STATE)


def allocate_cache(
    groups: Iterable[CacheGroup], block_size: int, num_blocks: int, num_slots: int, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """One contiguous tensor per group, [num_blocks | num_slots, *item_shape], zeroed so that its pages are resident.

    Raises ValueError for a block size that a group's ratio does not divide, or for fewer than one item.
    """
    import torch

    if num_blocks < 1 or num_slots < 1:
        raise ValueError(f"the cache needs at least one block and one slot, got {num_blocks} and {num_slots}")
    return {
        group.name: torch.zeros(
            (num_blocks if group.kind is GroupKind.PAGED else num_slots, *group.item_shape(block_size)),
            dtype=getattr(torch, group.dtype),
            device=device,
        )
        for group in groups
    }


def fingerprint(groups: Iterable[CacheGroup], block_size: int, model_digest: str) -> str:
    """Hash of everything that decides the cache's bytes for given tokens; two engines may pair iff theirs are equal."""
    record = {
        "format": _FORMAT,
        "block_size": block_size,
        "model": model_digest,
        "groups": [dataclasses.asdict(group) for group in groups],
    }
    return hashlib.blake2b(json.dumps(record, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()
