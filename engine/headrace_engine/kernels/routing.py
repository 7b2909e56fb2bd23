"""The router of a mixture of experts: scores sqrt(softplus(gate)), biased top-k or a given choice."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headrace_engine.kernels.native import library_for

_EPSILON = 1e-20  # keeps the sum of the chosen scores from zero


def route(
    x: torch.Tensor,
    gate: torch.Tensor,
    bias: torch.Tensor | None,
    forced_ids: torch.Tensor | None,
    topk: int,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts of each token: ids [T, k] int64, best first (lower id among equals), and weights [T, k] fp32.

    x [T, d] dt, gate [E, d] fp32. `bias` [E] fp32 moves the choice but not the weights; `forced_ids` [T, k] int64 (a
    hash layer) takes the choice's place. The weights of a token sum to `scaling`.
    """
    library = library_for(x)
    if library is None:
        return route_reference(x, gate, bias, forced_ids, topk, scaling)
    tokens, dim = x.shape
    num_experts = gate.shape[0]
    if not (x.is_contiguous() and topk <= num_experts):
        raise ValueError("route: x must be contiguous, top-k at most the experts")
    if not (gate.dtype is torch.float32 and gate.shape[1] == dim and gate.is_contiguous()):
        raise ValueError(f"route: gate must be contiguous fp32 [experts, {dim}]")
    if not (bias is None or (bias.dtype is torch.float32 and bias.shape == (num_experts,) and bias.is_contiguous())):
        raise ValueError(f"route: bias must be contiguous fp32 [{num_experts}]")
    if not (
        forced_ids is None
        or (forced_ids.dtype is torch.int64 and forced_ids.shape == (tokens, topk) and forced_ids.is_contiguous())
    ):
        raise ValueError(f"route: forced ids must be contiguous int64 [{tokens}, {topk}]")
    ids = torch.empty((tokens, topk), dtype=torch.int64)
    weights = torch.empty((tokens, topk))
    library.headrace_route(
        x.dtype is torch.bfloat16, x.data_ptr(), gate.data_ptr(),
        None if bias is None else bias.data_ptr(), None if forced_ids is None else forced_ids.data_ptr(),
        tokens, dim, num_experts, topk, scaling, ids.data_ptr(), weights.data_ptr(),
    )  # fmt: skip
    return ids, weights


def route_reference(
    x: torch.Tensor,
    gate: torch.Tensor,
    bias: torch.Tensor | None,
    forced_ids: torch.Tensor | None,
    topk: int,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = F.softplus(F.linear(x.float(), gate)).sqrt()
    ids = forced_ids
    if ids is None:
        ids = torch.topk(scores if bias is None else scores + bias, topk, dim=-1).indices
    weights = scores.gather(1, ids)
    return ids, weights / (weights.sum(dim=-1, keepdim=True) + _EPSILON) * scaling
