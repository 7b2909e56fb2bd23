"""Reading the published number formats into plain tensors: FP8 with block scales, FP4 rows (formats: `quantize`)."""

from __future__ import annotations

import functools

import torch

from headrace_engine.models.quantize import FP4_ROW, fp8_block

_CHUNK = 1 << 18  # elements: intermediate results of a chunk stay in the CPU's cache


def dequantize_into(target: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> None:
    """Fill target [rows, columns] from a stored weight and its scales, rounded once to the target's dtype.

    weight: e4m3 [rows, columns] with scales for blocks, or int8/uint8 of two e2m1 each [rows, columns / 2] with scales
    [rows, columns / 32]. scale: ue8m0 or fp32. Raises ValueError if they do not fit or a scale is no finite number.
    """
    scale = scale.to(torch.float32)  # of an e8m0 tensor: the power of two, 0xFF is NaN
    if not bool(torch.isfinite(scale).all()):
        raise ValueError("a scale is not a finite number")
    if weight.dtype in (torch.int8, torch.uint8):
        _fp4_into(target, weight.view(torch.uint8), scale)
    elif weight.dtype is torch.float8_e4m3fn:
        _fp8_into(target, weight, scale)
    else:
        raise ValueError(f"{weight.dtype} is no quantized type")


def _fp8_into(target: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> None:
    block = fp8_block(weight.shape, scale.shape)
    if block is None or target.shape != weight.shape:
        raise ValueError(f"scales {list(scale.shape)} do not fit weights {list(weight.shape)}")
    num_rows, num_columns = weight.shape
    of_columns = scale.repeat_interleave(block[1], dim=1)[:, :num_columns]  # [bands, columns]
    bands = torch.arange(num_rows, device=weight.device) // block[0]
    step = max(1, _CHUNK // num_columns)
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        target[rows] = weight[rows].to(torch.float32).mul_(of_columns[bands[rows]])


def _fp4_into(target: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor) -> None:
    num_rows, num_bytes = packed.shape
    if target.shape != (num_rows, 2 * num_bytes) or scale.shape != (num_rows, 2 * num_bytes // FP4_ROW):
        raise ValueError(f"scales {list(scale.shape)} do not fit packed weights {list(packed.shape)}")
    pairs = _fp4_pairs().to(packed.device)
    step = max(1, _CHUNK // (2 * num_bytes))
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        values = pairs.index_select(0, packed[rows].reshape(-1).int()).view(-1, scale.shape[1], FP4_ROW)
        target[rows] = values.mul_(scale[rows].unsqueeze(-1)).flatten(1)


@functools.cache
def _fp4_pairs() -> torch.Tensor:
    """[256, 2] fp32: the two values of each byte, the low half first."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([values, -values])
    codes = torch.arange(256)
    return torch.stack([values[codes & 15], values[codes >> 4]], dim=1)
