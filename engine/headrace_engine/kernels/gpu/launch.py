"""What every Triton kernel's caller needs: types of products, sequences of tokens, sizes of grids."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace_engine.models.protocol import ForwardBatch

ENOUGH_PROGRAMS = 264  # two for each multiprocessor of an H200: a smaller grid is worth splitting


def product_type(dtype: torch.dtype) -> tl.dtype:
    """What matrix products multiply. The interpreter cannot do bfloat16, so it multiplies the same values as fp32."""
    is_narrow = dtype is torch.bfloat16 and not triton.knobs.runtime.interpret
    return tl.bfloat16 if is_narrow else tl.float32


def token_sequences(batch: ForwardBatch) -> torch.Tensor:
    """[T] int32: the sequence of each token."""
    rows = torch.arange(batch.num_tokens, device=batch.query_starts.device)
    return (torch.searchsorted(batch.query_starts, rows, right=True) - 1).to(torch.int32)


def num_splits(num_programs: int, num_tiles: int) -> int:
    """Parts of each program's work that run beside one another, so that a small batch too fills the GPU."""
    return max(1, min(num_tiles, ENOUGH_PROGRAMS // max(1, num_programs)))
