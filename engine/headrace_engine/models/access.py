"""A step's reads and writes of the cache, whether it keeps plain tensors or packed records.

Kernels read plain rows. Of packed records a step first unpacks what it is about to read: window rows, the chosen
entries, the index keys that it can see.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from headrace_engine import kernels
from headrace_engine.kv.records import CacheRecords, RecordFormat
from headrace_engine.models.closing import Closing, sequence_of_token
from headrace_engine.models.protocol import ForwardBatch
from headrace_engine.models.rope import StepRope


@dataclass(frozen=True)
class Reads:
    """The entries that a layer's queries see: those of a layer of a group, all visible ones or the selected."""

    group: str
    layer: int  # in the group
    ratio: int
    selected: torch.Tensor | None  # as kernels.Entries has it


@dataclass(frozen=True)
class Keys:
    """A layer's index keys as kernels.select_entries wants them."""

    batch: ForwardBatch
    pages: torch.Tensor
    layer: int


class PlainCache:
    """Groups as tensors [blocks | slots, layers, entries | rows, n] in a dtype of numbers."""

    is_packed = False

    def __init__(self, batch: ForwardBatch, tensors: Mapping[str, torch.Tensor]) -> None:
        self.batch, self.tensors = batch, tensors

    def seen(self, kv: torch.Tensor, group: str) -> torch.Tensor:
        """Window rows [T, n] dt as later steps will read them: so is a prompt the same however it is cut."""
        dtype = self.tensors[group].dtype
        return kv if dtype is kv.dtype else kv.to(dtype).to(kv.dtype)

    def attend(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        group: str,
        layer: int,
        window: int,
        sinks: torch.Tensor,
        scale: float,
        rope: StepRope,
        reads: Reads | None,
    ) -> torch.Tensor:
        """kernels.attention over the window of `group` and the entries of `reads`."""
        entries = None
        if reads is not None:
            entries = kernels.Entries(self.tensors[reads.group], reads.layer, reads.ratio, reads.selected)
        ring = self.tensors[group]
        return kernels.attention(q, kv, self.batch, ring, layer, window, sinks, scale, rope.cos, rope.sin, entries)

    def keep_window(self, kv: torch.Tensor, group: str, layer: int) -> None:
        """kernels.write_ring."""
        kernels.write_ring(kv, self.tensors[group], layer, self.batch)

    def per_block(self, group: str) -> int:
        """Entries of a block."""
        return self.tensors[group].shape[2]

    def keep_compressed(self, entries: torch.Tensor, closing: Closing, group: str, layer: int) -> None:
        """Puts entries [C, n] of the groups of tokens that close where they belong."""
        blocks, numbers = closing.places(self.batch, self.per_block(group))
        tensor = self.tensors[group]
        tensor[blocks, layer, numbers] = entries.to(tensor.dtype)

    def keep_keys(self, keys: torch.Tensor, closing: Closing, group: str, layer: int) -> None:
        self.keep_compressed(keys, closing, group, layer)

    def keys(self, group: str, layer: int, ratio: int, dtype: torch.dtype) -> Keys:
        """Keys of every entry of `ratio` tokens that the step can see; dtype: of the queries."""
        del ratio, dtype
        return Keys(self.batch, self.tensors[group], layer)


class PackedCache(PlainCache):
    """Groups as pages of records, uint8 [blocks | slots, layers, page bytes]."""

    is_packed = True

    def __init__(self, batch: ForwardBatch, tensors: Mapping[str, torch.Tensor], records: CacheRecords) -> None:
        super().__init__(batch, tensors)
        self.records = records
        self._visible: dict[int, _Places] = {}  # by ratio

    def seen(self, kv: torch.Tensor, group: str) -> torch.Tensor:
        return kernels.round_to_records(kv, self.records.window)

    def attend(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        group: str,
        layer: int,
        window: int,
        sinks: torch.Tensor,
        scale: float,
        rope: StepRope,
        reads: Reads | None,
    ) -> torch.Tensor:
        entries, tables = None, self.batch.block_tables
        if reads is not None:
            places = self._places(reads)
            record, tables = self.records.compressed, places.tables
            pages = self._read(reads.group, reads.layer, places.items, places.numbers, record, q.dtype)
            entries = kernels.Entries(pages.view(-1, 1, 1, record.dim), 0, reads.ratio, reads.selected)
        num_sequences, device = len(self.batch.query_lens), q.device
        slots = torch.arange(num_sequences, device=device)
        batch = dataclasses.replace(self.batch, block_tables=tables, state_slots=slots)
        record = self.records.window
        num_rows = self._per_page(group, record)
        items = self.batch.state_slots.repeat_interleave(num_rows)
        numbers = torch.arange(num_rows, device=device).repeat(num_sequences)
        ring = self._read(group, layer, items, numbers, record, q.dtype).view(num_sequences, 1, num_rows, record.dim)
        return kernels.attention(q, kv, batch, ring, 0, window, sinks, scale, rope.cos, rope.sin, entries)

    def keep_window(self, kv: torch.Tensor, group: str, layer: int) -> None:
        batch, num_rows = self.batch, self._per_page(group, self.records.window)
        sequence = sequence_of_token(batch)
        kept = torch.nonzero(batch.positions >= batch.context_lens[sequence] - num_rows).squeeze(1)
        slots, numbers = batch.state_slots[sequence[kept]], batch.positions[kept] % num_rows
        kernels.write_records(kv[kept], self.tensors[group], layer, slots, numbers, self.records.window)

    def per_block(self, group: str) -> int:
        return self._per_page(group, self.records.compressed)

    def keep_compressed(self, entries: torch.Tensor, closing: Closing, group: str, layer: int) -> None:
        self._keep(entries, closing, group, layer, self.records.compressed)

    def keep_keys(self, keys: torch.Tensor, closing: Closing, group: str, layer: int) -> None:
        self._keep(keys, closing, group, layer, self.records.index_key)

    def keys(self, group: str, layer: int, ratio: int, dtype: torch.dtype) -> Keys:
        record = self.records.index_key
        places = self._all_visible(group, ratio, record)
        pages = self._read(group, layer, places.items, places.numbers, record, dtype)
        batch = dataclasses.replace(self.batch, block_tables=places.tables)
        return Keys(batch, pages.view(-1, 1, 1, record.dim), 0)

    def _keep(self, entries: torch.Tensor, closing: Closing, group: str, layer: int, record: RecordFormat) -> None:
        blocks, numbers = closing.places(self.batch, self._per_page(group, record))
        kernels.write_records(entries, self.tensors[group], layer, blocks, numbers, record)

    def _read(
        self,
        group: str,
        layer: int,
        items: torch.Tensor,
        numbers: torch.Tensor,
        record: RecordFormat,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        return kernels.read_records(self.tensors[group], layer, items, numbers, record, dtype)

    def _per_page(self, group: str, record: RecordFormat) -> int:
        """Records of a block or slot, in one layer."""
        return self.tensors[group].shape[2] // record.record_bytes

    def _places(self, reads: Reads) -> _Places:
        record = self.records.compressed
        if reads.selected is None:
            return self._all_visible(reads.group, reads.ratio, record)
        num_entries, chosen = self.batch.max_context_len // reads.ratio, reads.selected.long()
        shape = (len(self.batch.query_lens), num_entries + 1)
        wanted = torch.zeros(shape, dtype=torch.bool, device=chosen.device)
        wanted[sequence_of_token(self.batch).unsqueeze(1), chosen.where(chosen >= 0, num_entries)] = True
        return self._find(wanted[:, :num_entries], reads.group, record)

    def _all_visible(self, group: str, ratio: int, record: RecordFormat) -> _Places:
        """Of every entry that is closed after this step: the same for all layers, and for entries and keys."""
        if ratio not in self._visible:
            numbers = torch.arange(self.batch.max_context_len // ratio, device=self.batch.positions.device)
            wanted = numbers < (self.batch.context_lens // ratio).unsqueeze(1)
            self._visible[ratio] = self._find(wanted, group, record)
        return self._visible[ratio]

    def _find(self, wanted: torch.Tensor, group: str, record: RecordFormat) -> _Places:
        """wanted [S, G] bool: the entries to read of each sequence."""
        sequences, numbers = torch.nonzero(wanted, as_tuple=True)
        tables = torch.zeros((wanted.shape[0], max(1, wanted.shape[1])), dtype=torch.int32, device=wanted.device)
        tables[sequences, numbers] = torch.arange(len(numbers), dtype=torch.int32, device=wanted.device)
        per_block = self._per_page(group, record)
        blocks = self.batch.block_tables[sequences, numbers // per_block].long()
        return _Places(blocks, numbers % per_block, tables)


@dataclass(frozen=True)
class _Places:
    """U entries in the cache, and where each is among those that are read, one to a page."""

    items: torch.Tensor  # [U] blocks
    numbers: torch.Tensor  # [U] in its block
    tables: torch.Tensor  # [S, G] int32


def open_cache(batch: ForwardBatch, tensors: Mapping[str, torch.Tensor], records: CacheRecords | None) -> PlainCache:
    return PlainCache(batch, tensors) if records is None else PackedCache(batch, tensors, records)
