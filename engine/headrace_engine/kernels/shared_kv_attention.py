"""Attention with one shared head whose keys are also its values: a window of raw rows and compressed entries.

One call serves decode rows and prefill chunks alike: the rows before this step are in the ring, this step's are given,
the entries are in the cache. Formulas: DeepSeek-V4 report, section 2.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace_engine.kernels.native import library_for
from headrace_engine.kernels.norm_rope import rotate
from headrace_engine.models.protocol import ForwardBatch

_REFERENCE_TILE = 128  # queries


@dataclass(frozen=True)
class Entries:
    """One layer's compressed entries. A query at position p sees those below (p + 1) // ratio.

    cache [blocks, layers, entries per block, n]; selected [T, K] int32, each row ascending and -1 padded: a query sees
    only these (all must be visible); None: all.
    """

    cache: torch.Tensor
    layer: int  # index in the cache's layer axis
    ratio: int
    selected: torch.Tensor | None = None


def attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    batch: ForwardBatch,
    ring: torch.Tensor,
    layer: int,
    window: int,
    sinks: torch.Tensor,
    scale: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    entries: Entries | None,
) -> torch.Tensor:
    """[T, heads, n] dt: softmax over window and entries with one more logit per head that has no value.

    q [T, heads, n] and kv [T, n] (this step's rows) dt, rotated; ring [slots, layers, rows >= window - 1, n] holds the
    rows of earlier positions (position p in row p % rows), of which those below batch.window_starts are not seen; sinks
    [heads] fp32. The output is turned back by its own
    position's angle, cos and sin [T, r] fp32, since values carry their key's rotation.
    """
    library = library_for(q)
    caches = [ring] if entries is None else [ring, entries.cache]
    if library is None or any(cache.dtype is not q.dtype for cache in caches):
        return attention_reference(q, kv, batch, ring, layer, window, sinks, scale, cos, sin, entries)
    _check(q, kv, ring, window, sinks, cos, sin, entries)
    heads, dim = q.shape[1:]
    out = torch.empty_like(q)
    selected = None if entries is None else entries.selected
    library.headrace_attention(
        q.dtype is torch.bfloat16, q.data_ptr(), kv.data_ptr(),
        batch.query_starts.data_ptr(), batch.context_lens.data_ptr(), batch.state_slots.data_ptr(),
        batch.block_tables.data_ptr(), None if batch.window_starts is None else batch.window_starts.data_ptr(),
        len(batch.query_lens), batch.block_tables.shape[1],
        layer_pointer(ring, layer), ring.stride(0), ring.shape[2], sinks.data_ptr(), cos.data_ptr(), sin.data_ptr(),
        None if entries is None else layer_pointer(entries.cache, entries.layer),
        0 if entries is None else entries.cache.stride(0), 1 if entries is None else entries.cache.shape[2],
        1 if entries is None else entries.ratio,
        None if selected is None else selected.data_ptr(), 0 if selected is None else selected.shape[1],
        heads, dim, window, cos.shape[1], scale, torch.get_num_threads(), out.data_ptr(),
    )  # fmt: skip
    return out


def write_ring(rows: torch.Tensor, ring: torch.Tensor, layer: int, batch: ForwardBatch) -> None:
    """Puts each sequence's last rows of this step, as many as fit, where their positions belong in the ring.

    rows [T, n] dt; ring [slots, layers, ring rows, n]. Only after `attention`, which reads what this replaces.
    """
    library = library_for(rows)
    if library is None or ring.dtype is not rows.dtype:
        write_ring_reference(rows, ring, layer, batch)
        return
    if not (rows.is_contiguous() and ring.is_contiguous() and rows.shape[1] == ring.shape[3]):
        raise ValueError(f"write_ring: rows must be contiguous [T, {ring.shape[3]}]")
    library.headrace_write_ring(
        rows.dtype is torch.bfloat16, rows.data_ptr(), batch.query_starts.data_ptr(), batch.context_lens.data_ptr(),
        batch.state_slots.data_ptr(), len(batch.query_lens), layer_pointer(ring, layer), ring.stride(0),
        ring.shape[2], ring.shape[3],
    )  # fmt: skip


def layer_pointer(cache: torch.Tensor, layer: int) -> int:
    """Address of a layer's first row in a cache tensor [items, layers, rows, n]."""
    if not (cache.is_contiguous() and 0 <= layer < cache.shape[1]):
        raise ValueError(f"cache {list(cache.shape)} has no layer {layer}")
    return cache.data_ptr() + layer * cache.stride(1) * cache.element_size()


def attention_reference(
    q: torch.Tensor,
    kv: torch.Tensor,
    batch: ForwardBatch,
    ring: torch.Tensor,
    layer: int,
    window: int,
    sinks: torch.Tensor,
    scale: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    entries: Entries | None,
) -> torch.Tensor:
    out = torch.empty_like(q)
    lowest = [0] * len(batch.query_lens) if batch.window_starts is None else batch.window_starts.tolist()
    for s, (start, first, length) in enumerate(sequences(batch)):
        history = torch.arange(max(lowest[s], first - window + 1), first, device=q.device)
        old = ring[batch.state_slots[s], layer, history % ring.shape[2]].to(q.dtype)
        keys = torch.cat([old, kv[start : start + length]])
        key_positions = torch.arange(first - len(history), first + length, device=q.device)
        closed = None if entries is None else paged_rows(entries.cache, entries.layer, batch, s, entries.ratio)
        for low in range(start, start + length, _REFERENCE_TILE):
            rows = slice(low, min(low + _REFERENCE_TILE, start + length))
            distance = batch.positions[rows].unsqueeze(1) - key_positions
            tile_keys, visible = keys, (distance >= 0) & (distance < window)
            if entries is not None and closed is not None:
                tile_keys = torch.cat([keys, closed.to(q.dtype)])
                visible = torch.cat([visible, _visible_entries(batch, rows, entries, len(closed))], dim=1)
            out[rows] = _attend(q[rows], tile_keys, visible, sinks, scale)
    return rotate(out, cos, sin, inverse=True)


def write_ring_reference(rows: torch.Tensor, ring: torch.Tensor, layer: int, batch: ForwardBatch) -> None:
    for s, (start, first, length) in enumerate(sequences(batch)):
        kept = torch.arange(max(0, length - ring.shape[2]), length, device=rows.device)
        ring[batch.state_slots[s], layer, (first + kept) % ring.shape[2]] = rows[start + kept].to(ring.dtype)


def sequences(batch: ForwardBatch) -> list[tuple[int, int, int]]:
    """(first token row, first position, length) of each sequence's part in this step, on the host."""
    starts, ends = batch.query_starts.tolist(), batch.context_lens.tolist()
    return [(start, end - n, n) for start, end, n in zip(starts, ends, batch.query_lens, strict=False)]


def paged_rows(cache: torch.Tensor, layer: int, batch: ForwardBatch, s: int, ratio: int) -> torch.Tensor:
    """[G, n]: every entry that sequence s has closed after this step, gathered from its blocks."""
    numbers = torch.arange(int(batch.context_lens[s]) // ratio, device=cache.device)
    blocks = batch.block_tables[s, numbers // cache.shape[2]].long()
    return cache[blocks, layer, numbers % cache.shape[2]]


def _visible_entries(batch: ForwardBatch, rows: slice, entries: Entries, num_entries: int) -> torch.Tensor:
    """[queries, num_entries] bool."""
    positions = batch.positions[rows].unsqueeze(1)
    if entries.selected is None:
        return torch.arange(num_entries, device=positions.device) < (positions + 1) // entries.ratio
    chosen = entries.selected[rows].long()
    mask = torch.zeros((len(chosen), num_entries + 1), dtype=torch.bool, device=chosen.device)
    return mask.scatter_(1, chosen.where(chosen >= 0, num_entries), True)[:, :num_entries]


def _attend(
    q: torch.Tensor, keys: torch.Tensor, visible: torch.Tensor, sinks: torch.Tensor, scale: float
) -> torch.Tensor:
    """[Q, heads, n] of q [Q, heads, n] over keys [K, n] where visible [Q, K]."""
    logits = torch.einsum("qhn,kn->qhk", q.float(), keys.float()) * scale
    logits = logits.masked_fill(~visible.unsqueeze(1), -torch.inf)
    sink = sinks.view(1, -1, 1).expand(len(q), -1, 1)
    shares = torch.softmax(torch.cat([logits, sink], dim=-1), dim=-1)[..., :-1]
    return torch.einsum("qhk,kn->qhn", shares, keys.float()).to(q.dtype)


def _check(
    q: torch.Tensor,
    kv: torch.Tensor,
    ring: torch.Tensor,
    window: int,
    sinks: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    entries: Entries | None,
) -> None:
    tokens, heads, dim = q.shape
    if not (q.is_contiguous() and kv.is_contiguous() and kv.shape == (tokens, dim) and kv.dtype is q.dtype):
        raise ValueError(f"attention: q [T, heads, n] and kv [{tokens}, {dim}] must be contiguous and of one dtype")
    if not (ring.shape[3] == dim and ring.shape[2] >= window - 1):
        raise ValueError(f"attention: ring of {window - 1}+ rows of {dim}")
    if not (
        all(x.dtype is torch.float32 and x.is_contiguous() for x in (sinks, cos, sin))
        and sinks.shape == (heads,)
        and cos.shape == sin.shape
        and cos.shape[0] == tokens
        and 2 * cos.shape[1] <= dim
    ):
        raise ValueError("attention: sinks [heads], cos and sin [T, r] must be contiguous fp32")
    if entries is None:
        return
    if not (entries.cache.shape[3] == dim):
        raise ValueError(f"attention: entries of {dim}")
    chosen = entries.selected
    if not (chosen is None or (chosen.dtype is torch.int32 and chosen.shape[0] == tokens and chosen.is_contiguous())):
        raise ValueError(f"attention: selected must be contiguous int32 [{tokens}, K]")
