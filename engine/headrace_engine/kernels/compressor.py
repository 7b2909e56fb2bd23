"""Compressed KV entries: groups of tokens pooled into one entry each (DeepSeek-V4 report, section 2.3)."""

from __future__ import annotations

import torch

from headrace_engine.kernels.native import library_for
from headrace_engine.kernels.norm_rope import rms_norm_reference, rotate
from headrace_engine.kernels.shared_kv_attention import layer_pointer, sequences
from headrace_engine.models.protocol import ForwardBatch


def compress(
    rows: torch.Tensor,
    position_bias: torch.Tensor,
    batch: ForwardBatch,
    carry: torch.Tensor,
    carry_layer: int,
    norm_weight: torch.Tensor,
    frequencies: torch.Tensor,
    eps: float,
    entries: torch.Tensor,
    entries_layer: int,
) -> None:
    """Writes the entries that this step closes, then the carry rows that later steps need.

    rows [T, 2 * C * n] dt, row-strided: a token's values, then its gates; position_bias [ratio, C * n] fp32 is added
    to the gates by position in the group; carry [slots, layers, carry rows, 2 * C * n] fp32 keeps such rows, gates
    with bias; norm_weight [n] and frequencies [r] (angle per position of each rotated pair) fp32; entries [blocks,
    layers, entries per block, n]. Entry g pools, per channel, softmax(gates)-weighted values: for C = 1 of tokens
    g * ratio ..; for C = 2 also, as series 0 (the own group's is series 1), of the group before, which needs 2 * ratio
    carry rows. Then RMSNorm and rotation at position g * ratio.
    """
    library = library_for(rows)
    if library is None or (entries.dtype is not torch.bfloat16 and entries.dtype is not torch.float32):
        compress_reference(
            rows, position_bias, batch, carry, carry_layer, norm_weight, frequencies, eps, entries, entries_layer
        )
        return
    ratio, dim, series = _check(rows, position_bias, carry, norm_weight, frequencies, entries)
    library.headrace_compress(
        rows.dtype is torch.bfloat16, entries.dtype is torch.bfloat16, rows.data_ptr(), rows.stride(0),
        position_bias.data_ptr(), batch.query_starts.data_ptr(), batch.context_lens.data_ptr(),
        batch.state_slots.data_ptr(), batch.block_tables.data_ptr(), len(batch.query_lens),
        batch.block_tables.shape[1], layer_pointer(carry, carry_layer), carry.stride(0), carry.shape[2],
        norm_weight.data_ptr(), frequencies.data_ptr(), dim, series, ratio, frequencies.shape[0], eps,
        layer_pointer(entries, entries_layer), entries.stride(0), entries.shape[2],
    )  # fmt: skip


def compress_reference(
    rows: torch.Tensor,
    position_bias: torch.Tensor,
    batch: ForwardBatch,
    carry: torch.Tensor,
    carry_layer: int,
    norm_weight: torch.Tensor,
    frequencies: torch.Tensor,
    eps: float,
    entries: torch.Tensor,
    entries_layer: int,
) -> None:
    ratio, dim, series, ring_rows = len(position_bias), entries.shape[3], _num_series(rows, entries), carry.shape[2]
    for s, (start, first, length) in enumerate(sequences(batch)):
        ring = carry[batch.state_slots[s], carry_layer]
        own = rows[start : start + length].to(torch.float32, copy=True)
        positions = torch.arange(first, first + length, device=rows.device)
        own[:, series * dim :] += position_bias[positions % ratio]
        for g in range(first // ratio, (first + length) // ratio):
            low = max(0, g - series + 1) * ratio
            slots = torch.arange(low, (g + 1) * ratio, device=rows.device)
            table = torch.where(
                (slots < first).unsqueeze(1), ring[slots % ring_rows], own[(slots - first).clamp(min=0)]
            )
            pooled = _pool(table.view(len(slots), 2, series, dim), ratio)
            normed = rms_norm_reference(pooled.unsqueeze(0), norm_weight, eps).to(entries.dtype)
            angles = float(g * ratio) * frequencies.unsqueeze(0)
            block = batch.block_tables[s, g // entries.shape[2]].long()
            entries[block, entries_layer, g % entries.shape[2]] = rotate(normed, angles.cos(), angles.sin())[0]
        kept = torch.arange(max(0, length - ring_rows), length, device=rows.device)
        ring[(first + kept) % ring_rows] = own[kept]


def _pool(table: torch.Tensor, ratio: int) -> torch.Tensor:
    """[n] of table [slots, (values, gates), series, n]: the last `ratio` slots of the last series, the rest of it."""
    parts = [table[-ratio:, :, -1]] if table.shape[2] == 1 else [table[:-ratio, :, 0], table[-ratio:, :, 1]]
    values, gates = torch.cat(parts).unbind(1)
    return (torch.softmax(gates, dim=0) * values).sum(dim=0)


def _num_series(rows: torch.Tensor, entries: torch.Tensor) -> int:
    return rows.shape[1] // (2 * entries.shape[3])


def _check(
    rows: torch.Tensor,
    position_bias: torch.Tensor,
    carry: torch.Tensor,
    norm_weight: torch.Tensor,
    frequencies: torch.Tensor,
    entries: torch.Tensor,
) -> tuple[int, int, int]:
    """(ratio, n, series)."""
    ratio, dim, series = len(position_bias), entries.shape[3], _num_series(rows, entries)
    width = series * dim
    if not (series in (1, 2) and rows.shape[1] == 2 * width and rows.stride(1) == 1):
        raise ValueError(f"compress: rows must hold values and gates of 1 or 2 series of {dim}")
    if not (
        all(x.dtype is torch.float32 and x.is_contiguous() for x in (position_bias, carry, norm_weight, frequencies))
        and position_bias.shape == (ratio, width)
        and norm_weight.shape == (dim,)
        and 2 * len(frequencies) <= dim
    ):
        raise ValueError(
            f"compress: position_bias [{ratio}, {width}], norm_weight [{dim}], frequencies and carry: contiguous fp32"
        )
    if not (carry.shape[2] >= series * ratio and carry.shape[3] == 2 * width):
        raise ValueError(f"compress: the carry needs at least {series * ratio} rows of {2 * width}")
    return ratio, dim, series
