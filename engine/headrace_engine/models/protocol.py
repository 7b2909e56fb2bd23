"""What the engine asks of a model: cache groups, and a forward over a flat batch with a paged cache.

Shapes: T tokens of S sequences in this step; token rows of one sequence are consecutive.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from headrace_engine.kv.records import CacheRecords, RecordFormat

if TYPE_CHECKING:
    import torch

    from headrace_engine.ep.exchange import Exchange


class GroupKind(enum.StrEnum):
    PAGED = "paged"  # append-only; entries of block b live at item b; shared by prefix
    STATE = "state"  # fixed size per sequence (a ring over positions); lives at the sequence's slot


class Holds(enum.StrEnum):
    """What an entry of a cache group is."""

    WINDOW = "window"  # the raw key/value of one of a sequence's last tokens
    COMPRESSED = "compressed"  # the key/value of `tokens_per_entry` tokens
    INDEX_KEY = "index key"  # what the indexer scores such an entry by
    CARRY = "carry"  # a raw row of a group of tokens that is not yet closed


class Transfer(enum.StrEnum):
    """When prefill pushes a group's data to decode."""

    EACH_BLOCK = "each block once it is complete"
    SLOT_AT_END = "the slot once, after the last chunk"


_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class CacheGroup:
    """One kind of per-sequence state. Block tables, transfers, prefix keys and memory estimates derive from these.

    PAGED: tensor [num_blocks, num_layers, block_size // tokens_per_entry, entry_dim].
    STATE: tensor [num_slots, num_layers, rows, entry_dim]; the row of position p is p % rows.
    With a record the last two axes are one, a page of packed records: [items, num_layers, page bytes].
    """

    name: str
    kind: GroupKind
    layers: tuple[int, ...]  # model layers that own an entry, in order of the tensor's layer axis
    entry_dim: int
    dtype: str  # "float32" | "bfloat16"; "uint8" with `record`
    tokens_per_entry: int = 1  # PAGED: the compression ratio
    rows: int = 0  # STATE only
    holds: Holds = field(kw_only=True)
    record: RecordFormat | None = field(kw_only=True, default=None)

    @property
    def bytes_per_entry(self) -> int:
        """Of one layer's entry or row."""
        return self.entry_dim * _ELEMENT_BYTES[self.dtype] if self.record is None else self.record.record_bytes

    @property
    def transfer(self) -> Transfer:
        return Transfer.EACH_BLOCK if self.kind is GroupKind.PAGED else Transfer.SLOT_AT_END

    @property
    def format_name(self) -> str:
        """For people."""
        return self.dtype if self.record is None else self.record.name

    def num_entries(self, block_size: int) -> int:
        """Entries or rows of one layer in a block or slot."""
        if self.kind is GroupKind.STATE:
            return self.rows
        if block_size % self.tokens_per_entry:
            raise ValueError(f"block size {block_size} is no multiple of {self.name}'s ratio {self.tokens_per_entry}")
        return block_size // self.tokens_per_entry

    def item_shape(self, block_size: int) -> tuple[int, ...]:
        """[layers, entries or rows, dim], or [layers, page bytes], of one block or slot."""
        num_entries = self.num_entries(block_size)
        if self.record is None:
            return (len(self.layers), num_entries, self.entry_dim)
        return (len(self.layers), num_entries * self.record.record_bytes)


def packed_groups(groups: Iterable[CacheGroup], records: CacheRecords | None) -> tuple[CacheGroup, ...]:
    """The groups with their entries in records of these formats; carries stay as they are. None: all do."""
    if records is None:
        return tuple(groups)
    formats = {Holds.WINDOW: records.window, Holds.COMPRESSED: records.compressed, Holds.INDEX_KEY: records.index_key}
    return tuple(
        dataclasses.replace(group, dtype="uint8", record=formats[group.holds]) if group.holds in formats else group
        for group in groups
    )


@dataclass
class ForwardBatch:
    """One step's tokens. Integer tensors are int64 unless said otherwise and live on the model's device.

    A sequence with a query of q tokens and `context_lens[s] = c` computes positions c - q .. c - 1; what came
    before is in the cache. Entries that this step completes are written by the forward itself. The caller has
    allocated every block that positions below c need. T = 0 is legal: an idle rank still joins every exchange.
    """

    token_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    query_starts: torch.Tensor  # [S + 1], query_starts[0] = 0, query_starts[S] = T
    context_lens: torch.Tensor  # [S], tokens in the cache after this step
    block_tables: torch.Tensor  # [S, max_blocks], int32: block of tokens [i * block_size, (i + 1) * block_size)
    state_slots: torch.Tensor  # [S]
    logit_rows: torch.Tensor  # [R], rows of the T tokens whose logits are wanted
    query_lens: tuple[int, ...]  # the same on the host, so that no forward waits for the device
    max_context_len: int
    # [S, H]: ids of the H = Model.num_previous_tokens tokens before each query, oldest first, -1 before the sequence
    previous_ids: torch.Tensor | None = None
    # [S] int64, at most the query's first position: windows show no raw row before it; None: every row there is
    window_starts: torch.Tensor | None = None
    # How many of each query's first rows only bring back raw rows of the window; see models.deepseek_v41.replay
    replay_lens: tuple[int, ...] | None = None

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)


class Model(Protocol):
    """One rank's share of a model: all of attention, and its experts."""

    cache_groups: tuple[CacheGroup, ...]
    vocab_size: int
    max_position: int
    eos_token_ids: tuple[int, ...]
    block_multiple: int  # the block size must be a multiple of this
    num_experts: int  # of the whole model, not of this rank
    num_previous_tokens: int  # how many ids before a query the forward looks at, besides the cache
    digest: str  # identity of weights and precision: equal tokens give equal cache bytes iff digests are equal

    def forward(self, batch: ForwardBatch, cache: Mapping[str, torch.Tensor], exchange: Exchange) -> torch.Tensor:
        """Logits [R, vocab] in fp32. Reads and writes `cache` (one tensor per cache group, by name)."""
        ...


@runtime_checkable
class ReadsAhead(Protocol):
    """A model that can prepare for tokens as soon as it knows their ids."""

    def read_ahead(self, token_ids: Sequence[int]) -> None:
        """A prompt that will be computed sooner or later. Returns at once; what it does changes no result."""
        ...
