"""Counted references to a fixed number of items (cache blocks, or state slots). Pure.

An item is *free* (nobody has it), *used* (at least one reference: a sequence, a hit being copied, a quarantine) or
*idle* (only the prefix index keeps it, so it can be had by evicting it there).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class ItemPool:
    """Ids 0 .. num_items - 1 with reference counts; freed ids are reused oldest first."""

    def __init__(self, num_items: int) -> None:
        if num_items < 1:
            raise ValueError(f"a pool needs at least one item, not {num_items}")
        self.num_items = num_items
        self._free: deque[int] = deque(range(num_items))
        self._references = [0] * num_items
        self._kept: set[int] = set()  # by the prefix index
        self._num_idle = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_available(self) -> int:
        """How many items could be taken if everything idle were evicted."""
        return self.num_free + self._num_idle

    def is_used(self, item: int) -> bool:
        return self._references[item] > 0

    def take(self, num_items: int) -> list[int]:
        """Free items, each with one reference. The caller has made sure that there are enough."""
        if num_items > len(self._free):
            raise ValueError(f"{num_items} items asked, {len(self._free)} free")
        taken = [self._free.popleft() for _ in range(num_items)]
        for item in taken:
            self._references[item] = 1
        return taken

    def retain(self, items: Iterable[int]) -> None:
        """One more reference to each of these, none of which is free."""
        for item in items:
            if self._references[item] == 0:
                if item not in self._kept:
                    raise ValueError(f"item {item} is free and cannot be shared")
                self._num_idle -= 1
            self._references[item] += 1

    def release(self, items: Iterable[int]) -> None:
        """One reference less to each of these."""
        for item in items:
            if self._references[item] == 0:
                raise ValueError(f"item {item} is released more often than it was taken")
            self._references[item] -= 1
            if self._references[item] == 0:
                if item in self._kept:
                    self._num_idle += 1
                else:
                    self._free.append(item)

    def keep(self, item: int) -> None:
        """The prefix index keeps a used item beyond its last reference."""
        if not self.is_used(item) or item in self._kept:
            raise ValueError(f"item {item} is not in use or kept already")
        self._kept.add(item)

    def drop(self, item: int) -> None:
        """The prefix index lets a kept item go."""
        self._kept.remove(item)
        if self._references[item] == 0:
            self._num_idle -= 1
            self._free.append(item)

    def check_integrity(self) -> None:
        """Raise AssertionError if an item is lost, doubled or miscounted."""
        free = set(self._free)
        assert len(free) == len(self._free), "an item is free twice"
        for item in range(self.num_items):
            expected = self._references[item] == 0 and item not in self._kept
            assert (item in free) == expected, f"item {item} is lost or free while in use"
        idle = sum(1 for item in self._kept if self._references[item] == 0)
        assert idle == self._num_idle, f"{idle} idle items, {self._num_idle} counted"
