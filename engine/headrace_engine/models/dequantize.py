"""Reading the published number formats into plain tensors: FP8 with block scales, FP4 rows (formats: `quantize`)."""

from __future__ import annotations

import torch

from headrace_engine.kernels.dequantize import dequantize_fp4, dequantize_fp8
from headrace_engine.models.quantize import FP4_ROW, fp8_block


def dequantize_into(target: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> None:
    """Fill target [rows, columns] from a stored weight and its scales, rounded once to the target's dtype.

    weight: e4m3 [rows, columns] with scales for blocks, or int8/uint8 of two e2m1 each [rows, columns / 2] with scales
    [rows, columns / 32]. scale: ue8m0 or fp32. Raises ValueError if they do not fit or a scale is no finite number.
    """
    scale = scale.to(torch.float32).contiguous()  # of an e8m0 tensor: the power of two, 0xFF is NaN
    if not bool(torch.isfinite(scale).all()):
        raise ValueError("a scale is not a finite number")
    if weight.dtype in (torch.int8, torch.uint8):
        num_rows, num_bytes = weight.shape
        if target.shape != (num_rows, 2 * num_bytes) or scale.shape != (num_rows, 2 * num_bytes // FP4_ROW):
            raise ValueError(f"scales {list(scale.shape)} do not fit packed weights {list(weight.shape)}")
        dequantize_fp4(weight.view(torch.uint8).contiguous(), scale, target)
    elif weight.dtype is torch.float8_e4m3fn:
        block = fp8_block(weight.shape, scale.shape)
        if block is None or target.shape != weight.shape:
            raise ValueError(f"scales {list(scale.shape)} do not fit weights {list(weight.shape)}")
        dequantize_fp8(weight.contiguous(), scale, block, target)
    else:
        raise ValueError(f"{weight.dtype} is no quantized type")
