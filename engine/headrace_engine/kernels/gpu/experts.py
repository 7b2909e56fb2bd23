"""Grouped matrix products of the routed experts, on weights as checkpoints store them: FP4 or FP8, or bfloat16.

Rows come in one of two layouts. *Contiguous*: rows sorted by expert, every expert's part padded to whole tiles, what a
prefill step has after its exchange. *Masked*: a fixed room of rows per expert and a count of those that are there, what
a captured decode step has. Formulas: DeepSeek-V4 report, section 2.1; formats: `models.quantize`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from headrace_engine.kernels.experts import dense_mlp_reference
from headrace_engine.kernels.gpu import numbers
from headrace_engine.kernels.gpu.launch import product_type
from headrace_engine.models.dequantize import dequantize_into
from headrace_engine.models.quantize import FP4_ROW, fp8_block

ROWS = 16  # of a tile; a contiguous layout pads each expert's rows to a multiple
_COLUMNS = 64  # of a program, of the output
_DEPTH = 64  # multiplied at once


@dataclass(frozen=True)
class Stack:
    """One matrix per expert. weight: bf16 or fp32 [E, n, k] without scale; e4m3 [E, n, k] with ue8m0 scale
    [E, ceil(n / B), ceil(k / B)]; or e2m1 pairs [E, n, k / 2] uint8 with ue8m0 scale [E, n, k / 32]."""

    weight: torch.Tensor
    scale: torch.Tensor | None = None

    @property
    def is_fp4(self) -> bool:
        return self.weight.dtype is torch.uint8

    @property
    def shape(self) -> tuple[int, int, int]:
        """(experts, n, k)"""
        num_experts, rows, columns = self.weight.shape
        return num_experts, rows, 2 * columns if self.is_fp4 else columns

    @property
    def block(self) -> tuple[int, int]:
        """(rows, columns) that share a scale. Raises ValueError if weight and scale do not fit each other."""
        if self.scale is None:
            if self.weight.dtype in (torch.bfloat16, torch.float32):
                return 1, 1
            raise ValueError(f"experts: {self.weight.dtype} needs scales")
        num_experts, rows, columns = self.shape
        if self.is_fp4 and self.scale.shape == (num_experts, rows, columns // FP4_ROW):
            return 1, FP4_ROW
        block = None if self.is_fp4 else fp8_block((rows, columns), self.scale.shape[1:])
        if block is None or self.scale.shape[0] != num_experts:
            raise ValueError(f"experts: scales {list(self.scale.shape)} do not fit weights {list(self.weight.shape)}")
        return block

    def plain(self, dtype: torch.dtype) -> torch.Tensor:
        """[E, n, k] dtype."""
        if self.scale is None:
            return self.weight.to(dtype)
        out = torch.empty(self.shape, dtype=dtype)
        for expert, (weight, scale) in enumerate(zip(self.weight, self.scale, strict=True)):
            dequantize_into(out[expert], weight, scale)
        return out


def grouped_mlp_contiguous(
    rows: torch.Tensor, tile_experts: torch.Tensor, weights: torch.Tensor, w13: Stack, w2: Stack, limit: float
) -> torch.Tensor:
    """weight * expert(row) of each row: [M, d] dt, zeros where a tile has no expert. The expert is that of expert_mlp.

    rows [M, d] dt, M a multiple of ROWS; tile_experts [M / ROWS] int32, negative for none; weights [M] fp32.
    """
    num_rows, dim = rows.shape
    if num_rows != ROWS * len(tile_experts):
        raise ValueError(f"experts: {num_rows} rows are not {len(tile_experts)} tiles of {ROWS}")
    return _mlp(rows.view(1, num_rows, dim), tile_experts, weights, w13, w2, limit, is_masked=False).view(num_rows, dim)


def grouped_mlp_masked(
    rows: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor, w13: Stack, w2: Stack, limit: float
) -> torch.Tensor:
    """weight * expert(row) of the first counts[e] rows of each expert: [E, R, d] dt; the other rows are zeros.

    rows [E, R, d] dt; counts [E] int32; weights [E, R] fp32.
    """
    if len(rows) != len(counts) or len(rows) != w13.shape[0]:
        raise ValueError(f"experts: rows of {len(rows)} experts, counts of {len(counts)}, weights of {w13.shape[0]}")
    return _mlp(rows, counts, weights, w13, w2, limit, is_masked=True)


def grouped_mlp_contiguous_reference(
    rows: torch.Tensor, tile_experts: torch.Tensor, weights: torch.Tensor, w13: Stack, w2: Stack, limit: float
) -> torch.Tensor:
    plain13, plain2 = w13.plain(torch.float32), w2.plain(torch.float32)
    out = torch.zeros_like(rows)
    for tile, expert in enumerate(tile_experts.tolist()):
        own = slice(tile * ROWS, (tile + 1) * ROWS)
        if expert >= 0:
            result = dense_mlp_reference(rows[own].float(), plain13[expert], plain2[expert], limit)
            out[own] = (result * weights[own].unsqueeze(1)).to(rows.dtype)
    return out


def grouped_mlp_masked_reference(
    rows: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor, w13: Stack, w2: Stack, limit: float
) -> torch.Tensor:
    plain13, plain2 = w13.plain(torch.float32), w2.plain(torch.float32)
    out = torch.zeros_like(rows)
    for expert, count in enumerate(counts.tolist()):
        result = dense_mlp_reference(rows[expert, :count].float(), plain13[expert], plain2[expert], limit)
        out[expert, :count] = (result * weights[expert, :count].unsqueeze(1)).to(rows.dtype)
    return out


def _mlp(
    rows: torch.Tensor, groups: torch.Tensor, weights: torch.Tensor, w13: Stack, w2: Stack, limit: float,
    *, is_masked: bool,
) -> torch.Tensor:  # fmt: skip
    """rows [G, R, d], weights of as many rows; groups: tile_experts (one G) or counts (G experts)."""
    num_groups, num_rows, dim = rows.shape
    _, width2, depth = w13.shape
    if not (w2.shape[1:] == (dim, width2 // 2) and depth == dim and w2.shape[0] == w13.shape[0]):
        raise ValueError(f"experts: w13 {list(w13.shape)} and w2 {list(w2.shape)} do not fit rows of {dim}")
    if not (rows.is_contiguous() and weights.is_contiguous() and weights.numel() == num_groups * num_rows):
        raise ValueError(f"experts: rows and fp32 weights of {num_groups * num_rows} rows must be contiguous")
    if groups.dtype is not torch.int32:
        raise ValueError("experts: counts and tile_experts are int32")
    hidden, out = rows.new_empty((num_groups, num_rows, width2 // 2)), torch.zeros_like(rows)
    _launch(rows, groups, weights, w13, hidden, limit, is_masked, is_gated=True)
    _launch(hidden, groups, weights, w2, out, limit, is_masked, is_gated=False)
    return out


def _launch(
    x: torch.Tensor, groups: torch.Tensor, weights: torch.Tensor, stack: Stack, out: torch.Tensor, limit: float,
    is_masked: bool, *, is_gated: bool,
) -> None:  # fmt: skip
    num_groups, num_rows, num_columns = out.shape
    _, stack_rows, depth = stack.shape
    block_rows, block_columns = stack.block
    weight = stack.weight.view(torch.uint8) if stack.scale is not None else stack.weight
    scale = weight if stack.scale is None else stack.scale.view(torch.uint8)
    _grouped_product[(num_groups, triton.cdiv(num_rows, ROWS), triton.cdiv(num_columns, _COLUMNS))](
        x, groups, weights, weight, scale, out, num_rows, num_columns, depth, stack_rows,
        0 if stack.scale is None else stack.scale.stride(0), 0 if stack.scale is None else stack.scale.stride(1), limit,
        BITS=4 if stack.is_fp4 else 8 * stack.weight.element_size(), BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns,
        IS_MASKED=is_masked, IS_GATED=is_gated, ROWS=ROWS, COLUMNS=_COLUMNS, DEPTH=_DEPTH,
        PRODUCT=product_type(x.dtype),
    )  # fmt: skip


@triton.jit
def _load_weights(
    weight, scale, row, column, mask, depth, scale_stride,
    BITS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """fp32 elements of one expert's matrix at row [1, N] and column [K, 1]: [K, N], as a product wants them."""
    if BITS >= 16:
        values = tl.load(weight + row * depth + column, mask=mask, other=0.0).to(tl.float32)
    else:
        if BITS == 8:
            values = numbers.e4m3_to_float(tl.load(weight + row * depth + column, mask=mask, other=0))
        else:
            pairs = tl.load(weight + row * (depth // 2) + column // 2, mask=mask, other=0)
            values = numbers.e2m1_to_float(pairs.to(tl.int32) >> (column % 2 * 4))
        at = row // BLOCK_ROWS * scale_stride + column // BLOCK_COLUMNS
        values *= numbers.ue8m0_to_float(tl.load(scale + at, mask=mask, other=0))
    return values


@triton.jit
def _grouped_product(
    x_ptr, groups_ptr, weights_ptr, weight_ptr, scale_ptr, out_ptr, num_rows, num_columns, depth, stack_rows,
    expert_scales, scale_stride, limit,
    BITS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, IS_MASKED: tl.constexpr,
    IS_GATED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    """out = silu(min(x W1, limit)) * clip(x W3, +-limit) where gated, else row weight * x W; one tile of it."""
    group, tile = tl.program_id(0), tl.program_id(1)
    rows = tile * ROWS + tl.arange(0, ROWS)
    if IS_MASKED:
        expert, num_valid = group, tl.load(groups_ptr + group)
    else:
        expert, num_valid = tl.load(groups_ptr + tile), num_rows
    if (expert >= 0) & (tile * ROWS < num_valid):
        row, is_row = group.to(tl.int64) * num_rows + rows, rows < num_valid
        columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        is_column, depths = columns < num_columns, tl.arange(0, DEPTH)
        stack = weight_ptr + expert.to(tl.int64) * stack_rows * (depth // 2 if BITS == 4 else depth)
        scales = scale_ptr + expert.to(tl.int64) * expert_scales
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        gated = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, depth, DEPTH):
            column = start + depths
            is_inner = column < depth
            at = row[:, None] * depth + column[None, :]
            x = tl.load(x_ptr + at, mask=is_row[:, None] & is_inner[None, :], other=0.0)
            mask = is_inner[:, None] & is_column[None, :]
            w = _load_weights(
                stack, scales, columns[None, :], column[:, None], mask, depth, scale_stride,
                BITS, BLOCK_ROWS, BLOCK_COLUMNS,
            )  # fmt: skip
            sums = tl.dot(x.to(PRODUCT), w.to(PRODUCT), sums, input_precision="ieee")
            if IS_GATED:
                w = _load_weights(
                    stack, scales, num_columns + columns[None, :], column[:, None], mask, depth, scale_stride,
                    BITS, BLOCK_ROWS, BLOCK_COLUMNS,
                )  # fmt: skip
                gated = tl.dot(x.to(PRODUCT), w.to(PRODUCT), gated, input_precision="ieee")
        if IS_GATED:
            gate = tl.minimum(sums, limit)
            result = gate * tl.sigmoid(gate) * tl.minimum(tl.maximum(gated, -limit), limit)
        else:
            result = sums * tl.load(weights_ptr + row, mask=is_row, other=0.0)[:, None]
        to = out_ptr + row[:, None] * num_columns + columns[None, :]
        tl.store(to, result, mask=is_row[:, None] & is_column[None, :])
