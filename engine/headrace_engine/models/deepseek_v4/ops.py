"""DeepSeek-V4's token-wise operations in plain torch: hyper-connections, norm, rotary, routing, experts, pooling.

Each is one function over plain tensors, so that a faster kernel can take its place with the same signature. Formulas:
DeepSeek-V4 report, section 2. `dt` below is the model dtype; statistics and small matrices are fp32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x [..., n] dt over its last axis, times weight [n] fp32 if given; fp32 inside, one rounding at the end."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide if weight is None else wide * weight).to(x.dtype)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """Rotates the last 2 * r dims of x [T, n] or [T, heads, n] in place, and returns x.

    Adjacent dims (2k, 2k + 1) are one complex number, turned by the angle of cos, sin [T, r] fp32 (or back by it).
    """
    if x.ndim == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    pairs = x[..., x.shape[-1] - 2 * cos.shape[-1] :].view(*x.shape[:-1], cos.shape[-1], 2)
    real, imaginary = pairs[..., 0].float(), pairs[..., 1].float()
    if inverse:
        sin = -sin
    turned_real, turned_imaginary = real * cos - imaginary * sin, real * sin + imaginary * cos
    pairs[..., 0], pairs[..., 1] = turned_real, turned_imaginary  # only now: `real` may be a view of the pairs
    return x


def hc_mix(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One site's hyper-connection: what its sublayer reads, and how its output and the streams are mixed afterwards.

    streams [T, N, d] dt; fn [(2 + N) * N, N * d], base [(2 + N) * N], scale [3] fp32, in the order pre | post | comb.
    Returns collapsed [T, d] dt, post [T, N] fp32, comb [T, N, N] fp32 (row = source stream, column = destination).
    """
    num_streams = streams.shape[1]
    wide = streams.float()
    logits = _normalised_linear(wide, fn, norm_eps)
    pre, post, comb = torch.split(logits, [num_streams, num_streams, num_streams**2], dim=-1)
    pre_base, post_base, comb_base = torch.split(base, [num_streams, num_streams, num_streams**2])
    pre = torch.sigmoid(pre * scale[0] + pre_base) + hc_eps
    post = 2 * torch.sigmoid(post * scale[1] + post_base)
    comb = (comb * scale[2] + comb_base).view(-1, num_streams, num_streams)
    comb = torch.softmax(comb, dim=-1) + hc_eps
    comb = comb / (comb.sum(dim=-2, keepdim=True) + hc_eps)
    for _ in range(iterations - 1):  # Sinkhorn-Knopp towards a doubly stochastic matrix; ends on columns
        comb = comb / (comb.sum(dim=-1, keepdim=True) + hc_eps)
        comb = comb / (comb.sum(dim=-2, keepdim=True) + hc_eps)
    return _weighted_sum(pre, wide).to(streams.dtype), post, comb


def hc_update(streams: torch.Tensor, output: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """The streams after a site: stream j = post_j * output + sum over i of comb[i, j] * stream i. Shapes as hc_mix."""
    mixed = torch.bmm(comb.transpose(1, 2), streams.float())
    return torch.addcmul(mixed, post.unsqueeze(-1), output.float().unsqueeze(1)).to(streams.dtype)


def hc_collapse(
    streams: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, norm_eps: float, hc_eps: float
) -> torch.Tensor:
    """The final collapse of the streams [T, N, d] to [T, d]; fn [N, N * d], base [N], scale [1] fp32."""
    wide = streams.float()
    pre = torch.sigmoid(_normalised_linear(wide, fn, norm_eps) * scale + base) + hc_eps
    return _weighted_sum(pre, wide).to(streams.dtype)


def route(
    x: torch.Tensor,
    gate: torch.Tensor,
    bias: torch.Tensor | None,
    forced_ids: torch.Tensor | None,
    topk: int,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts of each token: ids [T, k] int64 and weights [T, k] fp32.

    x [T, d] dt, gate [E, d] fp32. `bias` [E] fp32 moves the choice but not the weights; `forced_ids` [T, k] (a hash
    layer) takes the choice's place.
    """
    scores = F.softplus(F.linear(x.float(), gate)).sqrt()
    ids = forced_ids
    if ids is None:
        ids = torch.topk(scores if bias is None else scores + bias, topk, dim=-1).indices
    weights = scores.gather(1, ids)
    return ids, weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) * scaling


def swiglu(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    """silu(min(gate, limit)) * clip(up, -limit, limit) of gate_up [M, 2 * I] dt (gate first); [M, I] dt."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def expert_mlp(
    rows: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    limit: float,
) -> torch.Tensor:
    """weight * expert(row) for each row, [M, d] dt. M may be 0.

    rows [M, d] dt; expert_ids [M] int64 into the stacks, negative for none (its output is zero); weights [M] fp32;
    w13 [E, 2 * I, d] (gate first), w2 [E, d, I] dt.
    """
    order = torch.argsort(expert_ids, stable=True)
    ends = torch.searchsorted(expert_ids[order], torch.arange(-1, w13.shape[0], device=rows.device), right=True)
    num_none = int(ends[0])  # negative ids sort first
    order = order[num_none:]
    offsets = (ends[1:] - num_none).to(torch.int32)
    hidden = F.grouped_mm(rows[order], w13.transpose(1, 2), offs=offsets)
    result = F.grouped_mm(swiglu(hidden, limit), w2.transpose(1, 2), offs=offsets)
    outputs = torch.zeros_like(rows)
    outputs[order] = (result * weights[order].unsqueeze(-1)).to(rows.dtype)
    return outputs


def pool(values: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """Per channel the softmax(gates)-weighted sum over the slots: [G, slots, n] fp32 twice -> [G, n] fp32.

    A gate of -inf leaves its slot out.
    """
    return (torch.softmax(gates, dim=1) * values).sum(dim=1)


def _normalised_linear(wide: torch.Tensor, fn: torch.Tensor, norm_eps: float) -> torch.Tensor:
    """fn applied to the RMS-normalised concatenation of the streams; wide [T, N, d] fp32 -> [T, out]."""
    flat = wide.flatten(1)
    return F.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)


def _weighted_sum(weights: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    return torch.bmm(weights.unsqueeze(1), wide).squeeze(1)
