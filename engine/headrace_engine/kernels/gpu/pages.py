"""Moving entries between a paged cache and contiguous rows, packing and unpacking them on the way."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace_engine.kernels.gpu.records import Layout, Pages, load_entries, store_entry
from headrace_engine.kernels.records import decode, encode
from headrace_engine.kv.records import RecordFormat

_ROWS = 16  # of a program that gathers


def gather_entries(
    pages: Pages, block_tables: torch.Tensor, sequences: torch.Tensor, entries: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Entries [N] of the sequences [N], both int64: [N, n] dtype; a negative entry is a row of zeros.

    block_tables [sequences, blocks] int32, contiguous.
    """
    _check(block_tables, sequences, entries)
    layout, num_rows = pages.layout, len(entries)
    rows = torch.empty((num_rows, layout.dim), dtype=dtype, device=entries.device)
    _gather[(triton.cdiv(num_rows, _ROWS),)](
        pages.base, pages.block_stride, block_tables, block_tables.shape[1], sequences, entries, rows, num_rows,
        LAYOUT=layout, ROWS=_ROWS,
    )  # fmt: skip
    return rows


def scatter_entries(
    rows: torch.Tensor, pages: Pages, block_tables: torch.Tensor, sequences: torch.Tensor, entries: torch.Tensor
) -> None:
    """Puts rows [N, n] dt where entries [N] of sequences [N] belong; a negative entry is left out. No entry twice."""
    _check(block_tables, sequences, entries)
    layout = pages.layout
    if not (rows.shape == (len(entries), layout.dim) and rows.is_contiguous()):
        raise ValueError(f"scatter_entries: rows must be contiguous [{len(entries)}, {layout.dim}]")
    _scatter[(len(entries),)](
        pages.base, pages.block_stride, block_tables, block_tables.shape[1], sequences, entries, rows, LAYOUT=layout
    )


def gather_entries_reference(
    pages: Pages, block_tables: torch.Tensor, sequences: torch.Tensor, entries: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    plain = plain_rows(pages)
    blocks, places = _places(pages.layout, block_tables, sequences, entries)
    return torch.where((entries >= 0).unsqueeze(1), plain[blocks, places], 0).to(dtype)


def scatter_entries_reference(
    rows: torch.Tensor, pages: Pages, block_tables: torch.Tensor, sequences: torch.Tensor, entries: torch.Tensor
) -> None:
    kept = entries >= 0
    blocks, places = _places(pages.layout, block_tables, sequences[kept], entries[kept])
    if pages.record is None:
        pages.base[blocks, places] = rows[kept].to(pages.cache.dtype)
        return
    values, scales = packed_parts(pages, pages.record)
    values[blocks, places], scales[blocks, places] = encode(rows[kept], pages.record)


def plain_rows(pages: Pages) -> torch.Tensor:
    """[blocks, entries per block, n] fp32."""
    if pages.record is None:
        return pages.base.float()
    values, scales = packed_parts(pages, pages.record)
    return decode(values.flatten(0, 1), scales.flatten(0, 1), pages.record).view(*values.shape[:2], -1)


def packed_parts(pages: Pages, record: RecordFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's elements [blocks, entries, value bytes] and scales [blocks, entries, scale bytes]; views."""
    end = pages.layout.per_page * record.value_bytes
    values = pages.base[:, :end].view(len(pages.cache), -1, record.value_bytes)
    return values, pages.base[:, end:].view(len(pages.cache), -1, record.scale_bytes)


def _places(
    layout: Layout, block_tables: torch.Tensor, sequences: torch.Tensor, entries: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = entries.clamp(min=0)
    return block_tables[sequences, numbers // layout.per_page].long(), numbers % layout.per_page


def _check(block_tables: torch.Tensor, sequences: torch.Tensor, entries: torch.Tensor) -> None:
    if not (block_tables.is_contiguous() and block_tables.dtype is torch.int32):
        raise ValueError("block_tables must be contiguous int32 [sequences, blocks]")
    if not (
        entries.shape == sequences.shape
        and all(x.dtype is torch.int64 and x.is_contiguous() for x in (sequences, entries))
    ):
        raise ValueError("sequences and entries must be contiguous int64 [N]")


@triton.jit
def _gather(
    base, block_stride, tables, max_blocks, sequences, entries, rows, num_rows,
    LAYOUT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    entry = tl.load(entries + row, mask=row < num_rows, other=-1)
    sequence = tl.load(sequences + row, mask=row < num_rows, other=0)
    found = load_entries(base, block_stride, tables + sequence * max_blocks, entry, entry >= 0, LAYOUT)
    to = rows + row.to(tl.int64)[:, None] * LAYOUT.dim + tl.arange(0, LAYOUT.dim)[None, :]
    tl.store(to, found, mask=(row < num_rows)[:, None])


@triton.jit
def _scatter(base, block_stride, tables, max_blocks, sequences, entries, rows, LAYOUT: tl.constexpr):
    row = tl.program_id(0)
    entry = tl.load(entries + row)
    if entry >= 0:
        block = tl.load(tables + tl.load(sequences + row) * max_blocks + entry // LAYOUT.per_page)
        values = tl.load(rows + row.to(tl.int64) * LAYOUT.dim + tl.arange(0, LAYOUT.dim)).to(tl.float32)
        store_entry(base, block_stride, block, entry % LAYOUT.per_page, values, LAYOUT)
