"""Attention over a window of raw rows and compressed entries, in two passes: parts of the keys, then their sum.

The contract and the torch reference are those of `kernels.shared_kv_attention`. Made for decoding: a program has one
token and 16 of its heads, and its keys are split so that few tokens fill the GPU too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace_engine.kernels.gpu.launch import num_splits, product_type, token_sequences
from headrace_engine.kernels.gpu.records import Layout, Pages, load_entries
from headrace_engine.models.protocol import ForwardBatch

_HEADS = 16  # the fewest rows of a matrix product
_KEYS = 32


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
    pages: Pages | None,
    ratio: int = 1,
    selected: torch.Tensor | None = None,
) -> torch.Tensor:
    """[T, heads, n] dt as kernels.attention: a query sees the selected [T, K] entries, or all that its position closes.

    The head size n and twice the rotary half are powers of two. pages: the layer's entries, plain or packed.
    """
    tokens, heads, dim = q.shape
    _check(q, kv, ring, window, cos, selected)
    num_entries = 0 if pages is None else batch.max_context_len // ratio if selected is None else selected.shape[1]
    window_tiles, entry_tiles = triton.cdiv(window, _KEYS), triton.cdiv(num_entries, _KEYS)
    head_blocks = triton.cdiv(heads, _HEADS)
    splits = num_splits(tokens * head_blocks, window_tiles + entry_tiles)
    sums = torch.empty((splits, tokens, heads, dim), dtype=torch.float32, device=q.device)
    tops = torch.empty((2, splits, tokens, heads), dtype=torch.float32, device=q.device)
    out, rows = torch.empty_like(q), ring.select(1, layer)
    _attend_part[(tokens, head_blocks, splits)](
        q, kv, rows, rows if pages is None else pages.base, out if selected is None else selected, sums, tops,
        token_sequences(batch), batch.query_starts, batch.context_lens, batch.state_slots, batch.block_tables,
        ring.stride(0), 0 if pages is None else pages.block_stride, batch.block_tables.shape[1], num_entries,
        window_tiles, triton.cdiv(window_tiles + entry_tiles, splits), scale, tokens, heads, ring.shape[2],
        DIM=dim, WINDOW=window, RATIO=ratio, LAYOUT=Layout(dim, 32, 1) if pages is None else pages.layout,
        HAS_ENTRIES=pages is not None, IS_SELECTED=selected is not None, HEADS=_HEADS, KEYS=_KEYS,
        PRODUCT=product_type(q.dtype),
    )  # fmt: skip
    _add_parts[(tokens, heads)](
        sums, tops, sinks, cos, sin, out, tokens, heads, splits,
        DIM=dim, HALF=cos.shape[1], SPLITS=triton.next_power_of_2(splits),
    )  # fmt: skip
    return out


def _check(
    q: torch.Tensor, kv: torch.Tensor, ring: torch.Tensor, window: int, cos: torch.Tensor, selected: torch.Tensor | None
) -> None:
    tokens, _, dim = q.shape
    if not (q.is_contiguous() and kv.is_contiguous() and kv.shape == (tokens, dim) and kv.dtype is q.dtype):
        raise ValueError(f"attention: q [T, heads, n] and kv [{tokens}, {dim}] must be contiguous and of one dtype")
    if not (ring.is_contiguous() and ring.shape[3] == dim and ring.shape[2] >= window - 1):
        raise ValueError(f"attention: ring of {window - 1}+ rows of {dim}")
    if dim & (dim - 1) or dim < _HEADS or 2 * cos.shape[1] > dim:
        raise ValueError(f"attention: heads of {dim} are no power of two from {_HEADS} on, or shorter than what turns")
    if not (selected is None or (selected.dtype is torch.int32 and selected.is_contiguous())):
        raise ValueError(f"attention: selected must be contiguous int32 [{tokens}, K]")


@triton.jit
def _attend_part(
    q_ptr, kv_ptr, ring_ptr, entries_ptr, selected_ptr, sums_ptr, tops_ptr,
    sequences_ptr, starts_ptr, contexts_ptr, slots_ptr, tables_ptr,
    slot_stride, block_stride, max_blocks, num_entries, window_tiles, tiles_per_split, scale, tokens, num_heads,
    ring_rows,
    DIM: tl.constexpr, WINDOW: tl.constexpr, RATIO: tl.constexpr, LAYOUT: tl.constexpr, HAS_ENTRIES: tl.constexpr,
    IS_SELECTED: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    """One softmax part: sums [splits, T, heads, n] unnormalised, tops [2, splits, T, heads] largest logit and total."""
    token, split = tl.program_id(0), tl.program_id(2)
    heads, dims, keys = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, DIM), tl.arange(0, KEYS)
    is_head = heads < num_heads
    sequence = tl.load(sequences_ptr + token)
    start, end = tl.load(starts_ptr + sequence), tl.load(starts_ptr + sequence + 1)
    first = tl.load(contexts_ptr + sequence) - (end - start)  # position of this step's first token
    position = first + token - start
    rows = ring_ptr + tl.load(slots_ptr + sequence) * slot_stride
    table = tables_ptr + sequence * max_blocks
    own = (token.to(tl.int64) * num_heads + heads)[:, None] * DIM + dims[None, :]
    q = tl.load(q_ptr + own, mask=is_head[:, None], other=0.0).to(PRODUCT)
    top = tl.full((HEADS,), -float("inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    sums = tl.zeros((HEADS, DIM), tl.float32)
    first_tile, last_tile = split * tiles_per_split, (split + 1) * tiles_per_split
    for tile in range(first_tile, tl.minimum(last_tile, window_tiles)):
        seen = position - WINDOW + 1 + tile * KEYS + keys
        is_seen = (seen >= 0) & (seen <= position)
        old = rows + (seen % ring_rows)[:, None] * DIM + dims[None, :]
        new = kv_ptr + (start + seen - first)[:, None] * DIM + dims[None, :]
        values = tl.load(old, mask=(is_seen & (seen < first))[:, None], other=0.0).to(tl.float32)
        values += tl.load(new, mask=(is_seen & (seen >= first))[:, None], other=0.0).to(tl.float32)
        top, total, sums = _accumulate(q, values.to(PRODUCT), is_seen, scale, top, total, sums)
    if HAS_ENTRIES:
        closed = (position + 1) // RATIO
        for tile in range(tl.maximum(first_tile, window_tiles), last_tile):
            place = (tile - window_tiles) * KEYS + keys
            if IS_SELECTED:
                chosen = selected_ptr + token.to(tl.int64) * num_entries + place
                entry = tl.load(chosen, mask=place < num_entries, other=-1).to(tl.int64)
            else:
                entry = tl.where(place < closed, place, -1)
            is_seen = entry >= 0
            values = load_entries(entries_ptr, block_stride, table, entry, is_seen, LAYOUT)
            top, total, sums = _accumulate(q, values.to(PRODUCT), is_seen, scale, top, total, sums)
    part = (split * tokens + token).to(tl.int64) * num_heads + heads
    tl.store(sums_ptr + part[:, None] * DIM + dims[None, :], sums, mask=is_head[:, None])
    tl.store(tops_ptr + part, top, mask=is_head)
    tl.store(tops_ptr + tl.num_programs(2) * tokens * num_heads + part, total, mask=is_head)


@triton.jit
def _accumulate(q, keys, is_seen, scale, top, total, sums):
    """A step of the running softmax of q [H, n] over keys [K, n], which are the values too."""
    logits = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
    logits = tl.where(is_seen[None, :], logits, -float("inf"))
    new_top = tl.maximum(top, tl.max(logits, 1))
    base = tl.where(new_top == -float("inf"), 0.0, new_top)  # nothing seen yet: all powers are 0, not NaN
    factor, powers = tl.exp(top - base), tl.exp(logits - base[:, None])
    sums = tl.dot(powers.to(keys.dtype), keys, sums * factor[:, None], input_precision="ieee")
    return new_top, total * factor + tl.sum(powers, 1), sums


@triton.jit
def _add_parts(
    sums_ptr, tops_ptr, sinks_ptr, cos_ptr, sin_ptr, out_ptr, tokens, num_heads, num_splits,
    DIM: tl.constexpr, HALF: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One token's head: its parts and the sink's logit in one softmax, turned back by the token's own angle."""
    token, head = tl.program_id(0), tl.program_id(1)
    splits, dims, pairs = tl.arange(0, SPLITS), tl.arange(0, DIM), tl.arange(0, DIM // 2)
    is_split = splits < num_splits
    parts = (splits * tokens + token).to(tl.int64) * num_heads + head
    tops = tl.load(tops_ptr + parts, mask=is_split, other=-float("inf"))
    totals = tl.load(tops_ptr + num_splits * tokens * num_heads + parts, mask=is_split, other=0.0)
    sink = tl.load(sinks_ptr + head)
    top = tl.maximum(tl.max(tops, 0), sink)
    factors = tl.exp(tops - top)
    total = tl.sum(totals * factors, 0) + tl.exp(sink - top)
    values = tl.load(sums_ptr + parts[:, None] * DIM + dims[None, :], mask=is_split[:, None], other=0.0)
    value = tl.sum(values * factors[:, None], 0) / total
    real, imaginary = tl.split(tl.reshape(value, (DIM // 2, 2)))
    turning = pairs - (DIM // 2 - HALF)
    angle = token * HALF + turning
    cos = tl.load(cos_ptr + angle, mask=turning >= 0, other=1.0)
    sin = tl.load(sin_ptr + angle, mask=turning >= 0, other=0.0)
    turned = tl.join(real * cos + imaginary * sin, imaginary * cos - real * sin)
    out = out_ptr + (token.to(tl.int64) * num_heads + head) * DIM + dims
    tl.store(out, tl.reshape(turned, (DIM,)))
