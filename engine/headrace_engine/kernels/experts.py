"""SwiGLU experts with clamped activations, routed and shared (DeepSeek-V4 report, section 2.1)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headrace_engine.kernels.native import library_for, require

MAX_ROWS = 256  # beyond, torch's grouped matmul wins (`python -m headrace_engine.kernels.bench`)
MAX_DENSE_ROWS = 32


def expert_mlp(
    rows: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    limit: float,
) -> torch.Tensor:
    """weight * expert(row) for each row, [M, d] dt, with expert(x) = W2 (silu(min(W1 x, limit)) * clip(W3 x, +-limit)).

    rows [M, d] dt in any order, M may be 0; expert_ids [M] int64 into the stacks, negative for none (its output is
    zero); weights [M] fp32; w13 [E, 2 * I, d] (W1 first), w2 [E, d, I] dt.
    """
    library = library_for(rows) if rows.shape[0] <= MAX_ROWS else None
    if library is None:
        return expert_mlp_reference(rows, expert_ids, weights, w13, w2, limit)
    num_experts = w13.shape[0]
    num_rows, dim, width = _check(rows, w13, w2, num_experts)
    require(
        expert_ids.shape == (num_rows,) and expert_ids.dtype is torch.int64 and expert_ids.is_contiguous()
        and weights.shape == (num_rows,) and weights.dtype is torch.float32 and weights.is_contiguous(),
        f"expert_mlp: expert_ids int64 and weights fp32 must be contiguous [{num_rows}]",
    )  # fmt: skip
    out = torch.empty_like(rows)
    library.headrace_experts(
        rows.dtype is torch.bfloat16, rows.data_ptr(), expert_ids.data_ptr(), weights.data_ptr(), w13.data_ptr(),
        w2.data_ptr(), num_rows, num_experts, dim, width, limit, out.data_ptr(),
    )  # fmt: skip
    return out


def dense_mlp(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, limit: float) -> torch.Tensor:
    """One expert for all rows with weight 1: x [M, d] dt, w13 [2 * I, d], w2 [d, I]; [M, d] dt."""
    library = library_for(x) if x.shape[0] <= MAX_DENSE_ROWS else None
    if library is None:
        return dense_mlp_reference(x, w13, w2, limit)
    num_rows, dim, width = _check(x, w13.unsqueeze(0), w2.unsqueeze(0), 1)
    out = torch.empty_like(x)
    library.headrace_experts(
        x.dtype is torch.bfloat16, x.data_ptr(), None, None, w13.data_ptr(), w2.data_ptr(),
        num_rows, 1, dim, width, limit, out.data_ptr(),
    )  # fmt: skip
    return out


def expert_mlp_reference(
    rows: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    limit: float,
) -> torch.Tensor:
    order = torch.argsort(expert_ids, stable=True)
    ends = torch.searchsorted(expert_ids[order], torch.arange(-1, w13.shape[0], device=rows.device), right=True)
    num_none = int(ends[0])  # negative ids sort first
    order = order[num_none:]
    offsets = (ends[1:] - num_none).to(torch.int32)
    hidden = F.grouped_mm(rows[order], w13.transpose(1, 2), offs=offsets)
    result = F.grouped_mm(_swiglu(hidden, limit), w2.transpose(1, 2), offs=offsets)
    outputs = torch.zeros_like(rows)
    outputs[order] = (result * weights[order].unsqueeze(-1)).to(rows.dtype)
    return outputs


def dense_mlp_reference(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, limit: float) -> torch.Tensor:
    return F.linear(_swiglu(F.linear(x, w13), limit), w2)


def _swiglu(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def _check(rows: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, num_experts: int) -> tuple[int, int, int]:
    """(rows, dim, width) of an expert call."""
    num_rows, dim = rows.shape
    width = w2.shape[-1]
    require(
        w13.shape == (num_experts, 2 * width, dim) and w2.shape == (num_experts, dim, width),
        f"experts: w13 {list(w13.shape)} and w2 {list(w2.shape)} do not fit rows of {dim}",
    )
    require(
        all(x.is_contiguous() and x.dtype is rows.dtype for x in (rows, w13, w2)),
        "experts: rows, w13 and w2 must be contiguous and of one dtype",
    )
    return num_rows, dim, width
