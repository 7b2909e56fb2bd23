"""What one step touches, worked out once and used by every layer: row numbers, positions, rotary tables.

Row numbers are for a layer's flat view of a cache tensor (`layer_view`), so they are the same for all layers of a
group. -1 means "none". Nothing here depends on weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from headrace_engine.models.deepseek_v4.cache import CARRY_OF_KIND, KV_OF_KIND, WINDOW
from headrace_engine.models.deepseek_v4.config import LayerKind, V4Config
from headrace_engine.models.deepseek_v4.rope import cos_sin
from headrace_engine.models.protocol import ForwardBatch

CosSin = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class StateWrite:
    """The last rows of each sequence's tokens, as many as a ring holds: step row `source` goes to ring row `target`."""

    source: torch.Tensor  # [n] int64
    target: torch.Tensor  # [n] int64


@dataclass(frozen=True)
class Chunk:
    """One sequence's run of two or more tokens."""

    rows: slice  # of the step's tokens
    first_position: int
    history_rows: torch.Tensor  # [P] int64: ring rows of the window's part before the chunk, oldest first
    entry_rows: dict[LayerKind, torch.Tensor]  # [E] int64: paged rows of every entry closed after the chunk


@dataclass(frozen=True)
class CompressionPlan:
    """Entries that this step closes (G of them), for all layers of one kind, and the carry rows to keep.

    Pooling reads a table of rows: the step's T token rows, then `history_rows` of the carry ring. For two series
    (CSA) the slots are the previous group's tokens, then the own ones; otherwise the own ones.
    """

    num_closed: int
    history_rows: torch.Tensor  # [C] int64, carry ring rows
    slots: torch.Tensor  # [G, slots] int64, into that table
    absent: torch.Tensor | None  # [G, slots, 1] bool: slots before the sequence's start; None if there are none
    entry_rows: torch.Tensor  # [G] int64, paged rows to write
    rope: CosSin  # [G, r / 2], at each entry's first token
    carry_write: StateWrite


@dataclass(frozen=True)
class StepPlan:
    token_rope: dict[bool, CosSin]  # [T, r / 2]; key: does the layer have a compressor
    decode_rows: torch.Tensor  # [D] int64: the step's rows of sequences with one token
    decode_window_rows: torch.Tensor  # [D, W] int64
    decode_entry_rows: dict[LayerKind, torch.Tensor]  # [D, E] int64, E = the longest one's closed entries
    chunks: tuple[Chunk, ...]
    window_write: StateWrite
    compression: dict[LayerKind, CompressionPlan]


def layer_view(tensor: torch.Tensor, layer_index: int) -> torch.Tensor:
    """Flat rows [n, dim] of a cache tensor [items, layers, rows, dim], starting at a layer's first row.

    The plan's row number item * layers * rows + row then means that layer's row.
    """
    return tensor.view(-1, tensor.shape[-1])[layer_index * tensor.shape[2] :]


def make_plan(
    config: V4Config,
    batch: ForwardBatch,
    cache: Mapping[str, torch.Tensor],
    ropes: Mapping[bool, torch.Tensor],
) -> StepPlan:
    """The plan of a step. `ropes`: frequencies by "does the layer have a compressor"."""
    step = _Step(batch)
    kinds: list[LayerKind] = [kind for kind in (LayerKind.CSA, LayerKind.HCA) if kind in config.layer_kinds]
    paged = {kind: _PagedRows(batch.block_tables, cache[KV_OF_KIND[kind]]) for kind in kinds}
    return StepPlan(
        token_rope={compressed: cos_sin(batch.positions, table) for compressed, table in ropes.items()},
        decode_rows=batch.query_starts[step.decode],
        decode_window_rows=_window_rows(config.window, step, cache[WINDOW]),
        decode_entry_rows={kind: _closed_entry_rows(config.ratio(kind), step, rows) for kind, rows in paged.items()},
        chunks=_chunks(config, step, cache[WINDOW], paged),
        window_write=_state_write(step, cache[WINDOW]),
        compression={
            kind: _compression(config, kind, step, cache[CARRY_OF_KIND[kind]], paged[kind], ropes[True])
            for kind in kinds
        },
    )


class _Step:
    """The batch with its sequences by token and by sort."""

    def __init__(self, batch: ForwardBatch) -> None:
        self.batch = batch
        device = batch.token_ids.device
        self.query_lens = batch.query_starts.diff()
        self.sequences = torch.repeat_interleave(  # [T] the sequence of each token
            torch.arange(len(batch.query_lens), device=device), self.query_lens, output_size=batch.num_tokens
        )
        self.starts = batch.context_lens - self.query_lens  # [S] first position of this step
        self.decode = torch.tensor(  # [D] sequences with one token
            [s for s, length in enumerate(batch.query_lens) if length == 1], dtype=torch.int64, device=device
        )


class _PagedRows:
    """Row numbers of entries of one kind."""

    def __init__(self, block_tables: torch.Tensor, tensor: torch.Tensor) -> None:
        self.block_tables = block_tables
        self.entries_per_block = tensor.shape[2]
        self.block_stride = tensor.shape[1] * tensor.shape[2]

    def of(self, sequences: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
        """int64 rows of entries of sequences; the two broadcast."""
        blocks = self.block_tables[sequences, entries // self.entries_per_block].long()
        return blocks * self.block_stride + entries % self.entries_per_block


def _ring_rows(slots: torch.Tensor, positions: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """int64 rows of positions in a ring tensor [slots, layers, rows, dim]; slots and positions broadcast."""
    return slots * (tensor.shape[1] * tensor.shape[2]) + positions % tensor.shape[2]


def _state_write(step: _Step, tensor: torch.Tensor) -> StateWrite:
    batch = step.batch
    kept = batch.positions >= batch.context_lens[step.sequences] - tensor.shape[2]
    source = kept.nonzero().squeeze(1)
    slots = batch.state_slots[step.sequences[source]]
    return StateWrite(source, _ring_rows(slots, batch.positions[source], tensor))


def _window_rows(window: int, step: _Step, tensor: torch.Tensor) -> torch.Tensor:
    last = step.batch.context_lens[step.decode].unsqueeze(1) - 1
    positions = last - torch.arange(window - 1, -1, -1, device=last.device)
    rows = _ring_rows(step.batch.state_slots[step.decode].unsqueeze(1), positions.clamp(min=0), tensor)
    return rows.where(positions >= 0, -1)


def _closed_entry_rows(ratio: int, step: _Step, paged: _PagedRows) -> torch.Tensor:
    num_closed = step.batch.context_lens[step.decode] // ratio
    width = int(num_closed.max()) if num_closed.numel() else 0
    entries = torch.arange(width, device=num_closed.device).expand(num_closed.shape[0], width)
    valid = entries < num_closed.unsqueeze(1)
    return paged.of(step.decode.unsqueeze(1), entries.where(valid, 0)).where(valid, -1)


def _chunks(
    config: V4Config, step: _Step, window: torch.Tensor, paged: Mapping[LayerKind, _PagedRows]
) -> tuple[Chunk, ...]:
    batch, device = step.batch, step.batch.token_ids.device
    starts, first_positions, slots = (x.tolist() for x in (batch.query_starts, step.starts, batch.state_slots))
    chunks = []
    for sequence, length in enumerate(batch.query_lens):
        if length < 2:
            continue
        first, start = first_positions[sequence], starts[sequence]
        history = torch.arange(max(0, first - config.window + 1), first, device=device)
        sequence_index = torch.tensor(sequence, device=device)
        chunks.append(
            Chunk(
                rows=slice(start, start + length),
                first_position=first,
                history_rows=_ring_rows(torch.tensor(slots[sequence], device=device), history, window),
                entry_rows={
                    kind: rows.of(sequence_index, torch.arange((first + length) // config.ratio(kind), device=device))
                    for kind, rows in paged.items()
                },
            )
        )
    return tuple(chunks)


def _compression(
    config: V4Config, kind: LayerKind, step: _Step, carry: torch.Tensor, paged: _PagedRows, rope: torch.Tensor
) -> CompressionPlan:
    batch, ratio = step.batch, config.ratio(kind)
    num_slots = 2 * ratio if kind is LayerKind.CSA else ratio
    closing = (batch.positions % ratio == ratio - 1).nonzero().squeeze(1)
    sequences, last = step.sequences[closing], batch.positions[closing]
    positions = last.unsqueeze(1) - torch.arange(num_slots - 1, -1, -1, device=last.device)  # [G, slots]
    starts = step.starts[sequences].unsqueeze(1)
    # A slot before the sequence's start reads its group's own closing row; its gate is masked.
    slots = batch.query_starts[sequences].unsqueeze(1) + (positions - starts)
    absent = positions < 0
    slots = slots.where(~absent, closing.unsqueeze(1))
    from_carry = (positions < starts) & ~absent
    carried = from_carry.nonzero(as_tuple=True)
    state_slots = batch.state_slots[sequences][carried[0]]
    slots[carried] = batch.num_tokens + torch.arange(carried[0].shape[0], device=last.device)
    first = last - (ratio - 1)
    return CompressionPlan(
        num_closed=closing.shape[0],
        history_rows=_ring_rows(state_slots, positions[carried], carry),
        slots=slots,
        absent=absent.unsqueeze(-1) if bool(absent.any()) else None,
        entry_rows=paged.of(sequences, first // ratio),
        rope=cos_sin(first, rope),
        carry_write=_state_write(step, carry),
    )
