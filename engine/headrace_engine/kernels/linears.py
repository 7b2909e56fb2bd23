"""Linear layers over prepared weights.

A packed weight serves any number of rows. Without packing a streaming kernel takes few rows, where a matmul library's
set-up costs more than the product, and the library takes many.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headrace_engine.kernels.native import library_for
from headrace_engine.kernels.weights import Weight

MAX_PLAIN_ROWS = 32  # beyond, the matmul library wins (`python -m headrace_engine.kernels.bench`)


def linear(x: torch.Tensor, weight: Weight, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """x [M, k] dt times weight [n, k] dt transposed: [M, n] in dt, or in fp32 (not rounded on the way) if asked."""
    library = library_for(x) if weight.packed or x.shape[0] <= MAX_PLAIN_ROWS else None
    if library is None:
        return linear_reference(x, weight.plain(), out_dtype)
    rows, depth = x.shape
    columns = weight.shape[0]
    _check(x, weight.data, (columns, depth))
    out = torch.empty((rows, columns), dtype=out_dtype or x.dtype)
    library.headrace_linear(
        x.dtype is torch.bfloat16, out.dtype is torch.bfloat16, weight.packed, x.data_ptr(), weight.data.data_ptr(),
        rows, 1, columns, depth, out.data_ptr(),
    )  # fmt: skip
    return out


def grouped_linear(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Block diagonal: x [M, groups, k] dt times weight [groups, n, k] dt, group by group: [M, groups, n] dt."""
    library = library_for(x) if weight.packed or x.shape[0] <= MAX_PLAIN_ROWS else None
    if library is None:
        return grouped_linear_reference(x, weight.plain())
    rows, groups, depth = x.shape
    columns = weight.shape[1]
    _check(x, weight.data, (groups, columns, depth))
    out = torch.empty((rows, groups, columns), dtype=x.dtype)
    is_bf16 = x.dtype is torch.bfloat16
    library.headrace_linear(
        is_bf16, is_bf16, weight.packed, x.data_ptr(), weight.data.data_ptr(),
        rows, groups, columns, depth, out.data_ptr(),
    )  # fmt: skip
    return out


def linear_reference(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    return F.linear(x, weight).to(out_dtype or x.dtype)


def grouped_linear_reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1).contiguous()


def _check(x: torch.Tensor, weight: torch.Tensor, shape: tuple[int, ...]) -> None:
    if not (weight.shape == shape and weight.dtype is x.dtype and weight.is_contiguous() and x.is_contiguous()):
        raise ValueError(f"linear: x and weight must be contiguous and of one dtype, weight {list(shape)}")
