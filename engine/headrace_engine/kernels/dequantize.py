"""Quantized weights to plain ones (formats: models.quantize). Called once for each tensor, by threads that load."""

from __future__ import annotations

import functools

import torch

from headrace_engine.kernels.native import is_wide, library_for
from headrace_engine.models.quantize import FP4_ROW

_CHUNK = 1 << 18  # elements: the reference's intermediate results stay in the CPU's cache


def dequantize_fp4(packed: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    """out [rows, columns] dt = packed [rows, columns / 2] uint8, the low half of a byte first, times its scale.

    scale [rows, columns / 32] fp32. Products are rounded once.
    """
    rows, columns = out.shape
    if packed.dtype is not torch.uint8 or packed.shape != (rows, columns // 2) or not packed.is_contiguous():
        raise ValueError(f"dequantize_fp4: packed must be contiguous uint8 [{rows}, {columns // 2}]")
    if columns % FP4_ROW or scale.shape != (rows, columns // FP4_ROW) or not is_wide(scale, scale.numel()):
        raise ValueError(f"dequantize_fp4: scale must be contiguous fp32 [{rows}, {columns / FP4_ROW:g}]")
    library = library_for(out) if out.is_contiguous() else None
    if library is None:
        dequantize_fp4_reference(packed, scale, out)
        return
    is_bf16 = out.dtype is torch.bfloat16
    library.headrace_fp4(is_bf16, packed.data_ptr(), scale.data_ptr(), rows, columns, out.data_ptr())


def dequantize_fp8(codes: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], out: torch.Tensor) -> None:
    """out [rows, columns] dt = codes [rows, columns] e4m3 times the scale of their block, rounded once.

    scale [ceil(rows / block[0]), ceil(columns / block[1])] fp32.
    """
    rows, columns = out.shape
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    if codes.dtype is not torch.float8_e4m3fn or codes.shape != out.shape or not codes.is_contiguous():
        raise ValueError(f"dequantize_fp8: codes must be contiguous e4m3 [{rows}, {columns}]")
    if scale.shape != grid or not is_wide(scale, scale.numel()):
        raise ValueError(f"dequantize_fp8: scale must be contiguous fp32 {list(grid)}")
    library = library_for(out) if out.is_contiguous() else None
    if library is None:
        dequantize_fp8_reference(codes, scale, block, out)
        return
    is_bf16 = out.dtype is torch.bfloat16
    library.headrace_fp8(is_bf16, codes.data_ptr(), scale.data_ptr(), rows, columns, *block, out.data_ptr())


def dequantize_fp4_reference(packed: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    pairs = _fp4_pairs().to(packed.device)
    step = max(1, _CHUNK // out.shape[1])
    for start in range(0, out.shape[0], step):
        rows = slice(start, start + step)
        values = pairs.index_select(0, packed[rows].reshape(-1).int()).view(-1, scale.shape[1], FP4_ROW)
        out[rows] = values.mul_(scale[rows].unsqueeze(-1)).flatten(1)


def dequantize_fp8_reference(
    codes: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], out: torch.Tensor
) -> None:
    of_columns = scale.repeat_interleave(block[1], dim=1)[:, : out.shape[1]]  # [bands, columns]
    bands = torch.arange(out.shape[0], device=out.device) // block[0]
    step = max(1, _CHUNK // out.shape[1])
    for start in range(0, out.shape[0], step):
        rows = slice(start, start + step)
        out[rows] = codes[rows].to(torch.float32).mul_(of_columns[bands[rows]])


@functools.cache
def _fp4_pairs() -> torch.Tensor:
    """[256, 2] fp32: the two values of each byte, the low half first."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([values, -values])
    codes = torch.arange(256)
    return torch.stack([values[codes & 15], values[codes >> 4]], dim=1)
