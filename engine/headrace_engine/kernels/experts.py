"""SwiGLU experts with clamped activations, routed and shared (DeepSeek-V4 report, section 2.1)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headrace_engine.kernels.fp4_weights import Fp4Weight
from headrace_engine.kernels.native import library_for
from headrace_engine.kernels.records import round_to_records
from headrace_engine.kernels.weights import Weight
from headrace_engine.kv.records import activations

MAX_PLAIN_ROWS = 256  # of unpacked weights; beyond, torch's grouped matmul wins
MAX_PLAIN_DENSE_ROWS = 32


def expert_mlp(
    rows: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    w13: Weight | Fp4Weight,
    w2: Weight | Fp4Weight,
    limit: float,
    round_block: int = 0,
) -> torch.Tensor:
    """weight * expert(row) for each row, [M, d] dt, with expert(x) = W2 (silu(min(W1 x, limit)) * clip(W3 x, +-limit)).

    rows [M, d] dt in any order, M may be 0; expert_ids [M] int64 into the stacks, negative for none (its output is
    zero); weights [M] fp32; w13 [E, 2 * I, d] (W1 first), w2 [E, d, I] dt. round_block: what W2 reads is multiplied by
    the weight first and rounded to e4m3 numbers with a scale for so many (kv.records.activations); 0: not rounded.
    """
    library = library_for(rows) if w13.packed or rows.shape[0] <= MAX_PLAIN_ROWS else None
    if library is None:
        return expert_mlp_reference(rows, expert_ids, weights, w13.plain(), w2.plain(), limit, round_block)
    num_experts = w13.shape[0]
    num_rows, dim, width = _check(rows, w13, w2, num_experts)
    if not (
        expert_ids.shape == (num_rows,)
        and expert_ids.dtype is torch.int64
        and expert_ids.is_contiguous()
        and weights.shape == (num_rows,)
        and weights.dtype is torch.float32
        and weights.is_contiguous()
    ):
        raise ValueError(f"expert_mlp: expert_ids int64 and weights fp32 must be contiguous [{num_rows}]")
    out = torch.empty_like(rows)
    library.headrace_experts(
        rows.dtype is torch.bfloat16, w13.packed, w2.packed, rows.data_ptr(), expert_ids.data_ptr(), weights.data_ptr(),
        *_pointers(w13), *_pointers(w2), num_rows, num_experts, dim, width, round_block, limit, out.data_ptr(),
    )  # fmt: skip
    return out


def dense_mlp(x: torch.Tensor, w13: Weight, w2: Weight, limit: float, round_block: int = 0) -> torch.Tensor:
    """One expert for all rows with weight 1: x [M, d] dt, w13 [2 * I, d], w2 [d, I]; [M, d] dt."""
    library = library_for(x) if w13.packed or x.shape[0] <= MAX_PLAIN_DENSE_ROWS else None
    if library is None:
        return dense_mlp_reference(x, w13.plain(), w2.plain(), limit, round_block)
    num_rows, dim, width = _check(x, w13, w2, None)
    out = torch.empty_like(x)
    library.headrace_experts(
        x.dtype is torch.bfloat16, w13.packed, w2.packed, x.data_ptr(), None, None, *_pointers(w13),
        *_pointers(w2), num_rows, 1, dim, width, round_block, limit, out.data_ptr(),
    )  # fmt: skip
    return out


def sum_choices(rows: torch.Tensor) -> torch.Tensor:
    """rows [T, k, d] dt -> [T, d] dt: each token's rows summed in fp32 in their order, rounded once."""
    library = library_for(rows)
    if library is None:
        return sum_choices_reference(rows)
    if not (rows.is_contiguous()):
        raise ValueError("sum_choices: rows must be contiguous [T, k, d]")
    tokens, k, dim = rows.shape
    out = torch.empty((tokens, dim), dtype=rows.dtype)
    library.headrace_sum_choices(rows.dtype is torch.bfloat16, rows.data_ptr(), tokens, k, dim, out.data_ptr())
    return out


def expert_mlp_reference(
    rows: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    limit: float,
    round_block: int = 0,
) -> torch.Tensor:
    order = torch.argsort(expert_ids, stable=True)
    ends = torch.searchsorted(expert_ids[order], torch.arange(-1, w13.shape[0], device=rows.device), right=True)
    num_none = int(ends[0])  # negative ids sort first
    order = order[num_none:]
    offsets = (ends[1:] - num_none).to(torch.int32)
    hidden = F.grouped_mm(rows[order], w13.transpose(1, 2), offs=offsets)
    shares = weights[order].unsqueeze(-1)
    hidden = _swiglu(hidden, limit)
    if round_block:
        hidden = round_to_records((hidden * shares).to(rows.dtype), activations(hidden.shape[1], round_block))
    result = F.grouped_mm(hidden, w2.transpose(1, 2), offs=offsets)
    outputs = torch.zeros_like(rows)
    outputs[order] = (result if round_block else result * shares).to(rows.dtype)
    return outputs


def dense_mlp_reference(
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, limit: float, round_block: int = 0
) -> torch.Tensor:
    hidden = _swiglu(F.linear(x, w13), limit)
    if round_block:
        hidden = round_to_records(hidden, activations(hidden.shape[1], round_block))
    return F.linear(hidden, w2)


def sum_choices_reference(rows: torch.Tensor) -> torch.Tensor:
    total = rows[:, 0].float()
    for choice in range(1, rows.shape[1]):
        total = total + rows[:, choice]
    return total.to(rows.dtype)


def _swiglu(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def _pointers(w: Weight | Fp4Weight) -> tuple[int, int | None]:
    """Of the numbers, and of the scales if it has some."""
    return (w.codes.data_ptr(), w.scales.data_ptr()) if isinstance(w, Fp4Weight) else (w.data.data_ptr(), None)


def _is_for(w: Weight | Fp4Weight, dtype: torch.dtype) -> bool:
    """Whether a kernel may read it beside rows of dtype."""
    if isinstance(w, Fp4Weight):
        return dtype is torch.bfloat16 and w.codes.is_contiguous() and w.scales.is_contiguous()
    return w.data.dtype is dtype and w.data.is_contiguous()


def _check(
    rows: torch.Tensor, w13: Weight | Fp4Weight, w2: Weight | Fp4Weight, num_experts: int | None
) -> tuple[int, int, int]:
    """(rows, dim, width) of an expert call; num_experts None: weights without an expert axis."""
    num_rows, dim = rows.shape
    width = w2.shape[-1]
    lead = () if num_experts is None else (num_experts,)
    if not (w13.shape == (*lead, 2 * width, dim) and w2.shape == (*lead, dim, width)):
        raise ValueError(f"experts: w13 {list(w13.shape)} and w2 {list(w2.shape)} do not fit rows of {dim}")
    if not (rows.is_contiguous() and _is_for(w13, rows.dtype) and _is_for(w2, rows.dtype)):
        raise ValueError("experts: rows, w13 and w2 must be contiguous and of one dtype")
    return num_rows, dim, width
