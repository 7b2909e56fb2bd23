"""Entries of a paged cache as Triton kernels read and write them: plain rows, or the packed records of `kv.records`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from headrace_engine.kernels.gpu import numbers
from headrace_engine.kv.records import RecordFormat, Scale

_SCALES = {Scale.UE8M0: numbers.UE8M0.value, Scale.E4M3: numbers.E4M3.value, Scale.FP32: numbers.FP32.value}


@dataclass(frozen=True)
class Layout:
    """How an entry lies in its page, as compile-time constants of a kernel. All sizes are powers of two but plain's."""

    dim: int
    bits: int  # of an element: 16 or 32 (plain rows), 8 or 4
    per_page: int  # entries
    block: int = 1  # elements that share a scale
    scale: int = 0  # UE8M0, E4M3 or FP32 of `numbers`
    plain_dim: int = 0  # last elements, in bfloat16
    value_bytes: int = 0
    scale_bytes: int = 0
    smallest: float = 0.0
    largest: float = 0.0


@dataclass(frozen=True)
class Pages:
    """One layer of a paged cache group.

    cache [blocks, layers, entries per block, n] of plain rows (record None), or [blocks, layers, page bytes] uint8 with
    pages as kv.records says.
    """

    cache: torch.Tensor
    layer: int
    record: RecordFormat | None = None

    def __post_init__(self) -> None:
        record, page = self.record, self.cache[0, self.layer] if len(self.cache) else self.cache
        is_packed = self.cache.dtype is torch.uint8 and self.cache.ndim == 3
        if not self.cache.is_contiguous() or is_packed is (record is None):
            raise ValueError("pages: cache must be contiguous, plain rows in 4 dimensions or packed bytes in 3")
        if record is not None and record.quantized_dim % record.block:
            raise ValueError(f"pages: {record.name} records end in a part of a block")
        if record is not None and page.numel() % record.record_bytes:
            raise ValueError(f"pages: {page.numel()} bytes are no number of {record.name} records")

    @property
    def base(self) -> torch.Tensor:
        """The layer's part of the cache, its first element in front."""
        return self.cache.select(1, self.layer)

    @property
    def block_stride(self) -> int:
        """Elements of the cache's type from one block to the next."""
        return self.cache.stride(0)

    @property
    def layout(self) -> Layout:
        record = self.record
        if record is None:
            return Layout(self.cache.shape[3], 8 * self.cache.element_size(), self.cache.shape[2])
        return Layout(
            record.dim,
            record.element.value,
            self.cache.shape[2] // record.record_bytes,
            record.block,
            _SCALES[record.scale],
            record.plain_dim,
            record.value_bytes,
            record.scale_bytes,
            record.smallest,
            record.element.largest,
        )


@triton.jit
def load_entries(base, block_stride, table, entries, mask, LAYOUT: tl.constexpr):
    """[E, dim] fp32 of a sequence's entries [E], whose block numbers are at `table`; zeros where mask [E] is false."""
    blocks = tl.load(table + entries // LAYOUT.per_page, mask=mask, other=0).to(tl.int64)
    pages, places = base + blocks * block_stride, entries % LAYOUT.per_page
    if LAYOUT.bits >= 16:
        rows = pages + places * LAYOUT.dim
        found = tl.load(rows[:, None] + tl.arange(0, LAYOUT.dim)[None, :], mask=mask[:, None], other=0.0)
        found = found.to(tl.float32)
    else:
        found = _load_packed(pages, places, mask[:, None], LAYOUT)
    return found


@triton.jit
def _load_packed(pages, places, wanted, LAYOUT: tl.constexpr):
    dims = tl.arange(0, LAYOUT.dim)[None, :]
    values = (pages + places * LAYOUT.value_bytes)[:, None]
    scales = (pages + LAYOUT.per_page * LAYOUT.value_bytes + places * LAYOUT.scale_bytes)[:, None]
    num_packed: tl.constexpr = LAYOUT.dim - LAYOUT.plain_dim
    is_packed = wanted & (dims < num_packed)
    if LAYOUT.bits == 8:
        found = numbers.e4m3_to_float(tl.load(values + dims, mask=is_packed, other=0))
    else:
        pairs = tl.load(values + dims // 2, mask=is_packed, other=0)
        found = numbers.e2m1_to_float(pairs.to(tl.int32) >> (dims % 2 * 4))
    found *= _load_factors(scales, dims // LAYOUT.block, is_packed, LAYOUT.scale)
    if LAYOUT.plain_dim > 0:
        plain = (values + num_packed * LAYOUT.bits // 8).to(tl.pointer_type(tl.bfloat16))
        is_plain = wanted & (dims >= num_packed)
        rest = tl.load(plain + (dims - num_packed), mask=is_plain, other=0.0).to(tl.float32)
        found = tl.where(is_plain, rest, found)
    return found


@triton.jit
def _load_factors(scales, blocks, mask, SCALE: tl.constexpr):
    """What the stored scales of some blocks mean, fp32."""
    if SCALE == numbers.FP32:
        factors = tl.load(scales.to(tl.pointer_type(tl.float32)) + blocks, mask=mask, other=0.0)
    elif SCALE == numbers.UE8M0:
        factors = numbers.ue8m0_to_float(tl.load(scales + blocks, mask=mask, other=0))
    else:
        factors = numbers.e4m3_to_float(tl.load(scales + blocks, mask=mask, other=0))
    return factors


@triton.jit
def store_entry(base, block_stride, block, place, entry, LAYOUT: tl.constexpr):
    """Writes one entry [dim] fp32, finite, to its place in a page, as kernels.records.encode does."""
    dims = tl.arange(0, LAYOUT.dim)
    page = base + block.to(tl.int64) * block_stride
    if LAYOUT.bits >= 16:
        tl.store(page + place * LAYOUT.dim + dims, entry)
    else:
        values = page + place * LAYOUT.value_bytes
        scales = page + LAYOUT.per_page * LAYOUT.value_bytes + place * LAYOUT.scale_bytes
        num_blocks: tl.constexpr = LAYOUT.dim // LAYOUT.block
        num_packed: tl.constexpr = LAYOUT.dim - LAYOUT.plain_dim
        blocks = tl.reshape(entry, (num_blocks, LAYOUT.block))
        wanted = tl.div_rn(tl.maximum(tl.max(tl.abs(blocks), 1), LAYOUT.smallest), LAYOUT.largest)
        factors = _store_factors(scales, wanted, num_blocks, num_packed // LAYOUT.block, LAYOUT.scale)
        scaled = tl.div_rn(blocks, tl.broadcast_to(factors[:, None], (num_blocks, LAYOUT.block)))
        scaled = tl.reshape(tl.minimum(tl.maximum(scaled, -LAYOUT.largest), LAYOUT.largest), (LAYOUT.dim,))
        if LAYOUT.bits == 8:
            tl.store(values + dims, numbers.float_to_e4m3(scaled), mask=dims < num_packed)
        else:
            low, high = tl.split(tl.reshape(numbers.float_to_e2m1(scaled), (LAYOUT.dim // 2, 2)))
            tl.store(values + tl.arange(0, LAYOUT.dim // 2), (low | (high << 4)).to(tl.uint8))
        if LAYOUT.plain_dim > 0:
            plain = (values + num_packed * LAYOUT.bits // 8).to(tl.pointer_type(tl.bfloat16))
            tl.store(plain + (dims - num_packed), entry.to(tl.bfloat16), mask=dims >= num_packed)


@triton.jit
def _store_factors(scales, wanted, NUM_BLOCKS: tl.constexpr, NUM_SCALES: tl.constexpr, SCALE: tl.constexpr):
    """Stores the scales of an entry's blocks, zeros behind NUM_SCALES of them; returns what the stored ones mean."""
    blocks = tl.arange(0, NUM_BLOCKS)
    if SCALE == numbers.FP32:
        factors = wanted
        tl.store(scales.to(tl.pointer_type(tl.float32)) + blocks, wanted)
    else:
        if SCALE == numbers.UE8M0:
            stored = numbers.float_to_ue8m0(wanted).to(tl.uint8)
            factors = numbers.ue8m0_to_float(stored)
        else:
            stored = numbers.float_to_e4m3(tl.minimum(wanted, 448.0))
            factors = numbers.e4m3_to_float(stored)
        tl.store(scales + blocks, tl.where(blocks < NUM_SCALES, stored, 0).to(tl.uint8))
    return factors
