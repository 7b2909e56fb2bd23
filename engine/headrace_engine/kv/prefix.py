"""Which prefixes of token ids are in the cache already, and which of them to give up first. Pure.

A tree over full blocks: an edge is one block's token ids, a node is the block that holds them. Edges are compared as
token ids, never as hashes of them, so a collision cannot hand out another prompt's cache.

Paged entries of a block serve any sequence with the same prefix. State groups (window ring, compressor carry) do not:
they are those of one position. With `needs_snapshots` a prefix of p tokens is therefore usable only if a copy of the
state at p exists, in a slot of its own (a *snapshot*); nodes that no snapshot at or below makes usable are dropped.
Without (decode in a P/D pair: prefill always pushes the state) any chain of blocks is usable.

Least recently used: nodes are kept in an order where a parent is younger than its children, so the oldest is a leaf.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from headrace_engine.kv.items import ItemPool


@dataclass(frozen=True)
class PrefixHit:
    """`num_tokens` leading tokens are cached in `block_ids`; their state is in `snapshot_slot` (None: not kept)."""

    num_tokens: int = 0
    block_ids: tuple[int, ...] = ()
    snapshot_slot: int | None = None


@dataclass(eq=False)
class _Node:
    parent: _Node | None
    edge: bytes
    block: int
    depth: int  # blocks from the root, this one included
    snapshot: int | None = None
    children: dict[bytes, _Node] = field(default_factory=dict)


class PrefixIndex:
    """Keeps blocks (and snapshot slots) of two pools after their sequences have ended, until they are evicted."""

    def __init__(self, blocks: ItemPool, slots: ItemPool, block_size: int, needs_snapshots: bool) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be positive, not {block_size}")
        self.block_size = block_size
        self.needs_snapshots = needs_snapshots
        self._blocks = blocks
        self._slots = slots
        self._roots: dict[bytes, _Node] = {}
        self._oldest_first: OrderedDict[_Node, None] = OrderedDict()
        self._oldest_snapshots_first: OrderedDict[_Node, None] = OrderedDict()

    def __len__(self) -> int:
        """Cached blocks."""
        return len(self._oldest_first)

    def match(self, token_ids: Sequence[int], max_tokens: int) -> PrefixHit:
        """The longest usable prefix of at most `max_tokens` tokens. The hit holds a reference on all it names."""
        usable: _Node | None = None
        for node in self._walk(token_ids, max_tokens):
            if node.snapshot is not None or not self.needs_snapshots:
                usable = node
        if usable is None:
            return PrefixHit()
        self._touch(usable)
        chain = tuple(node.block for node in _path(usable))[::-1]
        self._blocks.retain(chain)
        snapshot = usable.snapshot if self.needs_snapshots else None
        if snapshot is not None:
            self._slots.retain([snapshot])
        return PrefixHit(usable.depth * self.block_size, chain, snapshot)

    def count(self, token_ids: Sequence[int], max_tokens: int) -> int:
        """How many tokens `match` would find now; nothing is held, nothing becomes younger."""
        nodes = self._walk(token_ids, max_tokens)
        usable = (node.depth for node in nodes if node.snapshot is not None or not self.needs_snapshots)
        return max(usable, default=0) * self.block_size

    def has(self, token_ids: Sequence[int]) -> bool:
        """Whether exactly this prefix (full blocks) is cached and usable."""
        chain = list(self._walk(token_ids, len(token_ids)))
        if not chain or len(chain) * self.block_size != len(token_ids):
            return False
        return chain[-1].snapshot is not None or not self.needs_snapshots

    def insert(self, token_ids: Sequence[int], block_ids: Sequence[int], snapshot: int | None) -> None:
        """Cache the blocks of a prefix of full blocks, and the snapshot slot of its end.

        Where a block with the same prefix is cached already, that one stays: the caller's own remains the caller's.
        The caller still has a reference on every block and on the slot, and keeps it.
        """
        if len(token_ids) != len(block_ids) * self.block_size or not block_ids:
            raise ValueError(f"{len(token_ids)} tokens do not fill {len(block_ids)} blocks of {self.block_size}")
        if self.needs_snapshots != (snapshot is not None):
            raise ValueError("a snapshot slot is missing" if self.needs_snapshots else "snapshots are not kept here")
        node: _Node | None = None
        children = self._roots
        for edge, block in zip(self._edges(token_ids, len(token_ids)), block_ids, strict=True):
            child = children.get(edge)
            if child is None:
                child = _Node(node, edge, block, depth=node.depth + 1 if node else 1)
                self._blocks.keep(block)
                children[edge] = child
                self._oldest_first[child] = None
            node, children = child, child.children
        assert node is not None
        if snapshot is not None:
            if node.snapshot is not None:
                raise ValueError("this prefix has a snapshot already")
            self._slots.keep(snapshot)
            node.snapshot = snapshot
            self._oldest_snapshots_first[node] = None
        self._touch(node)

    def evict_block(self) -> None:
        """Give up the least recently used leaf, preferably one that no sequence shares."""
        leaf = self._oldest_leaf()
        first_used: _Node | None = None
        # What a sequence uses is young, whenever it was matched: said here once, so that the next search begins after
        # it. A leaf in use may hide idle ancestors (its sequence computed the same prefix itself, in blocks of its
        # own): when all leaves are in use, one of them goes.
        while self._blocks.is_used(leaf.block) and leaf is not first_used:
            first_used = first_used or leaf
            self._touch(leaf)
            leaf = self._oldest_leaf()
        self._drop_snapshot(leaf)
        self._prune(leaf)

    def _oldest_leaf(self) -> _Node:
        oldest = next(iter(self._oldest_first), None)
        if oldest is None:
            raise ValueError("nothing is cached")
        return oldest

    def evict_snapshot(self) -> None:
        """Give up the least recently used snapshot that nobody copies now, and the blocks that only it made usable."""
        node = next(
            (node for node in self._oldest_snapshots_first if not self._slots.is_used(_slot_of(node))),
            None,
        )
        if node is None:
            raise ValueError("no snapshot is idle")
        self._drop_snapshot(node)
        if not node.children:
            self._prune(node)

    def check_integrity(self) -> None:
        """Raise AssertionError if the tree, its order and its pools disagree."""
        seen: set[int] = set()
        ages = {node: age for age, node in enumerate(self._oldest_first)}
        for node in self._oldest_first:
            siblings = node.parent.children if node.parent else self._roots
            assert siblings.get(node.edge) is node, "a node is not its parent's child"
            assert node.block not in seen, f"block {node.block} is cached twice"
            seen.add(node.block)
            assert node.parent is None or ages[node.parent] > ages[node], "a parent is older than its child"
            assert node.parent is None or node.depth == node.parent.depth + 1
            assert (node.snapshot is not None) == (node in self._oldest_snapshots_first)
            assert node.children or node.snapshot is not None or not self.needs_snapshots, "a leaf is unusable"
        assert set(self._oldest_snapshots_first) <= set(ages), "a snapshot outlives its node"

    def _edges(self, token_ids: Sequence[int], max_tokens: int) -> Iterator[bytes]:
        """The token ids of each full block among the first `max_tokens`, as bytes (int32)."""
        for end in range(self.block_size, min(len(token_ids), max_tokens) + 1, self.block_size):
            yield array("i", token_ids[end - self.block_size : end]).tobytes()

    def _walk(self, token_ids: Sequence[int], max_tokens: int) -> Iterator[_Node]:
        children = self._roots
        for edge in self._edges(token_ids, max_tokens):
            node = children.get(edge)
            if node is None:
                return
            yield node
            children = node.children

    def _touch(self, node: _Node) -> None:
        for ancestor in _path(node):  # the deepest first, so that parents stay younger than children
            self._oldest_first.move_to_end(ancestor)
            if ancestor.snapshot is not None:
                self._oldest_snapshots_first.move_to_end(ancestor)

    def _drop_snapshot(self, node: _Node) -> None:
        if node.snapshot is not None:
            self._slots.drop(node.snapshot)
            node.snapshot = None
            del self._oldest_snapshots_first[node]

    def _prune(self, leaf: _Node) -> None:
        """Remove a leaf, and with it the ancestors that nothing makes usable any more."""
        node: _Node | None = leaf
        while node is not None and not node.children and node.snapshot is None:
            siblings = node.parent.children if node.parent else self._roots
            del siblings[node.edge]
            del self._oldest_first[node]
            self._blocks.drop(node.block)
            node = node.parent if self.needs_snapshots else None


def _path(node: _Node) -> Iterator[_Node]:
    """The node and its ancestors, the deepest first."""
    current: _Node | None = node
    while current is not None:
        yield current
        current = current.parent


def _slot_of(node: _Node) -> int:
    assert node.snapshot is not None
    return node.snapshot
